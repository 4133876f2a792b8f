"""What every family needs: image processors of either backend, a stand-in for video, and weights that show mistakes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
import torchvision_operators  # noqa: F401
import transformers
from torch import nn


def has_torchvision() -> bool:
    return find_spec("torchvision") is not None


BACKENDS = ("pil", "torchvision") if has_torchvision() else ("pil",)


def image_processor(name: str, backend: str, **settings: Any) -> Any:
    """transformers' image processor of a model, of backend "pil" or "torchvision"."""
    return getattr(transformers, name + ("Pil" if backend == "pil" else ""))(**settings)


def build_processor(kind: Any, *args: Any, video: bool = True, **settings: Any) -> Any:
    """A processor of an image and a tokenizer; where its class asks for a video processor, one that no test uses.

    Without torchvision transformers has no class of video processors, not even to compare with, and without num2words
    SmolVLM's refuses: both only serve videos.
    """
    stand_in = _video_processor()
    module = sys.modules[kind.__module__]
    with ExitStack() as stack:
        if not has_torchvision():
            stack.enter_context(mock.patch.object(kind, "check_argument_for_proper_class", lambda *_: None))
        if getattr(module, "num2words", kind) is None:
            stack.enter_context(mock.patch.object(module, "num2words", str))
        if video:
            settings["video_processor"] = stand_in
        return kind(*args, **settings)


def _video_processor() -> Any:
    if has_torchvision():
        from transformers import Qwen2VLVideoProcessor

        return Qwen2VLVideoProcessor()
    return NoVideo()


class NoVideo:
    """Says what processors ask their video processor for before they look whether there is a video."""

    num_frames, fps, merge_size, temporal_patch_size = 64, 1, 2, 2
    size: Mapping[str, int] = {"longest_edge": 512}
    model_input_names: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"video_processor_type": "NoVideo"}


def random_model(kind: Any, config: Any, seed: int = 0) -> nn.Module:
    """A model in float64 whose weights are large enough that every input matters to its loss."""
    config._attn_implementation = "sdpa"
    torch.manual_seed(seed)
    model = kind._from_config(config) if hasattr(kind, "_from_config") else kind(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            scale = 0.05 if parameter.dim() < 2 else min(0.3, parameter[0].numel() ** -0.5)
            parameter.copy_(parameter + scale * drawn if parameter.dim() < 2 else scale * drawn)
    return model.double().train()
