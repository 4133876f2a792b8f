"""Run by test_tools in Lightning's environment: `lightning_job.py WAY`, in a folder with `data`."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace
from typing import Any

import lightning
import shared
import torch
import torch.distributed as dist

import orchdata as od


class Model(torch.nn.Module):
    """Predicts each token's successor from it alone, so that rows and packed samples need no mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Embedding(256, 32), torch.nn.Tanh(), torch.nn.Linear(32, 256))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **others: Any) -> SimpleNamespace:
        logits, labels = self.layers(input_ids[..., :-1]), labels[..., 1:].flatten()
        return SimpleNamespace(
            loss_sum=torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels, reduction="sum")
        )


class Recorded(lightning.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, step: int) -> None:
        keys = batch["keys"] if isinstance(batch, dict) else shared.keys_of(batch)
        recorder.step(outputs["loss"].item(), keys)


def ours() -> None:
    settings = {"callbacks": [Recorded()], "logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    settings |= {"devices": shared.num_ranks(), "strategy": "ddp", "enable_progress_bar": False}
    lightning.Trainer = functools.partial(lightning.Trainer, **settings)
    names = {"model": Model(), "recipe": od.Recipe(image=None, audio=None)}
    names |= {"cost": od.CostModel(llm=od.PhaseCost(linear=1))}
    exec(shared.page_code("lightning"), names)


class Plain(lightning.LightningModule):
    """The scaled sum over the tokens of all ranks, which it counts by a collective."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)

    def training_step(self, batch: Any, step: int) -> torch.Tensor:
        tokens = (batch["labels"] != -100).sum()
        dist.all_reduce(tokens)
        return self.model(**batch).loss_sum * dist.get_world_size() / tokens


def collate(samples: list[Any]) -> dict[str, Any]:
    ids, labels = shared.padded(samples)
    return {"input_ids": ids, "labels": labels, "keys": [key for key, _ in samples]}


def plain() -> None:
    trainer = lightning.Trainer(
        max_steps=shared.STEPS,
        use_distributed_sampler=False,
        callbacks=[Recorded()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        accelerator="cpu",
        devices=shared.num_ranks(),
        strategy="ddp",
    )
    trainer.fit(Plain(), shared.plain_loader(collate))


if __name__ == "__main__":
    recorder = shared.Recorder(sys.argv[1])
    {"ours": ours, "plain": plain}[sys.argv[1]]()
