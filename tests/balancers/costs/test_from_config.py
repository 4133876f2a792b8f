"""Configs read without transformers: what is known of families, what is refused, and that it says so."""

from __future__ import annotations

from typing import Any

import pytest

from orchdata.balancers import CostModel, MoE, TransformerCost

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "hidden_act": "silu",
}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 14,
}
WHISPER = {
    "model_type": "whisper",
    "d_model": 32,
    "encoder_layers": 3,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "num_mel_bins": 80,
    "vocab_size": 100,
}
# As published: the text model's keys at the top, and a tower that does not name its type.
QWEN2_5_VL = {
    **LLAMA,
    "model_type": "qwen2_5_vl",
    "use_sliding_window": False,
    "sliding_window": 32_768,
    "max_window_layers": 4,
    "vision_config": {
        "depth": 8,
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 86,
        "num_heads": 2,
        "in_chans": 3,
        "out_hidden_size": 64,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [3, 7],
    },
}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def test_a_text_model() -> None:
    expected = TransformerCost(
        hidden=64,
        layers=4,
        ffn=160,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocab=100,
        causal=True,
        gated=True,
        trainable=False,
    )
    assert TransformerCost.from_config(LLAMA, trainable=False) == expected


def test_all_phases_of_a_model_at_once() -> None:
    tower = TransformerCost.from_config(QWEN2_5_VL, "image")
    # (112 / 14)**2 patches a window, in six layers of eight; 2*2 patches merge: (4*32*4*32 + 4*32*64) / 4 a patch.
    assert (tower.window, tower.window_layers, tower.gated) == (64, 6, True)
    assert (tower.stem_macs, tower.connector_macs) == (3 * 2 * 14 * 14 * 32, 4096 + 2048)
    model = CostModel.from_config(QWEN2_5_VL, image={"trainable": False}, llm={"flash": True})
    assert model == CostModel(
        image=TransformerCost.from_config(QWEN2_5_VL["vision_config"] | {"model_type": "qwen2_5_vl"}, trainable=False),
        llm=TransformerCost.from_config(LLAMA, flash=True),
    )
    assert CostModel.from_config(QWEN2_5_VL, image=None).phases == ("llm",)


def test_omni_models_keep_what_counts_in_their_thinker() -> None:
    audio = WHISPER | {"model_type": "qwen2_5_omni_audio_encoder", "n_window": 100, "output_dim": 64}
    whole = {"model_type": "qwen2_5_omni", "thinker_config": {"audio_config": audio, "text_config": LLAMA}}
    assert CostModel.from_config(whole).phases == ("audio", "llm")
    tower = TransformerCost.from_config(whole, "audio")
    # Mel bins once a frame, two frames a position; the second convolution once; pairs of positions leave.
    assert (tower.stem_macs, tower.connector_macs) == (2 * 3 * 80 * 32 + 3 * 32 * 32, 32 * 64 / 2)
    assert (tower.window, tower.window_layers) == (100, None)


def test_a_tower_alone_is_the_only_phase() -> None:
    assert TransformerCost.from_config(SIGLIP) == TransformerCost(
        hidden=32, layers=3, ffn=80, heads=2, stem_macs=3 * 14 * 14 * 32
    )
    assert TransformerCost.from_config(WHISPER).vocab is None


@pytest.mark.parametrize(
    ("text", "window_layers"),
    [
        ({"model_type": "mistral", "sliding_window": 64}, 4),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3}, 1),
        ({"model_type": "gemma2", "sliding_window": 64}, 2),
        ({"model_type": "gemma3_text", "sliding_window": 64, "num_hidden_layers": 13}, 11),
        ({"model_type": "gemma3_text", "sliding_window": 64, "sliding_window_pattern": 2}, 2),
        ({"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}, 2),
    ],
)
def test_layers_with_a_sliding_window(text: dict[str, Any], window_layers: int) -> None:
    found = TransformerCost.from_config(LLAMA | text)
    assert (found.window, found.window_layers) == (64, window_layers)


@pytest.mark.parametrize(
    ("text", "moe"),
    [
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, MoE(8, 2, 160)),
        ({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}, MoE(8, 2, 40)),
        (
            {
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 40,
                "shared_expert_intermediate_size": 80,
                "mlp_only_layers": [0],
                "decoder_sparse_step": 2,
            },
            MoE(8, 2, 40, shared_ffn=80, dense_layers=2),
        ),
        (
            {
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 40,
                "n_shared_experts": 2,
                "first_k_dense_replace": 1,
            },
            MoE(8, 2, 40, shared_ffn=80, dense_layers=1),
        ),
    ],
)
def test_experts(text: dict[str, Any], moe: MoE) -> None:
    assert TransformerCost.from_config(LLAMA | text).moe == moe


