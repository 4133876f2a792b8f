"""Detects cut audio: compares what a file declares with what it contains. libsndfile shortens such a clip silently.

It reads the sizes of RIFF (WAV), RF64, W64, AIFF, AIFC, AU and SPHERE, the pages of Ogg, and an MP3's Xing, Info or
VBRI tag. Programs that write to a pipe leave placeholders for sizes: those declare nothing.
"""

from __future__ import annotations

import re
import struct
from functools import lru_cache
from math import prod
from typing import Final, Literal, NamedTuple, TypeAlias

TOLERANCE_SECONDS: Final = 0.05
TOLERANCE_SHARE: Final = 0.01
"""A clip may lack this much of what it declares, the larger of the two."""

_MOST_CHUNKS: Final = 10_000
_MP3_SEARCH_BYTES: Final = 4096
_ID3V1_BYTES: Final = 128
_KBITS: Final = (
    (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
)
_SEVERAL: Final = "after one another, of which only the first would be read: join or split them"

Payload = bytes | memoryview
_Order: TypeAlias = Literal["little", "big"]


class Extent(NamedTuple):
    """The declared and the actual amount of sound in a file, both in the same unit: bytes, or frames."""

    declared: int
    present: int


def cut_reason(data: Payload, frames: int, rate: int, *, is_mp3: bool = False) -> str | None:
    """Return why a clip is not complete, or None; `frames` per channel are decoded of the whole file."""
    head = bytes(data[:16])
    if is_mp3:
        extent = _mp3(data, frames, rate)
    else:
        extent = _ogg(bytes(data)) if head[:4] == b"OggS" else _container(head, data)
    if extent is None or isinstance(extent, str):
        return extent
    seconds = frames / rate
    declared_seconds = seconds * extent.declared / max(1, extent.present)
    if not _lacks(seconds, declared_seconds):
        return None
    share = max(0, extent.present) / extent.declared
    return f"cut: {seconds:.3f} of {declared_seconds:.3f} s of sound are there, {share:.0%} of what the header declares"


def _lacks(seconds: float, declared: float) -> bool:
    return declared - seconds > max(TOLERANCE_SECONDS, TOLERANCE_SHARE * declared)


def _container(head: bytes, data: Payload) -> Extent | None:
    magic = head[:4]
    if magic in (b"RIFF", b"RIFX", b"FORM"):
        size, start = sound_chunk(data, "little" if magic == b"RIFF" else "big")
        return None if _is_placeholder(size) else Extent(size, len(data) - start)
    if magic in (b"RF64", b"BW64"):
        return _rf64(data)
    if magic == b"riff":
        return _w64(data)
    if magic in (b".snd", b"dns."):
        order: _Order = "big" if magic == b".snd" else "little"
        start, size = int.from_bytes(head[4:8], order), int.from_bytes(head[8:12], order)
        return None if _is_placeholder(size) else Extent(size, len(data) - start)
    return _sphere(data) if head.startswith(b"NIST_1A") else None


def _is_placeholder(size: int) -> bool:
    """Whether a size is a placeholder for an unknown one: 0, or about the maximum of 31 or 32 bits."""
    return size == 0 or 0x7FFF0000 <= size <= 0x80000000 or size >= 0xFFFF0000


def sound_chunk(data: Payload, order: _Order) -> tuple[int, int]:
    """Return (declared bytes, start) of the sound chunk of a RIFF or IFF file; (0, 0) without such a chunk."""
    at = 12
    for _ in range(_MOST_CHUNKS):
        if at + 8 > len(data):
            break
        name, size = bytes(data[at : at + 4]), int.from_bytes(data[at + 4 : at + 8], order)
        if name in (b"data", b"BODY"):
            return size, at + 8
        if name == b"SSND":  # an offset and a block size come first
            return size if _is_placeholder(size) else size - 8, at + 16
        at += 8 + size + (size & 1)
    return 0, 0


def unclosed_wav(data: Payload) -> int:
    """Return the start of the sound in a WAV that was piped out with sizes of 0; 0 for any other file."""
    size, start = sound_chunk(data, "little") if bytes(data[:4]) == b"RIFF" else (0, 0)
    if size or not start or start == len(data):
        return 0
    next_name, next_size = bytes(data[start : start + 4]), int.from_bytes(data[start + 4 : start + 8], "little")
    is_chunk = next_name.isascii() and next_name.decode().isprintable() and start + 8 + next_size <= len(data)
    return 0 if is_chunk else start  # a clip that is really empty may have chunks after it


def _rf64(data: Payload) -> Extent | None:
    size, start = sound_chunk(data, "little")
    if size == 0xFFFFFFFF and bytes(data[12:16]) == b"ds64":
        size = int.from_bytes(data[28:36], "little")
    return None if size in (0, 0xFFFFFFFF) or size >> 62 else Extent(size, len(data) - start)


def _w64(data: Payload) -> Extent | None:
    at = 40  # RIFF's GUID and size, WAVE's GUID
    for _ in range(_MOST_CHUNKS):
        if at + 24 > len(data):
            break
        size = int.from_bytes(data[at + 16 : at + 24], "little")  # with its own 24 bytes
        if bytes(data[at : at + 4]) == b"data":
            return Extent(size - 24, len(data) - at - 24) if 24 < size < 1 << 62 else None
        at += max(24, (size + 7) & ~7)
    return None


def _sphere(data: Payload) -> Extent | None:
    head = bytes(data[:1024])
    values = dict(re.findall(rb"\n(sample_count|channel_count|sample_n_bytes) -(?:i|s\d+) (\d{1,12})(?=\n)", head))
    if re.search(rb"\nsample_coding -s\d+ (?:ulaw|alaw|mu-law)", head):
        values.setdefault(b"sample_n_bytes", b"1")
    start = re.match(rb"NIST_1A\n\s*(\d{1,6})\n", head)
    if start is None or len(values) < 3:
        return None
    return Extent(prod(map(int, values.values())), len(data) - int(start[1]))


def _ogg(data: bytes) -> Extent | str | None:
    """Return a reason if sound is certainly missing according to the pages, or the extent if the last page is cut."""
    at, granule = 0, 0
    open_streams: set[int] = set()
    sound_begun = unfinished = False
    while (at := data.find(b"OggS", at)) >= 0:
        segments = data[at + 26] if at + 26 < len(data) else 0
        header = at + 27 + segments
        end = header + sum(data[at + 27 : header])
        serial, flags = int.from_bytes(data[at + 14 : at + 18], "little"), data[at + 5] if at + 5 < len(data) else 0
        if at + 18 <= len(data) and (data[at + 4] or flags > 7 or (not flags & 2 and serial not in open_streams)):
            at += 4  # no page
            continue
        # The last page is cut.
        if at + 27 > len(data) or end > len(data):
            if not open_streams:
                break  # data after the end of the sound
            last = int.from_bytes(data[at + 6 : at + 14], "little")
            if flags & 4 and granule < last < 1 << 62:
                return Extent(last, granule)
            return "cut: it ends inside an Ogg page"
        # A page that begins a stream, or continues one.
        if flags & 2:
            if sound_begun:
                return f"several Ogg streams {_SEVERAL}"
            open_streams.add(serial)
        else:
            sound_begun = True
            unfinished = not flags & 4 and segments > 0 and data[header - 1] == 255
            position = int.from_bytes(data[at + 6 : at + 14], "little")
            granule = position if position < 1 << 62 else granule
        if flags & 4:
            open_streams.discard(serial)
        at = end
    return "cut: it ends inside an Ogg packet" if unfinished else None


class Mp3(NamedTuple):
    """What the first frame of an MP3 says."""

    at: int  # where it is
    samples: int  # in each frame
    tagged: int | None  # frames by its Xing, Info or VBRI tag, -1 if it does not say it; None for a frame of sound
    added: int  # samples that the encoder added at both ends, by a tag of LAME
    end: int  # of the stream, by the tag
    is_sure: bool  # the frames begin where they should, and need no earlier ones


def read_mp3(data: Payload) -> Mp3 | None:
    """Return what the first frame of an MP3 says; None without one."""
    start, end = 0, len(data)
    while bytes(data[start : start + 3]) == b"ID3" and start + 10 <= end:
        size = 0
        for byte in data[start + 6 : start + 10]:
            size = size << 7 | byte & 0x7F
        start += 10 + size + (10 if data[start + 5] & 0x10 else 0)
    window = bytes(data[start : start + _MP3_SEARCH_BYTES])
    for match in re.finditer(rb"(?s)\xff[\xe2-\xff]..", window):
        frame = _frame(int.from_bytes(match[0], "big"))
        if frame is None:
            continue
        at, (_, samples, mono) = start + match.start(), frame
        side = (17 if mono else 32) if samples == 1152 else (9 if mono else 17)

        def number(place: int, size: int = 4) -> int:
            return int.from_bytes(data[place : place + size], "big")

        # A frame of a tag: how many follow, and their bytes. LAME's fields follow those that the flags name.
        tag, vbri = at + 4 + side, at + 36
        if bytes(data[tag : tag + 4]) in (b"Xing", b"Info"):
            flags = number(tag + 4)
            has_frames, has_bytes = flags & 1, flags >> 1 & 1
            more = tag + 8 + 4 * has_frames
            delays = number(more + 4 * has_bytes + 100 * (flags >> 2 & 1) + 4 * (flags >> 3 & 1) + 21, 3)
            stated = number(more) if has_frames and has_bytes else 0
            tagged = number(tag + 8) if has_frames else -1
            added = (delays >> 12) + (delays & 0xFFF)
            return Mp3(at, samples, tagged, added, at + stated if stated else end, match.start() == 0)
        if bytes(data[vbri : vbri + 4]) == b"VBRI":
            return Mp3(at, samples, number(at + 50), 0, end, False)
        begin = number(at + (4 if data[at + 1] & 1 else 6), 2) >> (7 if samples == 1152 else 8)
        return Mp3(at, samples, None, 0, end, match.start() == 0 and begin == 0)
    return None


def walk_mp3(data: Payload, at: int) -> tuple[int, bool, bool]:
    """Return the number of frames from `at` on, whether they fill the file, and whether their bit rates differ."""
    count, end, first, bits = 0, len(data), None, set()
    if bytes(data[-_ID3V1_BYTES:][:3]) == b"TAG":
        end -= _ID3V1_BYTES
    while at + 4 <= end:
        (header,) = struct.unpack_from(">I", data, at)
        frame = _frame(header)
        kind = header >> 19, header >> 10 & 3, header >> 6 & 3 == 3
        first = kind if first is None else first
        if frame is None or kind != first or at + frame[0] > end:
            break
        count, at = count + 1, at + frame[0]
        bits.add(header >> 12 & 15)
    return count, at == end, len(bits) > 1


@lru_cache(1024)
def _frame(header: int) -> tuple[int, int, bool] | None:
    """Return (bytes, samples, whether it is mono) of a layer III frame; None if it is none."""
    version, kbits, rate = header >> 19 & 3, header >> 12 & 15, header >> 10 & 3
    if header >> 21 != 0x7FF or version == 1 or header >> 17 & 3 != 1 or kbits in (0, 15) or rate == 3:
        return None
    samples, hertz = (1152 if version == 3 else 576), (44100, 48000, 32000)[rate] >> (2, 0, 1, 0)[version]
    length = samples // 8 * _KBITS[version == 3][kbits] * 1000 // hertz + (header >> 9 & 1)
    return (length, samples, header >> 6 & 3 == 3) if length >= 40 else None


def _mp3(data: Payload, frames: int, rate: int) -> Extent | str | None:
    """Return what a tag declares, or a reason: several streams, or a variable bit rate that no tag tells."""
    mp3 = read_mp3(data)
    if mp3 is None:
        return None
    if mp3.tagged is None:
        count, is_whole, is_variable = walk_mp3(data, mp3.at)
        if _lacks(frames / rate, count * mp3.samples / rate) or (is_variable and not is_whole):
            return (
                "VBR MP3 without a Xing tag: the decoder may stop before its end; remux it, for example "
                "ffmpeg -i in.mp3 -c copy out.mp3"
            )
        return None
    rest = data[mp3.end :]
    if len(rest) > _ID3V1_BYTES and (other := read_mp3(rest)) is not None:
        count, _, _ = walk_mp3(rest, other.at)
        if count > 1 and _lacks(frames / rate, (frames + count * other.samples) / rate):
            return f"several MP3 streams {_SEVERAL}"
    # Encoders disagree whether the tag's own frame counts.
    return Extent((mp3.tagged - 1) * mp3.samples - mp3.added, frames) if mp3.tagged > 0 else None
