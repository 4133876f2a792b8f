"""The format of a clip, from its first bytes; whether the file is complete, without a decoder, as a decoder reads a cut
file as far as possible and reports nothing; its header; and when its pictures are shown.

    plain MP4 and MOV --tables--> times of the pictures --Timeline--> their number and seconds (the header)
    header --sampled--> how many to use --pictures--> which to use

All is in integers and fractions. Files with fragments, several tracks or edits, cropping or encryption are left to a
scan of packets.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.modalities.modality import Header, starts_with
from orchdata.native.scan import FOUND, MORE, UNUSUAL

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
        if box.kind == b"sidx" and box.end <= len(data):  # a segment index says where its pieces end (14496-12, 8.16.3)
            content = data[box.start : box.end]
            head = 28 if content[0] else 20
            first = int.from_bytes(content[head - 8 : head] if content[0] else content[head - 4 : head], "big")
            count = int.from_bytes(content[head + 2 : head + 4], "big")
            offsets = range(head + 4, min(len(content), head + 4 + 12 * count), 12)
            pieces = sum(int.from_bytes(content[offset : offset + 4], "big") & 0x7FFFFFFF for offset in offsets)
            ends = max(ends, box.end + first + pieces)
        at = box.end
        ends = max(ends, at)
    if at + 8 <= len(data):
        raise _nothing_at(at, "box of an MP4")
    return ends


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


_FIRST_BOX: Final = b"ftyp"
_ONE: Final = 1 << 16
_UNIT: Final = 1 << 30
# How a track's matrix turns its pictures: whether width and height are exchanged.
_TURNS: Final[dict[tuple[int, ...], bool]] = {
    (_ONE, 0, 0, _ONE): False,
    (-_ONE, 0, 0, -_ONE): False,
    (0, _ONE, -_ONE, 0): True,
    (0, -_ONE, _ONE, 0): True,
}
_PLAIN_ENTRY: Final = frozenset((b"avc1", b"avc3", b"hvc1", b"hev1", b"mp4v", b"vp09", b"av01"))
_MOST_FRAMES: Final = 1 << 24
_HOLDERS: Final = frozenset(b"edts hoov mdia minf moof moov mvex stbl traf trak udta".split())
"""Boxes that contain boxes."""
_COUNTS: Final = {b"stsz": 8, b"stz2": 8, b"trun": 4}
"""Boxes with a number of frames, and the offset of that number in them."""
_FRAMES_A_BYTE: Final = 2
"""QuickTime's old sound has this number of samples per byte, and each counts as a frame."""
_FEW_EDITS: Final = 4
_FREE_ENTRIES: Final = 1 << 20
"""Number of frame entries, counted once per edit, that files of any size may have."""


class _NotPlain(Exception):
    """The tables are not plain: a scan of packets has to decide."""


def plain_header(data: memoryview, size: int) -> tuple[int, Header]:
    """Return a status of `native.scan`, and the header, of a file of `size` bytes that begins with `data`."""
    if bytes(data[4:8]) != _FIRST_BOX:
        return UNUSUAL, ()
    tables, at = None, 0
    while at + 8 <= size:
        if at + 16 > len(data) and len(data) < size:
            return MORE, ()
        box = next(boxes(data[at:], 0, size - at), None)
        open_ended = not int.from_bytes(data[at : at + 4], "big")
        if box is None or open_ended or box.end > size - at or box.kind in (b"moof", b"sidx"):
            return UNUSUAL, ()
        if box.kind == b"moov":
            if tables is not None:
                return UNUSUAL, ()
            if at + box.end > len(data):
                return MORE, ()
            tables = Box(box.kind, at + box.start, at + box.end)
        at += box.end
    if tables is None:
        return UNUSUAL, ()
    try:
        return FOUND, _header(data, tables, size)
    except (_NotPlain, DecodeError, LookupError, ValueError, StopIteration):
        return UNUSUAL, ()


