"""Recipes: sizes from headers, validation, and a fingerprint that is the same everywhere."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import math
import struct
import tarfile
import textwrap
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hostile_shards import sparse_1_0
from hypothesis import assume, given
from hypothesis import strategies as st
from shard_factory import SKIP_ANY, audio, jpeg
from tars import rows

import orchdata as od
from orchdata.loaders.errors import FieldError
from orchdata.loaders.functions import UserFunction
from orchdata.loaders.index.build import build_index
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.builtin import TEXT
from orchdata.loaders.recipe import (
    AudioPreprocessor,
    ChatTemplate,
    ImagePreprocessor,
    Recipe,
    TextPreprocessor,
    image_grid,
)
from orchdata.loaders.samples.measure import Measured, measure
from orchdata.loaders.samples.members import Member
from orchdata.loaders.shards.columns import ParquetShard
from orchdata.loaders.shards.fields import SPARSE
from orchdata.loaders.shards.tar import TarShard
from orchdata.loaders.storage.local import LocalFile

pytestmark = pytest.mark.usefixtures("kept_parquet_processes")


def qwen_smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The rule as Qwen2-VL publishes it, in floats."""
    rows, cols = round(height / factor) * factor, round(width / factor) * factor
    if rows * cols > max_pixels:
        beta = math.sqrt(height * width / max_pixels)
        rows, cols = math.floor(height / beta / factor) * factor, math.floor(width / beta / factor) * factor
    elif rows * cols < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        rows, cols = math.ceil(height * beta / factor) * factor, math.ceil(width * beta / factor) * factor
    return rows, cols


