"""Cost models: FLOPs by hand, one scale, golden values, no overflow."""

from __future__ import annotations

import hashlib
import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("trainable", [False, True])
def test_flops_agree_with_torchs_own_count(gated: bool, trainable: bool) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    hidden, layers, ffn, heads, kv_heads, vocab, length = 24, 3, 40, 6, 2, 50, 13

    def weight(columns: int, rows: int = hidden) -> object:
        return torch.randn(rows, columns, requires_grad=trainable)

    def split(x: object, count: int) -> object:
        return x.view(length, count, hidden // heads).transpose(0, 1).repeat_interleave(heads // count, 0)  # type: ignore[attr-defined]

    def layer(x: object) -> object:
        kv = hidden * kv_heads // heads
        query, key, value = (
            split(x @ weight(hidden), heads),
            split(x @ weight(kv), kv_heads),
            split(x @ weight(kv), kv_heads),
        )  # type: ignore[operator]
        attended = torch.bmm(torch.bmm(query, key.transpose(1, 2)).softmax(-1), value)  # type: ignore[attr-defined]
        x = x + attended.transpose(0, 1).reshape(length, hidden) @ weight(hidden)
        up = x @ weight(ffn)
        return x + (up * (x @ weight(ffn)).sigmoid() if gated else up.relu()) @ weight(hidden, ffn)

    with FlopCounterMode(display=False) as counter:
        # The first layer's input has a gradient too, as behind an embedding.
        x = torch.randn(length, hidden, requires_grad=trainable)
        for _ in range(layers):
            x = layer(x)
        logits = x @ weight(vocab)
        if trainable:
            logits.sum().backward()
    cost = TransformerCost(
        hidden=hidden,
        layers=layers,
        ffn=ffn,
        heads=heads,
        kv_heads=kv_heads,
        vocab=vocab,
        gated=gated,
        trainable=trainable,
    )
    assert cost.phase_cost().at(length) == counter.get_total_flops()


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


coefficients = st.one_of(st.just(0.0), st.floats(1e-30, 1e30), st.integers(0, 2**70))


@given(st.lists(st.tuples(st.floats(1e-30, 1e30), coefficients, coefficients), min_size=1, max_size=4))
def test_no_coefficients_overflow_in_any_number_of_phases(phases: list[tuple[float, float, float]]) -> None:
    names = ["llm", "image", "audio", "video"][: len(phases)]
    model = CostModel(**{name: PhaseCost(*values) for name, values in zip(names, phases, strict=True)})
    # The kernel refuses what would overflow, so none of these does.
    sample = sum(int(model.sequence_costs(name, [2**20])[0]) for name in names)
    assert sample * 2**20 <= 2**62 + len(names) * 2**20  # A phase that is next to free still costs 1.


def test_rounding_up_at_the_limit_does_not_pass_it() -> None:
    # (2**22 - 0.5) * 2**40 + 2**36 is just below 2**62; with 2**22 for the quadratic it is just above.
    model = CostModel(llm=PhaseCost(2.0**16, 2.0**22 - 0.5))
    assert 2**40 < model.sequence_costs("llm", [2**20])[0] <= 2**42


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
    ],
    ids=["operations", "tokens", "seconds"],
)
def test_golden_values(model: CostModel, golden: str) -> None:
    """Costs are part of the plan: a change here changes the plans of running jobs."""
    lengths = np.unique(np.geomspace(1, 2**20, 400).astype(np.int64))
    digest = hashlib.blake2b(json.dumps(model.describe(), sort_keys=True).encode(), digest_size=16)
    for phase in model.phases:
        digest.update(model.sequence_costs(phase, lengths).astype("<i8").tobytes())
    assert digest.hexdigest() == golden


def test_numbers_of_any_kind_give_the_same_model() -> None:
    plain = CostModel(llm=PhaseCost(3.0, 0.5), image=TransformerCost(hidden=8, layers=2, ffn=16))
    small = TransformerCost(hidden=np.int64(8), layers=np.int32(2), ffn=16)  # type: ignore[arg-type]
    assert CostModel(llm=PhaseCost(np.int64(3), np.float32(0.5)), image=small) == plain  # type: ignore[arg-type]
    assert json.loads(json.dumps(plain.describe())) == plain.describe()


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
        (lambda: PhaseCost(1.0, 0.0, float("inf")), "PhaseCost.constant .* got inf"),
        (lambda: PhaseCost(True), "PhaseCost.linear .* got True"),
        (lambda: PhaseCost("1"), "PhaseCost.linear .* got '1'"),  # type: ignore[arg-type]
        (lambda: PhaseCost(None), "PhaseCost.linear .* got None"),  # type: ignore[arg-type]
        (lambda: PhaseCost(10**400), "PhaseCost.linear must be a finite number"),
        (lambda: PhaseCost(0.0), "needs a coefficient above 0"),
        (lambda: TransformerCost(hidden=0, layers=1, ffn=1), "TransformerCost.hidden .* got 0"),
        (lambda: TransformerCost(hidden=8, layers=True, ffn=1), "TransformerCost.layers .* got True"),
        (lambda: TransformerCost(hidden=8, layers=1.5, ffn=1), "TransformerCost.layers .* got 1.5"),  # type: ignore[arg-type]
        (lambda: TransformerCost(hidden=8, layers=1, ffn=1, vocab=0), "TransformerCost.vocab .* got 0"),
        (lambda: TransformerCost(hidden=8, layers=1, ffn=1, causal=1), "TransformerCost.causal .* got 1"),  # type: ignore[arg-type]
        (
            lambda: TransformerCost(hidden=8, layers=1, ffn=1, kv_heads=2),
            "kv_heads=2 must divide heads, got heads=None",
        ),
        (lambda: TransformerCost(hidden=10**200, layers=1, ffn=1).phase_cost(), "more than a float holds"),
        (lambda: TransformerCost(hidden=8, layers=1, ffn=1, heads=4, kv_heads=3), "kv_heads=3 must divide heads"),
        (lambda: CostModel(image=PhaseCost(1.0)), r"CostModel needs llm=..., .* got \['image'\]"),
        (lambda: CostModel(), r"CostModel needs llm=..., .* got \[\]"),
        (lambda: CostModel(llm=3), r"CostModel\(llm=...\) must be a PhaseCost or a TransformerCost, got 3"),
        (lambda: CostModel(llm=PhaseCost(1e308)), "too large"),
        (lambda: CostModel(llm=PhaseCost(1.0), image=PhaseCost(0.0, 1e300)), "too large"),
        (lambda: MODEL.sequence_costs("video", [1]), "no phase 'video'"),
        (lambda: MODEL.coefficients("video"), "no phase 'video', it has image, audio, llm"),
        (lambda: MODEL.sequence_costs("llm", [-1]), r"lengths\[0\] is -1"),
        (lambda: MODEL.sequence_costs("llm", [2**23]), "too long for its cost"),
    ],
)
def test_errors(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