def test_unknown_models_are_read_by_the_usual_keys() -> None:
    assert TransformerCost.from_config(LLAMA | {"model_type": "new"}) == TransformerCost.from_config(LLAMA)
    gelu = LLAMA | {"model_type": "new", "hidden_act": "gelu"}
    assert TransformerCost.from_config(gelu, gated=False).gated is False
    vit = SIGLIP | {"model_type": "new", "hidden_act": "gelu"}
    assert TransformerCost.from_config(vit) == TransformerCost.from_config(SIGLIP)


@pytest.mark.parametrize(
    ("config", "phase", "message"),
    [
        (3, None, "must be a mapping or have to_dict, got int"),
        ({}, None, "pass the phase of the config: it has none of the keys"),
        (QWEN2_5_VL, None, "pass the phase of the config: it describes image, llm"),
        (LLAMA, "image", "no phase 'image': it describes llm"),
        (without(LLAMA, "num_attention_heads"), None, r"\(llama\) has no num_attention_heads or n_head.*heads=\.\.\."),
        (
            without(LLAMA, "intermediate_size"),
            None,
            r"has no intermediate_size.*AutoConfig.from_pretrained.*ffn=\.\.\.",
        ),
        (
            LLAMA | {"model_type": "new", "hidden_act": "gelu"},
            None,
            r"whether its feed-forward has a gate.*gated=\.\.\.",
        ),
        (LLAMA | {"kv_lora_rank": 512}, None, "has kv_lora_rank=512, which .* does not read: .* fit_phase_costs"),
        (LLAMA | {"layer_types": ["linear_attention"] * 4}, None, r"layer_types \['linear_attention'\]"),
        (LLAMA | {"model_type": "new", "sliding_window": 64}, None, "sliding_window=64 and no layer_types"),
        (LLAMA | {"num_experts": 8}, None, r"no num_experts_per_tok or .*moe=\.\.\."),
        (LLAMA | {"num_experts": 8, "expert_depth": 2}, None, "has expert_depth=2"),
        (SIGLIP | {"model_type": "swin", "depths": [2, 2]}, None, r"has depths=\[2, 2\]"),
        (SIGLIP | {"model_type": "new", "spatial_merge_size": 2}, None, "has a merger"),
    ],
)
def test_errors(config: Any, phase: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformerCost.from_config(config, phase)


def test_a_phase_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="no phase 'audio', it describes image, llm"):
        CostModel.from_config(QWEN2_5_VL, audio={})


@pytest.mark.parametrize(
    ("kind", "tokens", "projector"),
    [
        ("llava", 1, "llava.modeling_llava.LlavaMultiModalProjector"),
        ("internvl", 4, "internvl.modeling_internvl.InternVLMultiModalProjector"),
        ("gemma3", 16, "gemma3.modeling_gemma3.Gemma3MultiModalProjector"),
        ("paligemma", 1, "paligemma.modeling_paligemma.PaliGemmaMultiModalProjector"),
    ],
)
def test_projectors_have_the_weights_they_are_counted_by(kind: str, tokens: int, projector: str) -> None:
    pytest.importorskip("transformers", minversion="5.23")
    import importlib

    from transformers import AutoConfig

    tower = {"model_type": "siglip_vision_model", **without(SIGLIP, "model_type"), "image_size": 896}
    if kind == "internvl":
        tower = without(tower, "image_size") | {"model_type": "internvl_vision", "patch_size": [14, 14]}
    text = (
        LLAMA
        if kind in ("llava", "internvl")
        else LLAMA | {"model_type": "gemma" if kind == "paligemma" else "gemma3_text"}
    )
    more = {"projection_dim": 64} if kind == "paligemma" else {}
    config = AutoConfig.for_model(kind, vision_config=tower, text_config=text, **more)
    module, name = projector.rsplit(".", 1)
    made = getattr(importlib.import_module(f"transformers.models.{module}"), name)(config)
    weights = sum(parameter.numel() for parameter in made.parameters() if parameter.dim() == 2)
    assert TransformerCost.from_config(config, "image").connector_macs == weights / tokens
