"""Costs from configs against the operations that torch counts in the models themselves, as transformers builds them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23")

from published_models import PUBLISHED_MODELS
from real_models import RealModel

from orchdata.balancers import TransformerCost

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
