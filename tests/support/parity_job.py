"""Run by test_parity under torchrun: trains the same model balanced and unbalanced, and writes how far they end apart.

torchrun --nproc-per-node 2 parity_job.py SHARDS_GLOB RESULT.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import orchdata as od
from orchdata.demo.attention import Block
from orchdata.demo.launch import end_with_parent, leave
from orchdata.demo.model import ModelConfig, MultimodalLM, Sizes
from orchdata.demo.setup import fit_to_recipe, make_cost

GLOBAL_BATCH_SIZE = 6
MAX_TOKENS = 260
RECIPE = od.Recipe(
    image=od.ImagePreprocessor(patch_size=8, merge=2, min_tokens=1, max_tokens=12, dtype="float32"),
    audio=od.AudioPreprocessor(num_mels=16, dtype="float32"),
)
SMALL = Sizes(hidden=24, layers=2, ffn=48, num_heads=2)


@dataclass(frozen=True)
class Case:
    """One way of training. `wrapper` None is a single process that has every sample: the reference."""

    wrapper: str | None
    frozen: bool = False
    checkpoint: bool = False
    max_tokens: int | None = None
    loss: str = "global"


def make_loader(shards: str, case: Case, scope: str) -> od.DataLoader:
    config = make_config(case)
    return od.DataLoader(
        od.ShardDataset(shards, recipe=RECIPE),
        global_batch_size=GLOBAL_BATCH_SIZE,
        cost=make_cost(config),
        balance=od.Balance(scope=scope, max_tokens=case.max_tokens),
        dp=(0, 1) if case.wrapper is None else None,
        num_threads=0,
    )


def make_config(case: Case) -> ModelConfig:
    config = ModelConfig(llm=SMALL, image=SMALL, audio=SMALL, freeze_encoders=case.frozen, checkpoint=case.checkpoint)
    return fit_to_recipe(config, RECIPE)


def wrap(model: MultimodalLM, wrapper: str | None) -> torch.nn.Module:
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    if wrapper == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        for module in [module for module in model.modules() if isinstance(module, Block)]:
            fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def train(shards: str, case: Case, scope: str) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Ten steps of SGD in float64; returns the parameters, and what this rank had in each microbatch."""
    torch.manual_seed(0)
    model = wrap(MultimodalLM(make_config(case)).double(), case.wrapper)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    seen = []
    for batch in make_loader(shards, case, scope):
        out = model(**batch.model_inputs())
        scale = batch.loss_scale if case.loss == "global" else 1 / max(1, batch.loss_tokens)
        (out.loss_sum * scale).backward()
        seen.append(
            {
                "step": batch.step,
                "samples": len(batch.keys),
                "image": batch.image.num_tokens,
                "audio": batch.audio.num_tokens,
                "plan": batch.plan.hash,
                "microbatches": batch.num_microbatches,
            }
        )
        if batch.is_last_microbatch:
            optimizer.step()
            optimizer.zero_grad()
    return dict(full_parameters(model)), seen


def full_parameters(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        value = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        yield name.removeprefix("module."), value.detach().clone()


def distance(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Largest relative difference by norm of any parameter."""
    return max(float((first[name] - second[name]).norm() / second[name].norm()) for name in second)


def main(shards: str, result_path: str) -> None:
    end_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    initial = dict(full_parameters(MultimodalLM(make_config(Case(None))).double()))
    references = {frozen: train(shards, Case(None, frozen=frozen), "none")[0] for frozen in (False, True)}
    cases = [Case(*values) for values in product(("ddp", "fsdp2"), (False, True), (False, True), (None, MAX_TOKENS))]
    cases += [Case("ddp", loss="rank mean"), Case("fsdp2", loss="rank mean")]

    results = []
    for case in cases:
        balanced, seen_balanced = train(shards, case, "global")
        unbalanced, seen_unbalanced = train(shards, case, "none")
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, {"balanced": seen_balanced, "unbalanced": seen_unbalanced})
        results.append(
            {
                "wrapper": case.wrapper,
                "frozen": case.frozen,
                "checkpoint": case.checkpoint,
                "max_tokens": case.max_tokens,
                "loss": case.loss,
                "difference": distance(balanced, unbalanced),
                "from_reference": distance(balanced, references[case.frozen]),
                "moved": distance(balanced, initial),
                "seen": seen,
            }
        )
    if dist.get_rank() == 0:
        Path(result_path).write_text(json.dumps(results))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
