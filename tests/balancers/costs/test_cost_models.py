"""Cost models: FLOPs by hand, one scale, golden values, no overflow."""

from __future__ import annotations

import hashlib
import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchdata.balancers import CostModel, MoE, PhaseCost, TransformerCost

BACKBONE = TransformerCost(
    hidden=4096, layers=32, ffn=14_336, heads=32, kv_heads=8, vocab=128_256, causal=True, gated=True
)
VISION = TransformerCost(hidden=1280, layers=32, ffn=5120)
MODEL = CostModel(image=VISION, audio=PhaseCost(2e9, 5e4, 1e8), llm=BACKBONE)
WINDOWED = CostModel(
    image=TransformerCost(hidden=1280, layers=32, ffn=3420, gated=True, window=64, window_layers=28),
    llm=TransformerCost(
        hidden=2560,
        layers=34,
        ffn=10_240,
        heads=8,
        kv_heads=4,
        head_dim=256,
        causal=True,
        gated=True,
        window=1024,
        window_layers=29,
    ),
)


def test_transformer_flops_by_hand() -> None:
    # One layer, h=4, ffn=8: projections 4*4*4*2 = 128, feed-forward 4*4*8 = 128; pairs 4*4 = 16; backward makes it 3.
    assert TransformerCost(hidden=4, layers=1, ffn=8).phase_cost() == PhaseCost(3 * 256.0, 3 * 16.0)
    # Keys and values by half of the heads: 4*4*4*1.5 = 96; a gate: 6*4*8 = 192; causal: 8; vocabulary 2*4*10 = 80.
    cost = TransformerCost(
        hidden=4, layers=2, ffn=8, heads=2, kv_heads=1, vocab=10, causal=True, gated=True, trainable=False
    )
    assert cost.phase_cost() == PhaseCost(2 * 288.0 + 80, 2 * 8.0)


