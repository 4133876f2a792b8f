"""Costs from configs against the operations that torch counts in the models themselves, as transformers builds them on
the meta device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("transformers", minversion="5.23")

from orchdata.balancers import TransformerCost

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


TEXT_LENGTHS = (256, 1024, 4096, 8192, 32_768)
GRIDS = ((16, 16), (32, 32), (34, 50), (64, 64), (128, 128), (180, 182))
SQUARES = ((16, 16), (27, 27), (32, 32), (64, 64), (128, 128))


def text(kind: str, sizes: str, config: dict[str, Any], **wrong: Any) -> RealModel:
    """A language model; `sizes` are hidden, of the MLP, layers, heads, heads of keys, and of the vocabulary."""
    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size"
    common = dict(zip(names.split(), map(int, sizes.split()), strict=True))
    common |= {} if kind == "gemma3_text" else {"hidden_act": "silu"}
    return RealModel({"model_type": kind, **common, **config}, "llm", count_text, TEXT_LENGTHS, wrong)


def tower(kind: str, config: dict[str, Any], **wrong: Any) -> RealModel:
    """A vision tower of Qwen."""
    common = {"depth": 32, "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    return RealModel({"model_type": f"{kind}_vision", **common, **config}, "image", count_qwen_tower, GRIDS, wrong)


def vit(
    kind: str, sizes: str, config: dict[str, Any], gated: bool, lengths: tuple[Any, ...] = SQUARES, **unused: Any
) -> RealModel:
    """A plain one; `sizes` are hidden, of the MLP, layers and heads."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    common = dict(zip(names, map(int, sizes.split()), strict=True))
    return RealModel(
        {"model_type": kind, **common, **config}, "image", count_vit, lengths, {"gated": gated}, unused=unused
    )


