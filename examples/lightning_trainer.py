"""Train a small multimodal LLM on shards with Lightning's Trainer: one process, or many under torchrun.

orchdata synth omni omni
torchrun --nproc-per-node 2 examples/lightning_trainer.py 'omni/*.tar' --checkpoints runs/lightning

Its checkpoints are Lightning's own, with the loader's state in them; it continues from the last one, on any number of
ranks.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

import common
import orchdata as od


def main(arguments: list[str] | None = None) -> None:
    args = common.make_parser(__doc__).parse_args(arguments)
    with common.world():
        train(args)


class Trained(lightning.LightningModule):
    """An item of its loader is a whole optimizer step: the list of its microbatches."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args
        self.model = common.make_model()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return common.make_optimizer(self.model)

    def train_dataloader(self) -> Any:
        loader = od.DataLoader(
            od.ShardDataset(self.args.shards, recipe=common.RECIPE),
            global_batch_size=self.args.global_batch_size,
            shuffle=True,
            drop_last=True,
            cost=common.COST,
            balance=od.Balance(max_tokens=self.args.max_tokens),
        )
        return loader.steps()

    def training_step(self, microbatches: list[od.Batch], step: int) -> torch.Tensor:
        losses = [self.model(**batch.model_inputs()).loss_sum * batch.loss_scale for batch in microbatches]
        loss = torch.stack(losses).sum()
        common.tell(self.args, self.global_step + 1, loss, microbatches)
        return loss


def train(args: argparse.Namespace) -> None:
    callbacks = []
    if args.checkpoints:
        callbacks.append(ModelCheckpoint(args.checkpoints, save_last=True, every_n_train_steps=args.save_every))
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        strategy="ddp" if dist.is_initialized() else "auto",
        max_steps=args.steps,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = args.checkpoints / "last.ckpt" if args.checkpoints else None
    trainer.fit(Trained(args), ckpt_path=last if last and last.exists() else None)


if __name__ == "__main__":
    main()
