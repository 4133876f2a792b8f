"""Tar headers in a buffer: bytes of an archive -> positions of its members' names and contents, checksums verified.

Only plain forms are accepted: a regular file, or a directory without content, alone or after one GNU long name or one
PAX header with records that change only the name (the writer of webdataset adds one for its mtime). Everything else is
`UNUSUAL`, and the caller reads the whole archive with `tarfile`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.native.jit import Ints, kernel

MORE, FULL, END, UNUSUAL = 0, 1, 2, 3
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
    next header, why the scan ended: MORE (it is not in the piece, or too near its end), FULL, END (a zero block) or
    UNUSUAL (there, or before)).
    """
    base = position
    while position + HEADER_BYTES <= base + filled and (
        last or position == base or position + REUSE_BYTES <= base + filled
    ):
        if count == members.shape[0]:
            return count, position, FULL
        at = start + position - base
        end = start + filled
        name, length = 0, 0
        kind = buffer[at + 156]
        if kind == _PAX or kind == _LONG_NAME:
            size = _octal(buffer, at + 124)
            content = at + HEADER_BYTES
            if size > 0 and position != base and content + _padded(size) + HEADER_BYTES > end:
                return count, position, MORE
            if size <= 0 or content + _padded(size) + HEADER_BYTES > end or not _checksum_matches(buffer, at):
                return count, position, UNUSUAL
            name, length = _pax_name(buffer, content, size) if kind == _PAX else _long_name(buffer, content, size)
            if length < 0:
                return count, position, UNUSUAL
            at = content + _padded(size)
            kind = buffer[at + 156]
        elif kind == _OLD_FILE and _is_zero(buffer, at):
            return count, position, END
        size = _octal(buffer, at + 124)
        if size < 0 or not _checksum_matches(buffer, at) or not _is_plain(buffer, at, kind, size):
            return count, position, UNUSUAL
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
    return count, position, MORE


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
