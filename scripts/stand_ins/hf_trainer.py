"""`hf_trainer.py WORKERS given|seeded`: transformers.Trainer on a small language model, with the loader imported here.

If Accelerate knows the loader's class, it draws the order from its own generator ("seeded") unless it is set not to.
"""

from __future__ import annotations

import sys
import tempfile

import torch
import transformers
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

transformers.trainer.DataLoader = DataLoader


class Texts(Dataset):
    """Rows of 16 made-up ids."""

    def __init__(self, size: int) -> None:
        self.ids = torch.randint(0, 100, (size, 16), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


if __name__ == "__main__":
    transformers.set_seed(1)
    config = GPT2Config(vocab_size=100, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=2,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            eval_strategy="epoch",
            disable_tqdm=True,
            dataloader_num_workers=int(sys.argv[1]),
            accelerator_config={"use_seedable_sampler": sys.argv[2] == "seeded"},
        )
        Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Texts(75), eval_dataset=Texts(21)).train()
