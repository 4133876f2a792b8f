"""Whole models of Hugging Face families, tiny, and what torch counts in a training step of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}}
SIDE = 224
PATCHES = 256  # (224 / 14)**2
VIT = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 14,
}
QWEN_TOWER = {"depth": 3, "hidden_size": 48, "intermediate_size": 80, "out_hidden_size": 64, "num_heads": 4}
WHISPER = {
    "d_model": 48,
    "encoder_layers": 3,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "num_mel_bins": 16,
    "max_source_positions": 1500,
}
GRID = (16, 24)


@dataclass(frozen=True)
class Family:
    """A model and one part of each of its modalities.

    Attributes:
        config: as `AutoConfig.for_model` takes it, its text model among it.
        parts: phase -> (positions of the part, model -> its features, a tensor, and what else must join the loss).
    """

    config: dict[str, Any]
    parts: dict[str, tuple[int, Callable[[Any], tuple[torch.Tensor, list[torch.Tensor]]]]]
    text: dict[str, Any] | None = None

    def make_config(self) -> Any:
        from transformers import AutoConfig

        config = AutoConfig.for_model(**self.config)
        for each in (config, *(getattr(config, name) for name in config.sub_configs if getattr(config, name, None))):
            each._attn_implementation = "eager"
        return config

    def make_model(self, config: Any) -> Any:
        import transformers

        if config.model_type == "qwen2_5_omni_thinker":
            return transformers.Qwen2_5OmniThinkerForConditionalGeneration._from_config(config)
        if config.model_type == "qwen2_audio":
            return transformers.Qwen2AudioForConditionalGeneration._from_config(config)
        kind = transformers.AutoModelForImageTextToText if self.parts else transformers.AutoModelForCausalLM
        return kind.from_config(config)


def _joined(output: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    features = output if isinstance(output, torch.Tensor | list | tuple) else output.pooler_output
    if isinstance(features, list | tuple):
        features = torch.cat([each.reshape(-1, each.shape[-1]) for each in features])
    deepstack = getattr(output, "deepstack_features", None) or ()
    return features.reshape(-1, features.shape[-1]), [torch.cat(list(each)) for each in deepstack]


def squares(count: int, **inputs: Any) -> tuple[int, Callable[[Any], Any]]:
    """`count` images of the tower's own size."""

    def run(model: Any) -> Any:
        shape = inputs.get("shape", (count,))
        more = {name: value for name, value in inputs.items() if name != "shape"}
        return _joined(model.get_image_features(pixel_values=torch.rand(*shape, 3, SIDE, SIDE), **more))

    return count * PATCHES, run


def grid(patch_values: int) -> tuple[int, Callable[[Any], Any]]:
    positions = GRID[0] * GRID[1]

    def run(model: Any) -> Any:
        pixels, grid_thw = torch.rand(positions, patch_values), torch.tensor([[1, *GRID]])
        return _joined(model.get_image_features(pixel_values=pixels, image_grid_thw=grid_thw))

    return positions, run


def qwen2_audio(model: Any) -> Any:
    encoded = model.model.audio_tower(torch.rand(1, 16, 3000)).last_hidden_state
    return _joined(model.model.multi_modal_projector(encoded))


def omni_audio(model: Any) -> Any:
    features, mask = torch.rand(1, 16, 800), torch.ones(1, 800, dtype=torch.long)
    return _joined(model.get_audio_features(input_features=features, feature_attention_mask=mask))


def _vision(kind: str, seen_by: str, text: str, part: Any, **more: Any) -> Family:
    vision = {"model_type": seen_by, **(QWEN_TOWER if kind.startswith("qwen") else VIT), **more.pop("tower", {})}
    return Family(
        {"model_type": kind, "vision_config": vision, "text_config": {"model_type": text, **TEXT, **ROTARY}, **more},
        {"image": part},
    )


