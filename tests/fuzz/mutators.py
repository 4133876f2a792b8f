"""Mutations that know the structure of what they change: (kind, number, seed) -> the same bytes, anywhere."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from hostile_media import mend_ogg

Random = np.random.Generator
EDGE_VALUES = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, (1 << 63) - 1)


class Operation(NamedTuple):
    """One change; `seed` draws all that it needs, so that it means the same alone."""

    name: str
    seed: int


def operations(kind: str, number: int, seed: int) -> list[Operation]:
    """What is done to the seed file of a case."""
    random = np.random.default_rng([seed, zlib.crc32(kind.encode()), number])
    names = [*MUTATORS, *["digits"] * (2 * len(MUTATORS) if kind in ("json", "txt") else 0)]
    chosen = random.choice(len(names), size=int(random.choice((1, 1, 1, 2, 2, 3, 4))))
    return [Operation(names[which], int(random.integers(1 << 32))) for which in chosen.tolist()]


def mutated(kind: str, files: Sequence[bytes], number: int, done: Sequence[Operation]) -> bytes:
    """The bytes of a case, with checksums mended in two of three, so that the data after them is read."""
    data = files[number % len(files)]
    for operation in done:
        data = MUTATORS[operation.name](data, files, np.random.default_rng(operation.seed))
    mend = MENDERS.get(kind)
    return mend(data) if mend is not None and number % 3 else data


def _place(data: bytes, random: Random) -> int:
    """Rather in a header or a footer."""
    where = random.integers(4)
    if where == 0:
        return int(random.integers(len(data) + 1))
    reach = min(len(data), (32, 256, 256)[where - 1])
    return int(random.integers(reach + 1)) if where < 3 else len(data) - int(random.integers(reach + 1))


def _flip(data: bytes, _files: Sequence[bytes], random: Random) -> bytes:
    changed = bytearray(data)
    for _ in range(int(random.integers(1, 9))):
        if place := _place(data, random):
            changed[place - 1] ^= 1 << int(random.integers(8))
    return bytes(changed)


def _length(data: bytes, _files: Sequence[bytes], random: Random) -> bytes:
    """Set a number, where one may be, to an edge value or to one that is close to the old value."""
    width, order = int(random.choice((1, 2, 4, 8))), str(random.choice(("little", "big")))
    place = max(0, min(_place(data, random), len(data) - width))
    old = int.from_bytes(data[place : place + width], order)  # type: ignore[arg-type]
    near = (old + 1, old - 1, 2 * old, old // 2, old << 8, len(data), len(data) - place)
    value = int(random.choice(EDGE_VALUES[:-1])) if random.integers(2) else near[int(random.integers(len(near)))]
    return data[:place] + (value % (1 << 8 * width)).to_bytes(width, order) + data[place + width :]  # type: ignore[arg-type]


def _cut(data: bytes, _files: Sequence[bytes], random: Random) -> bytes:
    return data[: _place(data, random)]


def _remove(data: bytes, _files: Sequence[bytes], random: Random) -> bytes:
    place = _place(data, random)
    return data[:place] + data[place + int(random.integers(1, 65)) :]


def _repeat(data: bytes, _files: Sequence[bytes], random: Random) -> bytes:
    place, length = _place(data, random), int(random.integers(1, 513))
    return data[:place] + data[place : place + length] * int(random.integers(2, 9)) + data[place:]


def _splice(data: bytes, files: Sequence[bytes], random: Random) -> bytes:
    """A stretch of another file, in place of as much or between."""
    other = files[int(random.integers(len(files)))]
    start, length = _place(other, random), int(random.integers(1, 513))
    place = _place(data, random)
    return data[:place] + other[start : start + length] + data[place + (length if random.integers(2) else 0) :]


def _swap_halves(data: bytes, files: Sequence[bytes], random: Random) -> bytes:
    other = files[int(random.integers(len(files)))]
    return data[: _place(data, random)] + other[_place(other, random) :]


def _grow(data: bytes, _files: Sequence[bytes], random: Random) -> bytes:
    """A header, followed by more bytes than it ever had."""
    fill = bytes([int(random.choice((0, 0xFF, 0x20)))]) if random.integers(2) else random.bytes(64)
    return data[: max(1, _place(data, random))] + fill * int(random.integers(1, 4096))


def _digits(data: bytes, _files: Sequence[bytes], random: Random) -> bytes:
    """Text: another token where a digit, bracket or quote stood."""
    places = [place for place, byte in enumerate(data[:4096]) if byte in b'0123456789{}[]",:<>\\']
    if not places:
        return data
    place = places[int(random.integers(len(places)))]
    tokens = (
        b"",
        b"null",
        b"1e999",
        b"-1",
        b'"',
        b"{",
        b"}",
        b"[" * 300,
        b"\\ud800",
        b"\0",
        b"\xff",
        b"<image>",
        b"<audio>",
    )
    return data[:place] + tokens[int(random.integers(len(tokens)))] + data[place + 1 :]


MUTATORS: dict[str, Callable[[bytes, Sequence[bytes], Random], bytes]] = {
    "flip": _flip,
    "length": _length,
    "length again": _length,
    "cut": _cut,
    "remove": _remove,
    "repeat": _repeat,
    "splice": _splice,
    "other end": _swap_halves,
    "grow": _grow,
    "digits": _digits,
}


def _mend_png(data: bytes) -> bytes:
    """Right checksums of all chunks that can be found."""
    out, place = bytearray(data), 8
    while place + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, place)
        end = place + 8 + length
        if end + 4 > len(data):
            break
        out[end : end + 4] = struct.pack(">I", zlib.crc32(data[place + 4 : end]))
        place = end + 4
    return bytes(out)


def _mend_tar(data: bytes) -> bytes:
    """Right checksums of all blocks that look like a header."""
    out = bytearray(data)
    for start in range(0, len(data) - 511, 512):
        if data[start + 257 : start + 262] == b"ustar":
            total = sum(data[start : start + 148]) + 8 * 32 + sum(data[start + 156 : start + 512])
            out[start + 148 : start + 156] = b"%06o\0 " % total
    return bytes(out)


MENDERS = {"png": _mend_png, "tar": _mend_tar, "ogg": mend_ogg}
