"""The bounds of float_bounds.py find errors: what is 10 times as far away, and faults that have happened."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from decided_by_integers import differing
from float_bounds import (
    assert_log_mel_close,
)

from orchdata.loaders.modalities.audio import mel_bands

pytestmark = pytest.mark.cpus


def log_mel(dtype: torch.dtype, window: torch.Tensor | None = None) -> np.ndarray:
    """Whisper's features (num_frames, num_mels) of sound that falls by five decades, computed in `dtype`."""
    wave = np.random.default_rng(0).normal(size=16_000) * np.logspace(0, -2.5, 16_000)
    window = torch.hann_window(400, dtype=dtype) if window is None else window.to(dtype)
    spectrum = torch.stft(
        torch.from_numpy(wave.astype(np.float32)).to(dtype), 400, 160, window=window, return_complex=True
    )
    power = torch.from_numpy(mel_bands(40, 400, 16_000)).to(dtype).T @ spectrum.abs() ** 2
    log = power.clamp(min=1e-10).log10()
    return ((torch.maximum(log, log.max() - 8) + 4) / 4).T.float().numpy()


def test_a_window_of_a_quarter_of_the_digits_is_found() -> None:
    """As MKL's vector math gave it where threads called it first together (pytorch#188792)."""
    coarse = torch.hann_window(400, dtype=torch.float64).mul(2**12).round().div(2**12)
    with pytest.raises(AssertionError, match="times the bound"):
        assert_log_mel_close(log_mel(torch.float32, coarse), log_mel(torch.float32))


def test_a_digest_that_differs_under_one_instruction_set_is_named() -> None:
    same = {"plans": "a", "orders": "b"}
    assert differing({"native": same, "avx2": dict(same)}) == []
    assert differing({"native": same, "avx2": same | {"plans": "c"}}) == ["plans"]
    assert differing({"native": same, "avx2": {"plans": "a"}}) == ["orders"]
