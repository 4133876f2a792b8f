"""What the samples of a data set have and the model does not get: one warning for each kind."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.dataset.indexed.first import is_partial
from orchdata.dataset.mixture import Mixture
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.loaders.amounts import counted
from orchdata.loaders.index.fields.missing import missing_names
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.joined import JoinedIndex
from orchdata.loaders.index.totals import UNREAD
from orchdata.loaders.media_names import modality_of_ending, modality_of_member
from orchdata.loaders.modalities.builtin import BUILTINS, ON_REQUEST
from orchdata.loaders.samples.members import stem
from orchdata.loaders.shards.fields import classify
from orchdata.loaders.shards.open import by_identity
from orchdata.loaders.storage.paths import ARROW_SUFFIXES, PARQUET_SUFFIXES
from orchdata.loaders.text.media_words import record_keys
from orchdata.loaders.text.preprocessor import TEXT_FIELDS
from orchdata.loaders.text.words import WORDS_SUFFIX, names_words
from orchdata.notices import warn_once

Ints = NDArray[np.int64]
_SHOWN: Final = 5
_FEW: Final = 0.01
"""Share of samples without a token to learn that is no reason for a warning."""
_LEAST_ADDRESSES: Final = 0.01
"""Share of samples from which on a field of addresses is taken for media, and not for pages of the web."""
_PATHS: Final = record_keys((*BUILTINS, *ON_REQUEST))
"""Columns of strings that name media by path, and are compared with the media of the row."""


class _UnreadName(NamedTuple):
    """A field with names of media, the number of samples that have one, its modality, and one of the names."""

    samples: int
    field: str
    modality: str
    example: str

    @property
    def is_address(self) -> bool:
        return "://" in self.example


def warn_of_unread(dataset: ShardDataset | Mixture, index: Index | JoinedIndex) -> None:
    """Warn once about text, media and names of media that are not read."""
    parts = whole_parts(dataset, index)
    _warn_of_text(index, {field for one, _ in parts for field in one.recipe.text.fields})
    for one, each in parts:
        unread = _unread_media(one, each)
        names = _unread_names(one, each)
        if unread:
            _warn_of_media(each, unread)
        if undecoded := _undecoded(one, each):
            _warn_of_endings(each, undecoded)
        if names:
            _warn_of_names(each, names)
        if not unread and not names:
            _warn_of_unused_root(one, each)


def _warn_of_text(index: Index | JoinedIndex, read: Collection[str]) -> None:
    """Warn once about text that no rule reads: the model would not learn it.

    Args:
        read: names that recipes read in records, besides those of all records.
    """
    names_media = {field for fields in index.totals.get(UNREAD, {}).values() for field in fields}
    ignored = {
        name: count
        for name, count in index.totals["ignored_fields"].items()
        if _is_unread_text(name) and name not in read and name.removesuffix(WORDS_SUFFIX) not in names_media
    }
    if ignored:
        names = ", ".join(f"{name.removesuffix(WORDS_SUFFIX)!r} ({count:,})" for name, count in [*ignored.items()][:5])
        warn_once(
            f"unread text of {index.fingerprint}",
            f"text that is not read, and that the model does not learn: {names}{', ...' if len(ignored) > 5 else ''}. "
            "Read it with Recipe(record=...), a function of yours, with columns={old: 'text'}, or with "
            "TextPreprocessor(fields=...): docs/layouts.md",
        )


def _unread_media(one: ShardDataset, index: Index) -> dict[str, int]:
    """Return how many media of each modality of the library there are that the recipe lacks."""
    counts: dict[str, int] = {}
    for name, count in index.totals["ignored_fields"].items():
        modality = modality_of_member(name, classify(name)[0])
        if modality is not None and modality not in one.recipe.modalities:
            counts[modality] = counts.get(modality, 0) + count
    return counts


def _undecoded(one: ShardDataset, index: Index) -> dict[str, int]:
    """Return how many members there are of each ending of media that the modality of the recipe does not read, if not
    all samples have other media of it.
    """
    totals, counts = index.totals, dict[str, int]()
    for name, count in totals["ignored_fields"].items():
        ending = name.rpartition(".")[2]
        modality = modality_of_ending(f".{ending}")
        if modality not in one.recipe.modalities or ending in one.recipe.modalities[modality].fields:
            continue
        if totals["modalities"][modality]["samples"] < totals["samples"] - totals["bad"]:
            counts[ending] = counts.get(ending, 0) + count
    return counts


def _unread_names(one: ShardDataset, index: Index) -> list[_UnreadName]:
    """Return the fields with names of media that no rule reads, the most frequent first.

    Left out are fields that the recipe keeps for the user, and addresses of few samples: pages of the web may have the
    endings of media.
    """
    least = _LEAST_ADDRESSES * index.totals["samples"]
    names = [
        _UnreadName(each["samples"], field, modality, each["example"])
        for modality, fields in index.totals.get(UNREAD, {}).items()
        for field, each in fields.items()
        if field.partition(".")[0] not in one.recipe.keep
    ]
    likely = [name for name in names if not name.is_address or name.samples >= least]
    return sorted(likely, key=lambda name: -name.samples)


def _warn_of_media(index: Index, unread: Mapping[str, int]) -> None:
    """Warn once about media under a recipe without their modality: the model would get the text alone."""
    found = ", ".join(f"{modality} ({count:,})" for modality, count in unread.items())
    warn_once(
        f"unread media of {index.fingerprint}",
        f"media that the recipe does not read, so the model gets the text without them: {found}. Give the recipe "
        f"their modality: {next(iter(unread))}= of od.Recipe, or od.hf.recipe(processor) of one that has it",
    )


def _warn_of_endings(index: Index, counts: Mapping[str, int]) -> None:
    """Warn once about members in formats that are not read: the model would get the text alone."""
    found = ", ".join(f".{ending} ({count:,})" for ending, count in [*counts.items()][:_SHOWN])
    warn_once(
        f"undecoded media of {index.fingerprint}",
        f"media in formats that are not read, so the model gets the text without them: {found}. Convert them, to JPEG, "
        "PNG, FLAC or MP4 for example: docs/layouts.md#media-that-are-not-read",
    )


def _warn_of_names(index: Index, names: Sequence[_UnreadName]) -> None:
    """Warn once about paths and addresses of media that no rule reads: the model would get the text alone."""
    found = ", ".join(
        f"{one.field!r} ({counted(one.samples, 'sample')}, such as {one.example!r})" for one in names[:_SHOWN]
    )
    # What reads them depends on the names, and on what has them.
    ways = []
    if any(one.is_address for one in names):
        ways.append("Nothing is downloaded: download the files, and give their paths or bytes")
    if path := next((one for one in names if not one.is_address), None):
        renamed = "" if "." in path.field else f"columns={{{path.field!r}: {path.modality!r}}} or "
        ways.append(
            f"Read a path with {renamed}Recipe(record=...), a function of yours"
            if _opens_paths(index)
            else "Paths are read from JSON and CSV alone: write the bytes into the table, or its rows as JSON Lines"
        )
    warn_once(
        f"unread names of media of {index.fingerprint}",
        f"names of media that are not read, so the model gets the text without them: {found}"
        f"{', ...' if len(names) > _SHOWN else ''}. {'. '.join(ways)}. To train on the text alone, leave these fields "
        "out in Recipe(record=...): docs/layouts.md#media-that-are-not-read",
    )


def _opens_paths(index: Index) -> bool:
    """Return whether shards are records, whose paths are opened."""
    others = (*PARQUET_SUFFIXES, *ARROW_SUFFIXES)
    return any(not shard.container and not shard.url.lower().endswith(others) for shard in index.shards)


def _warn_of_unused_root(one: ShardDataset, index: Index) -> None:
    """Warn once about a `media_root` without media: their names are probably under a key that is not read."""
    totals = index.totals
    if one.media_root is None or totals["samples"] == totals["bad"] or not one.recipe.modalities:
        return
    if not any(kind.get("parts") for kind in totals["modalities"].values()):
        warn_once(
            f"no media below {one.media_root} of {index.fingerprint}",
            f"media_root={one.media_root!r} is given, and no sample has media: records name them under "
            f"{', '.join(record_keys(BUILTINS))}. Rename another key with columns=, or read it with "
            "Recipe(record=...): docs/layouts.md",
        )


def warn_of_no_loss(
    dataset: ShardDataset | Mixture, index: Index | JoinedIndex, unchosen: Ints, *, learns: bool
) -> None:
    """Warn once about each data set of which no chosen sample, or more than a few, have no token to learn.

    Args:
        unchosen: rows of the index that are not chosen, ascending.
        learns: whether the model learns from the tokens of batches: a function of the user's may give it others.
    """
    if not learns:
        return
    first = 0
    for name, one, each in _named_parts(dataset, index):
        rows = unchosen[slice(*np.searchsorted(unchosen, (first, first + each.num_rows)))] - first
        first += each.num_rows
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


def warn_of_missing(dataset: ShardDataset | Mixture, index: Index | JoinedIndex) -> None:
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


def whole_parts(dataset: ShardDataset | Mixture, index: Index | JoinedIndex) -> list[tuple[ShardDataset, Index]]:
    """Return the data sets with their indexes, without those of first samples alone: other samples are not known."""
    return [(one, each) for _, one, each in _named_parts(dataset, index) if not is_partial(each, one.urls)]


def _named_parts(dataset: ShardDataset | Mixture, index: Index | JoinedIndex) -> list[tuple[str, ShardDataset, Index]]:
    """Return the sources of a mixture by their names, or the data set under the name "", with their indexes."""
    if isinstance(dataset, ShardDataset):
        return [("", dataset, index)]
    assert isinstance(index, JoinedIndex)
    return [(leaf.name, leaf.dataset, each) for leaf, each in zip(dataset.leaves, index.indexes, strict=True)]


def _is_unread_text(name: str) -> bool:
    """Return whether an ignored field has words that no rule reads. Names that rules know gave way to another field."""
    base = stem(name.removesuffix(WORDS_SUFFIX))
    if name.endswith(WORDS_SUFFIX):
        return base not in _PATHS
    return base.rpartition(".")[2] not in TEXT_FIELDS and names_words(base)