PINPOINTS = [[SIDE, 2 * SIDE]]  # cut into 1 x 2 tiles, and the whole in small
TILES = squares(3, shape=(1, 3), image_sizes=torch.tensor([[SIDE, 2 * SIDE]]))
SIGLIP = {"vision_use_head": False}
FAMILIES = {
    "Llama": Family({"model_type": "llama", **TEXT}, {}),
    "Qwen3": Family({"model_type": "qwen3", **TEXT}, {}),
    "LLaVA-1.5": _vision("llava", "clip_vision_model", "llama", squares(1)),
    "LLaVA-NeXT": _vision("llava_next", "clip_vision_model", "llama", TILES, image_grid_pinpoints=PINPOINTS),
    "LLaVA-OneVision": _vision(
        "llava_onevision", "siglip_vision_model", "qwen2", TILES, image_grid_pinpoints=PINPOINTS, tower=SIGLIP
    ),
    "InternVL": _vision(
        "internvl", "internvl_vision", "qwen2", squares(3), tower={"image_size": [SIDE, SIDE], "patch_size": [14, 14]}
    ),
    "Idefics3": _vision("idefics3", "idefics3_vision", "llama", squares(3, shape=(1, 3))),
    "Gemma-3": _vision(
        "gemma3", "siglip_vision_model", "gemma3_text", squares(1), tower=SIGLIP, mm_tokens_per_image=64
    ),
    "PaliGemma": _vision("paligemma", "siglip_vision_model", "gemma", squares(1), tower=SIGLIP, projection_dim=64),
    "PaliGemma, a head unused": _vision("paligemma", "siglip_vision_model", "gemma", squares(1), projection_dim=64),
    "Qwen2-VL": _vision(
        "qwen2_vl",
        "qwen2_vl_vision",
        "qwen2_vl_text",
        grid(1176),
        tower={"embed_dim": 48, "hidden_size": 64, "mlp_ratio": 2, "intermediate_size": None},
    ),
    "Qwen2.5-VL": _vision(
        "qwen2_5_vl",
        "qwen2_5_vl_vision",
        "qwen2_5_vl_text",
        grid(1176),
        tower={"fullatt_block_indexes": [1], "window_size": 112},
    ),
    "Qwen3-VL": _vision(
        "qwen3_vl",
        "qwen3_vl_vision",
        "qwen3_vl_text",
        grid(1536),
        tower={"deepstack_visual_indexes": [0], "num_position_embeddings": 256},
    ),
    "Qwen2-Audio": Family(
        {
            "model_type": "qwen2_audio",
            "audio_config": {"model_type": "qwen2_audio_encoder", **WHISPER},
            "text_config": {"model_type": "qwen2", **TEXT},
        },
        {"audio": (1500, qwen2_audio)},
    ),
    "Qwen2.5-Omni": Family(
        {
            "model_type": "qwen2_5_omni_thinker",
            "vision_config": {**QWEN_TOWER, "fullatt_block_indexes": [1]},
            "audio_config": {**WHISPER, "n_window": 100, "output_dim": 64},
            "text_config": {**TEXT, **ROTARY},
        },
        {"image": grid(1176), "audio": (400, omni_audio)},
    ),
}


class Adapted(nn.Module):
    """A layer with a low-rank adapter, named as PEFT names them."""

    def __init__(self, base_layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base_layer.out_features, bias=False)})

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.base_layer(values) + self.lora_B["default"](self.lora_A["default"](values))


def adapt(module: nn.Module) -> None:
    """Add adapters to all layers of a module, and freeze the rest."""
    module.requires_grad_(False)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, Adapted(child))


def step_flops(family: Family, model: Any, text_tokens: int) -> tuple[int, float]:
    """(LLM positions, operations) of a forward and, where anything is trained, its backward."""
    with FlopCounterMode(display=False) as counter:
        embeds, joined = [model.get_input_embeddings()(torch.ones(1, text_tokens, dtype=torch.long))], []
        for _, run in family.parts.values():
            features, more = run(model)
            embeds.append(features[None])
            joined += more
        sequence = torch.cat(embeds, dim=1)
        hidden = model.get_decoder()(inputs_embeds=sequence, use_cache=False).last_hidden_state
        loss = model.get_output_embeddings()(hidden).sum() + sum(each.sum() for each in joined)
        if loss.requires_grad:
            loss.backward()
    return sequence.shape[1], float(counter.get_total_flops())
