"""`lightning_fit.py given|hooks [plain]`: Lightning's Trainer on a linear model, with the loader that is imported here.

The loaders are given to `fit`, or made in the hooks of the module, which Lightning calls once its process group is up.
They are shuffled, or "plain".
"""

from __future__ import annotations

import os
import sys
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Linear(L.LightningModule):
    """20 numbers to one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(20, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-2)


class Hooked(Linear):
    """The same with loaders of its own."""

    def train_dataloader(self) -> Any:
        return loader(shuffle=SHUFFLE)

    def val_dataloader(self) -> Any:
        return loader(shuffle=False)


SHUFFLE = "plain" not in sys.argv


def loader(*, shuffle: bool) -> Any:
    """75 rows, 4 at a time."""
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(75, 20, generator=numbers), torch.randn(75, 1, generator=numbers))
    return DataLoader(data, batch_size=4, shuffle=shuffle)


if __name__ == "__main__":
    L.seed_everything(1)
    ranks = int(os.environ["WORLD_SIZE"])
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    if sys.argv[1] == "hooks":
        trainer.fit(Hooked())
    else:
        trainer.fit(Linear(), loader(shuffle=SHUFFLE), loader(shuffle=False))
