"""Totals of a table: counts over its samples, as a JSON-safe value that can be summed over shards.

A split sample counts once, for any number of pieces.

Every number is a sum, except those called `max_...`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.index.table import Columns, offsets_of
from orchdata.loaders.unread_names import sum_unread

Totals = dict[str, Any]

_NAMED_BY_DATA = "ignored_fields"
UNREAD = "unread"
"""Name of the counts of what is not read: see `unread_names.UnreadNames`."""


def summarize(
    columns: Columns,
    modalities: Sequence[str],
    ignored_fields: Mapping[str, int],
    unread: Mapping[str, Any],
) -> Totals:
    """Count the samples of a table.

    Args:
        columns: of a table without unused members.
        modalities: their names by code, text first.
        ignored_fields: field -> number of members that the recipe does not use.
        unread: as `UnreadNames.totals`.

    Returns:
        samples (bad ones included), bad, bytes and members (of the usable samples), llm_tokens, loss_tokens,
        without_loss (usable samples without a token that carries loss), max_llm_tokens (of a row), overflow (see
        `overflow_of`), ignored_fields (under `records.LEFT_OUT`: samples that `Recipe.record` leaves out), and for each
        modality: samples that have it, parts, positions, tokens, max_positions. Text has no positions or parts; its
        tokens are those that no encoder fills.
    """
    starts = offsets_of(columns.part_tokens)[columns.part_offsets]
    text_tokens = columns.llm_tokens - (starts[1:] - starts[:-1])
    is_first = columns.piece == 0
    loss_tokens, member_size = columns.loss_tokens, columns.member_size
    if not is_first.all():
        loss_tokens = np.add.reduceat(loss_tokens, np.flatnonzero(is_first), dtype=np.int64)
        member_size = member_size[np.repeat(is_first, np.diff(columns.member_offsets))]
    with_text = int(np.count_nonzero(text_tokens[is_first]))
    by_modality: Totals = {"text": {"samples": with_text, "tokens": _sum(text_tokens)}}
    for code, name in enumerate(modalities[1:], 1):
        mine = (columns.part_modality == code).nonzero()[0]
        by_modality[name] = _summarize_parts(mine, columns) if mine.size else dict(_NO_PARTS)
    return {
        "samples": loss_tokens.size,
        "bad": columns.bad_row.size,
        "bytes": _sum(member_size),
        "members": member_size.size,
        "llm_tokens": _sum(columns.llm_tokens),
        "loss_tokens": _sum(columns.loss_tokens),
        "without_loss": int(np.count_nonzero((loss_tokens == 0) & (columns.llm_tokens[is_first] > 0))),
        "max_llm_tokens": int(np.maximum.reduce(columns.llm_tokens, initial=0)),
        "overflow": overflow_of(columns.piece, columns.cut_tokens),
        "ignored_fields": dict(ignored_fields),
        "modalities": by_modality,
        UNREAD: dict(unread),
    }


def overflow_of(piece: NDArray[np.int32], cut_tokens: NDArray[np.int32]) -> dict[str, int]:
    """Count the samples that `TextPreprocessor.overflow` changed, by their columns of an index, all rows in order.

    Returns:
        truncated: number of samples, and cut_tokens: LLM tokens that they lost; split: number of samples, and pieces:
        number of their rows.
    """
    continued = piece > 0
    split = int(np.count_nonzero(continued[1:] & ~continued[:-1]))
    return {
        "truncated": int(np.count_nonzero(cut_tokens)),
        "cut_tokens": _sum(cut_tokens),
        "split": split,
        "pieces": split + int(np.count_nonzero(continued)),
    }


_NO_PARTS = {"samples": 0, "parts": 0, "positions": 0, "tokens": 0, "max_positions": 0}


def _summarize_parts(parts: NDArray[np.int64], columns: Columns) -> dict[str, int]:
    rows = np.searchsorted(columns.part_offsets, parts, side="right")
    positions = columns.part_positions[parts]
    return {
        "samples": 1 + int(np.count_nonzero(rows[1:] != rows[:-1])),
        "parts": parts.size,
        "positions": _sum(positions),
        "tokens": _sum(columns.part_tokens[parts]),
        "max_positions": int(np.maximum.reduce(positions)),
    }


def _sum(values: NDArray[Any]) -> int:
    return int(np.add.reduce(values, dtype=np.int64))


def sum_totals(totals: Sequence[Totals]) -> Totals:
    """Return the sum of several totals, with all names that any of them has."""
    result: Totals = {}
    for name in dict.fromkeys(name for one in totals for name in one):
        values = [one[name] for one in totals if name in one]
        if name == _NAMED_BY_DATA:
            counts: Counter[str] = Counter()
            for value in values:
                counts.update(value)
            result[name] = dict(counts)
        elif name == UNREAD:
            result[name] = sum_unread(values)
        elif isinstance(values[0], dict):
            result[name] = sum_totals(values)
        else:
            result[name] = max(values) if name.startswith("max_") else sum(values)
    return result
