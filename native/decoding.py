"""Kernels of decoding: pixels -> patches, and complex spectra -> their parts.

Complex spectra -> separate real and imaginary parts, for vector instructions.

Pixels -> patches: uint8 (height, width, channels) -> (num_patches, 3 * repeats * patch * patch), normalised.

One pass over the pixels: there are only 256 values a channel, so normalisation and rounding to bfloat16 are a lookup.

Rows are in merge blocks: `merge` x `merge` consecutive patches form one merged token, blocks and the patches inside
them run left to right, then down (as Qwen2-VL's). Values of a patch are ordered (channel, time, row, column), with the
same picture at all times, or a separate one for each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.native.jit import kernel


@kernel
def split_complex(values: NDArray[np.float32], real: NDArray[np.float32], imaginary: NDArray[np.float32]) -> None:
    """Write the parts of complex numbers: values are (2 * n,), alternating real and imaginary."""
    for at in range(np.uint64(len(real))):
        real[at] = values[at + at]
        imaginary[at] = values[at + at + np.uint64(1)]


def patchify(
    pixels: NDArray[np.uint8], patch: int, merge: int, table: NDArray[Any], out: NDArray[Any], repeats: int = 1
) -> None:
    """Write the patches of an image (height, width, channels), or of pictures (times, height, width, channels), whose
    sides are multiples of patch * merge, into `out`, (num_patches, 3 * times * repeats * patch * patch): float32,
    uint16 (bfloat16 bits) or uint8, by the `table` of `channel_table`. `repeats`: the times that an image lasts.
    """
    times, (height, width, channels) = (len(pixels) if pixels.ndim == 4 else 1), pixels.shape[-3:]
    step = patch * merge
    if height % step or width % step or channels < 3 or (times > 1 and repeats > 1):
        raise ValueError(f"pixels {pixels.shape} are not RGB in whole blocks of {step} x {step}")
    expected = (height // patch * (width // patch), 3 * times * repeats * patch * patch)
    if out.shape != expected or table.shape != (3, 256) or table.dtype != out.dtype or not out.flags.c_contiguous:
        raise ValueError(f"out {out.shape} {out.dtype} should be {expected} of the table's {table.dtype}, C-contiguous")
    # Pillow's arrays are read-only, a separate type for numba: use one type for all.
    flat, table = pixels.reshape(-1), table.view()
    flat.flags.writeable = table.flags.writeable = False
    _patchify(flat, times, height, width, channels, patch, merge, table, out.reshape(-1), repeats)


def channel_table(mean: tuple[float, ...], std: tuple[float, ...], dtype: str) -> NDArray[Any]:
    """Return (3, 256): the value of each byte in each channel, (byte / 255 - mean) / std; for "uint8" the byte itself,
    for "bfloat16" the bits as uint16, rounded to nearest even.
    """
    levels = np.arange(256)
    if dtype == "uint8":
        return np.tile(levels.astype(np.uint8), (3, 1))
    means, stds = np.array(mean)[:, None], np.array(std)[:, None]
    values = ((levels / 255 - means) / stds).astype(np.float32)
    return values if dtype == "float32" else bfloat16_bits(values)


def bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bits of finite float32 values as bfloat16, rounded to nearest even."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


@kernel
def _patchify(
    pixels: NDArray[np.uint8],
    times: int,
    height: int,
    width: int,
    channels: int,
    patch: int,
    merge: int,
    table: NDArray[Any],
    out: NDArray[Any],
    repeats: int,
) -> None:
    # Unsigned indices of flat arrays, written from first to last: numba tests every signed index for negative values,
    # and three streams of writes take longer than one. Both together take twice as long.
    side, block, area = np.uint64(patch), np.uint64(merge), np.uint64(patch * patch)
    wide, step = np.uint64(width * channels), np.uint64(channels)
    whole, at = np.uint64(height) * wide, np.uint64(0)
    for block_y in range(np.uint64(height // (patch * merge))):
        for block_x in range(np.uint64(width // (patch * merge))):
            for row in range(block_y * block, block_y * block + block):
                for column in range(block_x * block, block_x * block + block):
                    corner = row * side * wide + column * side * step
                    for channel in range(np.uint64(3)):
                        values = table[channel]
                        for time in range(np.uint64(times)):
                            picture = time * whole + corner + channel
                            for y in range(side):
                                first = picture + y * wide
                                for x in range(side):
                                    out[at] = values[pixels[first + x * step]]
                                    at += np.uint64(1)
                        for _ in range((np.uint64(repeats) - np.uint64(1)) * area):
                            out[at] = out[at - area]
                            at += np.uint64(1)
