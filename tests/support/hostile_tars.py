"""Archives whose headers lie, and compressed ones that hide more than they hold."""

# ruff: noqa: E731 - small makers of bytes are next to the one line that takes them
from __future__ import annotations

import gzip
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import zstandard
from hostile import EITHER, FAILS, GOOD, GOOD_KEYS, MIB, HostileShard, tar_of, zeros


def block(name: str, size: bytes | int, kind: bytes = b"0", *, magic: bytes = b"ustar\x0000") -> bytes:
    """A header with a right checksum; `size` as a number, or its 12 bytes."""
    field = size if isinstance(size, bytes) else b"%011o\0" % size
    head = name.encode().ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + field + b"00000000000\0"
    tail = kind + bytes(100) + magic.ljust(8, b"\0")
    unsigned = (head + b" " * 8 + tail).ljust(512, b"\0")
    return (head + b"%06o\0 " % sum(unsigned) + tail).ljust(512, b"\0")


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def pax(records: Mapping[str, str | bytes]) -> bytes:
    """A pax header block and its records."""
    body = b""
    for key, value in records.items():
        text = value.encode() if isinstance(value, str) else value
        rest = b" " + key.encode() + b"=" + text + b"\n"
        length = len(rest) + 1
        while len(str(length)) + len(rest) != length:
            length += 1
        body += str(length).encode() + rest
    return block("pax", len(body), b"x") + padded(body)


def sparse_1_0(name: str, real_size: int | str, pieces: bytes) -> bytes:
    """A pax 1.0 sparse member: its map, in text, before its data."""
    records = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": name}
    records["GNU.sparse.realsize"] = str(real_size)
    return pax(records) + block(name, len(padded(pieces))) + padded(pieces)


def old_sparse(name: str, real_size: int, numbers: tuple[int, ...] = (0, 512)) -> bytes:
    """A GNU sparse member: its map in its header."""
    head = bytearray(block(name, 512, b"S", magic=b"ustar  "))
    entries = b"".join(b"%011o\0" % number for number in numbers)
    head[386 : 386 + len(entries)] = entries
    head[483:495] = b"%011o\0" % real_size
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head) + bytes(512)


def tar_shards() -> Iterator[HostileShard]:
    def one(name: str, hostile: bytes | Callable[[], bytes], *, heavy: bool = False) -> HostileShard:
        """Write it after good samples, which it must not harm; the last text before it may belong to it."""

        def write(path: Path) -> None:
            before = tar_of({**GOOD, "between.txt": b"the last before"}, ends=False)
            path.write_bytes(before + (hostile if isinstance(hostile, bytes) else hostile()) + bytes(1024))

        return HostileShard(name, ".tar", EITHER, write, good=GOOD_KEYS, heavy=heavy)

    base256 = lambda number: (number | 1 << 95).to_bytes(12, "big")
    yield one("a sparse file of 5 GiB", sparse_1_0("h.jpg", 5 << 30, b"1\n0\n512\n"), heavy=True)
    yield one("an old sparse file of 5 GiB", old_sparse("h.txt", 5 << 30), heavy=True)
    yield one(
        "a sparse map of a million pieces",
        lambda: sparse_1_0("h.txt", 9, b"1000000\n" + b"0\n0\n" * 1_000_000),
        heavy=True,
    )
    yield one("a sparse map that claims 10^18 pieces", sparse_1_0("h.txt", 9, b"1" + b"0" * 18 + b"\n"))
    yield one("a sparse map of 5,000 digits", sparse_1_0("h.txt", 9, b"1" * 5000 + b"\n"))
    yield one("a sparse size of 5,000 digits", sparse_1_0("h.txt", "1" * 5000, b"1\n0\n512\n"))
    yield one("a negative sparse size", sparse_1_0("h.txt", -5, b"1\n0\n512\n"))
    yield one("a sparse map that is negative", sparse_1_0("h.txt", 600, b"1\n-512\n512\n"))
    yield one("a sparse piece beyond the size", sparse_1_0("h.txt", 10, b"1\n99999999999\n512\n"))
    yield one(
        "an old sparse map that is no number", old_sparse("h.txt", 600).replace(b"00000001000\0", b"zzzzzzzzzzz\0", 1)
    )
    for size in (2**63 - 1, 2**64, 10**5000, -1, 0):
        name = str(size) if size < 10**30 else "10^5000"
        yield one(
            f"a pax size of {name}",
            pax({"size": str(size)[:5001] if size < 10**30 else "1" + "0" * 5000})
            + block("h.txt", 5)
            + padded(b"hello"),
        )
    yield one("a pax size of no number", pax({"size": "0x10"}) + block("h.txt", 5) + padded(b"hello"))
    yield one(
        "a pax record that claims more",
        block("p", 512, b"x") + b"999999999 path=x\n".ljust(512, b"\0") + block("h.txt", 5),
    )
    yield one("a pax record of no length", block("p", 512, b"x") + b"0 path=x\n".ljust(512, b"\0") + block("h.txt", 5))
    yield one("a pax record of 5,000 digits", block("p", 5120, b"x") + b"1" * 5120 + block("h.txt", 5))
    yield one("a pax header of 4 GiB", block("p", 4 << 30, b"x"))
    yield one("a long name of 4 GiB", block("././@LongLink", 4 << 30, b"L"))
    yield one("a global pax header of 1 MiB", lambda: block("g", MIB, b"g") + padded(b"30 comment=" + bytes(MIB - 11)))
    yield one("5,000 pax headers in a row", lambda: pax({"comment": "c"}) * 5000 + block("h.txt", 5) + padded(b"hello"))
    yield one(
        "5,000 long names in a row",
        lambda: (block("././@LongLink", 5, b"L") + padded(b"name\0")) * 5000 + block("h.txt", 5),
    )
    yield one("a size of 8 EiB in base 256", block("h.txt", base256(2**63 - 1)))
    yield one("a size of 2^90 in base 256", block("h.txt", base256(2**90)))
    yield one("a negative size in base 256", block("h.txt", b"\xff" * 12))
    yield one("a size that is no number", block("h.txt", b"99999999999\0"))
    yield one("a hard link", block("h.txt", 0, b"1"))
    yield one("a symbolic link", block("h.txt", 0, b"2"))
    yield one("a device", block("h.txt", 0, b"3"))
    yield one("a pipe", block("h.txt", 0, b"6"))
    yield one("a folder that claims content", block("h.txt/", 1 << 40, b"5"))
    yield one("an unknown kind", block("h.txt", 5, b"Z") + padded(b"hello"))
    yield one("a wrong checksum", lambda: bytes(bytearray(block("h.txt", 5)).replace(b"0000644", b"0000645")))
    yield one("100,000 empty members", lambda: b"".join(block(f"{n}.cls", 0) for n in range(100_000)), heavy=True)
    yield one(
        "100,000 members of one sample", lambda: b"".join(block(f"h.{n}.jpg", 0) for n in range(100_000)), heavy=True
    )
    yield one("one name 20,000 times", lambda: (block("h.txt", 1) + padded(b"x")) * 20_000)


