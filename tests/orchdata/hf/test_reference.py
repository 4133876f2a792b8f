"""The reference of the families: Hugging Face's own batches say the same, and templates render as published."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from hf_families.families import FAMILIES
from hf_families.reference import (
    batch_inputs_of,
    distance,
    float64,
    gradients_of,
    hf_rendered,
    loss_sum_of,
    reference,
)
from hf_families.samples import made_up

CHATS = [name for name, family in FAMILIES.items() if family.chat == "chat"]
EVERY_DAY = ("qwen2_vl", "internvl")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EVERY_DAY else pytest.mark.slow) for name in CHATS]
)
def test_a_padded_batch_of_hf_says_the_same(name: str) -> None:
    family = FAMILIES[name]
    processor, model = family.build()
    samples = made_up(family)
    expected = reference(family, model, processor, samples)
    inputs = batch_inputs_of(family, processor, samples)  # with features in float32, as a sample alone has them
    model.zero_grad()
    with float64():
        loss, tokens = loss_sum_of(model, inputs)
        loss.backward()
    assert tokens == expected.loss_tokens
    assert loss.item() == pytest.approx(expected.loss_sum, rel=1e-12)
    assert distance(gradients_of(model), expected.gradients) < 1e-10


@pytest.mark.parametrize("name", CHATS)
def test_marks_of_what_is_trained_change_no_text(name: str) -> None:
    family = FAMILIES[name]
    processor = family.build()[0]
    for sample in made_up(family):
        marked, published = (hf_rendered(family, processor, sample, generation=marks) for marks in (True, False))
        assert marked == published
