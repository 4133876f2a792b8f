"""Train a small multimodal LLM on shards in a loop with Accelerate: one process, or many.

orchdata synth omni omni
accelerate launch --cpu --num-processes 2 examples/accelerate_loop.py 'omni/*.tar' --checkpoints runs/accelerate

The loader's state is in the accelerator's; it continues from its last checkpoint, on any number of ranks.
"""

from __future__ import annotations

import argparse
import contextlib

import torch
from accelerate import Accelerator

import common
import orchdata as od


def main(arguments: list[str] | None = None) -> None:
    args = common.make_parser(__doc__).parse_args(arguments)
    with common.world():
        train(args)


def train(args: argparse.Namespace) -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = common.make_model()
    model, optimizer = accelerator.prepare(model, common.make_optimizer(model))
    loader = od.DataLoader(
        od.ShardDataset(args.shards, recipe=common.RECIPE),
        global_batch_size=args.global_batch_size,
        shuffle=True,
        drop_last=True,
        cost=common.COST,
        balance=od.Balance(max_tokens=args.max_tokens),
    )
    steps = od.hf.accelerate(loader.steps(), accelerator)  # batches on its device, and a state in its checkpoints

    done, checkpoint = common.last_checkpoint(args)
    if checkpoint:
        accelerator.load_state(str(checkpoint))

    for step, microbatches in common.steps_to_go(args, steps, done):
        loss = torch.zeros((), device=accelerator.device)
        for batch in microbatches:
            with contextlib.nullcontext() if batch.is_last_microbatch else accelerator.no_sync(model):
                scaled = model(**batch.model_inputs()).loss_sum * batch.loss_scale
                accelerator.backward(scaled)
            loss += scaled.detach()
        optimizer.step()
        optimizer.zero_grad()
        common.tell(args, step, loss, microbatches)
        if common.is_due(args, step):
            with common.new_checkpoint(args, step) as folder:
                accelerator.save_state(str(folder))


if __name__ == "__main__":
    main()
