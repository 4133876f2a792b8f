"""Costs of families without a rule: traced, against what torch counts in models that really compute."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23")

import torch
from tiny_hf_models import TEXT, TRACED
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

import orchdata as od
from orchdata.hf.families import model_class
from orchdata.hf.tiny import tiny_model
from orchdata.hf.tiny.model import text_of
from orchdata.hf.tracing.model import TracedModel, prepared
from orchdata.hf.tracing.phases import traced

ALL = {"frozen": ("llm",), "llm": {"causal": False}}
# Kinds of layers: plain, latent attention and experts, Mamba and Mamba-2, gated deltas, convolutions, per-layer
# embeddings, an indexer, parallel ones, positions up to 512 only.
EVERY_DAY = ("cohere", "deepseek_v3", "mamba2", "qwen3_next", "lfm2", "qwen3_5_moe_text", "roberta")
TEXTS = (
    *EVERY_DAY,
    "apertus",
    "falcon_h1",
    "bloom",
    "mamba",
    "jamba",
    "minimax",
    "nemotron_h",
    "granitemoehybrid",
    "phi",
)
WITHIN = 0.01


def counted(model: Any, length: int) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=text_of(model.config, length)[None], use_cache=False)
    return counter.get_total_flops()


def text_model(kind: str) -> Any:
    """A tiny model whose products torch sees one by one, and whose layers do not chunk a text of 192 or 320."""
    model = tiny_model(AutoConfig.for_model(kind), "eager").eval()
    for each in model.modules():
        if hasattr(getattr(each, "config", None), "_experts_implementation"):
            each.config._experts_implementation = "eager"
    return model


@pytest.mark.parametrize(
    "kind", [each if each in EVERY_DAY else pytest.param(each, marks=pytest.mark.slow) for each in TEXTS]
)
def test_a_text_costs_what_torch_counts(kind: str) -> None:
    model = text_model(kind)
    cost = od.hf.cost(model.config, **ALL).costs[-1]
    for length in (192, 320):
        assert cost.at(length) == pytest.approx(counted(model, length), rel=WITHIN)
    with pytest.raises(AssertionError):  # the comparison sees a tenth of the positions more
        assert cost.at(211) == pytest.approx(counted(model, 192), rel=WITHIN)


def test_experts_that_a_position_does_not_reach_cost_nothing() -> None:
    config = AutoConfig.for_model("llama4_text", num_hidden_layers=2, vocab_size=512)
    expert = 6 * config.hidden_size * config.intermediate_size
    one, two = (
        od.hf.cost(AutoConfig.for_model(**config.to_dict() | {"num_experts_per_tok": count}), **ALL).costs[0].linear
        for count in (1, 2)
    )
    assert two - one == pytest.approx(2 * expert, rel=1e-6)  # two layers, each of one expert more


@pytest.mark.parametrize("kind", ["cohere2", "olmo3"])
def test_windows_count_the_pairs_inside_of_them(kind: str) -> None:
    wide, narrow = (AutoConfig.for_model(kind, sliding_window=width) for width in (1 << 20, 1024))
    full, windowed = (od.hf.cost(each, frozen="llm").costs[0] for each in (wide, narrow))
    assert windowed.at(1024) == pytest.approx(full.at(1024))
    sliding = narrow.layer_types.count("sliding_attention")
    assert 0 < sliding < narrow.num_hidden_layers
    for length in (8192, 65_536):
        left_out = 4 * narrow.hidden_size * sliding * (length * length // 2 - (1024 * length - 1024**2 // 2))
        assert full.at(length) - windowed.at(length) == pytest.approx(left_out, rel=0.03)
        assert full.at(length) - windowed.at(length) != pytest.approx(left_out / 2, rel=0.03)


def test_a_window_is_found_under_other_names_too() -> None:
    for kind, key in (
        ("recurrent_gemma", "attention_window_size"),
        ("gpt_neo", "window_size"),
        ("llama4_text", "attention_chunk_size"),
    ):
        config = AutoConfig.for_model(
            kind,
            num_hidden_layers=6,
            **{key: 3000} | ({"attention_types": [[["global", "local"], 3]]} if kind == "gpt_neo" else {}),
        )
        widths = [width for width, _ in od.hf.cost(config, frozen="llm").costs[0].windows]
        assert widths == ([3000] if "chunk" in key else [4500, 18_000])


def test_towers_cost_what_torch_counts_at_other_sizes() -> None:
    for name in ("GLM-4V", "PaddleOCR-VL"):
        config = TRACED[name].make_config()
        model = TRACED[name].make_model(config).eval()
        cost = od.hf.cost(config, frozen=("image", "connector", "llm")).costs[0]
        patch = (3, 14, 14) if name == "PaddleOCR-VL" else (1176,)
        for high, wide in ((12, 22), (36, 50)):
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                grid = torch.tensor([[1, high, wide]])
                model.get_image_features(pixel_values=torch.rand(high * wide, *patch), image_grid_thw=grid)
            assert cost.at(high * wide) == pytest.approx(counter.get_total_flops(), rel=WITHIN)
            assert cost.at(high * (wide + 2)) != pytest.approx(counter.get_total_flops(), rel=WITHIN)


def test_qwen3_5_costs_what_torch_counts() -> None:
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    vision = {"depth": 3, "hidden_size": 48, "intermediate_size": 80, "num_heads": 4, "out_hidden_size": 64}
    text = TEXT | linear | {"num_hidden_layers": 4}
    tokens = {"image_token_id": 100, "video_token_id": 101}
    config = prepared(AutoConfig.for_model("qwen3_5", vision_config=vision, text_config=text, **tokens))
    model = model_class(config)._from_config(config).float().eval()
    image, llm = od.hf.cost(config, frozen=("image", "connector", "llm"), llm={"causal": False}).costs
    assert llm.at(320) == pytest.approx(counted(model, 320), rel=WITHIN)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.get_image_features(pixel_values=torch.rand(12 * 22, 1536), image_grid_thw=torch.tensor([[1, 12, 22]]))
    assert image.at(12 * 22) == pytest.approx(counter.get_total_flops(), rel=WITHIN)


def test_a_model_of_any_size_is_traced_without_its_memory_and_random_state_stays() -> None:
    config = AutoConfig.for_model("deepseek_v3")
    model = TracedModel(config, model_class(config))
    sizes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in model.model.parameters()}
    assert sum(each.numel() for each in model.model.parameters()) > 600e9 and sum(sizes.values()) < 100e6
    torch.manual_seed(1)
    before = torch.get_rng_state()
    traced.__globals__["_traced"].cache_clear()
    (cost,) = od.hf.cost(config).costs
    assert torch.equal(torch.get_rng_state(), before)
    # 37e9 parameters are active: 6 operations each, the embeddings' look-up left out.
    assert cost.linear == pytest.approx(6 * 37e9, rel=0.02)


def test_what_a_phase_trains_is_read_from_a_traced_model() -> None:
    config = TRACED["GLM-4V"].make_config()
    model = TRACED["GLM-4V"].make_model(config)
    model.model.visual.requires_grad_(False)
    model.model.visual.merger.requires_grad_(True)
    wrapped = torch.nn.Module()
    wrapped.module = model
    assert od.hf.cost(wrapped) == od.hf.cost(config, frozen="image") != od.hf.cost(config)


def test_a_phase_that_is_not_traced_says_what_to_write() -> None:
    with pytest.raises(ValueError, match="cannot trace it") as raised:
        od.hf.cost(AutoConfig.for_model("moonshine"))
    (line,) = list(str(raised.value).split("cost=")[-1:])
    assert isinstance(eval(line, {"od": od}), od.CostModel)
    config = TRACED["GLM-4V"].make_config()
    broken = AutoConfig.for_model(
        **config.to_dict() | {"vision_config": config.vision_config.to_dict() | {"num_heads": 5}}
    )
    with pytest.raises(ValueError, match=r"image phase of glm4v.*image=od.PhaseCost"):
        od.hf.cost(broken)
    assert od.hf.cost(broken, image=od.PhaseCost(2.0)).phases == ("image", "llm")
    assert od.hf.cost(broken, image=None).phases == ("llm",)


@pytest.mark.slow
def test_costs_are_equal_to_the_bit_on_other_cpus() -> None:
    program = (
        "import orchdata as od; from transformers import AutoConfig;"
        "print([od.hf.cost(AutoConfig.for_model(kind)).describe() for kind in ('qwen3_5', 'deepseek_v3', 'falcon_h1')])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": threads},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for capability, threads in (("default", "1"), ("avx2", "2"))
    }
    assert len(outputs) == 1 and "phases" in outputs.pop()
