"""A mixture, prepared: its sources' indexes as one, their orders as one, and how one goes on with other weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.dataset.mixture import Leaf, Mixture
from orchdata.dataset.options import PreparedDataset
from orchdata.delivery.state import Position, load_state
from orchdata.loaders.errors import StateError
from orchdata.loaders.index.index import Index, content_fingerprint
from orchdata.loaders.index.joined import JoinedIndex
from orchdata.loaders.recipe import Recipe
from orchdata.order.merge import MixedSource, Stage
from orchdata.order.mixture import MixtureOrder
from orchdata.order.order import Order, Shuffle
from orchdata.order.token_sums import TokenSums
from orchdata.planning.costs import IndexTokens

Ints = NDArray[np.int64]

_CHUNK_ROWS = 1 << 20


def joined_index(mixture: Mixture, indexes: Sequence[Index]) -> JoinedIndex:
    """Indexes of a mixture's leaves as one; one file is mapped once. Raises as `check_alike`."""
    check_alike([(leaf.name, leaf.dataset.recipe) for leaf in mixture.leaves])
    by_path: dict[Path, Index] = {}
    return JoinedIndex([by_path.setdefault(index.path, index) for index in indexes])


def check_alike(recipes: Sequence[tuple[str, Recipe]]) -> None:
    """Raise ValueError where two sources' samples could not be in one batch."""
    (first, one), *others = recipes
    wanted = _of_tensors(one)
    for name, other in others:
        for what, value in _of_tensors(other).items():
            if value != wanted.get(what) or wanted.keys() != _of_tensors(other).keys():
                here, there = wanted.get(what), value
                raise ValueError(
                    f"sources {first!r} and {name!r} differ in {what}, {here!r} and {there!r}: their samples are in "
                    "one batch, so it must be the same in both recipes; templates, placeholders, text fields "
                    "and limits on the tokens of a part may differ"
                )


def _of_tensors(recipe: Recipe) -> dict[str, Any]:
    """All of a recipe that its samples' tensors show, by name."""
    found: dict[str, Any] = {
        "modalities": list(recipe.modalities),
        "text.id": recipe.text.id,
        "limits": recipe.describe()["limits"],
    }
    for name, modality in recipe.modalities.items():
        parameters = modality.describe()
        found |= {f"{name}.{field}": value for field, value in _plain(parameters).items() if field not in modality.free}
        found[f"{name}.arrays"] = {array: str(spec) for array, spec in modality.arrays().items()}
        found[f"ids of {name}"] = list(recipe.slots[name]._replace(mark=None))
    return found


def _plain(described: Mapping[str, Any]) -> dict[str, Any]:
    """A description's fields, whatever is inside which."""
    found: dict[str, Any] = {}
    for field, value in described.items():
        found |= _plain(value) if isinstance(value, Mapping) else {field: value}
    return found


