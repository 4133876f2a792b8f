"""`python -m benchmarks.parquet`: measuring Parquet shards in a child process, as indexing does, and in this process.

many small files --files/s--> with a child, in process, and what a child's start takes
one large file   --rows/s---> with a child, in process
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from benchmarks.command import run_command
from orchdata.bench import Result, interleave, work_folder
from orchdata.loaders.limits import Limits
from orchdata.loaders.shards.children import measuring, scan
from orchdata.loaders.shards.columns import ParquetReader, ParquetShard
from orchdata.loaders.storage.local import LocalFile

SMALL_FILES = 100
SMALL_ROWS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ParquetBench:
    """What to measure.

    Attributes:
        rows: of the large file.
        repeats: of each measurement.
    """

    rows: int = 12_000
    repeats: int = 5

    def __post_init__(self) -> None:
        for name in ("rows", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def run(config: ParquetBench) -> list[Result]:
    """Files and rows a second."""
    with work_folder(None) as folder:
        return _measure(folder, rows=config.rows, repeats=config.repeats)


def _measure(folder: Path, *, rows: int, repeats: int) -> list[Result]:
    small = [_write(folder / f"small-{number}.parquet", SMALL_ROWS) for number in range(SMALL_FILES)]
    large = [_write(folder / "large.parquet", rows)]
    with measuring():  # the warm-up starts the child
        seconds = interleave(
            {
                "small, child": lambda: _in_child(small),
                "small, here": lambda: _here(small),
                "large, child": lambda: _in_child(large),
                "large, here": lambda: _here(large),
            },
            repeats=repeats,
        )
    starts = interleave({"start": lambda: _in_child(small[:1])}, repeats=repeats)["start"]
    results = []
    for name, words, unit, count in (
        ("small", f"{SMALL_FILES} files of {SMALL_ROWS} rows", "files/s", SMALL_FILES),
        ("large", f"a file of {rows} rows", "rows/s", rows),
    ):
        for where, meant in (("child", "in a child process"), ("here", "in this process")):
            values = tuple(count / taken for taken in seconds[f"{name}, {where}"])
            results.append(Result(name=f"Parquet, {words}, {meant}", unit=unit, values=values, better="high"))
    return [
        *results,
        Result(
            name="  start of a child, with its first file",
            unit="ms",
            values=tuple(1e3 * taken for taken in starts),
            note="once for each thread of a build, and for no build without Parquet",
        ),
    ]


def _in_child(paths: Sequence[Path]) -> None:
    """As indexing does it, with the checksum of the content."""
    for path in paths:
        shard = ParquetShard(str(path), LocalFile(path), limits=Limits())
        shard.facts()
        shard.close()


def _here(paths: Sequence[Path]) -> None:
    """The pass alone: nothing is hashed, and a file that ends the Parquet library would end this process."""
    for path in paths:
        file = LocalFile(path)
        scan(ParquetReader(file, Limits()), Limits())
        file.close()


def _write(path: Path, rows: int) -> Path:
    """Rows of an image of about 8 KB and 500 characters of text."""
    rng = np.random.default_rng(rows)
    out = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (112, 112, 3), np.uint8)).save(out, "JPEG", quality=75)
    images = [out.getvalue() + row.to_bytes(4) for row in range(rows)]
    texts = ["".join(rng.choice(list("etaoin shrdlu"), 500)) for _ in range(min(rows, 64))]
    text = [texts[row % len(texts)] for row in range(rows)]
    table = pa.table({"image": pa.array(images, pa.binary()), "text": text})
    pq.write_table(table, path, row_group_size=1000)
    return path


if __name__ == "__main__":
    run_command("benchmarks.parquet", ParquetBench, run)
