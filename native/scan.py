"""Headers in a buffer: those of a tar's members, and of media, for the plain cases only.

    bytes of an archive   -> positions of its members' names and contents, checksums verified
    first bytes of a member -> image size or audio length

Of tars, plain is a regular file, or a directory without content, alone or after one GNU long name or one PAX header
with records that change only the name (the writer of webdataset adds one for its mtime). Everything else is
`TAR_UNUSUAL`, and the caller reads the whole archive with `tarfile`. Results of media must equal exactly those of
Pillow (after `exif_transpose`) and soundfile; every other case is `UNUSUAL` and goes to them, with the whole member.
`MORE` requests more bytes of it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from orchdata.native.jit import Ints, kernel

TAR_MORE, TAR_FULL, TAR_END, TAR_UNUSUAL = 0, 1, 2, 3
HEADER_BYTES = 512

# Columns of the table of members. Offsets in the buffer: NAME, PREFIX, CONTENT; in the archive: OFFSET, of the content.
# AVAILABLE bytes of the content are in the buffer. Columns from CONTENT on are arguments of the scans of media.
NAME, NAME_LENGTH, PREFIX, PREFIX_LENGTH, OFFSET, CONTENT, AVAILABLE, SIZE = range(8)
NUM_COLUMNS = 8

REUSE_BYTES = 2560
"""The next member is taken from the same bytes when this much is left: its headers and a kilobyte of content."""

_SPACE, _SLASH, _ZERO, _SEVEN, _NINE, _EQUALS, _NEWLINE = 32, 47, 48, 55, 57, 61, 10
_OLD_FILE, _FILE, _DIR, _LONG_NAME, _PAX = 0, 48, 53, 76, 120

# PAX keywords that do not change what is read here. "path" is handled; any other is unusual.
_HARMLESS = np.frombuffer(b"mtime\natime\nctime\nuid\nuname\ngid\ngname\ncomment\n", dtype=np.uint8)
_PATH = np.frombuffer(b"path\n", dtype=np.uint8)


@kernel
def scan_block(
    buffer: NDArray[np.uint8],
    start: int,
    filled: int,
    position: int,
    last: bool,
    members: Ints,
    headers: NDArray[np.uint8],
    count: int,
) -> tuple[int, int, int]:
    """Append the members with headers in a piece of an archive: `filled` bytes from `start` on, at `position`, which
    must be that of a header. Rows of `members`, (capacity, NUM_COLUMNS), and `headers` are written from `count` on; the
    name is prefix + "/" + name if the prefix has a length. Directories are left out. Return (count, position of the
    next header, why the scan ended: TAR_MORE (it is not in the piece, or too near its end), TAR_FULL, TAR_END (a zero
    block) or TAR_UNUSUAL (there, or before)).
    """
    base = position
    while position + HEADER_BYTES <= base + filled and (
        last or position == base or position + REUSE_BYTES <= base + filled
    ):
        if count == members.shape[0]:
            return count, position, TAR_FULL
        at = start + position - base
        end = start + filled
        name, length = 0, 0
        kind = buffer[at + 156]
        if kind == _PAX or kind == _LONG_NAME:
            size = _octal(buffer, at + 124)
            content = at + HEADER_BYTES
            if size > 0 and position != base and content + _padded(size) + HEADER_BYTES > end:
                return count, position, TAR_MORE
            if size <= 0 or content + _padded(size) + HEADER_BYTES > end or not _checksum_matches(buffer, at):
                return count, position, TAR_UNUSUAL
            name, length = _pax_name(buffer, content, size) if kind == _PAX else _long_name(buffer, content, size)
            if length < 0:
                return count, position, TAR_UNUSUAL
            at = content + _padded(size)
            kind = buffer[at + 156]
        elif kind == _OLD_FILE and _is_zero(buffer, at):
            return count, position, TAR_END
        size = _octal(buffer, at + 124)
        if size < 0 or not _checksum_matches(buffer, at) or not _is_plain(buffer, at, kind, size):
            return count, position, TAR_UNUSUAL
        position = base + at - start + HEADER_BYTES
        if kind != _DIR:
            row = members[count]
            row[NAME], row[NAME_LENGTH], row[PREFIX_LENGTH] = name, length, 0
            if length == 0:
                row[NAME], row[NAME_LENGTH] = at, _length_to_nul(buffer, at, 100)
                row[PREFIX], row[PREFIX_LENGTH] = at + 345, _length_to_nul(buffer, at + 345, 155)
            row[OFFSET], row[CONTENT], row[SIZE] = position, at + HEADER_BYTES, size
            row[AVAILABLE] = min(size, end - row[CONTENT])
            headers[count] = buffer[at : at + HEADER_BYTES]
            count += 1
            position += _padded(size)
    return count, position, TAR_MORE


@kernel
def _is_plain(buffer: NDArray[np.uint8], at: int, kind: int, size: int) -> bool:
    """Return whether it is a regular file, or a directory without content."""
    if kind == _OLD_FILE:  # in the old form, a directory is a file with a name that ends in a slash
        length = _length_to_nul(buffer, at, 100)
        return length == 0 or buffer[at + length - 1] != _SLASH
    return bool(kind == _FILE or (kind == _DIR and size == 0))


@kernel
def _octal(buffer: NDArray[np.uint8], at: int) -> int:
    """Return the number at `at`, eleven octal digits and an end in 12 bytes; -1 for any other form."""
    value = np.int64(0)
    for i in range(at, at + 11):
        if buffer[i] < _ZERO or buffer[i] > _SEVEN:
            return np.int64(-1)
        value = value * 8 + (np.int64(buffer[i]) - _ZERO)
    if buffer[at + 11] != 0 and buffer[at + 11] != _SPACE:
        return np.int64(-1)
    return value


@kernel
def _padded(size: int) -> int:
    return (size + 511) // 512 * 512


@kernel
def _is_zero(buffer: NDArray[np.uint8], at: int) -> bool:
    total = np.int64(0)
    for i in range(at, at + HEADER_BYTES):
        total += buffer[i]
    return bool(total == 0)


@kernel
def _checksum_matches(buffer: NDArray[np.uint8], at: int) -> bool:
    """Compare the sum of the header's bytes, with the checksum as spaces, to the octal number before NUL or spaces."""
    stored = np.int64(0)
    i = at + 148
    while i < at + 156 and buffer[i] == _SPACE:
        i += 1
    first = i
    while i < at + 156 and _ZERO <= buffer[i] <= _SEVEN:
        stored = stored * 8 + (np.int64(buffer[i]) - _ZERO)
        i += 1
    if i == first:
        return False
    while i < at + 156:
        if buffer[i] != 0 and buffer[i] != _SPACE:
            return False
        i += 1
    total = np.int64(8 * _SPACE)
    for j in range(at, at + 148):
        total += buffer[j]
    for j in range(at + 156, at + HEADER_BYTES):
        total += buffer[j]
    return bool(total == stored)


