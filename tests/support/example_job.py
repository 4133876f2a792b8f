"""Run by test_examples: one of the examples, as a rank of a job."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from rank_jobs import run_rank

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("ddp", "fsdp2", "hsdp_tp", "hf_trainer", "accelerate_loop", "lightning_trainer", "deepspeed_zero")


def main(name: str, dies_at: str, *arguments: str) -> bool:
    sys.path.insert(0, str(EXAMPLES))
    common = import_module("common")
    tell = common.tell

    def tell_and_die(args: Any, step: int, *others: Any) -> None:
        tell(args, step, *others)
        if step == int(dies_at):
            os.kill(os.getpid(), signal.SIGKILL)

    common.tell = tell_and_die
    if name == "finetune_a_vlm":
        give_a_small_model()
    import_module(name).main(list(arguments))
    return True


def give_a_small_model() -> None:
    """In place of a published model, random weights of its classes."""
    import transformers
    from hf_families.families import FAMILIES

    processor, model = FAMILIES["qwen2_5_vl"].build()
    transformers.AutoProcessor.from_pretrained = lambda name: processor
    transformers.AutoModelForImageTextToText.from_pretrained = lambda name: model.float()


if __name__ == "__main__":
    run_rank(main)
