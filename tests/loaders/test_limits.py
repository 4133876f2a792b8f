"""Limits: each at its value and one above it, by the sample it names; what headers claim is never allocated."""

from __future__ import annotations

import gzip
import io
import math
import struct
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shard_factory import SKIP_ANY, audio, jpeg

import orchdata as od
import orchdata.building.memory
from orchdata.loaders.errors import FieldError
from orchdata.loaders.index.build import build_index
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.builtin import TEXT
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.measure import Measured, measure
from orchdata.loaders.samples.members import Member
from orchdata.loaders.shards.fields import SPARSE
from orchdata.loaders.shards.parquet.shard import ParquetShard
from orchdata.loaders.shards.tar import TarShard
from orchdata.loaders.storage.local import LocalFile

pytestmark = pytest.mark.usefixtures("kept_parquet_processes")

IMAGE, AUDIO = 1, 2


def measured(members: Sequence[Member], limits: Limits, text: bytes = b"hello", **recipe: Any) -> Measured:
    all_members = [*members, Member("txt", TEXT, size=len(text))]
    return measure(all_members, {len(members): text}, Recipe(limits=limits, **recipe))


def test_tokens_of_a_sample() -> None:
    # 56x56 at patch 14, merged 2x2: 4 tokens; and 5 bytes of text
    image = [Member("jpg", IMAGE, header=(56, 56))]
    assert measured(image, Limits(sample_tokens=9)).llm_tokens == 9
    with pytest.raises(FieldError, match=r"9 LLM tokens, above Limits\.sample_tokens=8: raise it in Recipe"):
        measured(image, Limits(sample_tokens=8))


def test_decoded_bytes_of_images() -> None:
    images = [Member("0.jpg", IMAGE, header=(112, 56)), Member("1.jpg", IMAGE, header=(56, 56))]
    # patches of 3*14*14 values in 4 bytes, as float32, 32 and 16 of them; pixels of the larger image in 4 bytes
    expected = (32 + 16) * 588 * 4 + 112 * 56 * 4
    assert measured(images, Limits(sample_decoded_bytes=expected)).parts
    with pytest.raises(
        FieldError, match=rf"{expected} bytes of media once decoded, above Limits\.sample_decoded_bytes"
    ):
        measured(images, Limits(sample_decoded_bytes=expected - 1))


def tar_of(path: Path, members: Sequence[tuple[str, bytes]]) -> str:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return str(path)


def flac_header(seconds: int, rate: int = 16_000) -> bytes:
    """42 bytes: one channel of 16 bits, so many seconds, and nothing of them."""
    packed = rate << 44 | 0 << 41 | 15 << 36 | seconds * rate
    return b"fLaC\x80\0\0\x22" + struct.pack(">HH", 4096, 4096) + bytes(6) + packed.to_bytes(8) + bytes(16)


