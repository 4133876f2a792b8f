"""What the model's phases really cost here: timed passes of made-up batches -> a fitted cost model, in seconds.

    sequences of one phase beside a usual batch's others --less the others' time--> seconds --fit--> PhaseCost
    a minimal batch --a whole DDP step--> what every step takes, whatever is in it

A pass is a forward and a backward. Beside others, because caches and memory make a phase cost more in a large batch
than alone: measured so, it costs what it adds to a batch as they are.

All ranks measure at the same time, since they also train at the same time; a pass takes the mean over ranks of each
one's median, in CPU time, which other work on the machine lengthens least. Nothing of the training that is to be
predicted is looked at.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from orchdata.balancers import CostModel, FittedCost, fit_phase_cost
from orchdata.bench.harness import Clock
from orchdata.demo.model import ModelConfig, MultimodalLM
from orchdata.loaders.index import Index
from orchdata.loaders.modality import ENCODERS, MODALITIES

Lengths: TypeAlias = list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What was fitted.

    Attributes:
        fits: phase -> its cost in seconds a sequence.
        step_seconds: what a step takes beside that: Python, the reduction of gradients, the optimizer.
    """

    fits: Mapping[str, FittedCost]
    step_seconds: float

    @property
    def cost(self) -> CostModel:
        return CostModel(**{phase: fit.cost for phase, fit in self.fits.items()})


def calibrate(
    index: Index, config: ModelConfig, *, samples_per_rank: float, num_lengths: int, repeats: int
) -> Calibration:
    """Measure and fit; every rank of torch.distributed takes part and gets the same result.

    Args:
        index: the lengths to measure at are those that it has.
        config: of the model, with both encoders.
        samples_per_rank: of a training step; a pass holds about as many positions of each phase as one does.
        num_lengths: different lengths of sequences to measure each phase at, at least 3.
        repeats: times to measure each pass, in turn with all others.
    """
    torch.manual_seed(0)
    model = MultimodalLM(config)
    phases = (*ENCODERS, "llm")
    loss_share = float(index.loss_tokens.sum() / index.llm_tokens.sum())
    usual: dict[str, Lengths] = {}
    measured: dict[str, list[Lengths]] = {}
    for phase in phases:
        lengths = _lengths_of(index, phase)
        total = samples_per_rank * lengths.sum() / index.num_samples
        usual[phase] = _filled(phase, int(_nearest(lengths, lengths.mean())), total, config)
        measured[phase] = [_filled(phase, length, total, config) for length in length_classes(lengths, num_lengths)]

    minimal = made_up_batch(config, {}, loss_share)
    batches = []
    for phase in phases:
        others = {name: lengths for name, lengths in usual.items() if name != phase}
        batches.append(made_up_batch(config, others, loss_share))
        batches += [made_up_batch(config, {**others, phase: lengths}, loss_share) for lengths in measured[phase]]

    def passes(inputs: dict[str, Any]) -> Callable[[], None]:
        def run() -> None:
            model(**inputs).loss_sum.backward()
            model.zero_grad()

        return run

    seconds = iter(_medians([passes(inputs) for inputs in batches], repeats, time.process_time))
    fits = {}
    for phase in phases:
        without = next(seconds)
        added = [max(1e-6, next(seconds) - without) for _ in measured[phase]]
        fits[phase] = fit_phase_cost([np.array(lengths) for lengths in measured[phase]], np.array(added))
    return Calibration(fits=fits, step_seconds=_empty_step_seconds(config, minimal, 3 * repeats))


def length_classes(lengths: NDArray[np.int64], num_classes: int) -> Lengths:
    """Lengths evenly spread by ratio from a low to a high percentile, each one that occurs.

    `lengths` is int64 (num_sequences,); at least 3 values of it must differ.
    """
    low, high = np.percentile(lengths, (2, 99))
    return sorted({int(_nearest(lengths, wanted)) for wanted in np.geomspace(low, high, num_classes)})


def _nearest(lengths: NDArray[np.int64], wanted: float) -> np.int64:
    return np.int64(lengths[np.abs(lengths - wanted).argmin()])


