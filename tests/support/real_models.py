"""Models as transformers builds them, on the meta device, and the operations that torch counts in their forward."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

ATTENTION = ("aten.bmm", "aten.baddbmm")


@dataclass(frozen=True)
class RealModel:
    """A published model."""

    config: dict[str, Any]  # what its config.json says of the phase
    phase: str  # "llm", "image" or "audio"
    count: Callable[[Any, Any], tuple[int, float]]  # (transformers config, length) -> (positions, operations forward)
    lengths: tuple[Any, ...]  # positions, or (height, width) of a grid
    wrong: Mapping[str, Any]  # sizes that must miss: each test shows that it can fail
    unused: Mapping[str, Any] = field(default_factory=dict)

    def make_config(self, **changed: Any) -> Any:
        from transformers import AutoConfig

        values = {**self.config, **self.unused, **changed}
        return AutoConfig.for_model(values.pop("model_type"), **values)

    def shallow(self, layers: int) -> RealModel:
        """With fewer layers, of which one at least has full attention."""
        name = next(key for key in ("num_hidden_layers", "depth", "encoder_layers") if key in self.config)
        config = {**self.config, name: layers}
        if "fullatt_block_indexes" in config:
            config["fullatt_block_indexes"] = [layers - 1]
        return replace(self, config=config)


def build(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    with torch.device("meta"):
        return make().eval()


def counted(model: torch.nn.Module, share: Callable[[int], float] | None = None, **inputs: Any) -> float:
    """Operations of a forward; attention of layer i by `share(i)` of its pairs."""
    routed = []
    for module in model.modules():
        if hasattr(module, "experts") and isinstance(module.experts, torch.nn.Module):
            weights = sum(p.numel() // p.shape[0] for p in module.experts.parameters() if p.dim() == 3)

            def forward(hidden: torch.Tensor, index: torch.Tensor, *_: Any, weights: int = weights) -> torch.Tensor:
                routed.append(2 * weights * index.numel())
                return hidden

            module.experts.forward = forward
    with FlopCounterMode(display=False, depth=None) as counter, torch.no_grad():
        model(**inputs)
    flops = counter.get_flop_counts()
    total = float(sum(flops["Global"].values()) + sum(routed))
    if share is not None:
        for name, operations in flops.items():
            if name.endswith(".self_attn"):
                attention = sum(value for key, value in operations.items() if str(key) in ATTENTION)
                assert attention > 0
                total -= attention * (1 - share(int(name.split(".")[-2])))
    return total


def pairs(length: int, window: int | None = None) -> int:
    """Pairs of a position and one at or before it, at most window - 1 before."""
    inside = min(length, window or length)
    return inside * (inside + 1) // 2 + (length - inside) * inside


def count_text(config: Any, length: int) -> tuple[int, float]:
    from transformers import AutoModelForCausalLM

    config._attn_implementation = "eager"
    model = build(lambda: AutoModelForCausalLM.from_config(config))
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    if getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None):
        kinds = ["sliding_attention"] * config.num_hidden_layers

    def share(layer: int) -> float:
        window = config.sliding_window if kinds[layer] == "sliding_attention" else None
        return pairs(length, window) / length**2

    # Masks as they are made, so that nothing is read from tensors without values.
    mask = torch.zeros(1, 1, length, length, dtype=torch.bool, device="meta")
    by_kind = getattr(config, "layer_types", None) is not None
    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    inputs = {
        "input_ids": ids,
        "position_ids": ids,
        "attention_mask": dict.fromkeys(("full_attention", "sliding_attention"), mask) if by_kind else mask,
    }
    return length, counted(model, share, use_cache=False, **inputs)


def count_qwen_tower(config: Any, grid: tuple[int, int]) -> tuple[int, float]:
    from transformers import vision_utils

    family = config.model_type.removesuffix("_vision")
    classes = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    names = ("Qwen2VisionTransformerPretrainedModel", "Qwen2_5_VisionTransformerPretrainedModel", "Qwen3VLVisionModel")
    kind = next(getattr(classes, name) for name in names if hasattr(classes, name))
    config._attn_implementation = "eager"
    model = build(lambda: kind._from_config(config))
    grid_thw = torch.tensor([[1, *grid]])
    inputs = {"position_ids": vision_utils.get_vision_position_ids(grid_thw, config.spatial_merge_size)}
    if hasattr(model, "interpolation_mode"):
        inputs["interp_indices"], inputs["interp_weights"] = vision_utils.get_vision_interpolation_indices_and_weights(
            grid_thw,
            num_grid_per_side=model.num_grid_per_side,
            mode=model.interpolation_mode,
            align_corners=model.interpolation_align_corners,
            spatial_merge_size=config.spatial_merge_size,
        )
    positions = grid[0] * grid[1]
    patch = config.in_channels * config.temporal_patch_size * config.patch_size**2
    on_meta = {name: value.to("meta") for name, value in inputs.items()}
    pixels = torch.empty(positions, patch, device="meta")
    return positions, counted(model, hidden_states=pixels, grid_thw=grid_thw, **on_meta)


def count_vit(config: Any, grid: tuple[int, int]) -> tuple[int, float]:
    from transformers import AutoModel

    patch = config.patch_size if isinstance(config.patch_size, int) else config.patch_size[0]
    size = [patch * side for side in grid]
    config.image_size = size if config.model_type == "internvl_vision" else size[0]
    config._attn_implementation = "eager"
    model = build(lambda: AutoModel.from_config(config))
    return grid[0] * grid[1], counted(model, pixel_values=torch.empty(1, 3, *size, device="meta"))


def count_whisper(config: Any, positions: int) -> tuple[int, float]:
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config.max_source_positions = positions
    config._attn_implementation = "eager"
    model = build(lambda: WhisperEncoder._from_config(config))
    return positions, counted(model, input_features=torch.empty(1, config.num_mel_bins, 2 * positions, device="meta"))


def count_omni_audio(config: Any, chunks: int) -> tuple[int, float]:
    """Of Qwen2.5-Omni and Qwen3-Omni: whole chunks of 2 * n_window frames."""
    family = config.model_type.removesuffix("_audio_encoder")
    classes = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    kind = next(
        getattr(classes, n) for n in ("Qwen2_5OmniAudioEncoder", "Qwen3OmniMoeAudioEncoder") if hasattr(classes, n)
    )
    config._attn_implementation = "eager"
    model = build(lambda: kind._from_config(config))
    frames, two_dimensional = 2 * config.n_window, hasattr(config, "n_window_infer")
    lengths = torch.full((chunks,), frames)
    if two_dimensional:
        total = torch.tensor([frames * chunks])
        boundaries = classes.get_audio_cu_seqlens(lengths, total, config.n_window_infer, config.n_window)
    else:
        boundaries = classes.get_audio_cu_seqlens(lengths)
    positions = int(boundaries[-1])
    indices = torch.arange(positions, device="meta")
    return positions, counted(
        model,
        input_features=None,
        feature_lens=None,
        padded_feature=torch.empty(chunks, config.num_mel_bins, frames, device="meta"),
        chunk_lengths=lengths.to("meta"),
        cu_seqlens=boundaries,
        valid_indices=indices,
        **({} if two_dimensional else {"pool_indices": indices[::2]}),
    )
