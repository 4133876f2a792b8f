"""Run by test_trainer: transformers' Trainer over a DataLoader on some ranks; how far it is from the plain loop
there.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from hf_families.families import FAMILIES
from hf_families.reference import distance, gradients_of
from rank_jobs import run_rank
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

import orchdata as od

WAYS = ("joint", "per_phase")
SIZE = 6


# Steps of SGD, each logged.
SETTINGS: dict[str, Any] = {
    "learning_rate": 0.05,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "logging_steps": 1,
    "logging_nan_inf_filter": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
}


class Ours(od.hf.TrainerMixin, Trainer):
    pass


class Watching(TrainerCallback):
    """What each step was: its gradients, as the optimizer finds them, and its logged loss."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []
        self.losses: list[float] = []
        self.epochs: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        self.gradients.append(gradients_of(getattr(model, "module", model)))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.epochs.append(logs["epoch"])


def main(folder: str, *shards: str) -> dict[str, Any]:
    family = FAMILIES["qwen2_5_vl"]
    processor, _ = family.build()
    dataset = od.ShardDataset(list(shards), recipe=od.hf.recipe(processor))
    found: dict[str, Any] = {}

    def make_loader(model: Any, way: str) -> od.DataLoader:
        balance = od.Balance(assignment=way, max_tokens=260, oversize="own")
        inputs = od.hf.Inputs(model.config)
        return od.DataLoader(
            dataset, global_batch_size=SIZE, collate_fn=inputs, balance=balance, shuffle=True, num_threads=0
        )

    for way in WAYS:
        model = family.build()[1]
        expected = plain_loop(model, make_loader(model, way))
        model = family.build()[1]
        settings = TrainingArguments(os.path.join(folder, way), num_train_epochs=1, **SETTINGS)
        watching = Watching()
        loaders = {"train_dataset": make_loader(model, way), "eval_dataset": make_loader(model, way)}
        trainer = Ours(model, settings, callbacks=[watching], **loaders)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        pairs = list(zip(watching.gradients, expected, strict=True))
        found[way] = {
            "off": max(distance(ours, theirs) for ours, theirs in pairs),
            "off by one step": distance(pairs[0][0], pairs[1][1]),
            "steps": trainer.state.global_step,
            "eval": before,
            "prepared": len(trainer.accelerator._dataloaders),
        }
    return found


def plain_loop(model: Any, loader: od.DataLoader) -> list[dict[str, Tensor]]:
    """Gradients of each step by the model's own loss, averaged over ranks."""
    found, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in loader:
        inputs = batch.model_inputs()
        if batch.routes:
            inputs["mm_encoder_outputs"] = od.hf.encode(model, batch)
        model(**inputs).loss.backward()
        if not batch.is_last_microbatch:
            continue
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if dist.is_initialized():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        found.append(gradients_of(model))
        optimizer.step()
        optimizer.zero_grad()
    return found


if __name__ == "__main__":
    run_rank(main)
