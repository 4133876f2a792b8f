"""Run by test_tools in TRL's environment: `trl_job.py WAY`, in a folder with `data`."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "support"))

import shared
import torch
import trl
from hf_processors import tokenizer as make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import datasets

SETTINGS = {
    "max_steps": shared.STEPS,
    "learning_rate": shared.RATE,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
}


def make_model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, num_key_value_heads=2, **sizes))


def watched(kind: type[Any], way: str) -> type[Any]:
    """The trainer, which records each step."""
    recorder = shared.Recorder(way)

    class Watched(kind):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.keys = shared.keys_of(inputs) if isinstance(inputs, list) else []
            return super().training_step(model, inputs, *args, **kwargs)

        def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            if "loss" in logs:
                recorder.step(logs["loss"], self.keys)
            super().log(logs, *args, **kwargs)
            assert "loss" not in logs or 0 <= logs["mean_token_accuracy"] <= 1  # SFTTrainer's own metrics

    return Watched


def ours() -> None:
    code = shared.page_code("trl")
    setting, _, training = code.partition("trainer = ")
    trl.SFTConfig = functools.partial(trl.SFTConfig, **{n: v for n, v in SETTINGS.items() if n != "max_steps"})
    names: dict[str, Any] = {"model": make_model(), "tokenizer": make_tokenizer()}
    exec(setting, names)
    names["SFTTrainer"] = watched(names["SFTTrainer"], "ours")
    exec(f"trainer = {training}", names)


def plain() -> None:
    tokenizer = make_tokenizer()
    rows = [{"input_ids": tokenizer(text)["input_ids"]} for step in shared.plain_steps() for _, text in step]
    arguments = trl.SFTConfig(
        "run",
        per_device_train_batch_size=shared.SIZE // shared.num_ranks(),
        train_sampling_strategy="sequential",
        **SETTINGS,
    )
    kind = watched(trl.SFTTrainer, "plain")
    kind(make_model(), arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer).train()


if __name__ == "__main__":
    {"ours": ours, "plain": plain}[sys.argv[1]]()
