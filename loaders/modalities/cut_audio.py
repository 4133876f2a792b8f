"""Detects cut audio: compares what a file declares with what it contains. libsndfile shortens such a clip silently.

It reads the sizes of RIFF (WAV), RF64, W64, AIFF, AIFC, AU and SPHERE, the pages of Ogg, and an MP3's Xing, Info or
VBRI tag. Programs that write to a pipe leave placeholders for sizes: those declare nothing.
"""

from __future__ import annotations

import re
import struct
from math import prod
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

TOLERANCE_SECONDS: Final = 0.05
TOLERANCE_SHARE: Final = 0.01
"""A clip may lack this much of what it declares, the larger of the two."""

_MOST_CHUNKS: Final = 10_000
_MP3_SEARCH_BYTES: Final = 4096
_LEAST_FLAC_FRAME: Final = 10  # header 6, subframe 2, checksum 2

Payload = bytes | memoryview
_Order: TypeAlias = Literal["little", "big"]


class Extent(NamedTuple):
    """The declared and the actual amount of sound in a file, both in the same unit: bytes, or frames."""

    declared: int
    present: int


class PlainWav(NamedTuple):
    """The samples of a WAV as a view of the file, int16 (num_frames, num_channels), and their rate in Hz."""

    samples: NDArray[np.int16]
    rate: int


def plain_wav(data: Payload) -> PlainWav | None:
    """Return the samples of a plain 16-bit WAV, as most programs write it: its format first, then at most one chunk
    before the samples, then the samples to the end. None for any other, which libsndfile reads.
    """
    if bytes(data[:4]) != b"RIFF" or bytes(data[8:16]) != b"WAVEfmt " or len(data) < 44:
        return None
    size, kind, channels, rate, _, frame_bytes, bits = struct.unpack_from("<IHHIIHH", data, 16)
    if (
        (size, kind, bits) != (16, 1, 16)
        or not 0 < channels <= 8
        or frame_bytes != 2 * channels
        or not 0 < rate < 1 << 31
    ):
        return None
    between = 0
    if bytes(data[36:40]) in (b"LIST", b"fact"):
        between = 8 + int.from_bytes(data[40:44], "little")
    size, start = _chunk(data, "little")
    if not size or start != 44 + between + (between & 1) or start + size != len(data) or size % frame_bytes:
        return None
    return PlainWav(np.frombuffer(data, "<i2", offset=start).reshape(-1, channels), rate)


def cut_reason(data: Payload, frames: int, rate: int) -> str | None:
    """Return why a clip is not complete, or None.

    Args:
        data: the whole file.
        frames: number of frames per channel in the file; rate: in Hz.
    """
    head = bytes(data[:16])
    if head[:4] == b"OggS":
        extent = _ogg(bytes(data))
        if isinstance(extent, str):
            return extent
    else:
        extent = _mp3(data, frames) if _is_mp3(head) else _container(head, data)
    if extent is None or extent.present >= extent.declared:
        return None
    seconds = frames / rate
    declared_seconds = seconds * extent.declared / max(1, extent.present)
    if declared_seconds - seconds <= max(TOLERANCE_SECONDS, TOLERANCE_SHARE * declared_seconds):
        return None
    share = max(0, extent.present) / extent.declared
    return f"cut: {seconds:.3f} of {declared_seconds:.3f} s of sound are there, {share:.0%} of what the header declares"


def flac_reason(data: Payload, frames: int) -> str | None:
    """Return why a FLAC cannot contain the frames in its header, or None. Smaller cuts show when it is decoded."""
    least = least_flac_bytes(data, frames)
    if len(data) >= least:
        return None
    return f"cut: {len(data)} bytes cannot hold the {frames} frames that its header tells"


