"""Resampling: the values of torchaudio, without it."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchaudio_anyway import torchaudio

from orchdata.loaders.modalities import audio_decode
from orchdata.loaders.modalities.audio_decode import resample

RATES = (8_000, 11_025, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 88_200, 96_000)
NEW_RATES = (8_000, 16_000, 24_000, 44_100)
PAIRS = [(rate, new_rate) for rate in RATES for new_rate in NEW_RATES if rate != new_rate]


def noise(num_frames: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=num_frames).astype(np.float32))


def both(rate: int, new_rate: int) -> tuple[Callable[[torch.Tensor], torch.Tensor], Any]:
    def ours(wave: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(resample(wave.numpy(), rate, new_rate))

    return ours, torchaudio().transforms.Resample(rate, new_rate)


@pytest.mark.parametrize(("rate", "new_rate"), PAIRS)
def test_ours_equals_torchaudios_to_the_bit(rate: int, new_rate: int) -> None:
    ours, theirs = both(rate, new_rate)
    for seed, num_frames in enumerate((1, 7, rate // 100 + 1, rate // 3, rate)):
        wave = noise(num_frames, seed)
        torch.testing.assert_close(ours(wave), theirs(wave), rtol=0, atol=0)


@pytest.mark.parametrize("change", ["_ROLLOFF", "_CROSSINGS"])
def test_another_filter_would_be_seen(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    monkeypatch.setattr(audio_decode, change, {"_ROLLOFF": 0.98, "_CROSSINGS": 7}[change])
    audio_decode._kernels.cache_clear()
    ours, theirs = both(48_000, 16_000)
    resampled, expected = ours(noise(4_800)), theirs(noise(4_800))
    audio_decode._kernels.cache_clear()
    assert resampled.shape == expected.shape and not torch.equal(resampled, expected)


def test_lengths_are_torchaudios_where_float32_cannot_tell_them() -> None:
    ours, theirs = both(8_000, 24_000)
    num_frames = 2_000_003
    assert len(ours(noise(1).expand(num_frames))) == theirs(noise(1).expand(num_frames)).shape[-1]


def test_nothing_requires_torchaudio() -> None:
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = {name for name, wanted in declared["optional-dependencies"].items() if "torchaudio>=2.6" in wanted}
    assert extras == {"dev"} and not any("torchaudio" in each for each in declared["dependencies"])
