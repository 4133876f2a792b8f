"""What is one for all sources of a data set: the index, the order, and the fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from orchdata.dataset.index_costs import IndexTokens
from orchdata.dataset.indexed import content_of, num_first_rows
from orchdata.dataset.sharded import is_mixture
from orchdata.loaders.index.index import Index, shards_in_words
from orchdata.loaders.index.joined import JoinedIndex
from orchdata.loaders.recipe import Recipe
from orchdata.order.mixture import AnyOrder, MixtureOrder
from orchdata.order.order import MixedSource, Order, Shuffle

if TYPE_CHECKING:
    from orchdata.dataset.mixture import Mixture
    from orchdata.dataset.shard_dataset import ShardDataset

Ints = NDArray[np.int64]

_CHUNK_ROWS = 1 << 20


def index_of(
    dataset: ShardDataset | Mixture, opened: Callable[[ShardDataset], Index] = lambda each: each.index()
) -> Index:
    """Return the index of a data set as `opened` gives it; that of a mixture joins its sources, and one file is mapped
    once. Raises as `check_alike`.
    """
    indexes = [opened(leaf.dataset) for leaf in dataset.leaves]
    if not is_mixture(dataset):
        return indexes[0]
    check_alike([(leaf.name, leaf.dataset.recipe) for leaf in dataset.leaves])
    by_path: dict[Path, Index] = {}
    return JoinedIndex([by_path.setdefault(index.path, index) for index in indexes])


def text_is_bytes(dataset: ShardDataset | Mixture | None) -> bool:
    """Return whether LLM tokens of text are UTF-8 bytes, because a recipe has no tokenizer."""
    return dataset is not None and any(leaf.dataset.recipe.text.tokenizer is None for leaf in dataset.leaves)


def check_alike(recipes: Sequence[tuple[str, Recipe]]) -> None:
    """Raise ValueError if samples of two sources could not be in one batch."""
    (first, one), *others = recipes
    wanted = _tensor_fields(one)
    for name, other in others:
        fields = _tensor_fields(other)
        for field, value in fields.items():
            if value != wanted.get(field) or wanted.keys() != fields.keys():
                raise ValueError(
                    f"sources {first!r} and {name!r} differ in {field}, {wanted.get(field)!r} and {value!r}: their "
                    "samples are in one batch, so it must be the same in both recipes; templates, placeholders, text "
                    "fields and limits on the tokens of a part may differ"
                )


def _tensor_fields(recipe: Recipe) -> dict[str, Any]:
    """Return the parts of a recipe on which its samples' tensors depend, by name."""
    fields: dict[str, Any] = {
        "modalities": list(recipe.modalities),
        "text.id": recipe.text.id,
        "limits": recipe.describe()["limits"],
    }
    for name, modality in recipe.modalities.items():
        parameters = modality.describe()
        fields |= {
            f"{name}.{field}": value
            for field, value in _flat(parameters).items()
            if field not in modality.may_differ_in_mixture
        }
        fields[f"{name}.arrays"] = {array: str(spec) for array, spec in modality.arrays().items()}
        fields[f"ids of {name}"] = list(recipe.slots[name]._replace(mark=None))
    return fields


def _flat(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a description at all levels as one dict."""
    fields: dict[str, Any] = {}
    for field, value in described.items():
        fields |= _flat(value) if isinstance(value, Mapping) else {field: value}
    return fields


def order_of(
    dataset: ShardDataset | Mixture | None,
    index: Index,
    excluded: Ints,
    *,
    shuffle: Shuffle | None,
    seed: int,
    multiple_of: int = 1,
) -> AnyOrder:
    """Build the order of a data set's samples, or of an index alone.

    Args:
        excluded: rows to leave out, of all sources, ascending. Those that no selection can choose are no part of the
            order, whether the index has them or not.
        seed: the seed of each source of a mixture is derived from it and the source's name.
        multiple_of: tokens are counted up to it.

    Raises:
        ValueError: a source without a usable sample, or weights too far apart.
    """
    if not is_mixture(dataset):
        num_rows = num_first_rows(index, () if dataset is None else dataset.selections)
        return Order(num_rows, shuffle=shuffle, seed=seed, excluded=excluded[excluded < num_rows])
    # Each source has its own order, without its excluded rows.
    sources, largest = [], 1
    for number, (leaf, own, first) in enumerate(dataset.parts(index)):
        num_rows = num_first_rows(own, leaf.dataset.selections)
        left_out = excluded[slice(*np.searchsorted(excluded, (first, first + num_rows)))] - first
        own_seed = _seed_of(seed, leaf.name)
        order = Order(num_rows, shuffle=shuffle, seed=own_seed, excluded=left_out, source=number)
        if not order.num_samples:
            raise ValueError(f"source {leaf.name!r} has no usable sample: leave it out of the mixture")
        counts = IndexTokens(own, multiple_of)
        sources.append(MixedSource(leaf.name, order, counts, order.sums(counts), first, float(leaf.loss_weight)))
        most = max(1, int(own.totals["max_llm_tokens"]))
        largest = max(largest, -(-most // multiple_of) * multiple_of)
    # An epoch must have room for every sample that is not excluded.
    size = dataset.epoch_size
    if size is not None and size[0] == "tokens" and size[1] < largest:
        largest = max(_longest(source) for source in sources)
        if size[1] < largest:
            raise ValueError(f"epoch_tokens={size[1]} is less than one sample has, {largest}: raise it")
    return MixtureOrder(sources, dataset.quantised(), by=dataset.by, stop=dataset.stop, epoch_size=size)


def _longest(source: MixedSource) -> int:
    """Return the tokens of the longest sample that is not excluded."""
    size, most = source.order.num_samples, 0
    for start in range(0, size, _CHUNK_ROWS):
        _, rows = source.order.located(np.arange(start, min(start + _CHUNK_ROWS, size)))
        most = max(most, int(source.counts(rows).max()))
    return most


def _seed_of(seed: int, name: str) -> int:
    """Return a seed for a source, independent of the other sources; it differs by name, as two may share shards."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")


def fingerprint_of(dataset: ShardDataset | Mixture, index: Index, order: AnyOrder) -> dict[str, Any]:
    """Return what a state must agree with; `allow` may let "weights" differ."""
    if not is_mixture(dataset):
        return _identity_of(dataset, index, order=order.describe())
    assert isinstance(order, MixtureOrder)
    sources = {
        leaf.name: _identity_of(leaf.dataset, own, loss_weight=float(leaf.loss_weight))
        for leaf, own, _ in dataset.parts(index)
    }
    return {"mixture": order.describe(), "sources": sources, "weights": order.describe_weights()}


def _identity_of(dataset: ShardDataset, index: Index, **more: Any) -> dict[str, Any]:
    chosen = dataset.selections
    content, shards = content_of(index, chosen)
    return {
        "dataset": content,
        "shards": shards_in_words(shards),
        "recipe": dataset.recipe.describe(),
        **more,
        **({"selection": [each.describe() for each in chosen]} if chosen else {}),
    }
