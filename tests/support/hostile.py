"""What a hostile file is: a sample or a shard that claims, nests, repeats or hides more than it holds.

Each says what must become of it: "fails" (named, with a reason that matches), "arrives", or "either", where a reader
may well do both. The samples next to it always arrive.
"""

from __future__ import annotations

import io
import struct
import tarfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shard_factory import jpeg

FAILS, ARRIVES, EITHER = "fails", "arrives", "either"
MIB = 1 << 20


@dataclass(frozen=True)
class HostileSample:
    """One sample."""

    name: str  # what it is
    fate: str  # what must become of it
    fields: Callable[[], Mapping[str, bytes]]  # its members, made when asked for: they may be large
    reason: str = ""  # an expression that the reason of a failure matches
    key: str | None = None  # its own, where the key is what is hostile
    heavy: bool = False  # takes seconds to make or to look through


def next_to(text: bytes | None) -> Callable[..., HostileSample]:
    """Return a function that makes samples of one hostile member, and a text if there is one."""
    rest = {} if text is None else {"txt": text}

    def sample(
        name: str, fate: str, field: str, make: Callable[[], bytes], reason: str = "", *, heavy: bool = False
    ) -> HostileSample:
        return HostileSample(name, fate, lambda: {field: make()} | rest, reason, heavy=heavy)

    return sample


@dataclass(frozen=True)
class HostileShard:
    """One shard.

    Attributes:
        name, fate, reason, heavy: as of a sample.
        suffix: of its path.
        write: makes it at a path.
        good: keys of samples in it that must arrive.
    """

    name: str
    suffix: str
    fate: str
    write: Callable[[Path], None]
    reason: str = ""
    good: tuple[str, ...] = ()
    heavy: bool = False


def add_member(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def tar_of(members: Mapping[str, bytes], *, ends: bool = True) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in members.items():
            add_member(archive, name, data)
        size = archive.offset
    return out.getvalue() if ends else out.getvalue()[:size]


GOOD = {"good-0.txt": b"a good neighbour", "good-1.jpg": jpeg(60, 40, 1), "good-1.txt": b"with a picture"}
GOOD_KEYS = ("good-0", "good-1")


def zeros(num_bytes: int, wbits: int = 15) -> bytes:
    """Zeros, deflated: one MiB, flushed so that it may stand again and again."""
    stream = zlib.compressobj(9, wbits=-15)
    block = bytes(MIB)
    body = (stream.compress(block) + stream.flush(zlib.Z_FULL_FLUSH)) * (num_bytes // MIB) + stream.flush()
    if wbits == 15:
        adler = 1
        for _ in range(num_bytes // MIB):
            adler = zlib.adler32(block, adler)
        return b"\x78\xda" + body + struct.pack(">I", adler)
    crc = 0
    for _ in range(num_bytes // MIB):
        crc = zlib.crc32(block, crc)
    return b"\x1f\x8b\x08" + bytes(7) + body + struct.pack("<II", crc, num_bytes & 0xFFFFFFFF)
