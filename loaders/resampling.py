"""Resampling of sound, by windowed sinc interpolation.

    wave --pieces, each with the filter's context on both sides--> torchaudio or SincResampler --> wave at the new rate

torchaudio's wheels contain libraries for one torch and one CUDA, so importing it may fail with a torch that otherwise
works. These libraries are not needed here: if the import fails, `SincResampler` is used. It repeats torchaudio's
`transforms.Resample` with default arguments, operation by operation, and gives the same values to the bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from math import ceil, pi
from types import ModuleType
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.memory import settle_first_calls

if TYPE_CHECKING:
    import torch

Wave = NDArray[np.float32]

# The filter: zero crossings on each side, and its cutoff as a share of the lower rate's band.
_CROSSINGS: Final = 6
_ROLLOFF: Final = 0.99
# Maximum size of a kernel: odd rates (44,099 Hz) would need gigabytes.
_KERNEL_VALUES: Final = 1 << 22
# Longer waves are resampled in pieces of this number of input frames: the convolution unfolds its input.
_PIECE_FRAMES: Final = 1 << 21

_build_lock = threading.Lock()


def resample(wave: Wave, rate: int, new_rate: int) -> Wave:
    """Return `wave` (num_frames,) at `new_rate` Hz."""
    if rate == new_rate:
        return wave
    import torch

    ratio = kernel_ratio(rate, new_rate)
    new, orig = ratio.numerator, ratio.denominator
    if new == orig:  # the rates differ by less than the rounding of the ratio
        return wave
    resampler = _resampler(orig, new, torch.get_default_dtype() == torch.float32)
    context = ceil(half_width(ratio) / orig) * orig
    block = ceil(_PIECE_FRAMES / orig) * orig
    pieces: list[Wave] = []
    with torch.no_grad():
        for start in range(0, len(wave), block):
            first, last = max(0, start - context), start + block + context
            piece = resampler(torch.from_numpy(wave[first:last])).numpy()
            skip = (start - first) // orig * new
            stop = skip + block // orig * new if start + block < len(wave) else len(piece)
            pieces.append(piece[skip:stop])
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def kernel_ratio(rate: int, new_rate: int) -> Fraction:
    """Return new_rate / rate, rounded by less than 0.03 % to a simpler fraction if its kernel would be too large."""
    exact = ratio = Fraction(new_rate, rate)
    largest = max(exact.numerator, exact.denominator)
    while min(ratio.numerator, ratio.denominator) > 1:
        # The kernel has one filter per new frame of a period, over its original frames and both half widths.
        if ratio.numerator * (ratio.denominator + 2 * half_width(ratio)) <= _KERNEL_VALUES:
            break
        largest = largest * 3 // 4
        ratio = exact.limit_denominator(largest) if exact < 1 else 1 / (1 / exact).limit_denominator(largest)
    return ratio


def half_width(ratio: Fraction) -> int:
    """Original frames that the filter covers on each side."""
    return ceil(_CROSSINGS * ratio.denominator / (_ROLLOFF * min(ratio.denominator, ratio.numerator)))


@lru_cache(maxsize=1)
def torchaudio_transforms() -> ModuleType | None:
    """`torchaudio.transforms`; None if importing it fails, with any exception."""
    try:
        import torchaudio.transforms
    except Exception:  # noqa: BLE001 - a missing library, two versions of CUDA, a torch that it was not built for
        return None
    module: ModuleType = torchaudio.transforms
    return module


@lru_cache(maxsize=32)
def _resampler(orig: int, new: int, as_torchaudio: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the resampler. Its kernel is computed once; any thread may use it afterwards.

    Args:
        as_torchaudio: whether torchaudio may compute the kernel, in the precision of torch's default dtype.
    """
    settle_first_calls()
    with _build_lock:
        transforms = torchaudio_transforms() if as_torchaudio else None
        if transforms is None:
            return SincResampler(orig, new)
        resampler: Callable[[torch.Tensor], torch.Tensor] = transforms.Resample(orig, new)
        return resampler


class SincResampler:
    """Band-limited interpolation (J. O. Smith, Digital Audio Resampling, https://ccrma.stanford.edu/~jos/resample/)
    with a Hann window, as in torchaudio.functional (`_get_sinc_resample_kernel` and `_apply_sinc_resample_kernel`,
    method "sinc_interp_hann"; BSD 2-Clause, https://github.com/pytorch/audio).

    Args:
        orig, new: rates without a common divisor: `orig` frames become `new`.
    """

    def __init__(self, orig: int, new: int) -> None:
        import torch

        self._orig, self._new = orig, new
        base = min(orig, new) * _ROLLOFF
        width = self._width = ceil(_CROSSINGS * orig / base)
        frames = torch.arange(-width, width + orig, dtype=torch.float64, device="cpu")[None, None] / orig
        # The phases are rounded to float32 before they are added, as in torchaudio.
        phases = torch.arange(0, -new, -1, device="cpu")[:, None, None].to(torch.float32) / new
        t = ((phases + frames) * base).clamp_(-_CROSSINGS, _CROSSINGS)
        window = torch.cos(t * pi / _CROSSINGS / 2) ** 2
        t *= pi
        kernels = torch.where(t == 0, torch.ones_like(t), t.sin() / t)
        kernels *= window * (base / orig)
        self._kernels = kernels.to(torch.float32)

    def __call__(self, wave: torch.Tensor) -> torch.Tensor:
        """Return `wave`, float32 (num_frames,), at the new rate: ceil(num_frames * new / orig) frames."""
        import torch

        padded = torch.nn.functional.pad(wave[None], (self._width, self._width + self._orig))
        resampled = torch.nn.functional.conv1d(padded[:, None], self._kernels, stride=self._orig)
        # The length is rounded to float32, as in torchaudio.
        length = ceil(float(np.float32(self._new * len(wave) / self._orig)))
        return resampled.transpose(1, 2).reshape(-1)[:length]
