"""What a table holds in all: counts over its samples, as a JSON-safe value that adds up over shards.

Every number is a sum, except those called `max_...`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.modality import ENCODERS, MODALITIES
from orchdata.loaders.table import Columns

Totals = dict[str, Any]


def summarize(columns: Columns, ignored_fields: Mapping[str, int]) -> Totals:
    """Count the samples of a table.

    Args:
        columns: of a table without unused members.
        ignored_fields: field -> members that nobody asked for.

    Returns:
        samples (bad ones included), bad, bytes and members (of the usable samples), llm_tokens, loss_tokens,
        max_llm_tokens, ignored_fields, and for each modality: samples that have it, parts, positions, tokens,
        max_positions. Text has no positions or parts; its tokens are those no encoder fills.
    """
    tokens = int(columns.llm_tokens.sum(dtype=np.int64))
    totals: Totals = {
        "samples": columns.shard.size,
        "bad": int(columns.bad_row.size),
        "bytes": int(columns.member_size.sum()),
        "members": columns.member_size.size,
        "llm_tokens": tokens,
        "loss_tokens": int(columns.loss_tokens.sum(dtype=np.int64)),
        "max_llm_tokens": int(columns.llm_tokens.max(initial=0)),
        "ignored_fields": dict(ignored_fields),
        "modalities": {},
    }
    ends = np.zeros(columns.part_tokens.size + 1, np.int64)
    np.cumsum(columns.part_tokens, out=ends[1:])
    starts = ends[columns.part_offsets]
    text_tokens = columns.llm_tokens - (starts[1:] - starts[:-1])
    totals["modalities"]["text"] = {
        "samples": int(np.count_nonzero(text_tokens)),
        "tokens": int(text_tokens.sum()),
    }
    for name in ENCODERS:
        mine = np.flatnonzero(columns.part_modality == MODALITIES.index(name))
        positions = columns.part_positions[mine]
        totals["modalities"][name] = {
            "samples": _rows_of(mine, columns),
            "parts": mine.size,
            "positions": int(positions.sum(dtype=np.int64)),
            "tokens": int(columns.part_tokens[mine].sum(dtype=np.int64)),
            "max_positions": int(positions.max(initial=0)),
        }
    return totals


def _rows_of(parts: NDArray[np.int64], columns: Columns) -> int:
    """In how many rows these parts, ascending, are."""
    if not parts.size:
        return 0
    rows = np.searchsorted(columns.part_offsets, parts, side="right")
    return 1 + int(np.count_nonzero(rows[1:] != rows[:-1]))


def add_totals(one: Totals, other: Totals) -> Totals:
    """The totals of both together; names that only one has are kept."""
    result = dict(one)
    for name, value in other.items():
        if name not in result:
            result[name] = value
        elif isinstance(value, dict):
            result[name] = add_totals(result[name], value)
        else:
            result[name] = max(result[name], value) if name.startswith("max_") else result[name] + value
    return result
