"""What the examples share, none of it about loading: the command line, a small multimodal LLM with its recipe and
costs, the line that is printed for a step, and the folder of checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import orchdata as od
from model import ModelConfig, MultimodalLM, Sizes, fit_to_recipe, make_cost

RECIPE = od.Recipe(
    image=od.ImagePreprocessor(patch_size=14, merge=2, min_tokens=4, max_tokens=64, dtype="float32"),
    audio=od.AudioPreprocessor(num_mels=80),
)
_SMALL = Sizes(hidden=64, layers=2, ffn=256)
CONFIG = fit_to_recipe(ModelConfig(llm=_SMALL, image=_SMALL, audio=_SMALL), RECIPE)
COST = make_cost(CONFIG)


def make_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="+")
    parser.add_argument("--steps", type=int, default=20, help="number of optimizer steps")
    parser.add_argument("--global-batch-size", type=int, default=16, help="samples of a step, over all ranks")
    parser.add_argument("--max-tokens", type=int, default=4096, help="LLM positions per microbatch and rank")
    parser.add_argument("--checkpoints", type=Path, help="a folder; resumes from the last checkpoint in it")
    parser.add_argument("--save-every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument(
        "--record", type=Path, help="a folder for one line of JSON for each step and rank: loss, and samples"
    )
    return parser


@contextmanager
def world() -> Iterator[None]:
    """The ranks that torchrun started, over gloo; a single process has no group."""
    ours = "RANK" in os.environ and not dist.is_initialized()
    if ours:
        dist.init_process_group("gloo")
    yield
    if ours:
        dist.barrier()  # A rank that leaves while others work may be aborted by gloo's threads.
        dist.destroy_process_group()


def make_model() -> MultimodalLM:
    torch.manual_seed(0)
    return MultimodalLM(CONFIG)


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


def steps_to_go(args: argparse.Namespace, steps: Any, done: int) -> Iterator[tuple[int, list[od.Batch]]]:
    """The remaining optimizer steps, over as many epochs as needed: number and microbatches of each.

    Args:
        steps: `loader.steps()`; each `iter()` of it is an epoch.
        done: steps that were taken before the checkpoint that a run continues from.
    """
    while done < args.steps:
        for microbatches in steps:
            done += 1
            yield done, microbatches
            if done == args.steps:
                break


def tell(args: argparse.Namespace, step: int, loss: torch.Tensor, microbatches: Sequence[od.Batch]) -> None:
    """Report a step, on every rank.

    Args:
        loss: sum of this rank's scaled losses; its mean over the ranks is the mean over the tokens of the step.
    """
    rank, mean = 0, loss.detach().double()
    if dist.is_initialized():
        rank = dist.get_rank()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    if rank == 0:
        print(f"step {step}: loss {mean.item():.4f}, {len(microbatches[0].plan.row)} samples", flush=True)
    if args.record:
        args.record.mkdir(parents=True, exist_ok=True)
        keys = [[Path(shard).name, key] for batch in microbatches for shard, key in batch.sample_ids]
        with (args.record / f"rank-{rank}.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "loss": mean.item(), "keys": keys}) + "\n")


def last_checkpoint(args: argparse.Namespace) -> tuple[int, Path | None]:
    """The step after which it was written, and its path; (0, None) if there is none."""
    paths = sorted(args.checkpoints.glob("step-*")) if args.checkpoints else []
    return (int(paths[-1].name.removeprefix("step-")), paths[-1]) if paths else (0, None)


@contextmanager
def new_checkpoint(args: argparse.Namespace, step: int) -> Iterator[Path]:
    """A folder into which every rank writes a checkpoint; it gets its final name when it is complete."""
    part = args.checkpoints / f"part-{step:06d}"
    part.mkdir(parents=True, exist_ok=True)
    yield part
    if dist.is_initialized():
        dist.barrier()
    if not dist.is_initialized() or dist.get_rank() == 0:
        part.rename(args.checkpoints / f"step-{step:06d}")


def is_due(args: argparse.Namespace, step: int) -> bool:
    """Whether a checkpoint must be written after this step."""
    return args.checkpoints is not None and (step % args.save_every == 0 or step == args.steps)