def png_header(width: int, height: int) -> bytes:
    """57 bytes: 8-bit RGB of so many pixels, and nothing of them."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", b""), (b"IEND", b"")]
    framed = [struct.pack(">I", len(body)) + name + body + zlib.crc32(name + body).to_bytes(4) for name, body in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


BOMBS = {
    "flac": [(f"evil.{i}.flac", flac_header(2 * 3600)) for i in range(40)],
    "png": [(f"evil.{i}.png", png_header(10_000, 10_000)) for i in range(2_000)],
    "gz": [(f"evil.{i}.txt.gz", gzip.compress(b"x" * (9 << 20))) for i in range(2)],
}


@pytest.mark.parametrize("kind", BOMBS)
def test_headers_that_claim_too_much_are_one_bad_sample(tmp_path: Path, kind: str) -> None:
    good = [(f"{key}.txt", key.encode()) for key in ("a", "b", "f", "g")]
    shard = tar_of(tmp_path / "a.tar", [*good[:2], *BOMBS[kind], ("evil.txt", b"hello"), *good[2:]])
    dataset = od.ShardDataset(shard)
    index = dataset.index()
    assert [index.key(int(row)) for row in index.bad_rows()] == ["evil"]
    loader = od.DataLoader(dataset, batch_size=2, on_error=SKIP_ANY)
    assert sorted(key for batch in loader for _, key in batch.sample_ids) == ["a", "b", "f", "g"]


def test_texts_of_a_sample_count_together_and_decompressed(tmp_path: Path) -> None:
    text = b"x" * 1_000
    shard = tar_of(tmp_path / "a.tar", [("k.json.gz", gzip.compress(b'"%s"' % text[2:])), ("k.txt", text)])
    for limit, bad in ((2_000, 0), (1_999, 1)):
        index = build_index([shard], Recipe(limits=Limits(text_bytes=limit)))
        assert index.totals["bad"] == bad
    assert index.failure(0).reason == "the sample has 2000 bytes of text, above Limits.text_bytes=1999"


def parquet_errors(path: Path, limits: Limits) -> list[str]:
    return list(ParquetShard(str(path), LocalFile(path), limits=limits).facts().table.errors.values())


def test_rows_of_nothing_are_held_against_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.nulls(1 << 16, pa.string())}), path)
    size = path.stat().st_size
    assert size < 1_000
    assert parquet_errors(path, Limits()) == []
    pq.write_table(pa.table({"text": pa.nulls((1 << 16) + 1, pa.string())}), path)
    (error,) = parquet_errors(path, Limits())
    assert error.startswith("65537 rows in a file of ") and "above Limits.decompression_ratio=200" in error
    assert parquet_errors(path, Limits(decompression_ratio=200 * 65537 / path.stat().st_size)) == []


@pytest.mark.parametrize("dictionary", [False, True], ids=["strings", "dictionary type"])
def test_a_column_is_held_while_it_is_decoded(tmp_path: Path, dictionary: bool) -> None:
    # 1,000 rows of one text of 10,000 bytes, stored once: the footer says 10 KB, decoding gives 10 MB
    column = pa.chunked_array([pa.array(["x" * 10_000] * 100)] * 10)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": column.dictionary_encode() if dictionary else column}), path)
    chunk = pq.read_metadata(path).row_group(0).column(0)
    assert chunk.total_uncompressed_size < 20_000 and path.stat().st_size < 3_000
    enough = 10_000_000 + 1_000 * 8 + 64 * 100
    assert parquet_errors(path, Limits(column_bytes=enough)) == []
    (error,) = parquet_errors(path, Limits(column_bytes=9_000_000))
    assert error.startswith("row group 0, column 'text' decompresses to ") and "Limits.column_bytes=9000000" in error
    assert int(error.split("decompresses to ")[1].split()[0]) < 9_000_000 + 64 * 10_000 * 2  # stopped at once


def sparse_tar(path: Path, size: int, stretches: Sequence[tuple[int, int]], name: str = "a.txt") -> str:
    """A member as GNU tar's PAX format 1.0 stores it: a map, then the stretches of x that are there."""
    written = f"{len(stretches)}\n" + "".join(f"{at}\n{length}\n" for at, length in stretches)
    content = written.encode().ljust(-(-len(written) // 512) * 512, b"\0") + b"x" * sum(n for _, n in stretches)
    info = tarfile.TarInfo(f"GNUSparseFile.0/{name}")
    info.size = len(content)
    info.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": name,
        "GNU.sparse.realsize": str(size),
    }
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(info, io.BytesIO(content))
    return str(path)


def sparse_rows(path: str, limits: Limits) -> list[dict[str, Any]]:
    return TarShard(path, LocalFile(path), limits=limits).facts().table.arrow().to_pylist()


def test_a_sparse_member_reads_as_tarfile_reads_it(tmp_path: Path) -> None:
    path = sparse_tar(tmp_path / "a.tar", 3_000, [(0, 10), (1_000, 5), (2_990, 0), (2_995, 5)])
    (row,) = sparse_rows(path, Limits())
    assert row["encoding"] == SPARSE
    shard = TarShard(path, LocalFile(path), limits=Limits())
    with tarfile.open(path) as archive:
        expected = archive.extractfile(archive.getmembers()[0]).read()  # type: ignore[union-attr]
    assert bytes(shard.read(row["offset"], row["size"], SPARSE, "txt")) == expected


def test_a_sparse_member_is_held_against_what_is_stored(tmp_path: Path) -> None:
    path = sparse_tar(tmp_path / "a.tar", 2 << 20, [(0, 1 << 14)])  # 2 MiB of 16 KiB: 128 to 1
    for ratio, bad in ((128, 0), (127, 1)):
        index = build_index([path], Recipe(limits=Limits(decompression_ratio=ratio)))
        assert index.totals["bad"] == bad
    reason = index.failure(0).reason
    assert reason == "a sparse member of 2097152 bytes, 16384 of them stored, above Limits.decompression_ratio=127"


def test_extended_headers_of_one_member_are_bounded_together(tmp_path: Path) -> None:
    # Maps of stretches of nothing, four bytes each: the second one is above 1 MiB.
    for stretches, over in ((200_000, False), (300_000, True)):
        (row,) = sparse_rows(sparse_tar(tmp_path / "a.tar", 100, [(0, 0)] * stretches), Limits())
        assert ("extended headers claim more than 1048576 bytes" in (row["error"] or "")) == over


@pytest.mark.parametrize("name", ["0.txt", "0" * 150 + ".txt"])
def test_global_headers_of_a_tar_are_bounded(tmp_path: Path, name: str) -> None:
    """tarfile copies them for each member, so that a small archive takes gigabytes."""
    path = tmp_path / "a.tar"
    for records, over in (
        ({"comment": "x" * 60_000}, False),
        ({"comment": "x" * 66_000}, True),
        ({f"x{i}": "1" for i in range(1_000)}, False),
        ({f"x{i}": "1" for i in range(1_100)}, True),
    ):
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers=records) as archive:
            archive.addfile(tarfile.TarInfo(name))
        (row,) = sparse_rows(str(path), Limits())
        assert ("global headers of more than 1024 records or 65536 characters" in (row["error"] or "")) == over


