"""Audio becomes Whisper's log-mel frames, exactly as many as the index says."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from float_bounds import assert_log_mel_close, assert_standard_scores_close
from shard_factory import audio, write_shard
from torchaudio_anyway import torchaudio

import orchdata as od
from orchdata.loaders.errors import DecodeError
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities import audio_decode
from orchdata.loaders.modalities.audio import mel_bands
from orchdata.loaders.modalities.audio_decode import SincResampler, fit, plain_wav, read_mono, resample
from orchdata.loaders.modalities.modality import PartSize
from orchdata.loaders.recipe import AudioPreprocessor

pytestmark = pytest.mark.cpus

LIMITS = Limits()
PRE = AudioPreprocessor()


def tone(num_frames: int, rate: int, hertz: float = 440.0) -> np.ndarray:
    return (0.3 * np.sin(2 * np.pi * hertz * np.arange(num_frames) / rate)).astype(np.float32)


def encoded(wave: np.ndarray, rate: int, kind: str = "WAV", subtype: str | None = "FLOAT") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, wave, rate, format=kind, subtype=subtype)
    return file.getvalue()


def features(data: bytes, num_samples: int, pre: AudioPreprocessor = PRE, limits: Limits = LIMITS) -> np.ndarray:
    dtype = np.float32 if pre.dtype == "float32" else np.uint16
    out = np.full((pre.mel_frames(num_samples), pre.num_mels), 7, dtype)
    pre.decode_into(data, PartSize(0, 0, extent=(num_samples,)), {"features": out}, limits)
    return out


@pytest.mark.parametrize("channels", [2, 3, 8])
def test_channels_are_averaged(channels):
    waves = np.stack([tone(5000, 16_000, 200.0 * (1 + channel)) for channel in range(channels)], axis=1)
    mono, rate = read_mono(encoded(waves, 16_000), LIMITS)
    assert rate == 16_000
    np.testing.assert_allclose(mono, waves.mean(axis=1), atol=1e-6)


def riff(*chunks: tuple[bytes, bytes]) -> bytes:
    body = b"".join(
        name + len(content).to_bytes(4, "little") + content + b"\0" * (len(content) % 2) for name, content in chunks
    )
    return b"RIFF" + (4 + len(body)).to_bytes(4, "little") + b"WAVE" + body


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("between", [(), ((b"LIST", b"INFOISFT\x03\0\0\0abc"),)])
def test_samples_of_a_plain_wav_are_libsndfiles(channels, between):
    values = np.random.default_rng(0).integers(-(2**15), 2**15, (777, channels), np.int16)
    header = struct.pack("<HHIIHH", 1, channels, 16_000, 32_000 * channels, 2 * channels, 16)
    data = riff((b"fmt ", header), *between, (b"data", values.tobytes()))
    expected, _ = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    assert plain_wav(data) is not None
    np.testing.assert_array_equal(read_mono(data, LIMITS)[0], expected.mean(axis=1, dtype=np.float32))


@pytest.mark.parametrize("rate", [11_127, 44_099, 47_952, 191_999])
def test_odd_rates_decode_to_the_indexed_length(rate):
    num_samples = PRE.num_samples(rate, rate)
    assert num_samples == 16_000
    got = features(encoded(tone(rate, rate), rate), num_samples)
    reference = features(encoded(tone(16_000, 16_000), 16_000), 16_000)
    np.testing.assert_allclose(got[2:-6, :40], reference[2:-6, :40], atol=0.25)


@pytest.mark.parametrize(
    ("decoded", "indexed"),
    [(16_000, 16_000), (16_000, 15_300), (15_300, 16_000), (100 * 16_000, 99.1 * 16_000), (100, 800)],
)
def test_a_small_difference_to_the_index_is_cut_or_padded(decoded, indexed):
    wave = np.ones(int(decoded), np.float32)
    fitted = fit(wave, int(indexed), 16_000)
    assert len(fitted) == int(indexed)
    assert fitted.sum() == min(decoded, int(indexed))


@pytest.mark.parametrize(("decoded", "indexed"), [(16_000, 15_100), (15_100, 16_000), (160_000, 158_000)])
def test_a_larger_difference_is_an_error_that_names_both(decoded, indexed):
    with pytest.raises(DecodeError, match=rf"decoded to {decoded / 16_000:.3f} s .* says {indexed / 16_000:.3f} s"):
        fit(np.ones(decoded, np.float32), indexed, 16_000)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_values_that_are_no_numbers_are_errors(value):
    wave = tone(4000, 16_000)
    wave[3999] = value
    with pytest.raises(DecodeError, match="NaN or infinite"):
        features(encoded(wave, 16_000), 4000)


@pytest.mark.parametrize("total", [0, 16_001, 1 << 35])
def test_a_flac_whose_total_is_unknown_or_wrong_decodes_to_what_it_holds(total):
    data = bytearray(encoded(tone(16_000, 16_000), 16_000, "FLAC", "PCM_16"))
    data[21:26] = (int.from_bytes(data[21:26]) >> 36 << 36 | total).to_bytes(5)
    wave, rate = read_mono(bytes(data), LIMITS)
    assert (len(wave), rate) == (16_000, 16_000)
    assert features(bytes(data), 16_000).shape == (100, 128)


def test_threads_share_kernels_and_get_equal_results():
    clips = [encoded(tone(rate, rate), rate) for rate in (8000, 22_050, 44_100)]
    alone = [features(clip, 16_000) for clip in clips]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda clip: features(clip, 16_000), clips * 4))
    for got, expected in zip(together, alone * 4, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_the_limit_on_seconds_holds_while_decoding():
    with pytest.raises(DecodeError, match=r"above Limits\.audio_seconds=1"):
        features(encoded(tone(200_000, 16_000), 16_000), 200_000, limits=Limits(audio_seconds=1))


# The bounds of float_bounds.py find errors: what is 10 times as far away, and faults that have happened.


# Windows, long clips and waveforms: what is counted from a header is what decoding yields.


SECONDS = 2
WINDOW = SECONDS * 16_000


def recipe(**given):
    return od.AudioPreprocessor(**{"num_mels": 40, "window_seconds": SECONDS, **given})


def noise(num_samples):
    return (np.random.default_rng(num_samples).normal(size=num_samples) * 0.1).astype(np.float32)


def decoded(pre, wave):
    """Size and features of a clip at 16 kHz."""
    file = io.BytesIO()
    soundfile.write(file, wave, 16_000, format="WAV", subtype="FLOAT")
    size = pre.count_header((len(wave), 16_000), LIMITS)
    out = np.full((size.rows, *pre.row_shape), 7, np.float32)
    pre.decode_into(file.getvalue(), size, {"features": out}, LIMITS)
    return size, out


def whole_window(wave, num_samples):
    """The twin: Whisper's log-mel spectrogram of a clip followed by zeros, computed in full."""
    padded = torch.zeros(num_samples)
    padded[: len(wave)] = torch.from_numpy(wave)
    stft = torch.stft(padded, 400, 160, window=torch.hann_window(400), return_complex=True)
    power = (stft[..., :-1].abs() ** 2).contiguous()
    log = torch.clamp(torch.from_numpy(mel_bands(40, 400, 16_000)).float().T @ power, min=1e-10).log10()
    return ((torch.maximum(log, log.max() - 8.0) + 4.0) / 4.0).T.numpy()


