"""`python -m benchmarks.first_look`: how soon something is known of data without an index.

a few tars under many names --a fresh process: orchdata index --limit--> seconds, and how far the estimate is off
a few tars                  --a fresh process: the first batch of dataset.take--> seconds
"""

from __future__ import annotations

import io
import json
import os
import random
import resource
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.command import run_command
from orchdata.bench.harness import Result, work_folder
from orchdata.loaders.storage.cache import CACHE_VARIABLE

_WORDS = "a model learns from what its samples say and from nothing else that anyone may have meant".split()
_TAKE = """
import sys, time
began = time.perf_counter()
import orchdata as od
next(iter(od.DataLoader(od.ShardDataset(sys.argv[2:]).take(int(sys.argv[1])), batch_size=8, shuffle=True)))
print(time.perf_counter() - began)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstLookBench:
    """What to measure.

    Attributes:
        samples: of all shards together.
        shards: number of tars.
        files: number of tars that are written; the others are hard links to them.
        limit: samples to look at, and to take.
        repeats: runs, each in a fresh process with an empty cache folder.
        seed: of the texts.
        folder: where to write (about 1.2 KB a sample of the written tars); by default a temporary folder.
    """

    samples: int = 10_000_000
    shards: int = 1_000
    files: int = 8
    limit: int = 1_000
    repeats: int = 3
    seed: int = 0
    folder: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.files <= self.shards or self.samples < self.shards:
            raise ValueError(f"{self.files} files for {self.shards} shards of {self.samples} samples")


def run(config: FirstLookBench) -> list[Result]:
    """Measure."""
    with work_folder(config.folder or None) as folder:
        data = folder / "data"
        data.mkdir()
        each = config.samples // config.shards
        files = [_write(data / f"{number:06d}.tar", each, config.seed + number) for number in range(config.files)]
        for number in range(config.files, config.shards):
            os.link(files[number % config.files], data / f"{number:06d}.tar")
        looks = [_look(folder / f"look{number}", data, config.limit) for number in range(config.repeats)]
        takes = [_take(folder / f"take{number}", files, config.limit) for number in range(config.repeats)]
    counted = each * config.shards
    cpu = max(look["cpu_seconds"] for look in looks)
    off = tuple(100 * abs(look["samples"] - counted) / counted for look in looks)
    return [
        Result(
            name=f"orchdata index --limit {config.limit:,} of {counted:,} samples in {config.shards:,} tars",
            unit="s",
            values=tuple(look["seconds"] for look in looks),
            demand=5.0,
            note=f"fresh process with imports, nothing indexed, page cache warm; CPU time {cpu:.2g} s",
        ),
        Result(name="  number of samples, off by", unit="%", values=off),
        Result(
            name=f"first batch of a loader over dataset.take({config.limit:,})",
            unit="s",
            values=tuple(takes),
            note=f"fresh process with imports, {config.files} tars of {each:,} samples, nothing indexed",
        ),
    ]


def _write(path: Path, samples: int, seed: int) -> Path:
    draw = random.Random(seed)
    with tarfile.open(path, "w") as out:
        for number in range(samples):
            data = json.dumps({"text": " ".join(draw.choices(_WORDS, k=draw.randint(5, 60)))}).encode()
            info = tarfile.TarInfo(f"{number:08d}.json")
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
    return path


def _look(cache: Path, data: Path, limit: int) -> dict[str, float]:
    command = [sys.executable, "-m", "orchdata.cli", "index", str(data / "*.tar"), "--limit", str(limit), "--json"]
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=_with(cache))
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return {"seconds": seconds, "cpu_seconds": cpu, "samples": json.loads(done.stdout)["samples"]}


def _take(cache: Path, files: list[Path], limit: int) -> float:
    command = [sys.executable, "-c", _TAKE, str(limit), *map(str, files)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=_with(cache))
    return float(done.stdout)


def _with(cache: Path) -> dict[str, str]:
    return {**os.environ, CACHE_VARIABLE: str(cache)}


if __name__ == "__main__":
    run_command("benchmarks.first_look", FirstLookBench, run)
