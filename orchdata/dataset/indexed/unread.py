"""What the samples of a data set have and the model does not get: one warning for each kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from orchdata.dataset.indexed.first import is_partial
from orchdata.dataset.mixture import Mixture
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.loaders.index.fields.missing import missing_names
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.joined import JoinedIndex
from orchdata.loaders.modalities.builtin import BUILTINS, KINDS, ON_REQUEST
from orchdata.loaders.samples.members import stem
from orchdata.loaders.shards.fields import classify
from orchdata.loaders.shards.open import by_identity
from orchdata.loaders.text.media_words import record_keys
from orchdata.loaders.text.preprocessor import TEXT_FIELDS
from orchdata.loaders.text.words import WORDS_SUFFIX, names_words
from orchdata.notices import warn_once

_PATHS: Final = record_keys((*BUILTINS, *ON_REQUEST))
"""Columns of strings that name media by path, and are compared with the media of the row."""


def warn_of_unread(dataset: ShardDataset | Mixture, index: Index | JoinedIndex, *, learns: bool) -> None:
    """Warn once about text, media and names of media that are not read, and, if the model `learns` from the tokens of
    batches, about data without a token to learn.
    """
    _warn_of_text(index)
    parts = whole_parts(dataset, index)
    for one, each in parts:
        unread = _unread_media(one, each)
        if unread:
            _warn_of_media(each, unread)
        else:
            _warn_of_unused_root(one, each)
    keeps = any(one.recipe.keep for one, _ in parts)  # classes, say, which are learned
    if learns and not keeps:
        _warn_of_no_loss(index)


def _warn_of_text(index: Index | JoinedIndex) -> None:
    """Warn once about text that no rule reads: the model would not learn it."""
    ignored = {name: count for name, count in index.totals["ignored_fields"].items() if _is_unread_text(name)}
    if ignored:
        names = ", ".join(f"{name.removesuffix(WORDS_SUFFIX)!r} ({count:,})" for name, count in [*ignored.items()][:5])
        warn_once(
            f"unread text of {index.fingerprint}",
            f"text that is not read, and that the model does not learn: {names}{', ...' if len(ignored) > 5 else ''}. "
            "Read it with Recipe(record=...), a function of yours, with columns={old: 'text'}, or with "
            "TextPreprocessor(fields=...): docs/layouts.md",
        )


def _unread_media(one: ShardDataset, index: Index) -> dict[str, int]:
    """Return how many media of each built-in modality there are that the recipe lacks."""
    counts: dict[str, int] = {}
    for name, count in index.totals["ignored_fields"].items():
        kind = classify(name)[0]
        modality = _PATHS.get(name.partition(".")[0]) or (KINDS[kind] if kind < len(KINDS) else "")
        if modality in BUILTINS and modality not in one.recipe.modalities:
            counts[modality] = counts.get(modality, 0) + count
    return counts


def _warn_of_media(index: Index, unread: Mapping[str, int]) -> None:
    """Warn once about media under a recipe without their modality: the model would get the text alone."""
    found = ", ".join(f"{modality} ({count:,})" for modality, count in unread.items())
    warn_once(
        f"unread media of {index.fingerprint}",
        f"media that the recipe does not read, so the model gets the text without them: {found}. Give the recipe "
        f"their modality: {next(iter(unread))}= of od.Recipe, or od.hf.recipe(processor) of one that has it",
    )


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


def _warn_of_no_loss(index: Index | JoinedIndex) -> None:
    """Warn once about data without a token to learn in any sample."""
    totals = index.totals
    if totals["samples"] > totals["bad"] and not totals["loss_tokens"]:
        warn_once(
            f"no loss tokens of {index.fingerprint}",
            "no sample has a token to learn: batch.loss_tokens is 0 in every step. A text is read from "
            f"{', '.join(TEXT_FIELDS)}, and of a chat the roles in ChatTemplate.loss_roles are trained. Rename a "
            "column with columns={old: 'text'}: docs/layouts.md",
        )


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
    mine: list[tuple[ShardDataset, Index]] = []
    if isinstance(dataset, ShardDataset):
        mine = [(dataset, index)]
    elif isinstance(index, JoinedIndex):
        mine = [(leaf.dataset, each) for leaf, each in zip(dataset.leaves, index.indexes, strict=True)]
    return [(one, each) for one, each in mine if not is_partial(each, one.urls)]


def _is_unread_text(name: str) -> bool:
    """Return whether an ignored field has words that no rule reads. Names that rules know gave way to another field."""
    base = stem(name.removesuffix(WORDS_SUFFIX))
    if name.endswith(WORDS_SUFFIX):
        return base not in _PATHS
    return base.rpartition(".")[2] not in TEXT_FIELDS and names_words(base)
