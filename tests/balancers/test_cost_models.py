"""Cost models: FLOPs by hand, one scale, golden values, no overflow."""

from __future__ import annotations

import hashlib
import json
import pickle

import numpy as np
import pytest

from orchdata.balancers import CostModel, PhaseCost, TransformerCost

BACKBONE = TransformerCost(
    hidden=4096, layers=32, ffn=14_336, heads=32, kv_heads=8, vocab=128_256, causal=True, gated=True
)
VISION = TransformerCost(hidden=1280, layers=32, ffn=5120)
MODEL = CostModel(image=VISION, audio=PhaseCost(2e9, 5e4, 1e8), llm=BACKBONE)


def test_transformer_flops_by_hand() -> None:
    # One layer, h=4, ffn=8: projections 4*4*4*2 = 128, feed-forward 4*4*8 = 128; pairs 4*4 = 16; backward makes it 3.
    assert TransformerCost(hidden=4, layers=1, ffn=8).phase_cost() == PhaseCost(3 * 256.0, 3 * 16.0)
    # Keys and values by half of the heads: 4*4*4*1.5 = 96; a gate: 6*4*8 = 192; causal: 8; vocabulary 2*4*10 = 80.
    cost = TransformerCost(
        hidden=4, layers=2, ffn=8, heads=2, kv_heads=1, vocab=10, causal=True, gated=True, trainable=False
    )
    assert cost.phase_cost() == PhaseCost(2 * 288.0 + 80, 2 * 8.0)


def test_recomputing_adds_a_forward_and_frozen_has_only_one() -> None:
    frozen, trained, recomputed = (
        TransformerCost(hidden=8, layers=2, ffn=32, trainable=t, recompute=r).phase_cost().linear
        for t, r in ((False, True), (True, False), (True, True))
    )
    assert (trained, recomputed) == (3 * frozen, 4 * frozen)


def test_backbone_flops_are_about_six_a_parameter() -> None:
    parameters = 8.03e9 - 0.53e9  # Llama 3 8B; its input embedding is a lookup.
    assert BACKBONE.phase_cost().linear == pytest.approx(6 * parameters, rel=0.01)


def test_phases_run_encoders_first_and_the_backbone_last() -> None:
    one = PhaseCost(1.0)
    assert CostModel(llm=one, video=one, audio=one, image=one).phases == ("image", "audio", "video", "llm")
    assert CostModel(llm=one, audio=None).phases == ("llm",)


def test_tokens_cost_what_they_are() -> None:
    lengths = [0, 1, 17, 2**31 - 1]
    assert CostModel.tokens().sequence_costs("llm", lengths).tolist() == lengths
    whole = CostModel(llm=PhaseCost(3, 2, 5))
    assert whole.sequence_costs("llm", [0, 1, 10]).tolist() == [0, 10, 235]  # 3*10 + 2*100 + 5


def test_scale_is_shared_so_that_phases_compare() -> None:
    for phase, cost in zip(MODEL.phases, MODEL.costs, strict=True):
        for length in (1, 100, 5_000, 1_000_000):
            exact = cost.at(length) * 2.0**MODEL.exponent
            assert MODEL.sequence_costs(phase, [length])[0] == pytest.approx(exact, rel=1e-4, abs=1)


def test_a_million_samples_of_a_million_tokens_do_not_overflow() -> None:
    one_sample = sum(int(MODEL.sequence_costs(phase, [1_000_000])[0]) for phase in MODEL.phases)
    assert one_sample * 1_000_000 < 2**62
    assert one_sample > 2**38  # And little of the range is given away.


@pytest.mark.parametrize("unit", [1e-18, 1e-6, 1.0, 1e9, 1e20])
def test_costs_do_not_depend_on_the_unit_but_for_powers_of_two(unit: float) -> None:
    lengths = np.array([1, 300, 4_000, 100_000])
    costs = CostModel(llm=PhaseCost(3.3 * unit, 0.001 * unit)).sequence_costs("llm", lengths)
    exact = 3.3 * lengths + 0.001 * lengths**2
    assert costs == pytest.approx(exact * costs[-1] / exact[-1], rel=1e-6, abs=1)


def test_every_present_sequence_costs_at_least_one() -> None:
    assert CostModel(image=PhaseCost(1e-12), llm=PhaseCost(1.5)).sequence_costs("image", [0, 1, 9]).tolist() == [
        0,
        1,
        1,
    ]


def test_golden_values() -> None:
    """Costs are part of the plan: a change here changes the plans of running jobs."""
    lengths = np.unique(np.geomspace(1, 2**20, 400).astype(np.int64))
    digest = hashlib.blake2b(json.dumps(MODEL.describe(), sort_keys=True).encode(), digest_size=16)
    for phase in MODEL.phases:
        digest.update(MODEL.sequence_costs(phase, lengths).astype("<i8").tobytes())
    assert digest.hexdigest() == "c2d6f7a0c1a1f5fab1629ca18b776ab0"


def test_a_model_is_a_value() -> None:
    same = CostModel(llm=BACKBONE, audio=PhaseCost(2e9, 5e4, 1e8), image=VISION)
    assert same == MODEL
    assert hash(same) == hash(MODEL)
    assert pickle.loads(pickle.dumps(MODEL)) == MODEL
    assert json.loads(json.dumps(MODEL.describe())) == MODEL.describe()
    with pytest.raises(AttributeError):
        MODEL.exponent = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PhaseCost(-1.0), "PhaseCost.linear must be a finite number of at least 0, got -1.0"),
        (lambda: PhaseCost(1.0, float("nan")), "PhaseCost.quadratic .* got nan"),
        (lambda: PhaseCost(0.0), "needs a coefficient above 0"),
        (lambda: TransformerCost(hidden=0, layers=1, ffn=1), "TransformerCost.hidden .* got 0"),
        (lambda: TransformerCost(hidden=8, layers=1, ffn=1, heads=4, kv_heads=3), "kv_heads=3 must divide heads"),
        (lambda: CostModel(image=PhaseCost(1.0)), r"CostModel needs llm=..., .* got \['image'\]"),
        (lambda: CostModel(llm=3), r"CostModel\(llm=...\) must be a PhaseCost or a TransformerCost, got 3"),
        (lambda: CostModel(llm=PhaseCost(1e308)), "too large"),
        (lambda: MODEL.coefficients("video"), "no phase 'video', it has image, audio, llm"),
        (lambda: MODEL.sequence_costs("llm", [-1]), r"lengths\[0\] is -1"),
        (lambda: MODEL.sequence_costs("llm", [2**23]), "too long for its cost"),
    ],
)
def test_errors(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
