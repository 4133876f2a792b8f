"""What the samples of a data set have and the model does not get: one warning for each kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from orchdata.dataset.indexed import is_partial
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.stored import missing_names
from orchdata.loaders.index.table import UNREAD
from orchdata.loaders.modalities.builtin import BUILTINS
from orchdata.loaders.shards.open import by_identity
from orchdata.loaders.text.messages import HARMLESS
from orchdata.loaders.text.preprocessor import TEXT_FIELDS
from orchdata.loaders.text.template import record_keys
from orchdata.loaders.unread_names import above, modality_of_name
from orchdata.notices import warn_once

if TYPE_CHECKING:
    from orchdata.dataset.mixture import Mixture
    from orchdata.dataset.shard_dataset import ShardDataset


Ints = NDArray[np.int64]
_SHOWN: Final = 40
_MEDIA_SHOWN: Final = 3
_FEW: Final = 0.01
"""Share of samples without a token to learn that is no reason for a warning."""


def unread_of(dataset: ShardDataset | Mixture | None, index: Index) -> dict[str, Any]:
    """Return {"names": name -> number of samples, "others": the sum of all other counts} of fields that are not read,
    the most frequent first; without those of `index_fields`.
    """
    own = {field for leaf in dataset.leaves for field in leaf.dataset.index_fields} if dataset else set()
    unread = index.totals[UNREAD]
    names = sorted(unread["names"].items(), key=lambda each: (-each[1], each[0]))
    return {"names": {name: count for name, count in names if own.isdisjoint(above(name))}, "others": unread["others"]}


def warn_of_unread(dataset: ShardDataset | Mixture, index: Index, rank: int) -> None:
    """Warn once about fields that are not read, those of each source of a mixture. One rank speaks for all."""
    if not rank and (message := unread_in_words(dataset, index)):
        warn_once(f"unread fields of {index.fingerprint} {message}", message)


def unread_in_words(dataset: ShardDataset | Mixture, index: Index) -> str:
    """Return what a warning says of fields that are not read; "" if there is nothing to say.

    Named are fields that are below no other, but for harmless ones, and those that the data set ignores.
    """
    said, more, media, known = list[str](), list[str](), dict[str, str](), set[str]()
    for (source, one, *_), each, _ in dataset.parts(index):
        of = f"of source {source!r} " if source else ""
        if root := _unused_root(one, each):
            more.append(root)
        counts = unread_of(one, each)["names"]
        top = {
            name: count
            for name, count in counts.items()
            if name not in HARMLESS
            and counts.keys().isdisjoint(parents := above(name)[:-1])
            and {name, *parents}.isdisjoint(one.ignore)
        }
        if top:
            shown = ", ".join(f"{name!r} ({count:,})" for name, count in [*top.items()][:_SHOWN])
            said.append(f"{of}{shown}{f' and {len(top) - _SHOWN:,} more' if len(top) > _SHOWN else ''}")
            media |= {name: kind for name in top if (kind := modality_of_name(name)) is not None}
            known |= one.recipe.modalities.keys()
    if not said:
        return ". ".join(more)
    ways = [
        f"{name!r} is {kind} in a format or under a name that is not read: convert or rename it"
        if kind in known
        else f"{name!r} is of a modality that the recipe lacks: {kind}= of od.Recipe, or od.hf.recipe(processor)"
        for name, kind in [*media.items()][:_MEDIA_SHOWN]
    ]
    ways.append(
        "Recipe(keep=...) delivers a field, Recipe(record=...) or columns= reads it, and ShardDataset(ignore=...) says "
        "no more of it: docs/layouts.md#fields-that-are-not-read"
    )
    return ". ".join([f"fields that are not read, with the samples that have them: {'; '.join(said)}", *more, *ways])


def _unused_root(one: ShardDataset, index: Index) -> str:
    """Say that a `media_root` is without media: their names are probably under a key that is not read."""
    totals = index.totals
    if one.media_root is None or totals["samples"] == totals["bad"] or not one.recipe.modalities:
        return ""
    if is_partial(index, one.urls) or any(kind.get("parts") for kind in totals["modalities"].values()):
        return ""
    keys = ", ".join(record_keys(BUILTINS))
    return f"media_root={one.media_root!r} is given, and no sample has media: records name them under {keys}"


def warn_of_no_loss(dataset: ShardDataset | Mixture, index: Index, unchosen: Ints, *, learns: bool) -> None:
    """Warn once about each data set of which no chosen sample, or more than a few, have no token to learn.

    Args:
        unchosen: rows of the index that are not chosen, ascending.
        learns: whether the model learns from the tokens of batches: a function of the user's may give it others.
    """
    if not learns:
        return
    for (name, one, *_), each, first in dataset.parts(index):
        rows = unchosen[slice(*np.searchsorted(unchosen, (first, first + each.num_rows)))] - first
        without, usable = _without_loss(each, rows)
        if one.recipe.keep or without <= _FEW * usable:  # kept are classes, say, which are learned
            continue
        of = f" of source {name!r}" if name else ""
        chosen = f" among those that {'its' if name else 'the'} data set chooses" if rows.size else ""
        if without < usable:
            said = (
                f"{without:,} of {usable:,} samples{of} have no token to learn{chosen}: they take time in steps, and "
            )
            said += "dataset.filter('loss_tokens > 0') leaves them out"
        else:
            in_steps = "gives no loss in any step" if name else "batch.loss_tokens is 0 in every step"
            said = f"no sample{of} has a token to learn{chosen}: {in_steps}"
        warn_once(
            f"no loss tokens of {name} {one.selections} {each.fingerprint}",
            f"{said}. A text is read from {', '.join(TEXT_FIELDS)}, and of a chat the roles in ChatTemplate.loss_roles "
            "are trained. Rename a column with columns={old: 'text'}: docs/layouts.md",
        )


def _without_loss(index: Index, unchosen: Ints) -> tuple[int, int]:
    """Return how many usable samples that are chosen have no token to learn, and how many are chosen."""
    totals = index.totals
    if not unchosen.size:
        return totals["without_loss"], totals["samples"] - totals["bad"]
    left_out = np.union1d(unchosen, index.bad_rows())
    with_loss = np.count_nonzero(index.loss_tokens) - np.count_nonzero(index.loss_tokens[left_out])
    chosen = index.num_rows - left_out.size
    return int(chosen - with_loss), int(chosen)


def warn_of_missing(dataset: ShardDataset | Mixture, index: Index) -> None:
    """Warn once about names of `Recipe.keep` that no sample has."""
    containers = by_identity(dataset.containers)
    keeping = [(each, one.recipe) for one, each in whole_parts(dataset, index) if one.recipe.keep]
    found = [missing_names(each, recipe, containers, dataset.files) for each, recipe in keeping]
    there = {name for (_, recipe), each in zip(keeping, found, strict=True) for name in {*recipe.keep} - {*each.names}}
    if missing := sorted({name for _, recipe in keeping for name in recipe.keep} - there):
        others = ", ".join(map(repr, list(dict.fromkeys(name for each in found for name in each.others))[:12]))
        records = sum(each.num_records for each in found)
        where = f", no key of {records:,} of its records," if records else ""
        warn_once(
            f"no kept fields of {index.fingerprint}",
            f"Recipe.keep names {', '.join(map(repr, missing))}, and no sample of the data set has such a field"
            f"{where or ','} but {others}",
        )


def whole_parts(dataset: ShardDataset | Mixture, index: Index) -> list[tuple[ShardDataset, Index]]:
    """Return the data sets with their indexes, without those of first samples alone: other samples are not known."""
    parts = [(leaf.dataset, each) for leaf, each, _ in dataset.parts(index)]
    return [(one, each) for one, each in parts if not is_partial(each, one.urls)]
