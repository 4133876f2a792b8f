"""Shards whose headers lie, that hide or decode to more than they hold, count what is not there, or are damaged."""

# ruff: noqa: E731 - small makers of bytes are next to the one line that takes them
from __future__ import annotations

import gzip
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from hostile import EITHER, FAILS, GOOD, GOOD_KEYS, MIB, HostileShard, tar_of, zeros
from shard_factory import jpeg


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


def old_sparse(name: str, real_size: int) -> bytes:
    """A GNU sparse member: its map in its header."""
    head = bytearray(block(name, 512, b"S", magic=b"ustar  "))
    head[386:410] = b"%011o\0%011o\0" % (0, 512)
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

    heavy = partial(one, heavy=True)
    base256 = lambda number: (number | 1 << 95).to_bytes(12, "big")
    yield heavy("a sparse file of 5 GiB", sparse_1_0("h.jpg", 5 << 30, b"1\n0\n512\n"))
    yield heavy("an old sparse file of 5 GiB", old_sparse("h.txt", 5 << 30))
    million = lambda: sparse_1_0("h.txt", 9, b"1000000\n" + b"0\n0\n" * 1_000_000)
    yield heavy("a sparse map of a million pieces", million)
    yield one("a sparse map that claims 10^18 pieces", sparse_1_0("h.txt", 9, b"1" + b"0" * 18 + b"\n"))
    yield one("a sparse map of 5,000 digits", sparse_1_0("h.txt", 9, b"1" * 5000 + b"\n"))
    yield one("a sparse size of 5,000 digits", sparse_1_0("h.txt", "1" * 5000, b"1\n0\n512\n"))
    yield one("a negative sparse size", sparse_1_0("h.txt", -5, b"1\n0\n512\n"))
    yield one("a sparse map that is negative", sparse_1_0("h.txt", 600, b"1\n-512\n512\n"))
    yield one("a sparse piece beyond the size", sparse_1_0("h.txt", 10, b"1\n99999999999\n512\n"))
    no_number = old_sparse("h.txt", 600).replace(b"00000001000\0", b"zzzzzzzzzzz\0", 1)
    yield one("an old sparse map that is no number", no_number)
    hello = block("h.txt", 5) + padded(b"hello")
    for size in (str(2**63 - 1), str(2**64), "1" + "0" * 5000, "-1", "0", "0x10"):
        yield one(f"a pax size of {size:.30}", pax({"size": size}) + hello)
    for number, name in ((b"999999999", "that claims more"), (b"0", "of no length")):
        record = block("p", 512, b"x") + (number + b" path=x\n").ljust(512, b"\0")
        yield one(f"a pax record {name}", record + block("h.txt", 5))
    yield one("a pax record of 5,000 digits", block("p", 5120, b"x") + b"1" * 5120 + block("h.txt", 5))
    yield one("a pax header of 4 GiB", block("p", 4 << 30, b"x"))
    yield one("a long name of 4 GiB", block("././@LongLink", 4 << 30, b"L"))
    yield one("a global pax header of 1 MiB", lambda: block("g", MIB, b"g") + padded(b"30 comment=" + bytes(MIB - 11)))
    yield one("5,000 pax headers in a row", lambda: pax({"comment": "c"}) * 5000 + hello)
    long_name = block("././@LongLink", 5, b"L") + padded(b"name\0")
    yield one("5,000 long names in a row", lambda: long_name * 5000 + block("h.txt", 5))
    yield one("a size of 8 EiB in base 256", block("h.txt", base256(2**63 - 1)))
    yield one("a size of 2^90 in base 256", block("h.txt", base256(2**90)))
    yield one("a negative size in base 256", block("h.txt", b"\xff" * 12))
    yield one("a size that is no number", block("h.txt", b"99999999999\0"))
    for kind, name in {b"1": "hard link", b"2": "symbolic link", b"3": "device", b"6": "pipe"}.items():
        yield one(f"a {name}", block("h.txt", 0, kind))
    yield one("a folder that claims content", block("h.txt/", 1 << 40, b"5"))
    yield one("an unknown kind", block("h.txt", 5, b"Z") + padded(b"hello"))
    yield one("a wrong checksum", lambda: bytes(bytearray(block("h.txt", 5)).replace(b"0000644", b"0000645")))
    yield heavy("100,000 empty members", lambda: b"".join(block(f"{n}.cls", 0) for n in range(100_000)))
    yield heavy("100,000 members of one sample", lambda: b"".join(block(f"h.{n}.jpg", 0) for n in range(100_000)))
    yield one("one name 20,000 times", lambda: (block("h.txt", 1) + padded(b"x")) * 20_000)


