"""Patches equal a plain reshape; bfloat16 bits equal torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchdata.native.decoding import bfloat16_bits, channel_table, patchify

pytestmark = pytest.mark.cpus

MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)


def plain_patches(pixels: np.ndarray, patch: int, merge: int) -> np.ndarray:
    """The twin: Qwen2-VL's reshape and transpose of (height, width, 3)."""
    blocks_h, blocks_w = pixels.shape[0] // (patch * merge), pixels.shape[1] // (patch * merge)
    split = pixels[:, :, :3].reshape(blocks_h, merge, patch, blocks_w, merge, patch, 3)
    # -> block row, block column, row in block, column in block, channel, y, x
    return split.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3 * patch * patch)


def random_pixels(rows: int, cols: int, patch: int, merge: int, channels: int) -> np.ndarray:
    rng = np.random.default_rng(rows * 31 + cols)
    return rng.integers(0, 256, (rows * patch * merge, cols * patch * merge, channels), np.uint8)


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 4),
    cols=st.integers(1, 4),
    patch=st.integers(1, 5),
    merge=st.integers(1, 3),
    channels=st.sampled_from([3, 4]),
    repeats=st.integers(1, 3),
    dtype=st.sampled_from(["uint8", "float32", "bfloat16"]),
)
def test_patches_are_the_plain_reshape(rows, cols, patch, merge, channels, repeats, dtype):
    pixels = random_pixels(rows, cols, patch, merge, channels)
    table = channel_table(MEAN, STD, dtype)
    out = np.empty((rows * cols * merge * merge, 3 * repeats * patch * patch), table.dtype)
    patchify(pixels, patch, merge, table, out, repeats)
    plain = plain_patches(pixels, patch, merge)
    channel = np.repeat(np.arange(3), patch * patch)
    values = table[channel, plain].reshape(-1, 3, 1, patch * patch)
    assert np.array_equal(out, np.repeat(values, repeats, axis=2).reshape(out.shape))


def test_normalisation_is_mean_and_std_of_each_channel():
    table = channel_table(MEAN, STD, "float32")
    levels = torch.arange(256, dtype=torch.float64) / 255
    for channel in range(3):
        expected = ((levels - MEAN[channel]) / STD[channel]).float().numpy()
        np.testing.assert_array_equal(table[channel], expected)


def test_bfloat16_rounds_to_nearest_even_as_torch_does():
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(size=5000), [0.0, -0.0, 1.0, 1.00390625, 1.01171875, -3e38, 1e-40]])
    values = values.astype(np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(bfloat16_bits(values), expected)


def test_read_only_pixels_are_taken():
    pixels = random_pixels(1, 1, 2, 1, 3)
    pixels.flags.writeable = False
    out = np.empty((1, 12), np.uint8)
    patchify(pixels, 2, 1, channel_table(MEAN, STD, "uint8"), out)
    assert np.array_equal(out, plain_patches(pixels, 2, 1))


@pytest.mark.parametrize(
    ("shape", "out_shape", "dtype"),
    [((27, 28, 3), (4, 588), np.uint8), ((28, 28, 3), (3, 588), np.uint8), ((28, 28, 3), (4, 588), np.float32)],
)
def test_sizes_that_do_not_fit_are_refused_before_the_kernel(shape, out_shape, dtype):
    with pytest.raises(ValueError, match=r"pixels|out"):
        patchify(np.zeros(shape, np.uint8), 14, 2, channel_table(MEAN, STD, "uint8"), np.zeros(out_shape, dtype))


def test_rows_that_are_not_contiguous_are_refused():
    apart = np.zeros((2 * 9, 3 * 4), np.uint8)[::2]
    with pytest.raises(ValueError, match="C-contiguous"):
        patchify(np.zeros((6, 6, 3), np.uint8), 2, 1, channel_table(MEAN, STD, "uint8"), apart)


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("channels", [3, 4])
def test_pictures_of_a_clip_are_contiguous_in_each_channel_of_a_patch(times: int, channels: int) -> None:
    pixels = np.random.default_rng(times).integers(0, 256, (times, 24, 40, channels), np.uint8)
    table = channel_table((0.4, 0.5, 0.6), (0.2, 0.3, 0.4), "float32")
    out = np.empty((6 * 10, 3 * times * 16), np.float32)
    patchify(pixels, 4, 2, table, out)
    values = np.stack([table[channel][pixels[..., channel]] for channel in range(3)])  # (3, times, height, width)
    cut = values.reshape(3, times, 3, 2, 4, 5, 2, 4)  # block, patch, pixel along height; the same along width
    np.testing.assert_array_equal(out, cut.transpose(2, 5, 3, 6, 0, 1, 4, 7).reshape(out.shape))
    with pytest.raises(ValueError, match="whole blocks"):
        patchify(pixels[:, :-1], 4, 2, table, out)
