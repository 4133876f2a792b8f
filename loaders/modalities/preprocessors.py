"""How media become encoder inputs, as frozen values.

    image (width, height) -> grid of patches -> merged tokens
    audio (frames, rate)  -> samples -> tokens -> mel frames -> positions

All counts follow from media headers, in integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Any, Final, Literal

import numpy as np

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

# How each dtype of a recipe is kept in numpy, which has no bfloat16: its bits as uint16.
STORED: Final[dict[str, type[Any]]] = {"bfloat16": np.uint16, "float32": np.float32, "uint8": np.uint8}


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagePreprocessor:
    """Images at native resolution and aspect, within a token budget, as patches.

    A patch is `patch_size` pixels square; `merge` x `merge` neighbouring patches become one LLM token.

    Attributes:
        patch_size: side of a patch in pixels.
        merge: side of a merged token in patches.
        min_tokens, max_tokens: merged tokens of one image; always respected, whatever the aspect ratio.
        mean, std: normalisation of channels in [0, 1] (default: CLIP's); unused with dtype "uint8".
        resizer: "pillow" (bicubic, the reference) or "torch" (bicubic with antialiasing on uint8, several
            times faster; few values differ, at sharp edges by up to 21/255).
        dtype: what patches are stored as; "uint8" holds raw values, to normalise on the device.
    """

    patch_size: int = 14
    merge: int = 2
    min_tokens: int = 4
    max_tokens: int = 4096
    mean: tuple[float, float, float] = CLIP_MEAN
    std: tuple[float, float, float] = CLIP_STD
    resizer: Literal["pillow", "torch"] = "pillow"
    dtype: Literal["bfloat16", "float32", "uint8"] = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("patch_size", "merge", "min_tokens"):
            _check_at_least_one("ImagePreprocessor", name, getattr(self, name))
        if not isinstance(self.max_tokens, int) or self.max_tokens < self.min_tokens:
            raise ValueError(
                f"ImagePreprocessor.max_tokens must be an int of at least min_tokens={self.min_tokens}, "
                f"got {self.max_tokens!r}"
            )
        _check_choice("ImagePreprocessor", "resizer", self.resizer, ("pillow", "torch"))
        _check_choice("ImagePreprocessor", "dtype", self.dtype, ("bfloat16", "float32", "uint8"))
        for name in ("mean", "std"):
            values = tuple(float(value) for value in getattr(self, name))
            if len(values) != 3:
                raise ValueError(f"ImagePreprocessor.{name} must have 3 values (red, green, blue), got {len(values)}")
            object.__setattr__(self, name, values)
        if not all(value > 0 for value in self.std):
            raise ValueError(f"ImagePreprocessor.std must be above 0 in every channel, got {self.std}")

    @property
    def patch_dim(self) -> int:
        """Values in one patch: 3 channels x patch_size x patch_size."""
        return 3 * self.patch_size * self.patch_size

    def num_tokens(self, grid: tuple[int, int]) -> int:
        """Merged tokens of a grid of patches."""
        return grid[0] * grid[1] // (self.merge * self.merge)


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioPreprocessor:
    """Audio as mono log-mel frames, a whole number of tokens a clip.

    With n samples at `sample_rate`: tokens = max(1, ceil(n * tokens_per_second / sample_rate)); a token is
    sample_rate / (tokens_per_second * hop_length) mel frames, and `conv_stride` mel frames become one position of
    the encoder. Both divisions must be exact.

    Attributes:
        sample_rate: Hz; clips of other rates are resampled.
        num_mels: mel bands.
        hop_length, n_fft: step and length of the analysis window, in samples.
        conv_stride: mel frames per position entering attention.
        tokens_per_second: LLM tokens per second of audio.
        dtype: what features are stored as.
    """

    sample_rate: int = 16_000
    num_mels: int = 128
    hop_length: int = 160
    conv_stride: int = 2
    tokens_per_second: int = 25
    n_fft: int = 400
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        for name in ("sample_rate", "num_mels", "hop_length", "conv_stride", "tokens_per_second", "n_fft"):
            _check_at_least_one("AudioPreprocessor", name, getattr(self, name))
        _check_choice("AudioPreprocessor", "dtype", self.dtype, ("float32", "bfloat16"))
        if self.sample_rate % (self.tokens_per_second * self.hop_length):
            raise ValueError(
                f"a token must be a whole number of mel frames: sample_rate={self.sample_rate} is not divisible by "
                f"tokens_per_second={self.tokens_per_second} * hop_length={self.hop_length}"
            )
        if self.mel_frames_per_token % self.conv_stride:
            raise ValueError(
                f"a token must be a whole number of positions: its {self.mel_frames_per_token} mel frames are not "
                f"divisible by conv_stride={self.conv_stride}"
            )

    @property
    def mel_frames_per_token(self) -> int:
        return self.sample_rate // (self.tokens_per_second * self.hop_length)

    def num_samples(self, frames: int, rate: int) -> int:
        """Samples at `sample_rate` of a clip of `frames` at `rate` Hz."""
        return -(-frames * self.sample_rate // rate)

    def num_tokens(self, num_samples: int) -> int:
        """LLM tokens of a clip of `num_samples` at `sample_rate`."""
        return max(1, -(-num_samples * self.tokens_per_second // self.sample_rate))

    def mel_frames(self, num_samples: int) -> int:
        """Mel frames of a clip of `num_samples` at `sample_rate`."""
        return self.num_tokens(num_samples) * self.mel_frames_per_token


def image_grid(width: int, height: int, pre: ImagePreprocessor) -> tuple[int, int]:
    """The patches (grid_h, grid_w) an image of `width` x `height` pixels is resized to; both multiples of `merge`.

    Qwen2-VL's smart resize: each side rounds to a whole number of merged tokens (half to even); above `max_tokens`
    (below `min_tokens`) both shrink (grow) by one factor, rounded down (up). Unlike there, sides never fall below
    one token and the product is held in both limits even for extreme aspect ratios. Integer arithmetic throughout,
    so every machine finds the same size.
    """
    if width < 1 or height < 1:
        raise ValueError(f"an image must have at least one pixel, got {width} x {height}")
    factor = pre.patch_size * pre.merge
    rows, cols = max(1, _round_half_even(height, factor)), max(1, _round_half_even(width, factor))
    if rows * cols > pre.max_tokens:
        # floor(sqrt(max_tokens * height / width)), exactly
        rows, cols = isqrt(pre.max_tokens * height // width), isqrt(pre.max_tokens * width // height)
        rows, cols = max(1, rows), max(1, cols)
    elif rows * cols < pre.min_tokens:
        rows, cols = _ceil_sqrt(pre.min_tokens * height, width), _ceil_sqrt(pre.min_tokens * width, height)
    if not pre.min_tokens <= rows * cols <= pre.max_tokens:
        rows, cols = _within(rows, cols, pre.min_tokens, pre.max_tokens)
    return rows * pre.merge, cols * pre.merge


def _within(rows: int, cols: int, low: int, high: int) -> tuple[int, int]:
    """The sides nearest to (rows, cols), the shorter one kept if it can be, whose product is in [low, high]."""
    short, long = min(rows, cols), max(rows, cols)
    for side in range(min(short, isqrt(high)), 0, -1):
        least, most = -(-low // side), high // side
        if least <= most:  # always so for a side of 1
            short, long = side, min(max(long, least), most)
            break
    return (short, long) if rows <= cols else (long, short)


def _round_half_even(value: int, step: int) -> int:
    quotient, rest = divmod(value, step)
    return quotient + (2 * rest > step or (2 * rest == step and quotient % 2 == 1))


def _ceil_sqrt(numerator: int, denominator: int) -> int:
    """The smallest k with k * k >= numerator / denominator > 0."""
    return isqrt(-(-numerator // denominator) - 1) + 1


def _check_at_least_one(owner: str, name: str, value: object) -> None:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{owner}.{name} must be an int of at least 1, got {value!r}")


def _check_choice(owner: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{owner}.{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
