"""Costs from configs against the operations that torch counts in the models themselves, as transformers builds them."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", minversion="5.23")

from real_models import REAL_MODELS, RealModel

from orchdata.balancers import TransformerCost

WITHIN = 0.02
# One of each kind: heads of their own width, experts, a sliding window, a merger and windows, a conv stem.
DAILY = ("Qwen3-4B", "Qwen3-30B-A3B", "Gemma-3-1B", "Qwen2.5-VL tower", "CLIP-L/336", "Whisper-large-v3")
FORWARD = {"trainable": False, "connector_trainable": False}


def errors(model: RealModel, lengths: tuple[object, ...], **wrong: object) -> dict[int, float]:
    """Positions -> (cost - counted) / counted, forward."""
    found = {}
    for length in lengths:
        positions, flops = model.count(model.make_config(), length)
        cost = TransformerCost.from_config(model.make_config(), model.phase, **FORWARD, **wrong).phase_cost()
        found[positions] = cost.at(positions) / flops - 1
    return found


@pytest.mark.parametrize("name", DAILY)
def test_shallow_models_cost_what_torch_counts(name: str) -> None:
    model = REAL_MODELS[name].shallow(6)
    lengths = (model.lengths[1], model.lengths[3])
    assert all(abs(error) < WITHIN for error in errors(model, lengths).values())
    assert any(abs(error) > WITHIN for error in errors(model, lengths, **model.wrong).values())


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL_MODELS)
def test_models_cost_what_torch_counts(name: str) -> None:
    """Run with -s for the table."""
    model = REAL_MODELS[name]
    found = errors(model, model.lengths)
    print(
        f"\n| {name} | "
        + " | ".join(f"{positions:,}: {100 * error:+.2f} %" for positions, error in found.items())
        + " |"
    )
    assert all(abs(error) < WITHIN for error in found.values())
    assert any(abs(error) > WITHIN for error in errors(model, model.lengths, **model.wrong).values())