@pytest.mark.parametrize("num_samples", [321, 5_000, 16_077, WINDOW - 401, WINDOW - 400, WINDOW - 1, WINDOW])
def test_a_window_is_whispers_with_silence_after_the_clip(num_samples):
    wave = noise(num_samples)
    size, out = decoded(recipe(fill="window"), wave)
    assert_log_mel_close(out, whole_window(wave, WINDOW)[None])
    own = -(-num_samples // 160)
    assert (size.positions, size.tokens, size.rows, size.extent) == (100, -(-own // 2) // 2, 1, (num_samples, own))
    _, alone = decoded(recipe(fill="none"), wave)
    np.testing.assert_array_equal(alone, out[0, :own])


@pytest.mark.parametrize("num_samples", [1, 100, 16_000, 16_077, 40_000])
def test_any_length_is_whispers_with_silence_after_the_clip(num_samples):
    wave = noise(num_samples)
    size, out = decoded(recipe(window_seconds=None), wave)
    assert_log_mel_close(out, whole_window(wave, 60_000)[: size.rows])


def test_the_highest_value_counts_where_only_a_frame_after_the_last_token_has_it():
    wave = np.zeros(640, np.float32)  # a token of 4 frames: the 5th, from 440 to 840, sees the end best
    wave[630:] = 0.5
    _, out = decoded(recipe(window_seconds=None), wave)
    assert_log_mel_close(out, whole_window(wave, 60_000)[:4])
    with pytest.raises(AssertionError, match="times the bound"):  # the twin of the clip alone
        assert_log_mel_close(out, whole_window(wave, 640))


@pytest.mark.parametrize("fill", ["token", "none", "window"])
@pytest.mark.parametrize("num_samples", [WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 400, 2 * WINDOW + 9_000])
def test_long_clips_are_cut_or_split_into_windows_of_their_own(fill, num_samples):
    wave = noise(num_samples)
    cut_size, cut = decoded(recipe(fill=fill, long_clips="cut"), wave)
    pre = recipe(fill=fill, long_clips="split")
    size, split = decoded(pre, wave)
    pieces = [wave[start : start + WINDOW] for start in range(0, num_samples, WINDOW)]
    if fill != "token" and len(pieces[-1]) < 321:
        pieces.pop()
    alone = [decoded(recipe(fill=fill), piece) for piece in pieces]
    np.testing.assert_array_equal(split, np.concatenate([out for _, out in alone]))
    np.testing.assert_array_equal(cut, alone[0][1])
    for name in ("positions", "tokens", "rows"):
        assert getattr(size, name) == sum(getattr(each, name) for each, _ in alone)
        assert getattr(cut_size, name) == getattr(alone[0][0], name)
    assert pre.extras([size])["window_lengths"].tolist() == [each.extent[1] for each, _ in alone]


def wav2vec_positions(num_samples):
    """Of wav2vec 2.0's convolutions, layer by layer."""
    for kernel, stride in zip((10, 3, 3, 3, 3, 2, 2), (5, 2, 2, 2, 2, 2, 2), strict=True):
        num_samples = (num_samples - kernel) // stride + 1
    return num_samples


@pytest.mark.parametrize("fill", ["token", "none", "window"])
def test_a_waveform_is_its_samples(fill):
    shape = {"hop_length": 320, "n_fft": 400, "conv_stride": 1, "tokens_per_second": 50}
    pre = recipe(features="waveform", fill=fill, **shape)
    for num_samples in (400, 719, 720, 16_000, 16_077):
        wave = noise(num_samples)
        size, out = decoded(pre, wave)
        np.testing.assert_array_equal(out.ravel()[:num_samples], wave)
        assert not out.ravel()[num_samples:].any()
        assert size.positions == wav2vec_positions(out.shape[-1])
        if fill == "token":
            assert size.tokens == size.positions == -(-num_samples // 320)
        else:
            assert size.tokens == wav2vec_positions(num_samples)
            assert out.shape == ((1, WINDOW) if fill == "window" else (num_samples,))


def test_a_normalized_waveform_has_mean_0_and_variance_1():
    wave = noise(9_000) + 0.25
    _, out = decoded(recipe(features="normalized_waveform", fill="window"), wave)
    expected = (wave - wave.mean()) / np.sqrt(wave.var() + 1e-7)
    assert_standard_scores_close(out[0, :9_000], expected)
    assert not out[0, 9_000:].any()


def test_costs_count_the_padded_window_and_tokens_the_clip(tmp_path):
    samples = [{"__key__": f"{n}", "wav": audio(0.5 + n / 2), "txt": b"word"} for n in range(2)]
    samples.append({"__key__": "2", "wav": audio(3.0), "txt": b"word"})
    whole = od.Recipe(image=None, audio=recipe(fill="window", long_clips="split"))
    dataset = od.ShardDataset(write_shard(tmp_path / "clips.tar", samples), recipe=whole)
    index = dataset.index()
    assert index.part_positions.tolist() == [100, 100, 200]
    assert index.part_tokens.tolist() == [12, 25, 75]  # 25 a second; half of the 13th is not there
    (batch,) = od.DataLoader(dataset, batch_size=3, num_threads=0)
    assert batch.audio.features.shape == (4, 200, 40)
    assert batch.audio.window_lengths.tolist() == [50, 100, 200, 100]
    assert batch.audio.cu_seqlens.tolist() == [0, 1, 2, 4]
    (samples,) = od.DataLoader(dataset, batch_size=3, num_threads=0, collate_fn=list)
    assert [sample.parts[0].extras["window_lengths"] for sample in samples] == [50, 100, (200, 100)]


# Resampling: the same values whether torchaudio does it or not, in any thread.


RATES = (8_000, 11_025, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 88_200, 96_000)
NEW_RATES = (8_000, 16_000, 24_000, 44_100)
PAIRS = [(rate, new_rate) for rate in RATES for new_rate in NEW_RATES if rate != new_rate]


def noise_of(num_frames: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=num_frames).astype(np.float32))


def both(rate: int, new_rate: int) -> tuple[SincResampler, Any]:
    common = gcd(rate, new_rate)
    orig, new = rate // common, new_rate // common
    return SincResampler(orig, new), torchaudio().transforms.Resample(orig, new)


@pytest.mark.parametrize(("rate", "new_rate"), PAIRS)
def test_ours_equals_torchaudios_to_the_bit(rate: int, new_rate: int) -> None:
    ours, theirs = both(rate, new_rate)
    torch.testing.assert_close(ours._kernels, theirs.kernel, rtol=0, atol=0)
    for seed, num_frames in enumerate((1, 7, rate // 100 + 1, rate // 3, rate)):
        wave = noise_of(num_frames, seed)
        torch.testing.assert_close(ours(wave), theirs(wave), rtol=0, atol=0)


@pytest.mark.parametrize("change", ["_ROLLOFF", "_CROSSINGS"])
def test_another_filter_would_be_seen(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    monkeypatch.setattr(audio_decode, change, {"_ROLLOFF": 0.98, "_CROSSINGS": 7}[change])
    ours, theirs = both(48_000, 16_000)
    resampled, expected = ours(noise_of(4_800)), theirs(noise_of(4_800))
    assert resampled.shape == expected.shape and not torch.equal(resampled, expected)


def test_lengths_are_torchaudios_where_float32_cannot_tell_them() -> None:
    ours, theirs = both(8_000, 24_000)
    num_frames = 2_000_003
    assert len(ours(noise_of(1).expand(num_frames))) == theirs(noise_of(1).expand(num_frames)).shape[-1]


def test_torchaudio_resamples_where_it_imports_and_we_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    wave = noise_of(44_100).numpy()
    resampled = {}
    for name, transforms in (("theirs", torchaudio().transforms), ("ours", None)):
        audio_decode._resampler.cache_clear()
        monkeypatch.setattr(audio_decode, "torchaudio_transforms", lambda transforms=transforms: transforms)
        resampled[name] = resample(wave, 44_100, 16_000)
        used = type(audio_decode._resampler(441, 160, True)).__name__
        assert used == {"theirs": "Resample", "ours": "SincResampler"}[name]
    audio_decode._resampler.cache_clear()
    np.testing.assert_array_equal(resampled["ours"], resampled["theirs"])


@pytest.mark.slow
def test_without_torchaudio_clips_are_resampled_to_the_same_bits_and_nothing_requires_it() -> None:
    code = """
import hashlib, io, sys
if sys.argv[1:] == ["blocked"]: sys.modules["torchaudio"] = None
import numpy as np, soundfile
import orchdata as od
from orchdata.loaders.modalities import audio_decode
digest = hashlib.sha256()
for rate in (8_000, 22_050, 44_100, 48_000):
    clip = io.BytesIO()
    wave = np.random.default_rng(rate).uniform(-1, 1, rate)
    soundfile.write(clip, wave, rate, format="FLAC")
    samples, rate = soundfile.read(io.BytesIO(clip.getvalue()), dtype="float32")
    digest.update(audio_decode.resample(samples, rate, 16_000).tobytes())
print(type(audio_decode._resampler(441, 160, True)).__name__, digest.hexdigest())
"""
    torchaudio()
    said = [
        subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True, check=True).stdout.split()
        for given in (["blocked"], [])
    ]
    assert said[0][0] == "SincResampler"
    assert said[0][1] == said[1][1]
    declared = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    extras = {name for name, wanted in declared["optional-dependencies"].items() if "torchaudio>=2.6" in wanted}
    assert extras == {"audio", "dev"} and not any("torchaudio" in each for each in declared["dependencies"])
