"""Models as transformers builds them, on the meta device, and the operations that torch counts in their forward.

Published sizes are written out here. Attention is counted by its products, which are of all pairs of positions, and
then by convention: causal the pairs before and at each position, a sliding window those inside of it. Routed experts
are counted by their weights, as which expert a position goes to is not known without values.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

ATTENTION = ("aten.bmm", "aten.baddbmm")
TEXT_LENGTHS = (256, 1024, 4096, 8192, 32_768)
GRIDS = ((16, 16), (32, 32), (34, 50), (64, 64), (128, 128), (180, 182))


@dataclass(frozen=True)
class RealModel:
    """A published model.

    Attributes:
        config: what its config.json says of the phase.
        phase: "llm", "image" or "audio".
        count: (transformers config, length) -> (positions, operations forward).
        lengths: positions, or (height, width) of a grid.
        wrong: sizes that must miss: each test shows that it can fail.
    """

    config: dict[str, Any]
    phase: str
    count: Callable[[Any, Any], tuple[int, float]]
    lengths: tuple[Any, ...]
    wrong: Mapping[str, Any]
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


SQUARES = ((16, 16), (27, 27), (32, 32), (64, 64), (128, 128))
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "hidden_act": "silu",
}
QWEN3 = {
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "sliding_window": None,
}
QWEN_TOWER = {"depth": 32, "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}


def text(config: dict[str, Any], **wrong: Any) -> RealModel:
    return RealModel(config, "llm", count_text, TEXT_LENGTHS, wrong)


REAL_MODELS = {
    "Llama-3-8B": text(LLAMA, kv_heads=None),
    "Qwen2.5-7B": text(
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "intermediate_size": 18_944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152_064,
            "hidden_act": "silu",
            "use_sliding_window": False,
            "sliding_window": 131_072,
            "max_window_layers": 28,
        },
        vocab=None,
    ),
    "Qwen3-0.6B": text(
        {
            **QWEN3,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
        },
        head_dim=None,
    ),
    "Qwen3-4B": text(
        {
            **QWEN3,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
        },
        head_dim=None,
    ),
    "Qwen3-30B-A3B": text(
        {
            **QWEN3,
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
        },
        ffn=1024,
        moe=None,
    ),
    "Mixtral-8x7B": text(
        {
            **LLAMA,
            "model_type": "mixtral",
            "vocab_size": 32_000,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
        moe=None,
    ),
    "Mistral-7B-v0.1": text(
        {**LLAMA, "model_type": "mistral", "vocab_size": 32_000, "sliding_window": 4096}, causal=False
    ),
    "Gemma-3-1B": text(
        {
            "model_type": "gemma3_text",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "vocab_size": 262_144,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        gated=False,
    ),
    "Gemma-3-4B": text(
        {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10_240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262_208,
            "sliding_window": 1024,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        gated=False,
    ),
    # Families that nothing is known of but the usual keys.
    "gpt-oss-20b": text(
        {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 201_088,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "hidden_act": "silu",
        },
        window=None,
        window_layers=None,
    ),
    "Qwen1.5-MoE-A2.7B": text(
        {
            "model_type": "qwen2_moe",
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "decoder_sparse_step": 1,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "vocab_size": 151_936,
            "use_sliding_window": False,
            "sliding_window": 32_768,
            "max_window_layers": 21,
            "hidden_act": "silu",
        },
        moe=None,
    ),
    "GLM-4.5-Air": text(
        {
            "model_type": "glm4_moe",
            "hidden_size": 4096,
            "intermediate_size": 10_944,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151_552,
            "hidden_act": "silu",
        },
        head_dim=None,
    ),
    "Qwen2-VL tower": RealModel(
        {**QWEN_TOWER, "model_type": "qwen2_vl_vision", "embed_dim": 1280, "mlp_ratio": 4, "hidden_size": 3584},
        "image",
        count_qwen_tower,
        GRIDS,
        {"gated": True},
    ),
    "Qwen2.5-VL tower": RealModel(
        {
            **QWEN_TOWER,
            "model_type": "qwen2_5_vl_vision",
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "out_hidden_size": 3584,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "hidden_act": "silu",
        },
        "image",
        count_qwen_tower,
        GRIDS,
        {"window": None, "window_layers": None},
    ),
    "Qwen3-VL tower": RealModel(
        {
            **QWEN_TOWER,
            "model_type": "qwen3_vl_vision",
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "out_hidden_size": 4096,
            "patch_size": 16,
            "deepstack_visual_indexes": [8, 16, 24],
            "hidden_act": "gelu_pytorch_tanh",
        },
        "image",
        count_qwen_tower,
        GRIDS,
        {"connector_macs": 0},
    ),
    "SigLIP-so400m": RealModel(
        {
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "patch_size": 14,
        },
        "image",
        count_vit,
        SQUARES,
        {"gated": True},
        unused={"vision_use_head": False},
    ),
    "InternViT-6B": RealModel(
        {
            "model_type": "internvl_vision",
            "hidden_size": 3200,
            "intermediate_size": 12_800,
            "num_hidden_layers": 45,
            "num_attention_heads": 25,
            "patch_size": [14, 14],
            "hidden_act": "gelu",
        },
        "image",
        count_vit,
        SQUARES,
        {"gated": True},
    ),
    "CLIP-L/336": RealModel(
        {
            "model_type": "clip_vision_model",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "patch_size": 14,
        },
        "image",
        count_vit,
        ((16, 16), (24, 24), (32, 32), (64, 64), (128, 128)),
        {"gated": True},
    ),
    "Pixtral-12B": RealModel(
        {
            "model_type": "pixtral",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "head_dim": 64,
            "patch_size": 16,
            "hidden_act": "gelu",
        },
        "image",
        count_vit,
        ((16, 16), (32, 32), (48, 64), (64, 64)),
        {"gated": False},
    ),
    "Whisper-large-v3": RealModel(
        {
            "model_type": "whisper",
            "d_model": 1280,
            "encoder_layers": 32,
            "encoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "num_mel_bins": 128,
            "vocab_size": 51_866,
        },
        "audio",
        count_whisper,
        (256, 750, 1500, 4096),
        {"causal": True},
    ),
    "Qwen2.5-Omni audio": RealModel(
        {
            "model_type": "qwen2_5_omni_audio_encoder",
            "d_model": 1280,
            "encoder_layers": 32,
            "encoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "num_mel_bins": 128,
            "n_window": 100,
            "output_dim": 3584,
        },
        "audio",
        count_omni_audio,
        (3, 10, 40),
        {"window": None},
    ),
    "Qwen3-Omni audio": RealModel(
        {
            "model_type": "qwen3_omni_moe_audio_encoder",
            "d_model": 1280,
            "encoder_layers": 32,
            "encoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "num_mel_bins": 128,
            "downsample_hidden_size": 480,
            "n_window": 50,
            "n_window_infer": 800,
            "output_dim": 2048,
        },
        "audio",
        count_omni_audio,
        (24, 80, 320),
        {"stem_macs": 0},
    ),
}
