"""Parts of each modality for models of Hugging Face families, and what torch counts in a training step of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hf_families.families import FAMILIES as BUILT
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

SIDE, PATCH = 112, 14
GRID = (16, 24)


@dataclass(frozen=True)
class Family:
    """A model and one part of each of its modalities."""

    name: str  # of hf_families
    # Phase -> (positions of the part, model -> its features, a tensor, and what else must join the loss).
    parts: dict[str, tuple[int, Callable[[Any], tuple[torch.Tensor, list[torch.Tensor]]]]]
    # Part of its configuration, name and value of settings that are otherwise.
    changed: tuple[tuple[str, str, Any], ...] = ()

    def make_model(self) -> Any:
        model = BUILT[self.name].build()[1]
        config = model.config
        for part, name, value in self.changed:
            setattr(getattr(config, part), name, value)
        for each in (config, *(getattr(config, name) for name in config.sub_configs if getattr(config, name, None))):
            each._attn_implementation = "eager"
        return type(model)._from_config(config)


def _joined(output: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    features = output if isinstance(output, torch.Tensor | list | tuple) else output.pooler_output
    if isinstance(features, list | tuple):
        features = torch.cat([each.reshape(-1, each.shape[-1]) for each in features])
    deepstack = getattr(output, "deepstack_features", None) or ()
    return features.reshape(-1, features.shape[-1]), [torch.cat(list(each)) for each in deepstack]


def squares(count: int, *, side: int = SIDE, **inputs: Any) -> tuple[int, Callable[[Any], Any]]:
    """`count` images of the tower's own size."""

    def run(model: Any) -> Any:
        shape = inputs.get("shape", (count,))
        more = {name: value for name, value in inputs.items() if name != "shape"}
        return _joined(model.get_image_features(pixel_values=torch.rand(*shape, 3, side, side), **more))

    return count * (side // PATCH) ** 2, run


def grid(patch_values: int) -> tuple[int, Callable[[Any], Any]]:
    positions = GRID[0] * GRID[1]

    def run(model: Any) -> Any:
        pixels, grid_thw = torch.rand(positions, patch_values), torch.tensor([[1, *GRID]])
        return _joined(model.get_image_features(pixel_values=pixels, image_grid_thw=grid_thw))

    return positions, run


def qwen2_audio(model: Any) -> Any:
    encoded = model.model.audio_tower(torch.rand(1, 128, 500)).last_hidden_state
    return _joined(model.model.multi_modal_projector(encoded))


def omni_audio(model: Any) -> Any:
    features, mask = torch.rand(1, 128, 400), torch.ones(1, 400, dtype=torch.long)
    return _joined(model.get_audio_features(input_features=features, feature_attention_mask=mask))


def tiles(side: int = SIDE) -> tuple[int, Callable[[Any], Any]]:
    """1 x 2 tiles, and the whole in small."""
    return squares(3, side=side, shape=(1, 3), image_sizes=torch.tensor([[side, 2 * side]]))


FAMILIES = {
    "Llama": Family("llama", {}),
    "Qwen3": Family("qwen3", {}),
    "LLaVA-1.5": Family("llava", {"image": squares(1)}),
    "LLaVA-NeXT": Family("llava_next", {"image": tiles()}),
    "LLaVA-OneVision": Family("llava_onevision", {"image": tiles(98)}),
    "InternVL": Family("internvl", {"image": squares(3)}),
    "Idefics3": Family("idefics3", {"image": squares(3, shape=(1, 3))}),
    "Gemma-3": Family("gemma3", {"image": squares(1)}, (("text_config", "sliding_window", 4096),)),
    "PaliGemma": Family("paligemma", {"image": squares(1)}),
    "PaliGemma, a head unused": Family(
        "paligemma", {"image": squares(1)}, (("vision_config", "vision_use_head", True),)
    ),
    "Qwen2-VL": Family("qwen2_vl", {"image": grid(1176)}),
    "Qwen2.5-VL": Family("qwen2_5_vl", {"image": grid(1176)}),
    "Qwen3-VL": Family("qwen3_vl", {"image": grid(1536)}),
    "Qwen2-Audio": Family("qwen2_audio", {"audio": (250, qwen2_audio)}),
    "Qwen2.5-Omni": Family("qwen2_5_omni", {"image": grid(1176), "audio": (200, omni_audio)}),
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