def _filled(phase: str, length: int, total: float, config: ModelConfig) -> Lengths:
    """Sequences of one length, about `total` positions together."""
    if phase == "image":
        length = math.prod(_grid(length, config.merge))
    return [length] * max(1, round(total / length))


def made_up_batch(config: ModelConfig, lengths: Mapping[str, Lengths], loss_share: float) -> dict[str, Any]:
    """Inputs of the model with sequences of these lengths, and one as short as can be in each phase that is not named.

    The encoders' tokens go nowhere in the LLM, as a dummy's do: their backward pass runs all the same, on zeros.

    Args:
        config: of the model, with both encoders.
        lengths: phase -> positions of each sequence; an image's grid has at most as many patches.
        loss_share: of the LLM's positions, those that have a loss.
    """
    side = config.merge
    grids = torch.tensor([_grid(length, side) for length in lengths.get("image", [side * side])], dtype=torch.int32)
    patches = grids.prod(dim=1)
    clips = torch.tensor(lengths.get("audio", [config.pool])) * config.conv_stride
    tokens = torch.tensor(lengths.get("llm", [2]))
    ids = torch.randint(0, config.vocab_size, (int(tokens.sum()),))
    labels = torch.where(torch.rand(len(ids)) < loss_share, ids, -100)
    labels[-1] = ids[-1]  # A batch has a loss.
    nowhere = torch.zeros(0, dtype=torch.int64)
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": torch.cat([torch.arange(length) for length in tokens.tolist()]),
        "cu_seqlens": _starts(tokens),
        "max_seqlen": int(tokens.max()),
        "image_patches": torch.randn(int(patches.sum()), config.patch_dim),
        "image_grid_hw": grids,
        "image_cu_seqlens": _starts(patches),
        "image_positions": nowhere,
        "audio_features": torch.randn(int(clips.sum()), config.num_mels),
        "audio_cu_seqlens": _starts(clips),
        "audio_positions": nowhere,
    }


def _grid(num_patches: int, side: int) -> tuple[int, int]:
    """Patches down and across, multiples of `side`, as square as can be; together at most num_patches."""
    down = max(1, round(num_patches**0.5 / side))
    return down * side, max(1, num_patches // (down * side * side)) * side


def _starts(lengths: Tensor) -> Tensor:
    return torch.cat((torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).to(torch.int32)))


def _lengths_of(index: Index, phase: str) -> NDArray[np.int64]:
    """Positions of every sequence in a phase, int64 (num_sequences,)."""
    if phase == "llm":
        return np.asarray(index.llm_tokens).astype(np.int64)
    mine = np.asarray(index.part_modality) == MODALITIES.index(phase)
    lengths: NDArray[np.int64] = np.asarray(index.part_positions)[mine].astype(np.int64)
    return lengths


def _medians(passes: Sequence[Callable[[], None]], repeats: int, clock: Clock) -> list[float]:
    """Median seconds of each pass over repeats, mean over ranks; all ranks begin each at the same time."""
    seconds: list[list[float]] = [[] for _ in passes]
    for turn in range(repeats + 1):
        for place in range(len(passes))[:: -1 if turn % 2 else 1]:
            dist.barrier()
            start = clock()
            passes[place]()
            elapsed = clock() - start
            if turn:  # The first round warms up.
                seconds[place].append(elapsed)
    medians = torch.tensor([statistics.median(values) for values in seconds], dtype=torch.float64)
    dist.all_reduce(medians)
    return [value / dist.get_world_size() for value in medians.tolist()]


def _empty_step_seconds(config: ModelConfig, minimal: dict[str, Any], repeats: int) -> float:
    """A whole step on a minimal batch, by the clock: ranks wait for each other's messages in it."""
    model = DistributedDataParallel(MultimodalLM(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        model(**minimal).loss_sum.backward()
        optimizer.step()
        optimizer.zero_grad()

    (seconds,) = _medians([step], repeats, time.perf_counter)
    return seconds
