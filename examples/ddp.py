"""Train a small multimodal LLM on shards with DistributedDataParallel: one process, or many under torchrun.

orchdata synth omni omni
torchrun --nproc-per-node 2 examples/ddp.py 'omni/*.tar' --checkpoints runs/ddp

It continues from its last checkpoint, on any number of ranks.
"""

from __future__ import annotations

import argparse
import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import common
import orchdata as od


def main(arguments: list[str] | None = None) -> None:
    args = common.make_parser(__doc__).parse_args(arguments)
    with common.world():
        train(args)


def train(args: argparse.Namespace) -> None:
    model = common.make_model()
    net = DistributedDataParallel(model) if dist.is_initialized() else model  # saved without DDP's prefix
    optimizer = common.make_optimizer(model)
    loader = od.DataLoader(
        od.ShardDataset(args.shards, recipe=common.RECIPE),
        global_batch_size=args.global_batch_size,
        shuffle=True,
        drop_last=True,
        cost=common.COST,
        balance=od.Balance(max_tokens=args.max_tokens),
    )

    done, checkpoint = common.last_checkpoint(args)
    if checkpoint:
        state = torch.load(checkpoint / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])

    for step, microbatches in common.steps_to_go(args, loader.steps(), done):
        loss = torch.zeros(())
        for batch in microbatches:
            synchronised = batch.is_last_microbatch or net is model
            with contextlib.nullcontext() if synchronised else net.no_sync():
                scaled = net(**batch.model_inputs()).loss_sum * batch.loss_scale
                scaled.backward()
            loss += scaled.detach()
        optimizer.step()
        optimizer.zero_grad()
        common.tell(args, step, loss, microbatches)
        if common.is_due(args, step):
            with common.new_checkpoint(args, step) as folder:
                if not dist.is_initialized() or dist.get_rank() == 0:  # states are the same on all ranks
                    weights = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(weights | {"loader": loader.state_dict()}, folder / "state.pt")


if __name__ == "__main__":
    main()
