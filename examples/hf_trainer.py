"""Train a small Qwen2.5-VL with transformers' Trainer: one process, or many under torchrun.

orchdata synth omni omni
torchrun --nproc-per-node 2 examples/hf_trainer.py 'omni/*.tar' --checkpoints runs/hf

Its checkpoints are the Trainer's own, with the loader's state in them; it continues from the last one, on any number
of ranks.
For a published model, od.hf.recipe(processor) makes the recipe: see docs/huggingface.md.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Trainer, TrainingArguments

import common
import orchdata as od

RECIPE = od.Recipe(
    image=od.ImagePreprocessor(patch_size=14, merge=2, min_tokens=4, max_tokens=64, dtype="float32"), audio=None
)


def main(arguments: list[str] | None = None) -> None:
    args = common.make_parser(__doc__).parse_args(arguments)
    with common.world():
        train(args)


def make_model() -> Any:
    """Random weights; the vocabulary is the recipe's, bytes and one image token."""
    text = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": RECIPE.text.vocab_size,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]},
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": 64,
        "temporal_patch_size": 1,
        "fullatt_block_indexes": [1],
        "window_size": 56,
    }
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=RECIPE.slots["image"].token_id, video_token_id=-1
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def make_loader(args: argparse.Namespace, config: Any) -> od.DataLoader:
    """A loader of the samples without a placeholder for audio in their text."""
    dataset = od.ShardDataset(args.shards, recipe=RECIPE).filter("not bad")
    return od.DataLoader(
        dataset,
        global_batch_size=args.global_batch_size,
        shuffle=True,
        drop_last=True,
        cost=od.hf.cost(config),
        balance=od.Balance(max_tokens=args.max_tokens),
        collate_fn=od.hf.Inputs(config),
    )


class VLTrainer(od.hf.TrainerMixin, Trainer):
    """Reports each step."""

    arguments: argparse.Namespace

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        common.tell(self.arguments, self.state.global_step + 1, loss, inputs)
        return loss


def train(args: argparse.Namespace) -> None:
    settings = TrainingArguments(
        output_dir=str(args.checkpoints or "runs/hf"),
        max_steps=args.steps,
        save_strategy="steps" if args.checkpoints else "no",
        save_steps=args.save_every,
        learning_rate=3e-4,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=0.0,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )  # before the loader, because it initializes torch.distributed
    model = make_model()
    trainer = VLTrainer(model, settings, train_dataset=make_loader(args, model.config))
    trainer.arguments = args
    resumes = args.checkpoints is not None and any(args.checkpoints.glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=resumes)


if __name__ == "__main__":
    main()
