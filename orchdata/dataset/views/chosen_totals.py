"""Totals of the chosen samples of an index, if a filter or a split leaves some out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.dataset.selection import columns_of, stretches
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.joined import JoinedIndex
from orchdata.loaders.index.totals import Totals, overflow_of, sum_totals


def chosen_totals(index: Index, left_out: NDArray[np.int64], *, until: float | None = None) -> Totals:
    """Return totals of the samples that are not left out: samples (bad ones included), bad, bytes, llm_tokens,
    loss_tokens, overflow, and for each modality samples, parts and tokens.

    Args:
        left_out: rows of whole samples, ascending, int64.
        until: as for `stretches`.
    """
    if not len(left_out):
        return index.totals
    if isinstance(index, JoinedIndex):
        return sum_totals(totals_of_sources(index, left_out, until=until))
    columns = columns_of(index)
    return sum_totals(
        [_stretch_totals(index, columns, *stretch, left_out) for stretch in stretches(index, until=until)]
    )


def totals_of_sources(index: JoinedIndex, left_out: NDArray[np.int64], *, until: float | None = None) -> list[Totals]:
    """Return the same of each source whose index is joined."""
    bounds = np.searchsorted(left_out, index.first_rows)
    parts = zip(index.indexes, index.first_rows[:-1].tolist(), bounds[:-1], bounds[1:], strict=True)
    return [chosen_totals(part, left_out[low:high] - first, until=until) for part, first, low, high in parts]


def _stretch_totals(
    index: Index, columns: dict[str, Callable[[int, int], Any]], start: int, stop: int, left_out: NDArray[np.int64]
) -> Totals:
    kept = np.ones(stop - start, bool)
    kept[left_out[np.searchsorted(left_out, start) : np.searchsorted(left_out, stop)] - start] = False
    pieces, cut_tokens = index.piece[start:stop], index.cut_tokens[start:stop]
    chosen = kept & (pieces == 0)  # columns have the values of whole samples

    def of(column: str) -> NDArray[np.int64]:
        values: NDArray[np.int64] = np.asarray(columns[column](start, stop))[chosen].astype(np.int64)
        return values

    modalities = {"text": {"samples": int(np.count_nonzero(of("text_tokens"))), "tokens": int(of("text_tokens").sum())}}
    for name in index.modalities[1:]:
        parts = of(f"{name}_parts")
        modalities[name] = {
            "samples": int(np.count_nonzero(parts)),
            "parts": int(parts.sum()),
            "tokens": int(of(f"{name}_tokens").sum()),
        }
    return {
        "samples": int(np.count_nonzero(chosen)),
        "bad": int(np.count_nonzero(of("bad"))),
        "bytes": int(of("bytes").sum()),
        "llm_tokens": int(of("tokens").sum()),
        "loss_tokens": int(of("loss_tokens").sum()),
        "overflow": overflow_of(pieces[kept], cut_tokens[kept]),
        "modalities": modalities,
    }