def least_flac_bytes(data: Payload, frames: int) -> int:
    """Return the minimum size of a FLAC with this number of frames: the largest blocks, each of the smallest size."""
    if bytes(data[:4]) != b"fLaC":
        return 0
    largest_block = max(1, int.from_bytes(data[10:12], "big"))
    smallest = max(_LEAST_FLAC_FRAME, int.from_bytes(data[12:15], "big"))
    return 42 + (-(-frames // largest_block) - 1) * smallest  # the last block may be shorter


def _container(head: bytes, data: Payload) -> Extent | None:
    magic = head[:4]
    if magic in (b"RIFF", b"RIFX", b"FORM"):
        size, start = _chunk(data, "little" if magic == b"RIFF" else "big")
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


def _chunk(data: Payload, order: _Order) -> tuple[int, int]:
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
    size, start = _chunk(data, "little") if bytes(data[:4]) == b"RIFF" else (0, 0)
    if size or not start or start == len(data):
        return 0
    next_name, next_size = bytes(data[start : start + 4]), int.from_bytes(data[start + 4 : start + 8], "little")
    is_chunk = next_name.isascii() and next_name.decode().isprintable() and start + 8 + next_size <= len(data)
    return 0 if is_chunk else start  # a clip that is really empty may have chunks after it


def _rf64(data: Payload) -> Extent | None:
    size, start = _chunk(data, "little")
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
                return (
                    "several Ogg streams after one another, of which only the first would be read: join or split them"
                )
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


def _is_mp3(head: bytes) -> bool:
    return head[:3] == b"ID3" or (len(head) > 1 and head[0] == 0xFF and head[1] & 0xE6 == 0xE2)


def _mp3(data: Payload, frames: int) -> Extent | None:
    """Return what a Xing, Info or VBRI tag declares; None without one."""
    first = _mp3_first_frame(data)
    if first is None:
        return None
    at, samples, side = first
    tag = at + 4 + side
    name = bytes(data[tag : tag + 4])
    if name in (b"Xing", b"Info"):
        flags = int.from_bytes(data[tag + 4 : tag + 8], "big")
        if not flags & 1:
            return None
        declared = int.from_bytes(data[tag + 8 : tag + 12], "big") * samples
        # LAME's fields follow those that the flags name: 21 bytes on, the padding by the encoder and the last frame.
        added = tag + 12 + 4 * (flags >> 1 & 1) + 100 * (flags >> 2 & 1) + 4 * (flags >> 3 & 1) + 21
        delay = int.from_bytes(data[added : added + 3], "big")
        declared -= (delay >> 12) + (delay & 0xFFF)
    elif bytes(data[at + 36 : at + 40]) == b"VBRI":
        declared = int.from_bytes(data[at + 50 : at + 54], "big") * samples
    else:
        return None
    return Extent(declared - samples, frames)  # encoders disagree whether the tag's own frame counts


def mp3_stream_bytes(data: Payload) -> int | None:
    """Return the end of the stream by an MP3's tag: None without a tag, the file's end if the tag does not say it."""
    first = _mp3_first_frame(data)
    if first is None:
        return None
    at, _, side = first
    tag = at + 4 + side
    if bytes(data[tag : tag + 4]) not in (b"Xing", b"Info"):
        return len(data) if bytes(data[at + 36 : at + 40]) == b"VBRI" else None
    flags = int.from_bytes(data[tag + 4 : tag + 8], "big")
    if flags & 3 != 3:
        return len(data)
    size = int.from_bytes(data[tag + 12 : tag + 16], "big")
    return at + size if size else len(data)


def lacks(frames: int, declared: int, rate: int) -> bool:
    """Whether a clip lacks more of its declared length than is tolerated."""
    return declared - frames > max(TOLERANCE_SECONDS * rate, TOLERANCE_SHARE * declared)


def _mp3_first_frame(data: Payload) -> tuple[int, int, int] | None:
    """Return (offset, samples, bytes of side information) of the first frame."""
    at = 0
    while bytes(data[at : at + 3]) == b"ID3" and at + 10 <= len(data):
        size = 0
        for byte in data[at + 6 : at + 10]:
            size = size << 7 | byte & 0x7F
        at += 10 + size + (10 if data[at + 5] & 0x10 else 0)
    window = bytes(data[at : at + _MP3_SEARCH_BYTES])
    for match in re.finditer(rb"\xff[\xe2-\xff]", window):
        header = int.from_bytes(window[match.start() : match.start() + 4], "big")
        version, layer = header >> 19 & 3, header >> 17 & 3
        if version != 1 and layer == 1 and header >> 12 & 15 not in (0, 15) and header >> 10 & 3 != 3:
            first, mono = version == 3, header >> 6 & 3 == 3
            side = (17 if mono else 32) if first else (9 if mono else 17)
            return at + match.start(), 1152 if first else 576, side
    return None
