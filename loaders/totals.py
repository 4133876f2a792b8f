"""What a table holds in all: counts over its samples, as a JSON-safe value that adds up over shards.

Every number is a sum, except those called `max_...`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

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
        "bad": int(columns.bad_rows().size),
        "bytes": int(columns.member_size.sum()),
        "members": columns.member_size.size,
        "llm_tokens": tokens,
        "loss_tokens": int(columns.loss_tokens.sum(dtype=np.int64)),
        "max_llm_tokens": int(columns.llm_tokens.max(initial=0)),
        "ignored_fields": dict(ignored_fields),
        "modalities": {},
    }
    row_of_part = np.repeat(np.arange(columns.shard.size), np.diff(columns.part_offsets))
    media_tokens = np.zeros(columns.shard.size, np.int64)
    np.add.at(media_tokens, row_of_part, columns.part_tokens)
    text_tokens = columns.llm_tokens - media_tokens
    totals["modalities"]["text"] = {
        "samples": int(np.count_nonzero(text_tokens)),
        "tokens": int(text_tokens.sum()),
    }
    for name in ENCODERS:
        mine = columns.part_modality == MODALITIES.index(name)
        totals["modalities"][name] = {
            "samples": int(np.count_nonzero(np.diff(row_of_part[mine], prepend=-1))),
            "parts": int(np.count_nonzero(mine)),
            "positions": int(columns.part_positions[mine].sum(dtype=np.int64)),
            "tokens": int(columns.part_tokens[mine].sum(dtype=np.int64)),
            "max_positions": int(columns.part_positions[mine].max(initial=0)),
        }
    return totals


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