def mixture_order(
    mixture: Mixture, index: JoinedIndex, excluded: Ints, *, shuffle: Shuffle | None, seed: int, multiple_of: int
) -> MixtureOrder:
    """The order of a mixture's samples.

    Args:
        excluded: rows of all sources, ascending.
        seed: each source is shuffled by one that it gives with the source's name.

    Raises:
        ValueError: a source without a usable sample, or weights too far apart.
    """
    sources, largest = [], 1
    bounds = np.searchsorted(excluded, index.first_rows)
    for number, (leaf, own) in enumerate(zip(mixture.leaves, index.indexes, strict=True)):
        first = int(index.first_rows[number])
        left_out = excluded[bounds[number] : bounds[number + 1]] - first
        order = Order(
            own.num_rows,
            shuffle=shuffle,
            seed=_seed_of(seed, leaf.name),
            excluded=left_out,
            dataset_id=number,
        )
        if not order.num_samples:
            raise ValueError(f"source {leaf.name!r} has no usable sample: leave it out of the mixture")
        counts = IndexTokens(own, multiple_of)
        sums = TokenSums(order, counts)
        sources.append(MixedSource(leaf.name, order, counts, sums, first, float(leaf.loss_weight)))
        most = max(1, int(own.totals["max_llm_tokens"]))
        largest = max(largest, -(-most // multiple_of) * multiple_of)
    size = mixture.epoch_size
    if size is not None and size[0] == "tokens" and size[1] < largest:
        largest = max(_longest(source) for source in sources)  # without those that are left out
    if size is not None and size[0] == "tokens" and size[1] < largest:
        raise ValueError(f"epoch_tokens={size[1]} is less than one sample has, {largest}: raise it")
    return MixtureOrder(sources, mixture.quantised(), by=mixture.by, stop=mixture.stop, epoch_size=size)


def _longest(source: MixedSource) -> int:
    """Tokens of the longest sample that comes."""
    size, most = source.order.num_samples, 0
    for start in range(0, size, _CHUNK_ROWS):
        rows = source.order.located(np.arange(start, min(start + _CHUNK_ROWS, size)))
        most = max(most, int(source.counts(*rows).max()))
    return most


def _seed_of(seed: int, name: str) -> int:
    """Another seed for each source, whatever the others are: two may have the same shards."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")


def mixture_fingerprint(leaves: Sequence[Leaf], index: JoinedIndex, order: MixtureOrder) -> dict[str, Any]:
    """What a state must agree with: "weights" may be allowed to differ."""
    return {
        "mixture": order.describe(),
        "sources": {
            leaf.name: {
                "dataset": content_fingerprint(own.shards, ""),
                "recipe": leaf.dataset.recipe.describe(),
                "loss_weight": float(leaf.loss_weight),
                **({"selection": [each.describe() for each in chosen]} if (chosen := leaf.dataset.selections) else {}),
            }
            for leaf, own in zip(leaves, index.indexes, strict=True)
        },
        "weights": order.told_stages(),
    }


def restore(
    prepared: PreparedDataset, state: Mapping[str, Any], allow: Sequence[str], num_workers: int
) -> tuple[PreparedDataset, Position]:
    """What goes on from a state, and where. A mixture has the stages that the state tells; where other weights are
    allowed, its own from the state's place on.

    Raises:
        StateError: as `load_state`, and for stages that are none.
    """
    order = prepared.spec.plan.order
    if not isinstance(order, MixtureOrder):
        return prepared, load_state(state, prepared.fingerprint, prepared.epochs, allow, num_workers)
    held = state.get("fingerprint") if isinstance(state, Mapping) else None
    of_mixture = isinstance(held, Mapping) and held.get("mixture") == prepared.fingerprint["mixture"]
    stages = _read_stages(state.get("stages"), order) if of_mixture else order.stages
    begun = prepared if stages == order.stages else prepared.with_order(order.restaged(stages))
    position = load_state(state, prepared.fingerprint, begun.epochs, allow, num_workers)
    ours = prepared.fingerprint["weights"]
    if held is None or held.get("weights") == ours:
        return begun, position
    there = begun.spec.plan.order
    assert isinstance(there, MixtureOrder)
    amount = there.amount(position.epoch, position.told["cut"][1] if position.told else 0)
    given = _read_stages(ours, order)
    now = next(stage for stage in reversed(given) if stage.bound <= amount)
    kept = [stage for stage in stages if stage.bound < amount]
    later = [stage for stage in given if stage.bound > amount]
    return prepared.with_order(order.restaged([*kept, Stage(amount, now.periods), *later])), position


def _read_stages(told: Any, order: MixtureOrder) -> tuple[Stage, ...]:
    """The stages of `MixtureOrder.told_stages`. Raises StateError."""
    names = [source.name for source in order.sources]
    stages: list[Stage] = []
    for stage in told if isinstance(told, list | tuple) else ():
        if not (isinstance(stage, list | tuple) and len(stage) == 2 and isinstance(stage[1], Mapping)):
            break
        bound, periods = stage[0], [stage[1].get(name) for name in names]
        ints = [bound, *periods]
        if any(type(value) is not int or not 0 <= value <= 1 << 62 for value in ints) or not any(periods):
            break
        if bound != 0 if not stages else bound <= stages[-1].bound:
            break
        stages.append(Stage(bound, tuple(int(period or 0) for period in periods)))
    else:
        if stages:
            return tuple(stages)
    raise StateError(f"the state says that its mixture had the stages {told!r}, which are none")