def compressed_shards() -> Iterator[HostileShard]:
    def one(
        name: str, suffix: str, make: Callable[[], bytes], fate: str, reason: str = "", *, heavy: bool = False
    ) -> HostileShard:
        def write(path: Path) -> None:
            path.write_bytes(make())

        return HostileShard(name, suffix, fate, write, reason, heavy=heavy)

    level = zstandard.ZstdCompressor(level=1)

    def zstd_zeros(num_bytes: int) -> bytes:
        stream = level.compressobj()
        return b"".join([*(stream.compress(bytes(MIB)) for _ in range(num_bytes // MIB)), stream.flush()])

    ratio = "decompression_ratio"
    yield one("4 GiB of zeros as .tar.zst", ".tar.zst", lambda: zstd_zeros(4 << 30), FAILS, ratio, heavy=True)
    yield one("1 GiB of zeros as .tar.gz", ".tar.gz", lambda: zeros(1 << 30, wbits=31), FAILS, ratio, heavy=True)
    large = lambda: tar_of(GOOD, ends=False) + block("h.jpg", 1 << 30)
    yield one(
        "a tar of 1 GiB of zeros",
        ".tar.zst",
        lambda: level.compress(large()) + zstd_zeros(1 << 30),
        FAILS,
        ratio,
        heavy=True,
    )
    plain = lambda: tar_of(GOOD)
    yield one("a gzip of a gzip", ".tgz", lambda: gzip.compress(gzip.compress(plain())), FAILS)
    yield one("a .tar.zst that is gzip", ".tar.zst", lambda: gzip.compress(plain()), EITHER)
    yield one(
        "100,000 empty gzip members",
        ".tar.gz",
        lambda: gzip.compress(b"", mtime=0) * 100_000 + gzip.compress(plain()),
        EITHER,
        heavy=True,
    )
    yield one(
        "300,000 skippable frames",
        ".tar.zst",
        lambda: b"\x50\x2a\x4d\x18\0\0\0\0" * 300_000 + level.compress(plain()),
        EITHER,
    )
    yield one(
        "300,000 empty frames", ".tar.zst", lambda: level.compress(b"") * 300_000 + level.compress(plain()), EITHER
    )
    yield one("a skippable frame of 4 GiB", ".tar.zst", lambda: b"\x50\x2a\x4d\x18\xff\xff\xff\xff" + bytes(100), FAILS)
    # Single segment, content size in 8 bytes: 2^60 bytes to come.
    yield one(
        "a frame that claims 1 EiB",
        ".tar.zst",
        lambda: b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 60) + bytes(50),
        FAILS,
    )
    # Window descriptor 0xA8: 2^31 bytes.
    yield one("a window of 2 GiB", ".tar.zst", lambda: b"\x28\xb5\x2f\xfd\0\xa8" + b"\1\0\0", FAILS)
    many = lambda: b"".join(b"\x28\xb5\x2f\xfd\0\xa8" + b"\3\0\0" + b"x" for _ in range(5000))
    yield one("5,000 windows of 2 GiB", ".tar.zst", many, FAILS)
    yield one("gzip with a name of 10 MiB", ".tar.gz", lambda: b"\x1f\x8b\x08\x08" + bytes(6) + b"n" * 10 * MIB, FAILS)
    yield one("a magic number alone", ".tar.gz", lambda: b"\x1f\x8b", FAILS)