@pytest.mark.parametrize("window", [64, 512, 4096])
def test_a_decoders_window_slides(window: int) -> None:
    sizes = {"hidden": 4, "layers": 1, "ffn": 8, "causal": True, "trainable": False}
    cost, full = (TransformerCost(**sizes, window=w).phase_cost() for w in (window, None))  # type: ignore[arg-type]
    for length in (*range(1, 4 * window, window // 50), 3 * window, 6 * window, 100 * window, 10_000 * window):
        # Half of the pairs, but for those of a position and one `window` or more before it: at 8 operations a pair.
        pairs = (length**2 - max(0, length - window) ** 2) / 2
        found = (cost.at(length) - cost.linear * length) / 16
        assert pairs <= found * (1 + 1e-9)
        assert found <= pairs * (1 + 1 / 8 + 1e-9)
        assert length > window or cost.at(length) == pytest.approx(full.at(length))
        assert length not in (3 * window, 10_000 * window) or found == pytest.approx(pairs, rel=1e-4)


def test_phases_run_encoders_first_and_the_backbone_last() -> None:
    one = PhaseCost(1.0)
    assert CostModel(llm=one, video=one, audio=one, image=one).phases == ("image", "audio", "video", "llm")
    assert CostModel(llm=one, audio=None).phases == ("llm",)


def test_scale_is_shared_so_that_phases_compare() -> None:
    for phase, cost in zip(MODEL.phases, MODEL.costs, strict=True):
        for length in (1, 100, 5_000, 1_000_000):
            exact = cost.at(length) * 2.0**MODEL.exponent
            assert MODEL.sequence_costs(phase, [length])[0] == pytest.approx(exact, rel=1e-4, abs=1)


def test_windows_are_one_each_by_width() -> None:
    cost = PhaseCost(1.0, windows=((64, 0.5), (8, 2), (64, 0.25), (9, 0.0)))
    assert cost == PhaseCost(1.0, windows=((8, 2.0), (64, 0.75)))
    assert [cost.at(length) for length in (4, 10, 100)] == [
        4 + 2.0 * 16 + 0.75 * 16,
        10 + 2.0 * 80 + 0.75 * 100,
        100 + 2.0 * 800 + 0.75 * 6400,
    ]
    assert PhaseCost(0.0, windows=[(8, 2)]).at(2) == 8  # type: ignore[arg-type]


def test_a_million_samples_of_a_million_tokens_do_not_overflow() -> None:
    one_sample = sum(int(MODEL.sequence_costs(phase, [1_000_000])[0]) for phase in MODEL.phases)
    assert one_sample * 1_000_000 < 2**62
    assert one_sample > 2**38  # And little of the range is given away.


coefficients = st.one_of(st.just(0.0), st.floats(1e-30, 1e30), st.integers(0, 2**70))


windows = st.lists(st.tuples(st.integers(1, 2**31 - 1), coefficients), max_size=2).map(tuple)


@given(st.lists(st.tuples(st.floats(1e-30, 1e30), coefficients, coefficients, windows), min_size=1, max_size=4))
def test_no_coefficients_overflow_in_any_number_of_phases(phases: list[tuple[float, float, float, Any]]) -> None:
    names = ["llm", "image", "audio", "video"][: len(phases)]
    model = CostModel(**{name: PhaseCost(*values) for name, values in zip(names, phases, strict=True)})
    # The kernel refuses what would overflow, so none of these does.
    sample = sum(int(model.sequence_costs(name, [2**20])[0]) for name in names)
    assert sample * 2**20 <= 2**62 + len(names) * 2**20  # A phase that is next to free still costs 1.


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


@pytest.mark.parametrize(
    ("model", "golden"),
    [
        (MODEL, "c2d6f7a0c1a1f5fab1629ca18b776ab0"),
        (CostModel.tokens(), "4f6219b6d59dab715364be17a4d3c2e5"),
        (
            CostModel(image=PhaseCost(2.7e-8, 3.1e-13), llm=PhaseCost(1.3e-6, 0.0, 4.2e-4)),
            "77b382023342b69fee20003ac1c82b0b",
        ),
        (WINDOWED, "344c3f9db1fc5ebb6ddf3ed7a61a679d"),
    ],
    ids=["operations", "tokens", "seconds", "windows"],
)
def test_golden_values(model: CostModel, golden: str) -> None:
    """Costs are part of the plan: a change here changes the plans of running jobs."""
    lengths = np.unique(np.geomspace(1, 2**20, 400).astype(np.int64))
    digest = hashlib.blake2b(json.dumps(model.describe(), sort_keys=True).encode(), digest_size=16)
    for phase in model.phases:
        digest.update(model.sequence_costs(phase, lengths).astype("<i8").tobytes())
    assert digest.hexdigest() == golden


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
        (lambda: PhaseCost(None), "PhaseCost.linear .* got None"),  # type: ignore[arg-type]
        (lambda: PhaseCost(0.0), "needs a coefficient above 0"),
        (lambda: PhaseCost(1.0, windows=((0, 1.0),)), "PhaseCost.windows: a width must be at least 1, got 0"),
        (lambda: PhaseCost(1.0, windows=((1 << 31, 1.0),)), "a width must be at most 2,147,483,647, got 2,147,483,648"),
        (lambda: PhaseCost(1.0, windows=(8, 1.0)), r"must be pairs \(width, coefficient\), got \(8, 1.0\)"),  # type: ignore[arg-type]
        (lambda: TransformerCost(hidden=0, layers=1, ffn=1), "TransformerCost.hidden .* got 0"),
        (lambda: TransformerCost(hidden=10**200, layers=1, ffn=1).phase_cost(), "more than a float can represent"),
        (lambda: TransformerCost(hidden=8, layers=1, ffn=1, heads=4, kv_heads=3), "kv_heads=3 must divide heads"),
        (lambda: TransformerCost(hidden=8, layers=1, ffn=1, head_dim=4), "head_dim=4 needs heads"),
        (lambda: TransformerCost(hidden=8, layers=1, ffn=1, window_layers=1), "window_layers=1 needs a window"),
        (lambda: TransformerCost(hidden=8, layers=1, ffn=1, window=4, window_layers=2), "at most layers=1"),
        (lambda: TransformerCost(hidden=8, layers=1, ffn=1, recompute="all"), "recompute must be .* got 'all'"),  # type: ignore[arg-type]
        (lambda: TransformerCost(hidden=8, layers=1, ffn=1, moe=MoE(4, 2, 8, dense_layers=2)), "dense_layers=2"),
        (lambda: MoE(4, 5, 8), "MoE.top_k must be at most num_experts=4, got 5"),
        (lambda: CostModel(image=PhaseCost(1.0)), r"CostModel needs llm=..., .* got \['image'\]"),
        (lambda: CostModel(llm=3), r"CostModel\(llm=...\) must be a PhaseCost or a TransformerCost, got 3"),
        (lambda: CostModel(llm=PhaseCost(1.0), image=PhaseCost(0.0, 1e300)), "too large"),
        (lambda: MODEL.sequence_costs("video", [1]), "no phase 'video'"),
        (lambda: MODEL.sequence_costs("llm", [-1]), r"lengths\[0\] is -1"),
        (lambda: MODEL.sequence_costs("llm", [2**23]), "too long for its cost"),
    ],
)
def test_errors(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