def compressed_shards() -> Iterator[HostileShard]:
    def one(
        name: str, suffix: str, make: Callable[[], bytes], fate: str, reason: str = "", *, heavy: bool = False
    ) -> HostileShard:
        return HostileShard(name, suffix, fate, lambda path: path.write_bytes(make()), reason, heavy=heavy)

    heavy = partial(one, heavy=True)
    level = zstandard.ZstdCompressor(level=1)

    def zstd_zeros(num_bytes: int) -> bytes:
        stream = level.compressobj()
        return b"".join([*(stream.compress(bytes(MIB)) for _ in range(num_bytes // MIB)), stream.flush()])

    ratio = "decompression_ratio"
    yield heavy("4 GiB of zeros as .tar.zst", ".tar.zst", lambda: zstd_zeros(4 << 30), FAILS, ratio)
    yield heavy("1 GiB of zeros as .tar.gz", ".tar.gz", lambda: zeros(1 << 30, wbits=31), FAILS, ratio)
    large = lambda: level.compress(tar_of(GOOD, ends=False) + block("h.jpg", 1 << 30)) + zstd_zeros(1 << 30)
    yield heavy("a tar of 1 GiB of zeros", ".tar.zst", large, FAILS, ratio)
    plain = lambda: tar_of(GOOD)
    yield one("a gzip of a gzip", ".tgz", lambda: gzip.compress(gzip.compress(plain())), FAILS)
    yield one("a .tar.zst that is gzip", ".tar.zst", lambda: gzip.compress(plain()), EITHER)
    members = lambda: gzip.compress(b"", mtime=0) * 100_000 + gzip.compress(plain())
    yield heavy("100,000 empty gzip members", ".tar.gz", members, EITHER)
    skippable, empty = b"\x50\x2a\x4d\x18\0\0\0\0", level.compress(b"")
    yield one("300,000 skippable frames", ".tar.zst", lambda: skippable * 300_000 + level.compress(plain()), EITHER)
    yield one("300,000 empty frames", ".tar.zst", lambda: empty * 300_000 + level.compress(plain()), EITHER)
    yield one("a skippable frame of 4 GiB", ".tar.zst", lambda: b"\x50\x2a\x4d\x18\xff\xff\xff\xff" + bytes(100), FAILS)
    # Single segment, content size in 8 bytes: 2^60 bytes to come.
    claims = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 60) + bytes(50)
    yield one("a frame that claims 1 EiB", ".tar.zst", lambda: claims, FAILS)
    # Window descriptor 0xA8: 2^31 bytes.
    yield one("a window of 2 GiB", ".tar.zst", lambda: b"\x28\xb5\x2f\xfd\0\xa8" + b"\1\0\0", FAILS)
    many = lambda: b"".join(b"\x28\xb5\x2f\xfd\0\xa8" + b"\3\0\0" + b"x" for _ in range(5000))
    yield one("5,000 windows of 2 GiB", ".tar.zst", many, FAILS)
    yield one("gzip with a name of 10 MiB", ".tar.gz", lambda: b"\x1f\x8b\x08\x08" + bytes(6) + b"n" * 10 * MIB, FAILS)
    yield one("a magic number alone", ".tar.gz", lambda: b"\x1f\x8b", FAILS)


def write_parquet(columns: Mapping[str, Any], path: Path, **options: Any) -> None:
    pq.write_table(pa.table(dict(columns)), path, **options)


def repeated(kind: str, value: bytes, rows: int, path: Path) -> None:
    """One value `rows` times, kept once: a dictionary page, and indices in a run."""
    values = pa.array([value], pa.binary())
    if kind == "text":
        values = values.cast(pa.string())
    indices = pa.array(np.zeros(rows, np.int32))
    options = {"compression": "zstd", "store_schema": False, "write_statistics": False}
    column = pa.DictionaryArray.from_arrays(indices, values)
    write_parquet({kind: column}, path, **options, dictionary_pagesize_limit=1 << 30)


def large_pages(kind: str, value_bytes: int, groups: int, rows: int, path: Path) -> None:
    """Zeros, deflated: each row group of `rows` values."""
    type_ = pa.large_string() if kind == "text" else pa.large_binary()
    offsets = pa.py_buffer(np.arange(rows + 1, dtype=np.int64) * value_bytes)
    data = pa.py_buffer(np.zeros(rows * value_bytes, np.uint8))
    table = pa.table({kind: pa.Array.from_buffers(type_, rows, [None, offsets, data])})
    with pq.ParquetWriter(
        path, table.schema, compression="zstd", compression_level=1, use_dictionary=False, write_statistics=False
    ) as writer:
        for _ in range(groups):
            writer.write_table(table)


def false_footer(old: int, new: int, inside: str, path: Path) -> None:
    """Write another count of rows into the footer: of the file or its row group. One byte each, as zigzag numbers."""
    write_parquet({"text": [f"row {n}" for n in range(old)]}, path, compression="none")
    data = bytearray(path.read_bytes())
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    places = [at for at in range(footer, len(data) - 8) if data[at] == 2 * old and data[at - 1] == 0x16]
    for at in places if inside == "everywhere" else places[:1] if inside == "file" else places[1:]:
        data[at] = 2 * new
    assert places
    path.write_bytes(data)


def nested(depth: int) -> pa.Array:
    array = pa.array(["x"])
    for _ in range(depth):
        array = pa.ListArray.from_arrays(pa.array([0, len(array)], pa.int32()), array)
    return array


def parquet_shards() -> Iterator[HostileShard]:
    def one(name: str, write: Callable[[Path], None], fate: str = EITHER, *, heavy: bool = False) -> HostileShard:
        return HostileShard(name, ".parquet", fate, write, heavy=heavy)

    heavy = partial(one, heavy=True)
    of = lambda **columns: partial(write_parquet, columns)
    for kind in ("text", "image"):
        yield heavy(f"one {kind} of 100 KB 50,000 times", partial(repeated, kind, bytes(100_000), 50_000))
        yield heavy(f"one {kind} of 100 MB 50 times", lambda path, kind=kind: repeated(kind, bytes(10**8), 50, path))
        yield heavy(f"one {kind} of a byte 20,000,000 times", partial(repeated, kind, b"x", 20_000_000))
        yield heavy(f"{kind} pages of 800 MB", partial(large_pages, kind, 4 * 10**8, 1, 2))
        yield heavy(f"10 {kind} groups of 100 MB", partial(large_pages, kind, 10**8, 10, 1))
    nulls = lambda rows: lambda path: write_parquet({"text": pa.nulls(rows, pa.string())}, path, row_group_size=1 << 26)
    yield one("20,000 null rows", nulls(20_000))
    yield heavy("30 million null rows", nulls(30 * 10**6))
    wide = lambda: pa.ListArray.from_arrays(pa.array([0, 2_000_000], pa.int32()), pa.nulls(2_000_000, pa.binary()))
    yield heavy("two million images in one cell", lambda path: write_parquet({"images": wide()}, path))
    turns = [[{"role": "user", "content": "a"}] * 500_000]
    yield heavy("500,000 turns in one cell", lambda path: write_parquet({"messages": pa.array(turns)}, path))
    for inside in ("file", "group", "everywhere"):
        yield one(f"a footer that counts more rows: {inside}", partial(false_footer, 5, 60, inside))
        yield one(f"a footer that counts fewer rows: {inside}", partial(false_footer, 60, 5, inside))
    yield heavy("5,000 columns", of(**{f"text{n}": ["x"] for n in range(5000)}))
    yield one("a list in a list, 200 deep", of(text=nested(200)))
    yield one("a column named with 5,000 digits", of(**{"1" * 5000 + ".jpg": [jpeg(40, 40)]}))
    yield one("a column named with nothing", of(**{"": ["x"], "text": ["y"]}))
    twice = lambda path: pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), path)
    yield one("two columns of one name", twice)
    yield heavy("a hundred thousand equal keys", of(__key__=["k"] * 100_000, text=["t"] * 100_000))
    keys = {"numbers": [1, 1, 2], "lists": [[1], [2], [3]], "structs": [{"a": 1}] * 3, "floats": [float("nan")] * 3}
    for name, values in keys.items():
        yield one(f"keys that are {name}", of(__key__=values, text=["a"] * 3))
    path_struct = pa.array([{"bytes": None, "path": "/etc/passwd"}, {"bytes": b"x", "path": "a\0b.png"}])
    yield one("paths in place of bytes", of(image=path_struct))
    buffers = [None, pa.py_buffer(np.array([0, 1, 3], np.int32)), pa.py_buffer(b"\xe9\xff\xfe")]
    latin = pa.Array.from_buffers(pa.string(), 2, buffers)
    yield one("strings that are not UTF-8", of(__key__=latin, text=latin))
    image = pa.table({"image": [jpeg(40, 40)]})
    meta = lambda text: lambda path: pq.write_table(image.replace_schema_metadata({"huggingface": text}), path)
    yield one("features that nest 100,000 deep", meta(b"[" * 100_000))
    yield one("features of another shape", meta(b'{"info": {"features": {"image": [[["Image"]]]}}}'))
    yield one("features that are a list", meta(b'{"info": {"features": []}}'))
    yield one("features that are null", meta(b'{"info": null}'))
    yield one("a row group without columns", of(a=pa.array([], pa.string())))
    yield one("no columns", of())
    yield one("a footer of 2 GiB", lambda path: path.write_bytes(b"PAR1" + bytes(100) + b"\xff\xff\xff\x7fPAR1"), FAILS)
    yield one("a footer of nothing", lambda path: path.write_bytes(b"PAR1\0\0\0\0PAR1"), FAILS)
    yield one("an encrypted footer", lambda path: path.write_bytes(b"PARE" + bytes(100) + b"\x10\0\0\0PARE"), FAILS)
    for part in range(1, 8):
        yield one(f"cut to {part} eighths", partial(_cut, part), FAILS)
    for seed in range(40):
        yield one(f"flipped bits, seed {seed}", partial(_flip, seed))


def _mixed(path: Path, **options: Any) -> bytes:
    rows = {"text": [f"row {n}" for n in range(50)], "image": [jpeg(30, 30, n % 3) for n in range(50)]}
    write_parquet(rows, path, row_group_size=20, **options)
    return path.read_bytes()


def _cut(eighths: int, path: Path) -> None:
    data = _mixed(path)
    path.write_bytes(data[: len(data) * eighths // 8])


def _flip(seed: int, path: Path) -> None:
    """Three bits of the footer or of a page header, which are what is parsed."""
    random = np.random.default_rng(seed)
    data = bytearray(_mixed(path, compression=("none", "snappy", "zstd", "gzip")[seed % 4]))
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    places = (footer, len(data)) if seed % 2 else (4, 200)
    for at in random.integers(*places, size=3):
        data[int(at)] ^= 1 << int(random.integers(8))
    path.write_bytes(data)


def empty_shards() -> Iterator[HostileShard]:
    for suffix in (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tzst", ".parquet"):
        yield HostileShard(f"nothing as {suffix}", suffix, FAILS, lambda path: path.write_bytes(b""))
        yield HostileShard(f"one byte as {suffix}", suffix, FAILS, lambda path: path.write_bytes(b"\x1f"))
        yield HostileShard(f"zeros as {suffix}", suffix, EITHER, lambda path: path.write_bytes(bytes(10_240)))


def hostile_shards() -> list[HostileShard]:
    """All of them: the corpus grows by what is found."""
    return [*tar_shards(), *compressed_shards(), *parquet_shards(), *empty_shards()]
