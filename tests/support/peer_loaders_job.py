"""Run by test_peer_loaders: loaders of 2 x 2 ranks, the peers of which share parts."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_jobs import FSDP2_RUNS, message, run_rank
from rounds_job import CONFIG, LM, Both, distance
from shard_factory import RECIPE
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import orchdata as od
from examples.model import ModelOutput, make_cost
from orchdata.building import arrays

MAX_TOKENS = 480  # of all ranks' microbatches


@dataclass(frozen=True)
class Case:
    """A way of running the recipe of the docs: under FSDP2, or DDP."""

    fsdp2: bool = False
    encode: str = "step"
    slices: bool = False  # a peer trains its part of the positions, as a context-parallel one
    swaps: bool = False  # a control: the rows of two peers


CASES = {"ddp": Case(encode="micro_step"), "context": Case(slices=True), "swapped": Case(swaps=True)}
if FSDP2_RUNS:
    CASES |= {"fsdp2": Case(fsdp2=True), "fsdp2, by micro-step": Case(fsdp2=True, encode="micro_step")}


class PeerLM(LM):
    """Trains every `of`-th position from its `place`. What features do depends on where they are."""

    place, of = 0, 1

    def forward(self, batch: od.Batch, features: dict[str, Tensor]) -> ModelOutput:  # type: ignore[override]
        x = batch.merge(self.embed(batch.llm.input_ids), features).tanh()
        logits = self.head(x * (1 + batch.llm.position_ids[:, None] / 10))
        media, mine = torch.zeros(len(logits), dtype=torch.bool), slice(self.place, None, self.of)
        media[torch.cat([*batch.llm.media_positions.values()])] = True
        of_text = F.cross_entropy(logits[mine], batch.llm.labels[mine], reduction="sum")
        return ModelOutput(of_text + logits[mine][media[mine]].square().sum(), 0)


def make_loader(shards: str, dp: Any, num_ranks: int = 2, encode: Any = "micro_step", **options: Any) -> od.DataLoader:
    caps: dict[str, Any] = {"max_tokens": MAX_TOKENS // num_ranks, "oversize": "own"}
    given = {"on_error": od.ErrorPolicy("skip", max_failures=None), "num_threads": 0} | options
    return od.DataLoader(
        od.ShardDataset(shards, recipe=RECIPE),
        global_batch_size=12,
        cost=make_cost(CONFIG),
        balance=od.Balance(assignment="per_phase", encode=encode, **caps),
        dp=dp,
        **given,
    )


def peers(shape: tuple[int, ...] = (2, 2), **options: Any) -> od.DataParallel:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp", "tp")[:: 4 - len(shape)])
    return od.DataParallel(mesh, dims=("dp",), **({"encoder_dims": ("tp",)} | options))


def train(shards: str, recipe: str, case: Case | None) -> list[dict[str, Tensor]]:
    """The gradients of each step of the recipe; of one rank without a case."""
    both, found = Both(), []
    both.lm.__class__ = PeerLM
    world = dist.get_world_size() if case else 1
    meshes = {(64, 8): (2, 2), (512,): (world,)}
    made: dict[Any, Any] = {}

    def make_mesh(_: str, shape: tuple[int, ...], **options: Any) -> Any:
        made[shape] = init_device_mesh("cpu", meshes[shape], **options)
        return made[shape]

    def exchange(rows: Tensor, route: Any, group: Any, requires_grad: bool) -> Tensor:
        features = od.exchange(rows, route, group=group if case else None, requires_grad=requires_grad)
        swaps = case is not None and case.swaps
        return torch.cat(features.split(route.peer_rows.tolist())[::-1]) if swaps else features

    def collect() -> None:
        grads = {}
        for name, parameter in both.named_parameters():
            grad = parameter.grad
            assert grad is not None, name
            grads[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
            if case and case.slices and name.startswith("lm."):
                dist.all_reduce(grads[name], group=made[64, 8].get_group("tp"))  # as a context-parallel LLM does
            parameter.grad = None
        found.append(grads)

    class Llm:
        """Wrapped by DDP once the mesh is made."""

        def __call__(self, *inputs: Any) -> Any:
            if case and not hasattr(self, "run"):
                both.lm.place, both.lm.of = (made[64, 8].get_local_rank("tp"), 2) if case.slices else (0, 1)
                self.run = DistributedDataParallel(both.lm, process_group=made[64, 8].get_group("dp"))
            return self.run(*inputs) if case else both.lm(*inputs)

    def loader(*_: Any, dp: Any, balance: od.Balance, **__: Any) -> od.DataLoader:
        assert balance.encode == "step"
        return make_loader(shards, dp, encode=case.encode) if case else make_loader(shards, (0, 1), 1)

    ours = SimpleNamespace(**{name: getattr(od, name) for name in ("DataParallel", "Balance", "rounds")})
    ours.DataLoader, ours.exchange = loader, exchange
    sharded = case is not None and case.fsdp2
    encoder = both.encoders if sharded or not case else DistributedDataParallel(both.encoders)
    nothing = lambda *_, **__: None  # noqa: E731
    names = {
        "od": ours,
        "dataset": None,
        "init_device_mesh": make_mesh if case else lambda *_, **__: mock.MagicMock(mesh_dim_names=("dp", "tp")),
        "llm": both.lm if sharded else Llm(),
        "encoder": encoder,
        "plan": {"head": ColwiseParallel(output_layouts=Replicate())},
        "parallelize_module": parallelize_module if sharded else nothing,
        "fully_shard": fully_shard if sharded else nothing,
        "optimizer": SimpleNamespace(step=collect, zero_grad=lambda: None),
    }
    exec(recipe, names)
    return found


def trained(shards: str, recipe: str) -> dict[str, float]:
    expected = train(shards, recipe, None)
    return {name: distance(train(shards, recipe, case), expected) for name, case in CASES.items()}


def epoch(loader: od.DataLoader) -> dict[str, Any]:
    """What this process decoded and delivered in an epoch."""
    decoded: list[str] = []
    decode = arrays.decode_part

    def counted(modality: od.Modality, *arguments: Any) -> None:
        decoded.append(type(modality).__name__)
        decode(modality, *arguments)

    with mock.patch.object(arrays, "decode_part", counted):
        batches = list(loader)
    return {
        "place": [batches[0].plan.num_ranks, batches[0].route("image").rank, batches[0].peer],
        "decoded": len(decoded),
        "keys": [key for batch in batches for _, key in batch.sample_ids],
        "labels": [batch.loss_tokens for batch in batches],
        "ids": [batch.llm.input_ids.tolist() for batch in batches],
        "failed": sorted(each["key"] for each in loader.stats()["failures"]["samples"]),
    }


def delivered(shards: str) -> dict[str, Any]:
    shared, read = peers(), peers(encoder_dims=(), replicate="read")
    workers = {"num_workers": 1, "multiprocessing_context": "fork"}
    one_differs = {} if dist.get_rank() else {"gradients": {"tp": "equal"}}
    return {
        "whole": epoch(make_loader(shards, (0, 1), 1)),
        "shared": epoch(make_loader(shards, shared)),
        "read": epoch(make_loader(shards, read)),
        "other dim": epoch(make_loader(shards, peers((1, 2, 2)), 1)),  # which encodes nothing by itself
        "workers": epoch(make_loader(shards, shared, **workers)),
        "by hand": by_hand(shards, shared),
        "budget": message(lambda: list(make_loader(shards, shared, on_error=od.ErrorPolicy("skip", max_failures=0)))),
        "differ": message(lambda: make_loader(shards, peers(**one_differs))),
    }


def by_hand(shards: str, dp: od.DataParallel) -> list[int]:
    """Loss tokens where the user masks failed parts."""
    loader = make_loader(shards, dp)
    loader._runtime.context.delivery._failed_parts = None
    return [batch.mask_failed(dp).loss_tokens for batch in loader]


def killed(shards: str, folder: str) -> None:
    """Store what came and a state after each step, and die in the third."""
    loader = make_loader(shards, peers())
    for number, step in enumerate(loader.steps()):
        if number == 2:
            os._exit(9)
        keys = [key for batch in step for _, key in batch.sample_ids]
        (Path(folder) / f"{number}-{dist.get_rank()}.json").write_text(json.dumps(keys))
        dist.barrier()
        if dist.get_rank() == 0:
            (Path(folder) / "state.json").write_text(json.dumps(loader.state_dict()))


def resumed(shards: str, folder: str, shape: str) -> dict[str, Any]:
    dp = peers(tuple(json.loads(shape)))
    loader = make_loader(shards, dp, dp.mesh.size(0))
    loader.load_state_dict(json.loads((Path(folder) / "state.json").read_text()))
    return {"place": dp.mesh.get_coordinate(), "keys": [key for batch in loader for _, key in batch.sample_ids]}


SCENARIOS = {"trained": trained, "delivered": delivered, "killed": killed, "resumed": resumed}

if __name__ == "__main__":
    run_rank(lambda shards, scenario, *arguments: SCENARIOS[scenario](shards, *arguments))
