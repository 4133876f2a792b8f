"""Audio of Hugging Face processors: counts, text and values are those of the processors themselves."""

from __future__ import annotations

import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import transformers
from float_bounds import assert_log_mel_close
from shard_factory import write_shard
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen2AudioProcessor, VoxtralProcessor, WhisperFeatureExtractor
from transformers.audio_utils import mel_filter_bank

import orchdata as od
from orchdata.hf.audio import HFAudio, WhisperAudio, audio_modality, rebuilt
from orchdata.loaders.errors import DecodeError
from orchdata.loaders.modalities.audio import mel_bands
from orchdata.loaders.modalities.audio_decode import decode_wave
from orchdata.loaders.modalities.modality import stored_dtype

NAMES = {
    "audio_token": "<|AUDIO|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
}


def byte_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>", extra_special_tokens=special
    )


def without_video(kind: Any, extractor: Any, **attributes: Any) -> Any:
    """A processor whose video processor would need torchvision, made without its constructor."""
    processor = kind.__new__(kind)
    tokenizer = byte_tokenizer(**NAMES)
    held = {"feature_extractor": extractor, "tokenizer": tokenizer, "chat_template": None, **attributes}
    held |= {"audio_token": tokenizer.audio_token, "audio_token_id": tokenizer.audio_token_id}
    for name, value in held.items():
        setattr(processor, name, value)
    return processor


_AUDIO = {"feature_size": 128}
_KINDS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "qwen2_audio": ("Qwen2AudioProcessor", _AUDIO, NAMES),
    "qwen2_5_omni": ("Qwen2_5OmniProcessor", _AUDIO, NAMES),  # published: chunk_length=300, so much for each clip
    "whisper": ("WhisperProcessor", {}, {}),
    "qwen3_omni": ("Qwen3OmniMoeProcessor", _AUDIO, NAMES),
    "audioflamingo3": ("AudioFlamingo3Processor", _AUDIO, {"audio_token": "<sound>"}),
}


@cache
def processor_of(family: str, **extractor: Any) -> Any:
    """`extractor` overrides parameters of its feature extractor."""
    name, settings, words = _KINDS[family]
    kind, mel = getattr(transformers, name), WhisperFeatureExtractor(**{**settings, **extractor})
    if family.endswith("omni"):
        return without_video(kind, mel, **({"n_window": 50} if family == "qwen3_omni" else {}))
    return kind(mel, byte_tokenizer(**words))