@kernel
def _length_to_nul(buffer: NDArray[np.uint8], start: int, limit: int) -> int:
    for i in range(limit):
        if buffer[start + i] == 0:
            return i
    return limit


@kernel
def _long_name(buffer: NDArray[np.uint8], start: int, size: int) -> tuple[int, int]:
    """Return (start, length) of a GNU long name; length -1 if only tarfile can tell."""
    length = _length_to_nul(buffer, start, size)
    return start, (length if length > 0 else -1)


@kernel
def _pax_name(buffer: NDArray[np.uint8], start: int, size: int) -> tuple[int, int]:
    """Return (start, length) of the value of `path` in PAX records; length 0 for none, -1 if only tarfile can tell."""
    name, name_length = 0, 0
    at, end = start, start + size
    while at < end:
        length = 0
        i = at
        while i < end and i < at + 6 and _ZERO <= buffer[i] <= _NINE:
            length = length * 10 + (np.int64(buffer[i]) - _ZERO)
            i += 1
        last = at + length - 1  # the newline that ends the record
        if i == at or i >= last or last >= end or buffer[i] != _SPACE or buffer[last] != _NEWLINE:
            return 0, -1
        key = i + 1
        value = _find(buffer, key, last, _EQUALS) + 1
        # NUL or newline in a value, and empty values, are left to tarfile.
        if value > last or _find(buffer, value, last, _NEWLINE) < last or _find(buffer, value, last, 0) < last:
            return 0, -1
        if _is_one_of(buffer, key, value - 1 - key, _PATH):
            if value == last or buffer[last - 1] == _SLASH or name_length > 0:  # empty, of a directory, or given twice
                return 0, -1
            name, name_length = value, last - value
        elif not _is_one_of(buffer, key, value - 1 - key, _HARMLESS):
            return 0, -1
        at = last + 1
    return name, name_length


@kernel
def _find(buffer: NDArray[np.uint8], start: int, end: int, byte: int) -> int:
    """Return the first index of `byte` in [start, end), else `end`."""
    for i in range(start, end):
        if buffer[i] == byte:
            return i
    return end


@kernel
def _is_one_of(buffer: NDArray[np.uint8], start: int, length: int, words: NDArray[np.uint8]) -> bool:
    """Return whether the bytes are one of `words`, each of which ends with a newline."""
    word = 0
    while word < words.size:
        end = _find(words, word, words.size, _NEWLINE)
        if end - word == length:
            same = 0
            while same < length and words[word + same] == buffer[start + same]:
                same += 1
            if same == length:
                return True
        word = end + 1
    return False


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