def none_left(*_: object, **__: object) -> None:
    raise MemoryError("none left")


@pytest.mark.parametrize("collate_fn", [None, list], ids=["packed", "samples"])
@pytest.mark.parametrize(
    ("field", "content", "target"),
    [
        ("jpg", jpeg(60, 60), "orchdata.loaders.modalities.image_decode.decode_jpeg"),
        ("flac", audio(0.1, suffix="flac"), "orchdata.loaders.modalities.audio_decode.Sound"),
    ],
)
def test_memory_that_runs_out_in_a_decoder_is_no_bad_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, content: bytes, target: str, collate_fn: Any
) -> None:
    dataset = od.ShardDataset(tar_of(tmp_path / "a.tar", [(f"a.{field}", content), ("a.txt", b"hello")]))
    dataset.index()
    monkeypatch.setattr(target, none_left)
    loader = od.DataLoader(dataset, batch_size=1, on_error=SKIP_ANY, collate_fn=collate_fn)
    with pytest.raises(MemoryError, match=r"not enough memory at sample 'a' of .*none left"):
        list(loader)


@pytest.mark.parametrize("name", list(Limits.__dataclass_fields__))
def test_every_limit_is_part_of_the_fingerprint_and_must_be_positive(name: str) -> None:
    raised = getattr(Limits(), name) + 1
    assert Recipe(limits=Limits(**{name: raised})).fingerprint() != Recipe().fingerprint()
    for value in (0, -1, math.nan):
        with pytest.raises(ValueError, match=f"Limits.{name} must be a number above 0"):
            Limits(**{name: value})
