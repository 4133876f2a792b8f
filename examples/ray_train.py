"""Train a small multimodal LLM with Ray Train: its workers are the ranks, and its checkpoints have the loader's state.

orchdata synth omni omni
python examples/ray_train.py 'omni/*.tar' --workers 2 --checkpoints runs/ray

It continues from the last checkpoint of the run in --checkpoints, on any number of workers. With --actors 2 actors of
the cluster build the steps of each worker, in place of threads of the worker.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

import common
import orchdata as od


def main(arguments: list[str] | None = None) -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--workers", type=int, default=2, help="training workers")
    parser.add_argument("--actors", type=int, default=0, help="actors that build the steps of each worker")
    args = parser.parse_args(arguments)
    if args.checkpoints is None:
        parser.error("Ray Train keeps its runs in a folder: give --checkpoints")
    # Workers of Ray Train start in folders of their own.
    args.shards = [each if "://" in each else str(Path(each).absolute()) for each in args.shards]
    TorchTrainer(
        train,
        train_loop_config={"args": args},
        scaling_config=ScalingConfig(num_workers=args.workers),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(name="orchdata", storage_path=str(args.checkpoints.absolute())),
    ).fit()


def train(config: dict[str, Any]) -> None:
    """Run by each worker of Ray Train, which has initialized torch.distributed."""
    args: argparse.Namespace = config["args"]
    model = common.make_model()
    net = ray.train.torch.prepare_model(model)
    optimizer = common.make_optimizer(model)
    options: dict[str, Any] = {"num_threads": 1}
    if args.actors:
        options |= {"num_workers": args.actors, "engine": od.RayEngine()}
    loader = od.DataLoader(
        od.ShardDataset(args.shards, recipe=common.RECIPE),
        global_batch_size=args.global_batch_size,
        shuffle=True,
        drop_last=True,
        cost=common.COST,
        balance=od.Balance(max_tokens=args.max_tokens),
        **options,
    )  # Not ray.train.torch.prepare_data_loader: it is distributed already.

    done = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt", weights_only=True)
        done = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])

    for step, microbatches in common.steps_to_go(args, loader.steps(), done):
        loss = torch.zeros(())
        for batch in microbatches:
            scaled = net(**batch.model_inputs()).loss_sum * batch.loss_scale
            scaled.backward()  # DDP averages the gradients of each microbatch: their sum is the same.
            loss += scaled.detach()
        optimizer.step()
        optimizer.zero_grad()
        common.tell(args, step, loss, microbatches)
        if common.is_due(args, step):
            report(step, model, optimizer, loader)


def report(step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: od.DataLoader) -> None:
    """Report a step to Ray Train; the first worker gives the checkpoint, since states are the same on all of them."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            weights = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(weights | {"loader": loader.state_dict(), "step": step}, Path(folder) / "state.pt")
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report({"step": step}, checkpoint=checkpoint)


if __name__ == "__main__":
    main()
