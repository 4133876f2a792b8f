"""The samples that are tried, as batches: packed in one row, or padded, a row a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor

from orchdata.batch.batch import Batch
from orchdata.batch.tensors import IGNORE, LLMBatch, TextBatch
from orchdata.hf.families import Family
from orchdata.hf.tiny import text_of
from orchdata.planning.plan import Plan

LENGTHS: Final = (29, 7, 23)
"""Tokens of the samples: more than twice a tiny model's windows and chunks, and fewer; multiples of none. The short one
shows models that look at the length of a row to know whether their window matters.
"""
_MEDIA: Final = slice(2, 6)
_PROMPT: Final = 3
_SIDE: Final = 2


@dataclass(frozen=True)
class Sample:
    """Tokens of one sample.

    Attributes:
        ids, labels: int64 (T,); -100 where there is no loss.
        media: positions of a part of 2 x 2 tokens; none if its model does not look for parts.
    """

    ids: Tensor
    labels: Tensor
    media: slice | None = None


def tried_samples(config: Any, family: Family) -> list[Sample]:
    """Random texts; with a part of media, and a prompt without loss, where masks or positions depend on them."""
    samples = []
    for seed, length in enumerate(LENGTHS):
        ids = text_of(config, length, seed)
        labels = ids.clone()
        labels[: _PROMPT if family.sees_ahead == "prefix" else 1] = IGNORE
        samples.append(Sample(ids, labels, _MEDIA if family.mrope or family.sees_ahead == "media" else None))
    return samples


def packed(samples: Sequence[Sample], *, mrope: bool) -> Batch:
    """Return all samples in one row. Positions restart at each sample."""
    lengths = torch.tensor([len(sample.ids) for sample in samples])
    starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    counting = torch.cat([torch.arange(int(length)) for length in lengths])
    turned = torch.cat([_turned(sample) for sample in samples], dim=1)
    llm = LLMBatch(
        input_ids=torch.cat([sample.ids for sample in samples]),
        position_ids=turned if mrope else counting,
        restart_position_ids=counting if mrope else None,
        labels=torch.cat([sample.labels for sample in samples]),
        cu_seqlens=starts.int(),
        lengths=lengths.int(),
        max_seqlen=int(lengths.max()),
        media_positions=_places(samples, starts.tolist()),
    )
    return _batch(llm, samples)


def padded(samples: Sequence[Sample], *, mrope: bool, multiple_of: int = 1) -> Batch:
    """Return one row per sample, padded to the longest sample, aligned up to `multiple_of`."""
    lengths = torch.tensor([len(sample.ids) for sample in samples])
    longest = -(-int(lengths.max()) // multiple_of) * multiple_of
    counting = torch.arange(longest).expand(len(samples), -1)
    llm = LLMBatch(
        input_ids=torch.stack([_filled(sample.ids, longest, 0) for sample in samples]),
        position_ids=torch.stack([_onwards(_turned(sample), longest) for sample in samples], 1) if mrope else counting,
        restart_position_ids=counting if mrope else None,
        labels=torch.stack([_filled(sample.labels, longest, IGNORE) for sample in samples]),
        cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int(),
        lengths=lengths.int(),
        max_seqlen=int(lengths.max()),
        attention_mask=torch.arange(longest) < lengths[:, None],
        media_positions=_places(samples, [row * longest for row in range(len(samples))]),
    )
    return _batch(llm, samples)


def _batch(llm: LLMBatch, samples: Sequence[Sample]) -> Batch:
    loss_tokens = int((llm.labels != IGNORE).sum())
    return Batch(
        text=TextBatch(input_ids=llm.input_ids.flatten(), cu_seqlens=llm.cu_seqlens),
        media={},
        llm=llm,
        sample_ids=tuple(("probe", str(number)) for number in range(len(samples))),
        plan=cast("Plan", None),  # nothing is planned, and only mixtures' weights would be read
        step=0,
        microbatch=0,
        num_microbatches=1,
        dp_size=1,
        loss_tokens=loss_tokens,
        global_loss_tokens=loss_tokens,
    )


def _turned(sample: Sample) -> Tensor:
    """Return (3, T): time, height and width; a part spans a grid of 2 x 2, and what follows continues after it."""
    length = len(sample.ids)
    if sample.media is None:
        return torch.arange(length).expand(3, -1)
    start, stop = sample.media.start, sample.media.stop
    grid = torch.arange(_SIDE)
    spanned = torch.stack([grid.new_zeros(4), grid.repeat_interleave(_SIDE), grid.repeat(_SIDE)])
    before = torch.arange(start).expand(3, -1)
    after = torch.arange(start + _SIDE, start + _SIDE + length - stop).expand(3, -1)
    return torch.cat([before, start + spanned, after], dim=1)


def _places(samples: Sequence[Sample], starts: Sequence[int]) -> dict[str, Tensor]:
    spans = [
        torch.arange(start + sample.media.start, start + sample.media.stop)
        for sample, start in zip(samples, starts, strict=False)
        if sample.media is not None
    ]
    return {"image": torch.cat(spans)} if spans else {}


def _filled(values: Tensor, length: int, filler: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, length - len(values)), value=filler)


def _onwards(positions: Tensor, length: int) -> Tensor:
    """(3, T) positions, counting on to a length."""
    more = torch.arange(1, length - positions.shape[1] + 1).expand(3, -1)
    return torch.cat([positions, positions[:, -1:] + more], dim=1)
