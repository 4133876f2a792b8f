"""What the sweep finds of some families: processors and configurations of defaults that it makes fit each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23")

import torchaudio_anyway
import transformers
from hf_sweep import outcomes
from hf_sweep.chats import template
from hf_sweep.configs import default_config, with_tokens
from hf_sweep.outcomes import outcome_of

import orchdata as od
from orchdata.hf.audio_processor import HFAudio
from orchdata.hf.tiny import tiny_model


@pytest.mark.filterwarnings("ignore")  # libraries about themselves, and what the probe says of padded models
@pytest.mark.parametrize("model_type", ["vipllava", pytest.param("qwen3_vl_moe", marks=pytest.mark.slow)])
def test_families_that_fit_are_exact(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcome_of(model_type, tmp_path)
    assert (found.word, found.layout) == ("exact", "padded")
    # The control: another processor's answer is seen.
    honest = outcomes._reference
    monkeypatch.setattr(outcomes, "_reference", lambda *given: 1.001 * honest(*given))
    assert outcome_of(model_type, tmp_path).word == "differs"


def test_features_of_layers_that_a_tiny_tower_lacks_are_of_layers_that_it_has() -> None:
    config = default_config("vipllava")
    assert min(config.vision_feature_layers) < -4
    tiny = tiny_model(config).config
    assert all(abs(layer) <= tiny.vision_config.num_hidden_layers for layer in tiny.vision_feature_layers)
    assert min(config.vision_feature_layers) < -4  # the given one is untouched


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


@pytest.mark.filterwarnings("ignore")
def test_padding_that_is_read_is_refused_also_of_a_sample_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchaudio_anyway.torchaudio()  # granite_speech's processor needs it, installed or not
    processor = outcomes._fitted("granite_speech")
    processor.chat_template = template(processor)
    recipe = od.hf.recipe(processor)
    assert (
        isinstance(recipe.audio, HFAudio) and not recipe.audio.pads_with_zeros
    )  # of a shorter clip: silence, whose features are no zeros
    other = od.hf.recipe(outcomes.processor_of("glmasr")).audio
    assert isinstance(other, HFAudio) and other.pads_with_zeros

    tokens = {name: modality.slot.token_id for name, modality in recipe.modalities.items()}
    inputs = od.hf.Inputs(with_tokens(default_config("granite_speech"), processor, tokens))
    samples = outcomes._samples(recipe, processor)
    loader, error = outcomes._loader(recipe, inputs, samples, tmp_path / "clips.tar", size=1)
    assert loader is None
    for part in ("granite_speech reads the padding of audio", "audio=None", "probe=False"):
        assert part in error
    # The control: a processor that pads with zeros, as batches do.
    monkeypatch.setattr(type(recipe.audio), "pads_with_zeros", True)
    assert outcomes._loader(recipe, inputs, samples, tmp_path / "clips.tar", size=1)[0] is not None
