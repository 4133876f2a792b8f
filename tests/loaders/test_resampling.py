"""Resampling: the same values whether torchaudio does it or not, in any thread."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchaudio_anyway import torchaudio

from orchdata.loaders.modalities import audio_decode
from orchdata.loaders.modalities.audio_decode import SincResampler, resample

RATES = (8_000, 11_025, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 88_200, 96_000)
NEW_RATES = (8_000, 16_000, 24_000, 44_100)
PAIRS = [(rate, new_rate) for rate in RATES for new_rate in NEW_RATES if rate != new_rate]


def noise(num_frames: int, seed: int = 0) -> torch.Tensor:
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
        wave = noise(num_frames, seed)
        torch.testing.assert_close(ours(wave), theirs(wave), rtol=0, atol=0)


@pytest.mark.parametrize("change", ["_ROLLOFF", "_CROSSINGS"])
def test_another_filter_would_be_seen(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    monkeypatch.setattr(audio_decode, change, {"_ROLLOFF": 0.98, "_CROSSINGS": 7}[change])
    ours, theirs = both(48_000, 16_000)
    resampled, expected = ours(noise(4_800)), theirs(noise(4_800))
    assert resampled.shape == expected.shape and not torch.equal(resampled, expected)


def test_lengths_are_torchaudios_where_float32_cannot_tell_them() -> None:
    ours, theirs = both(8_000, 24_000)
    num_frames = 2_000_003
    assert len(ours(noise(1).expand(num_frames))) == theirs(noise(1).expand(num_frames)).shape[-1]


def test_torchaudio_resamples_where_it_imports_and_we_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    wave = noise(44_100).numpy()
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
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = {name for name, wanted in declared["optional-dependencies"].items() if "torchaudio>=2.6" in wanted}
    assert extras == {"audio", "dev"} and not any("torchaudio" in each for each in declared["dependencies"])
