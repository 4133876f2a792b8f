"""Counting MP3 frames: whole file -> number of layer III frames, if the whole stream is regular.

Frame headers as in ISO 11172-3 and 13818-3 (and the 2.5 extension); the Xing/Info tag as LAME writes it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.jit import kernel

_KBITS_V1 = np.array([0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 0], dtype=np.int64)
_KBITS_V2 = np.array([0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 0], dtype=np.int64)
_RATES = np.array([44100, 48000, 32000, 0], dtype=np.int64)
_MPEG1, _MPEG2 = 3, 2
_XING, _INFO, _VBRI = 0x58696E67, 0x496E666F, 0x56425249
_TAG_TELLS_FRAMES = 1


@kernel
def scan_mp3(data: NDArray[np.uint8]) -> tuple[int, int, int]:
    """Count the frames of a layer III stream.

    Args:
        data: uint8 (num_bytes,), read-only: the whole file.

    Returns:
        (frames, samples_per_frame, tagged): `frames` counts audio frames, without a Xing/Info frame, and is -1 if
        the stream is not regular: junk, a cut frame, changing rates, free format, a first frame that needs earlier
        data, a tag with another number of frames. `tagged` is 1 with a Xing/Info frame.
    """
    at, end = _audio_span(data)
    frames, samples, tagged, tag_frames = 0, 0, 0, np.int64(-1)
    expected = np.int64(-1)
    while at < end:
        length, these_samples, kept = _frame(data, at, end)
        if length == 0 or (expected >= 0 and kept != expected):
            return -1, samples, tagged
        samples, expected = these_samples, kept
        if frames == 0 and tagged == 0:
            tag, has_tag, whole = _first_frame(data, at, length)
            if has_tag:
                tagged = 1
                tag_frames = _u32(data, tag + 8) if _u32(data, tag + 4) & _TAG_TELLS_FRAMES else np.int64(-1)
                at += length
                continue
            if not whole:
                return -1, samples, tagged
        frames += 1
        at += length
    if frames == 0 or (tagged == 1 and tag_frames != frames):
        return -1, samples, tagged
    return frames, samples, tagged


@kernel
def count_mp3(data: NDArray[np.uint8]) -> tuple[int, int]:
    """Count the frames of a layer III stream that may have junk in it.

    Args:
        data: uint8 (num_bytes,), read-only: the whole file.

    Returns:
        (frames, samples): the number of whole frames like the first, with that of a tag, each followed by another or by
        the end; and the samples of one. (0, 0) if there is none.
    """
    at, end = _audio_span(data)
    frames, samples, expected, in_step = 0, 0, np.int64(-1), False
    while at + 4 <= end:
        length, these_samples, kept = _frame(data, at, end)
        good = length > 0 and (expected < 0 or kept == expected)
        if good and not in_step and at + length + 4 <= end:  # a frame after junk must have another after it
            next_length, _, next_kept = _frame(data, at + length, end)
            good = next_length > 0 and next_kept == kept
        in_step = good
        if good:
            samples, expected = these_samples, kept
            frames += 1
            at += length
        else:
            at += 1
    return frames, samples


@kernel
def _u32(data: NDArray[np.uint8], at: int) -> int:
    high = (np.int64(data[at]) << 24) | (np.int64(data[at + 1]) << 16)
    return high | (np.int64(data[at + 2]) << 8) | np.int64(data[at + 3])


@kernel
def _audio_span(data: NDArray[np.uint8]) -> tuple[int, int]:
    """Return start and end of the frames: after ID3v2, before ID3v1."""
    at, end = np.int64(0), np.int64(data.size)
    while at + 10 <= end and data[at] == 73 and data[at + 1] == 68 and data[at + 2] == 51:  # ID3
        size = np.int64(0)
        for i in range(at + 6, at + 10):
            size = (size << 7) | np.int64(data[i] & 0x7F)
        at += 10 + size + (10 if data[at + 5] & 0x10 else 0)
    if end >= 128 and data[end - 128] == 84 and data[end - 127] == 65 and data[end - 126] == 71:  # TAG
        end -= 128
    return at, end


@kernel
def _frame(data: NDArray[np.uint8], at: int, end: int) -> tuple[int, int, int]:
    """Return (bytes, samples, bits that must not change) of the frame at `at`; 0 bytes if there is no whole one."""
    if at + 4 > end:
        return 0, 0, 0
    header = _u32(data, at)
    version = (header >> 19) & 3
    if header >> 21 != 0x7FF or version == 1 or (header >> 17) & 3 != 1:  # no sync, reserved, not layer III
        return 0, 0, 0
    first = version == _MPEG1
    rate = _RATES[(header >> 10) & 3] >> (0 if first else (1 if version == _MPEG2 else 2))
    kbits = _KBITS_V1[(header >> 12) & 15] if first else _KBITS_V2[(header >> 12) & 15]
    if rate == 0 or kbits == 0:
        return 0, 0, 0
    samples = 1152 if first else 576
    length = samples // 8 * kbits * 1000 // rate + ((header >> 9) & 1)
    if at + length > end or length < 40:
        return 0, 0, 0
    mono = np.int64((header >> 6) & 3 == 3)
    return length, samples, (mono << 24) | (version << 20) | rate


@kernel
def _first_frame(data: NDArray[np.uint8], at: int, length: int) -> tuple[int, bool, bool]:
    """Return (offset of a Xing/Info tag, whether it exists, whether the frame is audio without earlier data)."""
    header = _u32(data, at)
    first, mono = (header >> 19) & 3 == _MPEG1, (header >> 6) & 3 == 3
    tag = at + 4 + ((17 if mono else 32) if first else (9 if mono else 17))
    if tag + 12 <= at + length:
        name = _u32(data, tag)
        if name == _XING or name == _INFO:
            return tag, True, False
    side = at + 4 + (0 if header & 0x10000 else 2)  # after the checksum, if any
    begin = np.int64(data[side])
    if first:
        begin = (begin << 1) | (np.int64(data[side + 1]) >> 7)
    return tag, False, begin == 0 and _u32(data, at + 36) != _VBRI
