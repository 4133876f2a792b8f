"""Train a small multimodal LLM on shards with FSDP2; checkpoints by torch.distributed.checkpoint.

orchdata synth omni omni
torchrun --nproc-per-node 2 examples/fsdp2.py 'omni/*.tar' --checkpoints runs/fsdp2

It continues from its last checkpoint, on any number of ranks: weights are sharded again, and the loader's state is the
same on all of them.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import common
import orchdata as od
from model import MultimodalLM


def main(arguments: list[str] | None = None) -> None:
    args = common.make_parser(__doc__).parse_args(arguments)
    with common.world():
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("dp_shard",))
        model = shard(common.make_model(), mesh)
        train(args, model, mesh)


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
        dp=mesh,
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
