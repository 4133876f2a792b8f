"""Audio becomes Whisper's log-mel frames, exactly as many as the index says."""

from __future__ import annotations

import io
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import soundfile
from decided_by_integers import differing

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.audio_decode import fit, plain_wav, read_mono
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


def test_a_digest_that_differs_under_one_instruction_set_is_named() -> None:
    same = {"plans": "a", "orders": "b"}
    assert differing({"native": same, "avx2": dict(same)}) == []
    assert differing({"native": same, "avx2": same | {"plans": "c"}}) == ["plans"]
    assert differing({"native": same, "avx2": {"plans": "a"}}) == ["orders"]
