"""The format of a clip, from its first bytes, and whether the file is complete, without a decoder.

A decoder reads a cut file as far as possible, and reports nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.modalities.checks import starts_with

EBML: Final = b"\x1a\x45\xdf\xa3"
_SEGMENT: Final = b"\x18\x53\x80\x67"
_CLUSTER: Final = b"\x1f\x43\xb6\x75"
_GIF: Final = (b"GIF87a", b"GIF89a")
_NAMES: Final = re.compile(rb"[\x20-\x7e\xa9]{4}")
"""Valid types of boxes."""
BOXES: Final = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"styp", b"pnot")
_NO_VIDEO: Final = (b"avif", b"avis", b"heic", b"heix", b"heif", b"mif1", b"msf1", b"M4A ", b"M4B ", b"jxl ")
"""Brands of still pictures, and of sound only."""
TRACK_FIELDS: Final = tuple("video mp4 m4v mov 3gp webm mkv".split())
"""Names of members that may contain sound as well as pictures."""
_GIF_EXTENSION, _GIF_IMAGE, _GIF_END = 0x21, 0x2C, 0x3B


class Box(NamedTuple):
    """One box of an MP4: its type, and start and end of its content."""

    kind: bytes
    start: int
    end: int


def format_of(data: bytes | memoryview) -> str:
    """Return FFmpeg's name of the demuxer: "mp4", "matroska" or "gif". No other format is tried: some of them open
    other files by name. Raises DecodeError.
    """
    head = bytes(data[:12])
    if head.startswith(EBML):
        return "matroska"
    if head.startswith(_GIF):
        return "gif"
    if head[4:8] in BOXES:
        return "mp4"
    raise DecodeError(
        f"not a video that is read: starts with {starts_with(head)}; read are MP4 and MOV, WebM and Matroska, and GIF. "
        "Write others again: `ffmpeg -i in.avi out.mp4`"
    )


def is_video(head: bytes) -> bool:
    """Whether the first bytes of a file are those of a video, not of a picture or of sound."""
    return head.startswith(EBML) or (head[4:8] == b"ftyp" and head[8:12] not in _NO_VIDEO)


def boxes(data: memoryview, start: int, end: int) -> Iterator[Box]:
    """Yield the boxes between two offsets. A box that extends past `end` comes last, with its declared end. Bytes that
    are no box end the iteration.
    """
    at = start
    while at + 8 <= end:
        size, kind, content = int.from_bytes(data[at : at + 4], "big"), bytes(data[at + 4 : at + 8]), at + 8
        if size == 1:
            size, content = int.from_bytes(data[at + 8 : at + 16], "big"), at + 16
        elif size == 0:
            size = end - at
        if size < content - at:
            return
        yield Box(kind, content, at + size)
        at += size


def check_whole(data: memoryview, kind: str) -> None:
    """Raise DecodeError for an incomplete file, according to its own lengths."""
    ends = {"mp4": _mp4_end, "matroska": _matroska_end, "gif": _gif_end}[kind](data)
    if ends > len(data):
        raise DecodeError(f"the file is cut: it has {len(data)} bytes, and says that there are at least {ends}")


def _nothing_at(at: int, what: str) -> DecodeError:
    return DecodeError(
        f"damaged video: there is no {what} at byte {at}. Bytes are lost, or the file is followed by others; "
        "`ffmpeg -i in -c copy out` keeps what can be read"
    )


def _mp4_end(data: memoryview) -> int:
    ends = at = 0
    for box in boxes(data, 0, len(data)):
        if not _NAMES.fullmatch(box.kind):
            break
        if box.kind == b"sidx" and box.end <= len(data):
            ends = max(ends, box.end + _indexed_bytes(data[box.start : box.end]))
        at = box.end
        ends = max(ends, at)
    if at + 8 <= len(data):
        raise _nothing_at(at, "box of an MP4")
    return ends


def _indexed_bytes(content: memoryview) -> int:
    """Return the end of the pieces in a segment index (ISO/IEC 14496-12, 8.16.3)."""
    at = 28 if content[0] else 20
    first = int.from_bytes(content[at - 8 : at] if content[0] else content[at - 4 : at], "big")
    count = int.from_bytes(content[at + 2 : at + 4], "big")
    offsets = range(at + 4, min(len(content), at + 4 + 12 * count), 12)
    return first + sum(int.from_bytes(content[offset : offset + 4], "big") & 0x7FFFFFFF for offset in offsets)


def _matroska_end(data: memoryview) -> int:
    """Return the end of its segment; 0 if it has no length, because it was streamed out. All elements are checked."""
    # The head comes first, then the segment.
    size, at = _length(data, 4)
    if size is None:
        return 0
    at += size
    if bytes(data[at : at + 4]) != _SEGMENT:
        return at + 4 if at + 4 > len(data) else 0
    size, at = _length(data, at + 4)
    end = len(data) if size is None else at + size
    if end > len(data):
        return end
    # Walk over the elements of the segment.
    while at < end:
        width = 9 - data[at].bit_length()  # of its name
        if width > 4:
            raise _nothing_at(at, "element of Matroska")
        opens = bytes(data[at : at + 4]) == _CLUSTER
        length, content = _length(data, at + width)
        if content == at + width:  # no length
            if end - content < 8:
                break
            raise _nothing_at(at, "element of Matroska")
        if length is None and not opens:
            raise _nothing_at(at, "element of Matroska")
        at = content if opens or length is None else content + length
    if size is not None and at > end:
        raise _nothing_at(end, "end of an element of Matroska")
    return 0 if size is None else end


def _length(data: memoryview, at: int) -> tuple[int | None, int]:
    """Return the length of an EBML element, None if unknown, and the start of its content."""
    first = data[at] if at < len(data) else 0
    width = 9 - first.bit_length()
    if width > 8 or at + width > len(data):
        return len(data) + 1, at  # cut, or no length
    value = int.from_bytes(data[at : at + width], "big") & ((1 << 7 * width) - 1)
    return None if value == (1 << 7 * width) - 1 else value, at + width


def _gif_end(data: memoryview) -> int:
    """Return the end of its blocks, or one byte after the data if they continue."""
    cut = len(data) + 1
    if len(data) < 13:
        return cut
    at = 13 + _palette(data[10])
    while at < len(data):
        kind = data[at]
        if kind == _GIF_END:
            return at + 1
        if kind == _GIF_EXTENSION:
            at += 2
        elif kind == _GIF_IMAGE:
            if at + 10 >= len(data):
                return cut
            at += 11 + _palette(data[at + 9])
        else:
            raise _nothing_at(at, "block of a GIF")
        while True:
            if at >= len(data):
                return cut
            size = data[at]
            at += 1 + size
            if size == 0:
                break
    return cut


def _palette(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0