def check_tables(data: memoryview) -> None:
    """Raise DecodeError for tables with far more frames than the file has bytes, or with many edits of the same frames:
    libav allocates an entry for each before anything is read.
    """
    frames = edits = 0
    pending = [(0, len(data))]
    while pending:
        for kind, start, end in boxes(data, *pending.pop()):
            if kind in _HOLDERS:
                pending.append((start, min(end, len(data))))
            elif kind in _COUNTS:
                at = start + _COUNTS[kind]
                frames += int.from_bytes(data[at : at + 4], "big")
            elif kind == b"elst":
                edits = max(edits, min(int.from_bytes(data[start + 4 : start + 8], "big"), (end - start) // 12))
    if frames > _FRAMES_A_BYTE * len(data):
        raise DecodeError(f"damaged video: its tables list {frames} frames in {len(data)} bytes")
    if edits > _FEW_EDITS and edits * frames > max(_FREE_ENTRIES, len(data)):
        raise DecodeError(
            f"a video of {edits} edits over {frames} frames in {len(data)} bytes: encode it again as it is to be seen"
        )


def _header(data: memoryview, tables: Box, file_size: int) -> Header:
    children = _children(data, tables)
    if b"mvex" in children or b"mvhd" not in children:
        raise _NotPlain
    # The movie must not be turned; only its one track may.
    movie = _content(data, children[b"mvhd"][0])
    at = 32 if movie[0] == 1 else 20
    movie_scale = _uint(movie, 20 if movie[0] == 1 else 12)
    if _matrix(movie, at + 16) != (_ONE, 0, 0, _ONE):
        raise _NotPlain
    tracks = [_children(data, box) for box in children.get(b"trak", ())]
    shown = []
    for each in tracks:
        parts = _children(data, each[b"mdia"][0]) if b"mdia" in each else {}
        if b"hdlr" in parts and bytes(_content(data, parts[b"hdlr"][0])[8:12]) == b"vide":
            shown.append(each)
    if len(shown) != 1:
        raise _NotPlain
    (track,) = shown
    media = _children(data, track[b"mdia"][0])
    table = _children(data, _children(data, media[b"minf"][0])[b"stbl"][0])
    width, height = _size(data, table)
    head = _content(data, track[b"tkhd"][0])
    turned = _TURNS.get(_matrix(head, 52 if head[0] == 1 else 40))
    if turned is None or not head[3] & 1:  # not enabled
        raise _NotPlain
    media_header = _content(data, media[b"mdhd"][0])
    scale = _uint(media_header, 20 if media_header[0] == 1 else 12)
    # Times come from the tables, if an edit shows all frames.
    times = _times(data, table, file_size)
    _check_edits(data, track, times, scale, movie_scale)
    if not scale:
        raise _NotPlain
    line = Timeline.of(times.tolist(), Fraction(1, scale))
    if turned:
        width, height = height, width
    return width, height, line.frames, line.seconds.numerator, line.seconds.denominator


def _times(data: memoryview, table: dict[bytes, list[Box]], file_size: int) -> NDArray[np.int64]:
    """Return when each frame is shown, int64 (frames,), in stored order."""
    counts, deltas = _runs(data, table, b"stts", "i4")
    frames = int(counts.sum())
    sizes = _content(data, table[b"stsz"][0])
    if not 0 < frames <= min(_MOST_FRAMES, file_size) or _uint(sizes, 8) != frames or (deltas <= 0).any():
        raise _NotPlain
    if not _uint(sizes, 4) and not np.frombuffer(sizes, ">u4", frames, 12).all():  # a frame without bytes
        raise _NotPlain
    lasts = np.repeat(deltas, counts)
    times = np.cumsum(lasts) - lasts
    if b"ctts" in table:
        counts, offsets = _runs(data, table, b"ctts", "i4")
        if int(counts.sum()) != frames:
            raise _NotPlain
        times = times + np.repeat(offsets, counts)
    if b"stss" in table:
        content = _content(data, table[b"stss"][0])
        if not _uint(content, 4) or _uint(content, 8) != 1 or times[0] != times.min():
            raise _NotPlain  # frames are shown before the first keyframe
    return times


def _runs(
    data: memoryview, table: dict[bytes, list[Box]], kind: bytes, dtype: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return pairs of (number of repetitions, value)."""
    content = _content(data, table[kind][0])
    count = _uint(content, 4)
    pairs = np.frombuffer(content, f">{dtype}", 2 * count, 8).reshape(count, 2).astype(np.int64)
    if (pairs[:, 0] < 0).any() or int(pairs[:, 0].sum()) > _MOST_FRAMES:
        raise _NotPlain
    return pairs[:, 0], pairs[:, 1]


def _check_edits(
    data: memoryview, track: dict[bytes, list[Box]], times: NDArray[np.int64], scale: int, movie_scale: int
) -> None:
    """Raise _NotPlain if an edit leaves frames out: only a single edit that shows all of them is plain."""
    if b"edts" not in track:
        return
    children = _children(data, track[b"edts"][0])
    content = _content(data, children[b"elst"][0])
    wide = content[0] == 1
    if _uint(content, 4) != 1:
        raise _NotPlain
    length = int.from_bytes(content[8 : 16 if wide else 12], "big")
    start = int.from_bytes(content[16:24] if wide else content[12:16], "big", signed=True)
    rate = _uint(content, 24 if wide else 16)
    first, last = int(times.min()), int(times.max())
    if rate != _ONE or not 0 <= start <= first:
        raise _NotPlain
    if length and (last + 1 - start) * movie_scale >= length * scale:
        raise _NotPlain


def _size(data: memoryview, table: dict[bytes, list[Box]]) -> tuple[int, int]:
    """Return width and height of the frames, as stored."""
    content = _content(data, table[b"stsd"][0])
    start = table[b"stsd"][0].start
    if _uint(content, 4) != 1:
        raise _NotPlain
    entry = next(boxes(data, start + 8, table[b"stsd"][0].end))
    if entry.kind not in _PLAIN_ENTRY or entry.end > table[b"stsd"][0].end:
        raise _NotPlain
    if any(box.kind == b"clap" for box in boxes(data, entry.start + 78, entry.end)):
        raise _NotPlain
    width = int.from_bytes(data[entry.start + 24 : entry.start + 26], "big")
    height = int.from_bytes(data[entry.start + 26 : entry.start + 28], "big")
    if not width or not height:
        raise _NotPlain
    return width, height


def _matrix(content: memoryview, at: int) -> tuple[int, ...]:
    values = np.frombuffer(content, ">i4", 9, at).tolist()
    if values[2] or values[5] or values[8] != _UNIT:
        raise _NotPlain
    return values[0], values[1], values[3], values[4]


def _children(data: memoryview, parent: Box) -> dict[bytes, list[Box]]:
    """Return the boxes in a box, by type."""
    children: dict[bytes, list[Box]] = {}
    for box in boxes(data, parent.start, parent.end):
        if box.end > parent.end:
            raise _NotPlain
        children.setdefault(box.kind, []).append(box)
    return children


def _content(data: memoryview, box: Box) -> memoryview:
    return data[box.start : box.end]


def _uint(content: memoryview, at: int) -> int:
    if at + 4 > len(content):
        raise _NotPlain
    return int.from_bytes(content[at : at + 4], "big")


ENCODE_AGAIN: Final = "(`ffmpeg -i in.mp4 out.mp4` encodes again what can be recovered)"
"""The way out for a clip that players can show partly."""
_INT32_MAX: Final = 2**31 - 1
_FINEST: Final = 1_000_000
_DEFAULT_RATE: Final = 25
"""Pictures per second of a clip with one picture."""
_MOST_TICKS: Final = 2**62
_SIMPLE: Final = 100
"""The largest denominator of a plausible rate."""
TIMING: Final = re.compile(r"fps|rate|stamp|time|start|end|second|duration|trim|clip|total|indices", re.IGNORECASE)
"""Keys about when the frames of a video are shown, or about which frames: they are read, or an error."""


@dataclass(frozen=True)
class Timeline:
    """The pictures of a clip in the order in which they are shown."""

    ticks: NDArray[np.int64]  # (frames,), time of each picture, ascending, in units of the file
    seconds: Fraction  # length of the clip; its numerator and denominator are below 2**31
    is_constant: bool  # every picture is within half a step of its time at a constant rate
    _tick: Fraction = Fraction(1)

    @property
    def frames(self) -> int:
        return len(self.ticks)

    def pictures(self, count: int) -> list[int]:
        """Return `count` of the pictures, ascending: those that are shown at 0, 1/count, 2/count, ... of the clip.

        However the file rounds times of a constant rate. At a variable rate a picture may be used several times.
        """
        if self.is_constant:
            return [number * self.frames // count for number in range(count)]
        first, span = int(self.ticks[0]), self._span
        moments = [first + span * number / count for number in range(count)]
        # A tick is an integer: the last one at or before a moment is at or before its integer part.
        whole = np.array([moment.numerator // moment.denominator for moment in moments], np.int64)
        pictures: list[int] = (np.searchsorted(self.ticks, whole, side="right") - 1).tolist()
        return pictures

    @property
    def _span(self) -> Fraction:
        """Length of the clip in ticks, from its seconds."""
        return self.seconds / self._tick

    @classmethod
    def of(cls, ticks: list[int], tick: Fraction, last: int | None = None) -> Timeline:
        """Build a timeline from times in any order, in ticks of `tick` seconds. Rounded times of a steady rate give
        that rate.

        `last` is the duration of the last picture in ticks; None: the mean duration, as most files only guess the last.
        Raises DecodeError for no picture, or two pictures at the same time.
        """
        if not ticks:
            raise DecodeError("video without a single frame")
        if not (tick > 0 and min(ticks) > -_MOST_TICKS and max(ticks) < _MOST_TICKS):
            raise DecodeError("damaged video: it shows its frames at impossible times")
        at = np.sort(np.array(ticks, np.int64))
        spread, count = int(at[-1]) - int(at[0]), len(at)
        if count == 1:
            return cls(at, _bounded(last * tick) if last else Fraction(1, _DEFAULT_RATE), True, tick)
        if not (np.diff(at) > 0).all():
            raise DecodeError(f"damaged video: it shows two frames at one time {ENCODE_AGAIN}")
        is_constant = spread * (count - 1) < _MOST_TICKS
        if is_constant:
            off = (at - at[0]) * (count - 1) - np.arange(count, dtype=np.int64) * spread
            is_constant = bool((2 * np.abs(off) <= spread).all())
        seconds = (spread + last) * tick if last else Fraction(spread * count, count - 1) * tick
        if is_constant and not last:
            seconds = _steady(at, seconds, tick)
        return cls(at, _bounded(seconds), is_constant, tick)


def _steady(at: NDArray[np.int64], seconds: Fraction, tick: Fraction) -> Fraction:
    """Return the exact length of a clip whose times are those of a usual rate, each rounded to a tick; else as
    measured.
    """
    gaps, count = np.diff(at), len(at)
    if (gaps == gaps[0]).all():
        return seconds
    measured = count / seconds
    thousandths = round(measured * 1001 / 1000)
    usual = (Fraction(round(measured)), Fraction(1000 * thousandths, 1001), measured.limit_denominator(_SIMPLE))
    candidates = [(_off(at, 1 / (rate * tick)), count / rate) for rate in usual if rate]
    off, best = min(candidates, key=lambda each: each[0], default=(2.0, seconds))
    return best if off <= 1 else seconds


def _off(at: NDArray[np.int64], step: Fraction) -> float:
    """Return how far times differ from steps of `step` ticks: less than a tick in all if they are rounded."""
    past, up, down = at - at[0], step.numerator, step.denominator
    if max(len(at) * up, (int(past[-1]) + 1) * down) >= _MOST_TICKS:
        return math.inf
    return float(np.ptp(np.arange(len(at)) * up - past * down)) / down


def _bounded(seconds: Fraction) -> Fraction:
    """Return the same value, or one near it, with a numerator and denominator of 31 bits, as in the index."""
    if max(seconds.numerator, seconds.denominator) <= _INT32_MAX:
        return seconds
    most = _INT32_MAX // (int(seconds) + 1)
    return max(seconds.limit_denominator(max(1, min(_FINEST, most))), Fraction(1, _FINEST))


def sampled(frames: int, seconds: Fraction, fps: Fraction, least: int, most: int, multiple: int) -> int:
    """Return how many pictures of a clip to use: `fps` per second, between `least` and `most`, never more than
    `frames`, and a whole number of `multiple`s if there are that many.
    """
    wanted = seconds * fps
    count = min(max(wanted.numerator // wanted.denominator, least, 1), most, frames)
    return count - count % multiple if count >= multiple else count
