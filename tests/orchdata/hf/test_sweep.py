"""What the sweep finds of some families: processors and configurations of defaults that it makes fit each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23")

import transformers
from hf_sweep import outcomes
from hf_sweep.outcomes import outcome_of

import orchdata as od


@pytest.mark.filterwarnings("ignore")  # libraries about themselves, and what the probe says of padded models
@pytest.mark.parametrize("model_type", ["glmasr", pytest.param("qwen3_vl_moe", marks=pytest.mark.slow)])
def test_families_that_fit_are_exact(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcome_of(model_type, tmp_path)
    assert (found.word, found.layout) == ("exact", "padded")
    # The control: another processor's answer is seen.
    honest = outcomes._reference
    monkeypatch.setattr(outcomes, "_reference", lambda *given: 1.001 * honest(*given))
    assert outcome_of(model_type, tmp_path).word == "differs"


def test_a_processor_that_tells_no_text_for_a_clip_is_refused_with_the_way_out() -> None:
    processor: Any = outcomes.processor_of("voxtral")
    with pytest.raises(ValueError, match=r"what stands in the text for a clip.*od\.hf\.recipe\(processor\.tokenizer\)"):
        od.hf.recipe(processor)
    recipe = od.hf.recipe(processor.tokenizer)  # as the message says
    assert recipe.audio is None


def test_arrays_that_no_forward_takes_are_not_blamed_on_the_recipe() -> None:
    processor = outcomes.processor_of("kyutai_speech_to_text")
    inputs = od.hf.Inputs(transformers.LlamaConfig(), padded=True, probe=False)
    with pytest.raises(ValueError, match="generate") as raised:
        inputs.check(od.hf.recipe(processor), ("audio",), od.Balance())
    assert "make it of the model's processor" not in str(raised.value)
