"""Train a small multimodal LLM on shards with DeepSpeed.

orchdata synth omni omni
torchrun --nproc-per-node 2 examples/deepspeed_zero.py 'omni/*.tar' --checkpoints runs/deepspeed

The loader's state is in DeepSpeed's checkpoints; it continues from the last one, on any number of ranks under stage
0. With sharded states DeepSpeed itself needs the same ranks, unless its checkpoints are made universal.
"""

from __future__ import annotations

import argparse

import deepspeed
import torch

import common
import orchdata as od


def main(arguments: list[str] | None = None) -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--stage", type=int, default=0, help="what ZeRO shards")
    args = parser.parse_args(arguments)
    with common.world():
        train(args)


def train(args: argparse.Namespace) -> None:
    settings = {
        "train_micro_batch_size_per_gpu": 1,  # asked for, and nothing to us
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": args.stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # by default it clips, at a norm of 1
    }
    model = common.make_model()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=common.make_optimizer(model), config=settings, dist_init_required=False
    )
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
        _, kept = engine.load_checkpoint(str(checkpoint))
        loader.load_state_dict(kept["loader"])

    for step, microbatches in common.steps_to_go(args, loader.steps(), done):
        loss = torch.zeros(())
        for batch in microbatches:
            engine.set_gradient_accumulation_boundary(batch.is_last_microbatch)
            scaled = engine(**batch.model_inputs()).loss_sum * batch.loss_scale
            engine.backward(scaled * engine.gradient_accumulation_steps())
            engine.step()  # acts at the boundary
            loss += scaled.detach()
        common.tell(args, step, loss, microbatches)
        if common.is_due(args, step):
            with common.new_checkpoint(args, step) as folder:
                engine.save_checkpoint(str(folder), client_state={"loader": loader.state_dict()})


if __name__ == "__main__":
    main()
