"""Media headers in a buffer: first bytes of a member -> image size or audio length, for the plain cases only.

Results must equal exactly those of Pillow (after `exif_transpose`) and soundfile; every other case is `UNUSUAL` and
goes to them, with the whole member. `MORE` requests more bytes of it.

Results of the scan of a member's header.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from orchdata.native.jit import Ints, kernel

_LEAST_BYTES = 12
_LEAST_FLAC_FRAME = 10  # bytes: header 6, subframe 2, checksum 2

_EXIF = np.frombuffer(b"Exif\0\0", dtype=np.uint8)
_XMP = np.frombuffer(b"http://ns.adobe.com/xap/1.0/\0", dtype=np.uint8)
_XMP_ORIENTATION = np.frombuffer(b"tiff:Orientation", dtype=np.uint8)
_PNG = np.frombuffer(b"\x89PNG\r\n\x1a\n", dtype=np.uint8)


@kernel
def _matches(buffer: NDArray[np.uint8], at: int, end: int, pattern: NDArray[np.uint8]) -> bool:
    if at + pattern.size > end:
        return False
    same = 0
    while same < pattern.size and buffer[at + same] == pattern[same]:
        same += 1
    return same == pattern.size


@kernel
def _contains(buffer: NDArray[np.uint8], start: int, end: int, pattern: NDArray[np.uint8]) -> bool:
    for i in range(start, end - pattern.size + 1):
        if buffer[i] == pattern[0] and _matches(buffer, i, end, pattern):
            return True
    return False


@kernel
def _u16(buffer: NDArray[np.uint8], at: int, little: bool) -> int:
    if little:
        return np.int64(buffer[at]) | (np.int64(buffer[at + 1]) << 8)
    return (np.int64(buffer[at]) << 8) | np.int64(buffer[at + 1])


@kernel
def _u32(buffer: NDArray[np.uint8], at: int, little: bool) -> int:
    low, high = _u16(buffer, at, little), _u16(buffer, at + 2, little)
    return (low | (high << 16)) if little else ((low << 16) | high)


@kernel
def _exif_orientation(buffer: NDArray[np.uint8], start: int, end: int) -> int:
    """Return the orientation tag of the TIFF block in [start, end): 0 without one, -1 if only Pillow can tell."""
    if start + 8 > end:
        return -1
    little = buffer[start] == 73 and buffer[start + 1] == 73
    if not little and not (buffer[start] == 77 and buffer[start + 1] == 77):
        return -1
    if _u16(buffer, start + 2, little) != 42:
        return -1
    entries = start + _u32(buffer, start + 4, little)
    if entries + 2 > end:
        return -1
    count = _u16(buffer, entries, little)
    if entries + 2 + 12 * count > end:
        return -1
    orientation = 0
    for i in range(count):
        entry = entries + 2 + 12 * i
        if _u16(buffer, entry, little) == 0x0112:
            if orientation != 0 or _u16(buffer, entry + 2, little) != 3 or _u32(buffer, entry + 4, little) != 1:
                return -1
            orientation = _u16(buffer, entry + 8, little)
            if not 1 <= orientation <= 8:
                return -1
    return orientation


@kernel
def _jpeg(buffer: NDArray[np.uint8], start: int, end: int, whole: bool) -> tuple[int, int, int]:
    """Return (status, width, height) from the segments up to the start of scan."""
    short = UNUSUAL if whole else MORE
    width, height, orientation = 0, 0, 0
    has_exif, has_xmp = False, False
    at = start + 2
    while at + 4 <= end:
        marker, length, payload = _u16(buffer, at, False), _u16(buffer, at + 2, False), at + 4
        if marker == 0xFFDA:  # start of scan
            if width == 0 or height == 0 or (has_xmp and orientation == 0):
                return UNUSUAL, 0, 0
            return (FOUND, height, width) if orientation >= 5 else (FOUND, width, height)
        if not _is_segment(marker) or length < 2:
            return UNUSUAL, 0, 0
        at += 2 + length
        if at > end:
            return short, 0, 0
        if marker <= 0xFFC2:  # frame header: baseline, extended or progressive
            if width != 0 or not _is_plain_frame(buffer, payload, length):
                return UNUSUAL, 0, 0
            height, width = _u16(buffer, payload + 1, False), _u16(buffer, payload + 3, False)
        elif marker == 0xFFE1 and _matches(buffer, payload, at, _EXIF):
            orientation = -1 if has_exif else _exif_orientation(buffer, payload + 6, at)
            has_exif = True
            if orientation < 0:
                return UNUSUAL, 0, 0
        elif marker == 0xFFE1 and _matches(buffer, payload, at, _XMP):
            has_xmp = has_xmp or _contains(buffer, payload, at, _XMP_ORIENTATION)
    return short, 0, 0


@kernel
def _is_segment(marker: int) -> bool:
    """Return whether a plain header may have this marker with a length: no other frame, restart, start, end or fill."""
    if marker == 0xFFC4 or marker == 0xFFCC:  # tables
        return True
    return 0xFFC0 <= marker <= 0xFFC2 or 0xFFDB <= marker <= 0xFFFE


@kernel
def _is_plain_frame(buffer: NDArray[np.uint8], payload: int, length: int) -> bool:
    """Return whether a frame has eight bits; grey, three or four components."""
    if length < 8 or buffer[payload] != 8:
        return False
    components = np.int64(buffer[payload + 5])
    return (components == 1 or components == 3 or components == 4) and length == 8 + 3 * components


@kernel
def _png(buffer: NDArray[np.uint8], start: int, end: int, whole: bool) -> tuple[int, int, int]:
    """Return (status, width, height); any chunk of a PNG may have an orientation, so all are visited."""
    short = UNUSUAL if whole else MORE
    if start + 33 > end:
        return short, 0, 0
    if _u32(buffer, start + 8, False) != 13 or _u32(buffer, start + 12, False) != 0x49484452:  # IHDR
        return UNUSUAL, 0, 0
    width, height = _u32(buffer, start + 16, False), _u32(buffer, start + 20, False)
    if width == 0 or height == 0 or width > 0x7FFFFFFF or height > 0x7FFFFFFF:
        return UNUSUAL, 0, 0
    at = start + 33
    while True:
        if at + 12 > end:
            return short, 0, 0
        length = _u32(buffer, at, False)
        name = _u32(buffer, at + 4, False)
        if name == 0x49454E44:  # IEND
            return FOUND, width, height
        if name == 0x65584966:  # eXIf
            return UNUSUAL, 0, 0
        # tEXt, zTXt, iTXt with the first letter of a keyword that may have an orientation: Pillow reads them.
        if name == 0x74455874 or name == 0x7A545874 or name == 0x69545874:
            if at + 9 > end:
                return short, 0, 0
            if buffer[at + 8] == 82 or buffer[at + 8] == 88:  # R(aw profile type exif), X(ML:com.adobe.xmp)
                return UNUSUAL, 0, 0
        at += 12 + length


@kernel
def _wav(buffer: NDArray[np.uint8], start: int, end: int, whole: bool, size: int) -> tuple[int, int, int]:
    """Return (status, frames, rate) of plain PCM or float RIFF."""
    short = UNUSUAL if whole else MORE
    if _u32(buffer, start + 8, False) != 0x57415645 or _u32(buffer, start + 4, True) != size - 8:  # WAVE
        return UNUSUAL, 0, 0
    at = start + 12
    block, rate = 0, 0
    while True:
        if at + 8 > end:
            return short, 0, 0
        name = _u32(buffer, at, False)
        length = _u32(buffer, at + 4, True)
        if name == 0x666D7420:  # fmt
            if at + 24 > end:
                return short, 0, 0
            form, channels = _u16(buffer, at + 8, True), _u16(buffer, at + 10, True)
            bits = _u16(buffer, at + 22, True)
            rate = _u32(buffer, at + 12, True)
            block = _u16(buffer, at + 20, True)
            pcm = form == 1 and (bits == 8 or bits == 16 or bits == 24 or bits == 32)
            floats = form == 3 and (bits == 32 or bits == 64)
            if length < 16 or not (pcm or floats) or channels < 1 or channels > 32 or block * 8 != channels * bits:
                return UNUSUAL, 0, 0
            if rate < 1 or rate > 768_000:
                return UNUSUAL, 0, 0
        elif name == 0x64617461:  # data
            frames = length // block if block > 0 else 0
            if frames == 0 or length % block != 0 or at - start + 8 + length > size:
                return UNUSUAL, 0, 0
            return FOUND, frames, rate
        elif block > 0 or name == 0x4C495354 or name == 0x4A554E4B or name == 0x62657874:  # LIST, JUNK, bext
            pass
        else:
            return UNUSUAL, 0, 0
        if at - start + 8 + length > size:
            return UNUSUAL, 0, 0
        at += 8 + length + (length & 1)


@kernel
def _flac(buffer: NDArray[np.uint8], start: int, end: int, whole: bool, size: int) -> tuple[int, int, int]:
    """Return (status, frames, rate) of STREAMINFO, if the file is large enough for that number of frames."""
    if start + 26 > end:
        return (UNUSUAL if whole else MORE), 0, 0
    if buffer[start + 4] & 0x7F != 0 or _u32(buffer, start + 4, False) & 0xFFFFFF != 34:
        return UNUSUAL, 0, 0
    rate = _u32(buffer, start + 18, False) >> 12
    frames = ((np.int64(buffer[start + 21]) & 0x0F) << 32) | _u32(buffer, start + 22, False)
    block = _u16(buffer, start + 10, False)  # the largest, in frames
    if rate == 0 or frames == 0 or block == 0:
        return UNUSUAL, 0, 0
    smallest = max(_LEAST_FLAC_FRAME, _u32(buffer, start + 12, False) >> 8)  # bytes of a block; 0: unknown
    if size < 42 + (frames - 1) // block * smallest:
        return UNUSUAL, 0, 0
    return FOUND, frames, rate


@kernel
def scan_images(
    buffer: NDArray[np.uint8], starts: Ints, available: Ints, sizes: Ints, status: NDArray[np.uint8], facts: Ints
) -> None:
    """Write width and height, as displayed, of images with their first bytes in `buffer`, which is read-only: writable
    arrays are another type for numba, which would compile twice. (n,) each: start and number of bytes in the buffer,
    and size of the member; `status`: FOUND (then `facts`, (n, 2), are written), MORE or UNUSUAL.
    """
    for i in range(starts.size):
        start, whole = starts[i], available[i] >= sizes[i]
        end = start + min(available[i], sizes[i])
        if end - start < _LEAST_BYTES:
            status[i] = UNUSUAL if whole else MORE
            continue
        outcome = (UNUSUAL, 0, 0)
        if _u32(buffer, start, False) >> 8 == 0xFFD8FF:
            outcome = _jpeg(buffer, start, end, whole)
        elif _matches(buffer, start, end, _PNG):
            outcome = _png(buffer, start, end, whole)
        status[i] = outcome[0]
        if outcome[0] == FOUND:
            facts[i, 0], facts[i, 1] = outcome[1], outcome[2]


@kernel
def scan_audio(
    buffer: NDArray[np.uint8], starts: Ints, available: Ints, sizes: Ints, status: NDArray[np.uint8], facts: Ints
) -> None:
    """As `scan_images`: write frames of a channel and rate of clips."""
    for i in range(starts.size):
        start, size, whole = starts[i], sizes[i], available[i] >= sizes[i]
        end = start + min(available[i], size)
        if end - start < _LEAST_BYTES:
            status[i] = UNUSUAL if whole else MORE
            continue
        magic = _u32(buffer, start, False)
        outcome = (UNUSUAL, 0, 0)
        if magic == 0x52494646:  # RIFF
            outcome = _wav(buffer, start, end, whole, size)
        elif magic == 0x664C6143:  # fLaC
            outcome = _flac(buffer, start, end, whole, size)
        status[i] = outcome[0]
        if outcome[0] == FOUND:
            facts[i, 0], facts[i, 1] = outcome[1], outcome[2]


FOUND: Final = 0
MORE: Final = 1
"""More of its first bytes are needed."""
UNUSUAL: Final = 2
"""It takes a decoder, with the whole member, to say."""
