"""Audio of Hugging Face processors: counts, text and values are those of the processors themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hf_audio import noise, processor_of, wav

import orchdata as od
from orchdata.hf.audio import WhisperAudio, audio_modality
from orchdata.loaders.modalities.modality import stored_dtype

LIMITS = od.Limits()
RULED = ("qwen2_audio", "qwen2_5_omni", "whisper")
MEASURED = ("qwen3_omni", "audioflamingo3", "granite_speech")
SHORT = (321, 480, 1_601, 8_000, 16_077, 40_000)
WINDOW = (479_599, 479_600, 479_601, 479_840, 479_999, 480_000)


def decoded(modality, data, header):
    """Size and arrays of a clip, as the batch's memory has them."""
    size = modality.count_header(header, LIMITS)
    out = {
        name: np.full((size.num_rows if spec.per == "row" else 1, *spec.row_shape), 7, stored_dtype(spec.dtype))
        for name, spec in modality.arrays().items()
    }
    modality.decode_into(data, size, out, LIMITS)
    return size, out


def theirs(processor, wave):
    """What the processor itself makes of a clip and of the text that marks it."""
    if type(processor).__name__ == "WhisperProcessor":
        return processor(audio=wave, sampling_rate=16_000, return_tensors="np", return_attention_mask=True), ""
    kwargs = processor._merge_kwargs(
        processor.valid_processor_kwargs, tokenizer_init_kwargs=processor.tokenizer.init_kwargs
    )["audio_kwargs"]
    kwargs |= {"return_tensors": "pt", "sampling_rate": 16_000}
    found, (text,) = processor._process_audio([wave], **kwargs)
    return {name: np.asarray(value) for name, value in found.items()}, text


def tensor(modality, out):
    """HF's own tensors of one clip from rows, as the module says."""
    axes = modality.tensor_axes
    return {
        name: rows if not axes.get(name) else np.moveaxis(rows, 0, axes[name] - 1)[None] for name, rows in out.items()
    }


def written(modality, size):
    """The text that `expand` stands for."""
    pieces = modality.expand(size) or ()
    return "".join(piece if isinstance(piece, str) else modality.slot.mark * piece for piece in pieces)


def check_equal(family, num_samples):
    """Counts, text and values, to the bit."""
    processor = processor_of(family)
    modality, wave = audio_modality(processor), noise(num_samples)
    size, out = decoded(modality, wav(wave), (num_samples, 16_000))
    found, text = theirs(processor, wave)
    assert written(modality, size) == text
    assert size.tokens == (text.count(modality.slot.mark) if modality.places else 0)
    ours, given = tensor(modality, out)["input_features"], np.asarray(found["input_features"])
    if family == "qwen2_5_omni":  # whose model drops what the mask leaves out, before anything else
        given = given[:, :, : int(np.asarray(found["feature_attention_mask"]).sum())]
    np.testing.assert_array_equal(ours, given)
    return size, modality.extras([size]), found


@pytest.mark.parametrize("family", RULED)
def test_a_rule_is_found_for_what_has_one(family):
    assert type(audio_modality(processor_of(family))) is WhisperAudio


@pytest.mark.parametrize("num_samples", SHORT)
@pytest.mark.parametrize("family", (*RULED, *MEASURED))
def test_counts_text_and_values_are_the_processors(family, num_samples):
    if (family, num_samples) == ("granite_speech", 321):
        pytest.skip("shorter than a window of its spectrum")
    check_equal(family, num_samples)