def noise(num_samples: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng((seed, num_samples))
    loudness = np.interp(np.arange(num_samples), np.linspace(0, num_samples, 9), rng.random(9))
    return (rng.normal(scale=0.1, size=num_samples) * loudness).astype(np.float32)


def wav(wave: np.ndarray, rate: int = 16_000) -> bytes:
    """In floats, so that what is read are the same samples."""
    file = io.BytesIO()
    soundfile.write(file, wave, rate, format="WAV", subtype="FLOAT")
    return file.getvalue()


pytestmark = pytest.mark.cpus

LIMITS = od.Limits()
BRIEF = {"chunk_length": 4}  # a window of 4 s, where 30 s would show no more
RULED = ("qwen2_audio", "qwen2_5_omni", "whisper")


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """What is computed is small: threads would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


def check_equal(family, num_samples, **extractor):
    """Counts and text are equal; values within the bound of float_bounds.py, equal where the processor makes them."""
    processor = processor_of(family, **extractor)
    modality, wave = audio_modality(processor), noise(num_samples)
    size, out = decoded(modality, wav(wave), (num_samples, 16_000))
    found, text = theirs(processor, wave)
    assert written(modality, size) == text
    assert size.tokens == (text.count(modality.slot.mark) if modality.places else 0)
    ours, given = tensor(modality, out)["input_features"], np.asarray(found["input_features"])
    if family == "qwen2_5_omni":  # whose model drops what the mask leaves out, before anything else
        given = given[:, :, : int(np.asarray(found["feature_attention_mask"]).sum())]
    if type(modality) is WhisperAudio:
        assert_log_mel_close(np.asarray(ours), given, band_axis=1)
    else:
        np.testing.assert_array_equal(ours, given)
    return size, modality.extras([size]), found


@pytest.mark.parametrize("family", RULED)
def test_a_rule_is_found_for_what_has_one(family):
    assert type(audio_modality(processor_of(family, **BRIEF))) is WhisperAudio


@pytest.mark.parametrize("num_samples", [321, 16_077, 63_601, 64_000])
@pytest.mark.parametrize("family", RULED)
def test_counts_text_and_values_are_the_processors(family, num_samples):
    check_equal(family, num_samples, **BRIEF)


@pytest.mark.parametrize(("family", "num_samples"), [("qwen3_omni", 16_077), ("audioflamingo3", 84_000)])
def test_counts_text_and_values_of_any_other_processor_are_its_own(family, num_samples):
    assert type(audio_modality(processor_of(family, **BRIEF))) is HFAudio
    size, extras, found = check_equal(family, num_samples, **BRIEF)
    assert size.rows == (2 if family == "audioflamingo3" else 100)  # windows, frames
    masks = {name: np.asarray(found[name]) for name in extras}
    assert masks and all(np.array_equal(masks[name].reshape(extras[name].shape), extras[name]) for name in masks)


@pytest.mark.parametrize("family", ["qwen2_audio", "qwen2_5_omni"])
def test_tokens_of_hundreds_of_lengths_are_the_processors(family, monkeypatch):
    processor = processor_of(family, **BRIEF)
    modality = audio_modality(processor)
    longest = modality.window_samples
    blank = np.zeros((1, 1, 1), np.float32)
    # Of the class: some pytests would leave a method among the attributes of the instance, which tests share.
    monkeypatch.setattr(type(processor.feature_extractor), "_torch_extract_fbank_features", lambda *_: blank)
    lengths = np.random.default_rng(0).integers(1, longest + 1, 300).tolist()
    for num_samples in [*range(1, 1_400, 53), longest - 1, longest, *lengths]:
        _, text = theirs(processor, np.zeros(num_samples, np.float32))
        tokens = text.count(processor.audio_token)
        if tokens:
            size = modality.count_header((num_samples, 16_000), LIMITS)
            assert (size.tokens, written(modality, size)) == (tokens, text), num_samples
        else:
            with pytest.raises(DecodeError, match="too short for a token"):
                modality.count_header((num_samples, 16_000), LIMITS)


def test_real_speech_is_the_processors(fixtures_dir):
    processor = processor_of("qwen2_audio", **BRIEF)
    modality = audio_modality(processor, long_clips="cut")
    for path in sorted((fixtures_dir / "speech").rglob("*.wav"))[:6]:
        data = path.read_bytes()
        header = modality.probe(data, LIMITS)
        size, out = decoded(modality, data, header)
        found, text = theirs(processor, decode_wave(data, 16_000, size.extent[0], LIMITS))
        assert written(modality, size) == text, path
        assert_log_mel_close(out["input_features"], found["input_features"], band_axis=1)


def test_a_long_clip_is_an_error_that_names_the_ways_out():
    modality = audio_modality(processor_of("qwen2_audio"))
    modality.count_header((480_000, 16_000), LIMITS)
    with pytest.raises(DecodeError, match=r'30.000 s, above window_seconds=30: long_clips="split" .* "cut"'):
        modality.count_header((480_001, 16_000), LIMITS)


def test_a_clip_that_is_cut_is_what_the_processor_makes_of_it():
    processor, wave = processor_of("qwen2_audio", **BRIEF), noise(84_000)
    modality = audio_modality(processor, long_clips="cut")
    size, out = decoded(modality, wav(wave), (84_000, 16_000))
    found, text = theirs(processor, wave)
    assert (size.tokens, written(modality, size)) == (100, text)
    assert_log_mel_close(out["input_features"], found["input_features"], band_axis=1)


def test_a_clip_that_is_split_is_what_the_processor_makes_of_its_windows():
    processor, wave = processor_of("qwen2_audio", **BRIEF), noise(84_000)
    modality = audio_modality(processor, long_clips="split")
    size, out = decoded(modality, wav(wave), (84_000, 16_000))
    pairs = [theirs(processor, piece) for piece in (wave[:64_000], wave[64_000:])]
    assert modality.expand(size) == (100, 31)  # 20,000 samples: 125 frames, 63 positions
    assert (size.positions, size.tokens, size.rows) == (400, 131, 2)
    assert written(modality, size) == "".join(text for _, text in pairs)
    expected = {name: np.concatenate([found[name] for found, _ in pairs]) for name in pairs[0][0]}
    assert_log_mel_close(out["input_features"], expected["input_features"], band_axis=1)
    for name, values in modality.extras([size]).items():
        np.testing.assert_array_equal(values, expected[name])


def test_whispers_audio_has_no_place_in_the_text():
    modality = audio_modality(processor_of("whisper"), long_clips="cut")
    size = modality.count_header((1, 16_000), LIMITS)
    assert (size.positions, size.tokens, modality.expand(size), modality.extras([size])) == (1_500, 0, None, {})
    with pytest.raises(DecodeError, match=r'window_seconds=4: long_clips="cut" keeps the first 4 s'):
        audio_modality(processor_of("whisper", **BRIEF)).count_header((64_001, 16_000), LIMITS)
    with pytest.raises(ValueError, match='one window a text: long_clips="error" or "cut"'):
        audio_modality(processor_of("whisper"), long_clips="split")


def test_audio_that_another_processor_would_drop_is_an_error_unless_allowed():
    processor = processor_of("whisper", return_attention_mask=True, padding_value=0.5)
    modality = audio_modality(processor)
    assert type(modality) is HFAudio  # its silence is not zeros, which the rule's is
    assert modality.count_header((480_000, 16_000), LIMITS).positions == 3_000
    with pytest.raises(DecodeError, match=r'drops the end of a clip of 30.100 s: long_clips="cut"'):
        modality.count_header((481_600, 16_000), LIMITS)
    assert audio_modality(processor, long_clips="cut").count_header((481_600, 16_000), LIMITS).rows == 1
    with pytest.raises(ValueError, match="decides by itself what becomes of long clips"):
        audio_modality(processor_of("qwen3_omni"), long_clips="split")


def test_a_processor_that_writes_otherwise_than_the_rule_is_run_itself(monkeypatch):
    kind = type(processor_of("qwen2_audio"))
    write = kind.replace_audio_token
    monkeypatch.setattr(kind, "replace_audio_token", lambda *given, **named: f"[{write(*given, **named)}]")
    rebuilt.cache_clear()
    modality = audio_modality(processor_of("qwen2_audio", **BRIEF))
    assert type(modality) is HFAudio
    assert modality.expand(modality.count_header((16_000, 16_000), LIMITS)) == ("[", 25, "]")


def test_what_no_processor_tells_is_refused():
    extractor = processor_of("whisper").feature_extractor
    silent = without_video(VoxtralProcessor, extractor)
    with pytest.raises(ValueError, match="VoxtralProcessor does not tell what it makes of a clip alone"):
        audio_modality(silent)
    with pytest.raises(TypeError, match="has no feature extractor for audio"):
        audio_modality(byte_tokenizer())
    split = Qwen2AudioProcessor(extractor, byte_tokenizer())
    with pytest.raises(ValueError, match=r"'<\|AUDIO\|>' must be one added token"):
        audio_modality(split)
    louder = WhisperFeatureExtractor(**BRIEF)
    louder.mel_filters = 2 * louder.mel_filters  # which its JSON leaves out
    with pytest.raises(ValueError, match="built from its JSON it gives other values"):
        audio_modality(without_video(Qwen2AudioProcessor, louder))


@pytest.mark.parametrize("family", ["qwen2_audio", "qwen3_omni"])
def test_threads_and_pickled_copies_give_equal_values(family):
    modality, wave = audio_modality(processor_of(family, **BRIEF)), noise(40_000)
    expected = decoded(modality, wav(wave), (40_000, 16_000))[1]["input_features"]
    copy = pickle.loads(pickle.dumps(modality))
    assert copy == modality
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: decoded(copy, wav(wave), (40_000, 16_000))[1]["input_features"], range(4)))
    assert all(np.array_equal(each, expected) for each in found)


def test_the_fingerprint_follows_the_feature_extractor():
    recipes = [
        od.Recipe(audio=audio_modality(processor_of("qwen2_audio", **given)), image=None)
        for given in (BRIEF, {**BRIEF, "feature_size": 80}, {**BRIEF, "padding_value": 0.5}, {**BRIEF, "n_fft": 512})
    ]
    assert len({recipe.fingerprint() for recipe in recipes}) == len(recipes)


@pytest.mark.parametrize("num_mels", [40, 80, 128])
def test_mel_bands_are_transformers(num_mels):
    expected = mel_filter_bank(201, num_mels, 0.0, 8_000.0, 16_000, norm="slaney", mel_scale="slaney")
    np.testing.assert_allclose(mel_bands(num_mels, 400, 16_000), expected, rtol=1e-12, atol=1e-15)  # of float64


@pytest.mark.parametrize("family", ["qwen2_audio", "qwen2_5_omni", "whisper", "qwen3_omni"])
def test_a_loader_delivers_them(family, tmp_path):
    modality = audio_modality(processor_of(family, **BRIEF))
    clips = [wav(noise(4_000 + 3_000 * number)) for number in range(4)]
    samples = [
        {"__key__": f"{number}", "wav": clip, "txt": (modality.slot.mark + "word").encode()}
        for number, clip in enumerate(clips)
    ]
    recipe = od.Recipe(audio=modality, image=None)
    dataset = od.ShardDataset(write_shard(tmp_path / "clips.tar", samples), recipe=recipe)
    cost = od.CostModel(audio=od.PhaseCost(linear=1.0), llm=od.PhaseCost(linear=1.0))
    (batch,) = od.DataLoader(dataset, batch_size=4, cost=cost, num_threads=0)
    held, start = batch.media["audio"], 0
    for number, clip in enumerate(clips):
        size, out = decoded(modality, clip, (4_000 + 3_000 * number, 16_000))
        np.testing.assert_array_equal(held.input_features[start : start + size.rows], out["input_features"])
        start += size.rows
    assert len(held.input_features) == start
    assert int((batch.llm.input_ids == modality.slot.token_id).sum()) == held.num_tokens * modality.places
    words = 4 * len("word")  # as many bytes; the first of a sample is never a label
    assert batch.loss_tokens == (words if modality.places else words - 4)
    if not modality.places:
        with pytest.raises(ValueError, match="audio has none there .places=False."):
            od.DataLoader(dataset, batch_size=4, cost=cost, balance=od.Balance(assignment="per_phase"))