def audio(kind: str, count: Any, lengths: tuple[int, ...], config: dict[str, Any], **wrong: Any) -> RealModel:
    sizes = {"encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "num_mel_bins": 128}
    return RealModel({"model_type": kind, "d_model": 1280, **sizes, **config}, "audio", count, lengths, wrong)


QWEN3 = {"head_dim": 128, "use_sliding_window": False, "sliding_window": None}
# By what config.json of each says.
PUBLISHED_MODELS = {
    "Llama-3-8B": text("llama", "4096 14336 32 32 8 128256", {}, kv_heads=None),
    "Qwen2.5-7B": text(
        "qwen2",
        "3584 18944 28 28 4 152064",
        {"use_sliding_window": False, "sliding_window": 131_072, "max_window_layers": 28},
        vocab=None,
    ),
    "Qwen3-4B": text("qwen3", "2560 9728 36 32 8 151936", QWEN3, head_dim=None),
    "Qwen3-30B-A3B": text(
        "qwen3_moe",
        "2048 6144 48 32 4 151936",
        QWEN3
        | {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
        | {"decoder_sparse_step": 1, "mlp_only_layers": []},
        ffn=1024,
        moe=None,
    ),
    "Mixtral-8x7B": text(
        "mixtral",
        "4096 14336 32 32 8 32000",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
        moe=None,
    ),
    "Mistral-7B-v0.1": text("mistral", "4096 14336 32 32 8 32000", {"sliding_window": 4096}, causal=False),
    "Gemma-3-1B": text(
        "gemma3_text",
        "1152 6912 26 4 1 262144",
        {"head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 6}
        | {"hidden_activation": "gelu_pytorch_tanh"},
        gated=False,
    ),
    # Families that nothing is known of but the usual keys.
    "gpt-oss-20b": text(
        "gpt_oss",
        "2880 2880 24 64 8 201088",
        {"head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128}
        | {"layer_types": ["sliding_attention", "full_attention"] * 12},
        window=None,
        window_layers=None,
    ),
    "Qwen1.5-MoE-A2.7B": text(
        "qwen2_moe",
        "2048 5632 24 16 16 151936",
        {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts": 60}
        | {"num_experts_per_tok": 4, "decoder_sparse_step": 1}
        | {"use_sliding_window": False, "sliding_window": 32_768, "max_window_layers": 21},
        moe=None,
    ),
    "GLM-4.5-Air": text(
        "glm4_moe",
        "4096 10944 46 96 8 151552",
        {"moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8}
        | {"first_k_dense_replace": 1, "head_dim": 128},
        head_dim=None,
    ),
    "Qwen2-VL tower": tower("qwen2_vl", {"embed_dim": 1280, "mlp_ratio": 4, "hidden_size": 3584}, gated=True),
    "Qwen2.5-VL tower": tower(
        "qwen2_5_vl",
        {"hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584, "hidden_act": "silu"}
        | {"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
        window=None,
        window_layers=None,
    ),
    "Qwen3-VL tower": tower(
        "qwen3_vl",
        {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 4096, "patch_size": 16}
        | {"deepstack_visual_indexes": [8, 16, 24], "hidden_act": "gelu_pytorch_tanh"},
        connector_macs=0,
    ),
    "SigLIP-so400m": vit("siglip_vision_model", "1152 4304 27 16", {"patch_size": 14}, True, vision_use_head=False),
    "InternViT-6B": vit("internvl_vision", "3200 12800 45 25", {"patch_size": [14, 14], "hidden_act": "gelu"}, True),
    "CLIP-L/336": vit(
        "clip_vision_model",
        "1024 4096 24 16",
        {"patch_size": 14},
        True,
        ((16, 16), (24, 24), (32, 32), (64, 64), (128, 128)),
    ),
    "Pixtral-12B": vit(
        "pixtral",
        "1024 4096 24 16",
        {"head_dim": 64, "patch_size": 16, "hidden_act": "gelu"},
        False,
        ((16, 16), (32, 32), (48, 64), (64, 64)),
    ),
    "Whisper-large-v3": audio("whisper", count_whisper, (256, 750, 1500, 4096), {"vocab_size": 51_866}, causal=True),
    "Qwen2.5-Omni audio": audio(
        "qwen2_5_omni_audio_encoder",
        count_omni_audio,
        (3, 10, 40),
        {"n_window": 100, "output_dim": 3584},
        window=None,
    ),
    "Qwen3-Omni audio": audio(
        "qwen3_omni_moe_audio_encoder",
        count_omni_audio,
        (24, 80, 320),
        {"downsample_hidden_size": 480, "n_window": 50, "n_window_infer": 800, "output_dim": 2048},
        stem_macs=0,
    ),
}

WITHIN = 0.02
# Heads of their own width, experts, a sliding window, windows and a merger, a plain ViT, convolutions.
DAILY = ("Qwen3-4B", "Qwen3-30B-A3B", "Gemma-3-1B", "Qwen2.5-VL tower", "CLIP-L/336", "Whisper-large-v3")


def check(model: RealModel, lengths: tuple[Any, ...]) -> dict[int, float]:
    """Positions -> (cost - counted) / counted, forward; within the limit, and beyond it with what is `wrong`."""

    def error(positions: int, flops: float, **sizes: Any) -> float:
        cost = TransformerCost.from_config(
            model.make_config(), model.phase, trainable=False, connector_trainable=False, **sizes
        )
        return cost.phase_cost().at(positions) / flops - 1

    counted = [model.count(model.make_config(), length) for length in lengths]
    found = {positions: error(positions, flops) for positions, flops in counted}
    assert all(abs(one) < WITHIN for one in found.values()), found
    assert any(abs(error(positions, flops, **model.wrong)) > WITHIN for positions, flops in counted)
    return found


@pytest.mark.parametrize("name", DAILY)
def test_shallow_models_cost_what_torch_counts(name: str) -> None:
    model = PUBLISHED_MODELS[name].shallow(6)
    check(model, (model.lengths[1], model.lengths[3]))


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED_MODELS)
def test_models_cost_what_torch_counts(name: str) -> None:
    """Run with -s for the table."""
    found = check(PUBLISHED_MODELS[name], PUBLISHED_MODELS[name].lengths)
    print(f"\n| {name} | {' | '.join(f'{positions:,}: {error:+.2%}' for positions, error in found.items())} |")
