"""The same samples through orchdata: the loss and gradients of one optimizer step, averaged over ranks as DDP does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import orchdata as od
from hf_families.families import Family
from hf_families.reference import Measured, distance, float64, gradients_of

Change = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Mode:
    """A way to train on the samples."""

    padded: bool = False
    per_phase: bool = False
    microbatches: bool = False
    rounds: str | int = ""

    def __str__(self) -> str:
        flags = [name for name in ("microbatches", "rounds") if getattr(self, name)]
        return ", ".join(["padded" if self.padded else "packed", "per phase" if self.per_phase else "joint", *flags])


def modes_of(family: Family, num_ranks: int) -> list[Mode]:
    """Every way that the family can be trained on so many ranks."""
    layouts = [True, False] if family.packed else [True]
    modes = [Mode(padded=padded, microbatches=split) for padded in layouts for split in (False, True)]
    if num_ranks > 1 and family.per_phase:
        modes += [Mode(padded=padded, per_phase=True) for padded in layouts]
        modes += [Mode(padded=padded, per_phase=True, microbatches=True, rounds="step") for padded in layouts]
    return modes


def make_loader(family: Family, model: nn.Module, processor: Any, shards: Sequence[str], mode: Mode) -> od.DataLoader:
    """All samples of the shards in one global batch."""
    dataset = od.ShardDataset(list(shards), recipe=od.hf.recipe(processor))
    index = dataset.index()
    room = int(index.llm_tokens.max()) + 1 if mode.microbatches else None  # some models take even lengths
    return od.DataLoader(
        dataset,
        global_batch_size=len(index),
        collate_fn=od.hf.Inputs(model.config, padded=mode.padded),
        cost=od.hf.cost(model.config),
        balance=od.Balance(
            assignment="per_phase" if mode.per_phase else "joint",
            max_tokens=room,
            encode=mode.rounds or "micro_step",  # type: ignore[arg-type]
        ),
        num_threads=0,
    )


def trained(model: nn.Module, loader: od.DataLoader, change: Change | None = None) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the epoch's only step."""
    model.zero_grad()
    loss = 0.0
    with float64():
        for batch, features in _with_features(model, loader):
            inputs = batch.model_inputs() | features
            part = od.hf.loss(model(**(change(inputs) if change else inputs)), batch)
            part.backward()
            loss += part.item()
    gradients = gradients_of(model)
    if dist.is_initialized():
        flat = torch.cat([torch.tensor([loss], dtype=torch.float64), *(each.flatten() for each in gradients.values())])
        dist.all_reduce(flat)
        averaged = (flat / dist.get_world_size()).split([1, *(each.numel() for each in gradients.values())])
        loss = averaged[0].item()
        shaped = zip(gradients.items(), averaged[1:], strict=True)
        gradients = {name: mean.view_as(gradient) for (name, gradient), mean in shaped}
    return loss, gradients


def _with_features(model: nn.Module, loader: od.DataLoader) -> Iterator[tuple[od.Batch, dict[str, Any]]]:
    for step in loader.steps():
        batches = [in_float64(batch) for batch in step]
        if batches[0].plan.rounds is not None:
            yield from ((batch, {"mm_encoder_outputs": made}) for batch, made in od.hf.rounds(model, batches))
            continue
        for batch in batches:
            yield batch, {"mm_encoder_outputs": od.hf.encode(model, batch)} if batch.routes else {}


def in_float64(batch: od.Batch) -> od.Batch:
    """The same batch; what is rounded to float32 is that before the model."""
    media = {
        name: held.map(lambda each: each.double() if each.is_floating_point() else each)
        for name, held in batch.media.items()
    }
    return replace(batch, media=media)


def errors(found: tuple[float, dict[str, Tensor]], expected: Measured) -> tuple[float, float]:
    """How far loss and gradients are from the reference, relative to it."""
    loss, gradients = found
    return abs(loss - expected.loss) / expected.loss, distance(gradients, expected.mean_gradients())