sides = st.integers(1, 100_000)
budgets = st.tuples(st.integers(1, 300), st.integers(0, 5000)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(width=sides, height=sides, budget=budgets, patch=st.integers(1, 32), merge=st.integers(1, 4))
def test_the_token_budget_always_holds(width, height, budget, patch, merge):
    low, high = budget
    pre = ImagePreprocessor(patch_size=patch, merge=merge, min_tokens=low, max_tokens=high)
    grid_h, grid_w = image_grid(width, height, pre)
    assert grid_h % merge == 0
    assert grid_w % merge == 0
    assert low <= pre.num_tokens((grid_h, grid_w)) <= high


@given(width=st.integers(28, 6000), height=st.integers(28, 6000))
def test_ordinary_images_get_the_size_that_qwen_gives_them(width, height):
    assume(max(width, height) < 100 * min(width, height))
    pre = ImagePreprocessor(min_tokens=4, max_tokens=1280)
    rows, cols = qwen_smart_resize(height, width, 28, 4 * 784, 1280 * 784)
    assume(rows * cols > 0)
    # Floats may fall on the wrong side where a scaled side is exactly whole tokens: 38 x 38 grows to 56.00001.
    for budget in (4, 1280):
        assume(math.isqrt(budget * height * width) ** 2 != budget * height * width)
    if 4 <= rows * cols // 784 <= 1280:
        assert image_grid(width, height, pre) == (rows // 14, cols // 14)


@given(frames=st.integers(1, 10**7), rate=st.integers(1, 400_000))
def test_audio_counts_are_whole_tokens(frames, rate):
    pre = AudioPreprocessor()
    num_samples = pre.num_samples(frames, rate)
    assert num_samples == math.ceil(frames * 16_000 / rate) or rate > 10**5  # floats are exact enough below
    assert pre.num_tokens(num_samples) == max(1, -(-num_samples * 25 // 16_000))
    assert pre.mel_frames(num_samples) == pre.num_tokens(num_samples) * 4  # 16,000 / (25 * 160)
    assert pre.mel_frames(num_samples) * pre.hop_length >= num_samples


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ImagePreprocessor(patch_size=0), "patch_size must be an int of at least 1, got 0"),
        (lambda: ImagePreprocessor(min_tokens=9, max_tokens=8), "max_tokens .* at least min_tokens=9, got 8"),
        (lambda: ImagePreprocessor(dtype="float16"), "dtype must be one of .* got 'float16'"),
        (lambda: ImagePreprocessor(std=(1.0, 0.0, 1.0)), "std must be above 0"),
        (lambda: AudioPreprocessor(hop_length=150), "whole number of mel frames"),
        (lambda: TextPreprocessor(lambda text: [1]), "needs an id"),
        (lambda: TextPreprocessor(fields="txt"), "fields must be a tuple"),
    ],
)
def test_what_cannot_be_is_refused_with_value_and_limit(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    "other",
    [
        Recipe(image=None),
        Recipe(image=ImagePreprocessor(resizer="pillow")),
        Recipe(image=ImagePreprocessor(resample="bilinear")),
        Recipe(image=ImagePreprocessor(draft=True)),
        Recipe(image=ImagePreprocessor(alpha="drop")),
        Recipe(image=ImagePreprocessor(rule="qwen2_vl")),
        Recipe(image=ImagePreprocessor(temporal_patch_size=2)),
        Recipe(image=ImagePreprocessor(max_tokens=4095)),
        Recipe(audio=AudioPreprocessor(num_mels=80)),
        Recipe(text=TextPreprocessor(list, id="a")),
        Recipe(text=TextPreprocessor(list, id="b")),
        Recipe(text=TextPreprocessor(template=ChatTemplate(suffix=""))),
        Recipe(text=TextPreprocessor(eos_token_id=258)),
        *(Recipe(text=TextPreprocessor(max_tokens=8, overflow=way)) for way in ("error", "truncate", "split")),
        Recipe(text=TextPreprocessor(max_tokens=9)),
        Recipe(limits=Limits(image_pixels=5)),
    ],
)
def test_every_difference_shows_in_the_fingerprint_and_the_description(other):
    base = Recipe()
    assert other.fingerprint() != base.fingerprint()
    assert json.loads(json.dumps(other.describe())) == other.describe() != base.describe()


# Functions of the user's: ids from source text, ids that must be given, and errors that name function and line.


SCALE = 3


def whole(record: dict[str, Any], most: int = 5) -> Any:
    import re

    words = [re.sub(r"\s", " ", str(word)) for word in record["words"]]
    return {"text": json.dumps(sorted(words)[:most]), "root": math.sqrt(4), "kind": str(np.float32)}


def with_global(record: dict[str, Any]) -> Any:
    return record["x"] * SCALE


def calls_other(record: dict[str, Any]) -> Any:
    return with_global(record)


def with_default(record: dict[str, Any], kinds: Any = np.arange(2)) -> Any:  # noqa: B008
    return kinds


def of_own_module(record: dict[str, Any]) -> Any:
    import shard_factory

    return shard_factory


class Callable:
    def __call__(self, record: dict[str, Any]) -> Any:
        return record

    def method(self, record: dict[str, Any]) -> Any:
        return record


def function_of(text: str, folder: Path, name: str = "made") -> Any:
    """The function `f` of a module with this text."""
    path = folder / f"{name}.py"
    path.write_text(textwrap.dedent(text))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.f


def identity(function: Any, given: str | None = None) -> str:
    return UserFunction.of("Recipe.record", function, given).id


def test_function_that_uses_builtins_and_packages_has_an_id_of_its_source() -> None:
    assert identity(whole) == identity(whole)
    assert identity(whole).startswith("source:")
    assert identity(whole, "v1") == "v1"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (with_global, "it uses SCALE, which is defined outside of it"),
        (calls_other, "it uses with_global, which is defined outside of it"),
        (with_default, "default that is no string or number"),
        (of_own_module, "it imports shard_factory, which is code of your own"),
        (lambda record: record, "a lambda has no source text of its own"),
        (partial(whole, most=2), "it is a partial"),
        (Callable(), "it is a Callable"),
    ],
)
def test_function_that_its_source_does_not_describe_needs_an_id(function: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        identity(function)
    assert 'record_id="..."' in str(caught.value)
    assert identity(function, "mine") == "mine"


def test_id_follows_the_source_and_the_modules_that_it_names(tmp_path: Path) -> None:
    text = "import {} as m\n\ndef f(record):\n    return m.dumps(record)\n"
    first = function_of(text.format("json"), tmp_path, "a")
    assert identity(first) == identity(function_of(text.format("json"), tmp_path, "b"))
    assert identity(first) != identity(function_of(text.format("pickle"), tmp_path, "c"))
    changed = text.format("json").replace("dumps(record)", "dumps([record])")
    assert identity(first) != identity(function_of(changed, tmp_path, "d"))


# Limits: each at its value and one above it, by the sample it names; what headers claim is never allocated.


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
    with pytest.raises(FieldError, match=f"{expected} bytes of media once decoded, above Limits.sample_decoded"):
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


@pytest.mark.slow
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


def test_a_sparse_member_reads_as_tarfile_reads_it(tmp_path: Path) -> None:
    path, pieces = tmp_path / "a.tar", b"2\n0\n10\n1000\n5\n".ljust(512, b"\0") + b"x" * 15
    path.write_bytes(sparse_1_0("a.txt", 3_000, pieces) + bytes(1024))
    (row,) = rows(path)
    with tarfile.open(path) as archive:
        expected = archive.extractfile(archive.getmembers()[0]).read()  # type: ignore[union-attr]
    shard = TarShard(str(path), LocalFile(path), limits=Limits())
    assert bytes(shard.read(row["offset"], row["size"], SPARSE, "txt")) == expected


def test_a_sparse_member_is_held_against_what_is_stored(tmp_path: Path) -> None:
    path, pieces = tmp_path / "a.tar", b"1\n0\n16384\n".ljust(512, b"\0") + b"x" * 16_384
    path.write_bytes(sparse_1_0("a.txt", 2 << 20, pieces) + bytes(1024))  # 2 MiB of 16 KiB: 128 to 1
    for ratio, bad in ((128, 0), (127, 1)):
        index = build_index([str(path)], Recipe(limits=Limits(decompression_ratio=ratio)))
        assert index.totals["bad"] == bad
    reason = index.failure(0).reason
    assert reason == "a sparse member of 2097152 bytes, 16384 of them stored, above Limits.decompression_ratio=127"


@pytest.mark.slow
def test_extended_headers_of_one_member_are_bounded_together(tmp_path: Path) -> None:
    # Maps of stretches of nothing, four bytes each: the second one is above 1 MiB.
    for stretches, over in ((200_000, False), (300_000, True)):
        pieces = f"{stretches}\n".encode() + b"0\n0\n" * stretches
        (tmp_path / "a.tar").write_bytes(sparse_1_0("a.txt", 100, pieces) + bytes(1024))
        (row,) = rows(tmp_path / "a.tar")
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
        (row,) = rows(path)
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
