"""Train a small multimodal LLM on shards on a mesh: replicas of sharded weights (HSDP), and tensor parallelism in each.

orchdata synth omni omni
torchrun --nproc-per-node 8 examples/hsdp_tp.py 'omni/*.tar' --replicate 2 --tp 2 --checkpoints runs/hsdp

Ranks that differ only in tp get the same batches: one of them reads and sends them to the others.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import common
import orchdata as od
from model import MultimodalLM


def main(arguments: list[str] | None = None) -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--replicate", type=int, default=1, help="replicas of the weights")
    parser.add_argument("--tp", type=int, default=2, help="ranks that share each matrix")
    args = parser.parse_args(arguments)
    with common.world():
        sizes = (args.replicate, dist.get_world_size() // (args.replicate * args.tp), args.tp)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
        model = split(common.make_model(), mesh["tp"])
        train(args, shard(model, mesh["dp_replicate", "dp_shard"]), mesh)


def split(model: MultimodalLM, mesh: DeviceMesh) -> MultimodalLM:
    """The feed-forward layers of the LLM, each in as many parts as the mesh has ranks."""
    for block in model.llm.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def shard(model: MultimodalLM, mesh: DeviceMesh) -> FSDPModule:
    stacks = [model.llm, *(encoder.stack for encoder in (model.image, model.audio) if encoder is not None)]
    for stack in stacks:
        for block in stack.blocks:
            fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Trained:
    """Weights and optimizer, as torch.distributed.checkpoint takes them."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def train(args: argparse.Namespace, model: Any, mesh: DeviceMesh) -> None:
    loader = od.DataLoader(
        od.ShardDataset(args.shards, recipe=common.RECIPE),
        global_batch_size=args.global_batch_size,
        shuffle=True,
        drop_last=True,
        cost=common.COST,
        balance=od.Balance(max_tokens=args.max_tokens),
        dp=mesh,  # its tp dimension says which ranks get the same batches
    )
    optimizer = common.make_optimizer(model)
    state = {"trained": Trained(model, optimizer), "loader": loader}  # the loader is a Stateful, too
    done, checkpoint = common.last_checkpoint(args)
    if checkpoint:
        dcp.load(state, checkpoint_id=checkpoint)

    for step, microbatches in common.steps_to_go(args, loader.steps(), done):
        loss = torch.zeros(())
        for batch in microbatches:
            model.set_requires_gradient_sync(batch.is_last_microbatch)
            scaled = model(**batch.model_inputs()).loss_sum * batch.loss_scale
            scaled.backward()
            loss += scaled.detach()
        optimizer.step()
        optimizer.zero_grad()
        common.tell(args, step, loss, microbatches)
        if common.is_due(args, step):
            with common.new_checkpoint(args, step) as folder:
                dcp.save(state, checkpoint_id=folder)


if __name__ == "__main__":
    main()
