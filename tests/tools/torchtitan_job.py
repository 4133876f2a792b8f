# ruff: noqa: E402
"""Run by test_tools in torchtitan's environment: `torchtitan_job.py WAY`, in a folder with `data`.

torchtitan's own trainer and Llama, sharded by FSDP2, on CPUs. torchtitan is not made for these: the CPU is its device
here, of which it measures no memory and sets no timeouts; gloo sums gradients; and torch's dense attention takes the
mask of its flex attention, which has no backward on a CPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

os.environ["TORCH_COMPILE_DISABLE"] = "1"  # it compiles its masks

import torch

torch._utils._get_available_device_type = lambda: "cpu"

import shared
import torchtitan.components.metrics as metrics
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import create_mask
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config.configs import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

import orchdata as od

LENGTH = 256
keys: list[str] = []
"""Of the samples that this rank has taken since the last step."""

memory = SimpleNamespace(device_name="cpu", get_peak_stats=lambda: metrics.DeviceMemStats(0, 0, 0, 0, 0, 0))
memory.reset_peak_stats = lambda: None
dist_utils.set_pg_timeouts = lambda **_: None
metrics.build_device_memory_monitor = lambda: memory


def divide(model: FSDPModule, factor: float) -> None:
    """`set_gradient_divide_factor` for gloo, which reduces by sums alone."""
    model.set_force_sum_reduction_for_comms(True)
    set_factor(model, factor)


set_factor = FSDPModule.set_gradient_divide_factor
FSDPModule.set_gradient_divide_factor = divide


def dense(q: Any, k: Any, v: Any, *, block_mask: Any, scale: Any, enable_gqa: bool, **others: Any) -> Any:
    """Flex attention's result, by its mask."""
    mask = create_mask(block_mask.mask_mod, len(q), 1, q.shape[2], k.shape[2], "cpu")
    given = {"attn_mask": mask, "scale": scale, "enable_gqa": enable_gqa}
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **given), None


FlexAttention._compiled_flex_attn = staticmethod(dense)


class Recorded(metrics.MetricsProcessor):
    @dataclass(kw_only=True, slots=True)
    class Config(metrics.MetricsProcessor.Config):
        pass

    def log(self, step: int, global_avg_loss: float, *others: Any, **more: Any) -> None:
        recorder.step(global_avg_loss, keys)
        keys.clear()
        super().log(step, global_avg_loss, *others, **more)


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise AssertionError("the loader gives tokens")

    decode = get_vocab_size = encode


class Plain(BaseDataLoader):
    """torch's loader in rows."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Any, **others: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        yield from shared.plain_loader(self.collate)

    def collate(self, samples: list[Any]) -> Any:
        ids, labels = shared.padded(samples, LENGTH)
        keys.extend(key for key, _ in samples)
        following = torch.cat([labels[:, 1:], torch.full((len(samples), 1), -100)], dim=1)
        return {"input": ids, "positions": torch.arange(LENGTH).expand_as(ids)}, following

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def settings(local_batch_size: int) -> dict[str, Any]:
    """A configuration but for the dataloader."""
    spec = model_registry("debugmodel", attn_backend="flex")
    del spec.model.layers[2:]
    return {
        "model_spec": spec,
        "loss": CrossEntropyLoss.Config(),
        "optimizer": default_adamw(lr=1e-3),
        "lr_scheduler": LRSchedulersContainer.Config(warmup_steps=0),
        "training": TrainingConfig(
            local_batch_size=local_batch_size,
            seq_len=LENGTH,
            steps=shared.STEPS,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        "parallelism": ParallelismConfig(spmd_backend="partial_dtensor"),
        "tokenizer": NoTokenizer.Config(),
        "checkpoint": CheckpointManager.Config(enable=False),
        "metrics": Recorded.Config(log_freq=1),
        "activation_checkpoint": None,
        "debug": DebugConfig(seed=0),
    }


def ours() -> None:
    packed = od.torchtitan.DataLoader._packed

    def seen(self: Any, batch: Any) -> Any:
        keys.extend(shared.keys_of([batch]))
        return packed(self, batch)

    od.torchtitan.DataLoader._packed = seen
    recipe = od.Recipe(image=None, audio=None)
    cost = od.CostModel(llm=od.PhaseCost(linear=1))
    exec(shared.page_code("torchtitan"), {"settings": settings(1), "recipe": recipe, "cost": cost})


def plain() -> None:
    rows = shared.SIZE // shared.num_ranks()
    Trainer.Config(**settings(rows), dataloader=Plain.Config()).build().train()


if __name__ == "__main__":
    recorder = shared.Recorder(sys.argv[1])
    {"ours": ours, "plain": plain}[sys.argv[1]]()
