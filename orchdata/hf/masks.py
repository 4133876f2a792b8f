"""Masks of all pairs, for packed samples of models in which some tokens see ahead."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orchdata.batch.batch import Batch
from orchdata.batch.tensors import IGNORE, LLMBatch


def packed_masks(batch: Batch, config: Any, sees_ahead: str, attention: str) -> Tensor | dict[str, Tensor]:
    """Who attends to whom in one row of T packed tokens, (1, 1, T, T); for Gemma-3 by the type of its layers.

    Args:
        batch: packed.
        config: of the model; its text's `sliding_window` is read.
        sees_ahead: tokens of the same "media" part, or those of the "prefix", see each other in both directions.
        attention: "sdpa" takes True where one attends, "eager" zero there and the lowest number elsewhere.

    Raises:
        ValueError: a sample longer than the sliding window of a model that takes one mask for all layers.
    """
    llm = batch.llm
    positions = torch.arange(len(llm.input_ids), device=llm.input_ids.device)
    sample = torch.searchsorted(llm.cu_seqlens[1:].long(), positions, right=True)
    group = _parts(llm) if sees_ahead == "media" else _prefixes(llm, sample)
    together = (group[:, None] == group) & (group > 0)
    sees_before = positions[:, None] >= positions
    full = (sample[:, None] == sample) & (sees_before | together)
    window = getattr(config.get_text_config(), "sliding_window", None)
    if sees_ahead != "media":
        longest = max(llm.cu_seqlens[: len(batch.sample_ids) + 1].diff().tolist(), default=0)
        if window is not None and longest > window:
            raise ValueError(
                f"a sample of {longest} tokens is longer than the sliding window of {window}, which packed "
                f"masks of {config.model_type} do not know: use od.hf.Inputs(config, padded=True)"
            )
        return _as_taken(full, attention)
    sliding = full if window is None else full & (positions[:, None] - positions < window)
    return {"full_attention": _as_taken(full, attention), "sliding_attention": _as_taken(sliding, attention)}


def _parts(llm: LLMBatch) -> Tensor:
    """Return the number of each token's media part, from 1; 0 for text. Consecutive tokens are one part."""
    media = torch.zeros_like(llm.input_ids)
    for positions in llm.media_positions.values():
        media = media.index_fill(0, positions, 1)
    begins = media * (1 - torch.nn.functional.pad(media, (1, 0))[:-1])
    return media * begins.cumsum(0)


def _prefixes(llm: LLMBatch, sample: Tensor) -> Tensor:
    """Return 1 for tokens before the first loss token of their sample, else 0; padding counts as after it."""
    seen = (llm.labels != IGNORE).long().cumsum(0)
    before = torch.nn.functional.pad(seen, (1, 0))[llm.cu_seqlens[:-1].long()]
    return (seen == before[sample]).long()


def _as_taken(allowed: Tensor, attention: str) -> Tensor:
    if attention == "eager":
        lowest = torch.finfo(torch.float32).min
        allowed = torch.zeros(allowed.shape, device=allowed.device).masked_fill(~allowed, lowest)
    return allowed[None, None]
