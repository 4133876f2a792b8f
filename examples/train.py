"""Train a small multimodal LLM on shards: one process, or many under torchrun.

orchdata synth datasets/omni.yaml omni
orchdata index 'omni/*.tar' --recipe examples.train:RECIPE
torchrun --nproc-per-node 2 examples/train.py 'omni/*.tar' --steps 20 --checkpoint state.pt
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import orchdata as od
from orchdata.reference.model import ModelConfig, MultimodalLM, Sizes
from orchdata.reference.setup import fit_to_recipe, make_cost

RECIPE = od.Recipe(
    image=od.ImagePreprocessor(patch_size=14, merge=2, min_tokens=4, max_tokens=64),
    audio=od.AudioPreprocessor(num_mels=80),
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="+")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--global-batch-size", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=4096, help="LLM positions per microbatch and rank")
    parser.add_argument("--checkpoint", type=Path, help="resume from here if it exists; written at the end")
    args = parser.parse_args(arguments)

    distributed = "RANK" in os.environ  # set by torchrun
    if distributed:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    small = Sizes(hidden=64, layers=2, ffn=256)
    config = fit_to_recipe(ModelConfig(llm=small, image=small, audio=small), RECIPE)
    model = MultimodalLM(config)
    net = DistributedDataParallel(model) if distributed else model  # weights are saved without DDP's prefix
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loader = od.DataLoader(
        od.ShardDataset(args.shards, recipe=RECIPE),
        global_batch_size=args.global_batch_size,
        shuffle=True,
        drop_last=True,
        cost=make_cost(config),
        balance=od.Balance(objective="sum", max_tokens=args.max_tokens),  # ranks meet only when gradients do
    )

    step = 0
    if args.checkpoint and args.checkpoint.exists():
        state = torch.load(args.checkpoint, weights_only=True)
        step = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])

    loss = torch.zeros(1)
    while step < args.steps:
        for batch in loader:
            out = net(**batch.model_inputs())
            (out.loss_sum * batch.loss_scale).backward()
            loss += out.loss_sum.detach() / max(1, batch.global_loss_tokens)
            if not batch.is_last_microbatch:
                continue
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if distributed:
                dist.all_reduce(loss)
            if not distributed or dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.4f}, {len(batch.plan.row)} samples", flush=True)
            loss.zero_()
            if step == args.steps:
                break

    if args.checkpoint and (not distributed or dist.get_rank() == 0):
        weights = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({"step": step, "loader": loader.state_dict(), **weights}, args.checkpoint)
    if distributed:
        dist.barrier()  # A rank that leaves while others work may be aborted by gloo's threads.
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
