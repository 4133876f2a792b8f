"""How fast texts are indexed on one core and on two, in threads and in processes.

    made-up texts, JSON Lines in shards --orchdata index, pinned to cores--> seconds

A byte-level BPE is trained on the texts' words. Each build runs in a process of its own, on an empty cache, and the
ways take turns. The time is that of `build_index`, in a process that has indexed one shard before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.command import run_command
from benchmarks.pieces import PiecesBench, made_up, write_texts
from orchdata.bench import Result, WideTable
from orchdata.loaders.index.build import build_index
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.text.preprocessor import TextPreprocessor


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexTextBench:
    """What to measure.

    Attributes:
        shards: of the data set.
        texts: of a shard.
        words: of a text, about 1.3 tokens each.
        repeats: builds of each way.
        seed: of the texts.
    """

    shards: int = 8
    texts: int = 1_000
    words: int = 400
    repeats: int = 5
    seed: int = 0


_WAYS = {
    "one core, threads": (1, 1),
    "two cores, threads": (2, 1),
    "two cores, --jobs 2": (2, 2),
    "two cores, one large file, threads": (2, 1),
    "two cores, one large file, --jobs 2": (2, 2),
}
_LARGE = "large file"


def run(config: IndexTextBench) -> list[Result | WideTable]:
    """Measure a configuration. Raises ValueError on a machine with one core."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise ValueError("this process may use one core: two are compared")
    count = config.shards * config.texts
    texts, tokenizer = made_up(PiecesBench(documents=count, tokens=config.words, seed=config.seed))
    seconds: dict[str, list[float]] = {name: [] for name in _WAYS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "shards").mkdir()
        (folder / "large").mkdir()
        tokenizer.save(str(folder / "tokenizer.json"))
        write_texts(texts, folder / "large" / "texts.jsonl")
        for shard in range(config.shards):
            write_texts(texts[shard :: config.shards], folder / "shards" / f"{shard}.jsonl")
        for _ in range(config.repeats):
            for way, (num_cores, jobs) in _WAYS.items():
                seconds[way].append(_in_a_process(folder, _LARGE in way, cores[:num_cores], jobs))
    first = seconds["one core, threads"]
    return [
        Result(name=f"indexing {count:,} texts, {way}", unit="s", values=tuple(values), note=_ratio(first, values))
        for way, values in seconds.items()
    ]


def _ratio(first: list[float], values: list[float]) -> str:
    ratios = sorted(one / other for one, other in zip(first, values, strict=True))
    return f"{ratios[len(ratios) // 2]:.2f} times as fast ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def _in_a_process(folder: Path, large: bool, cores: list[int], jobs: int) -> float:
    """Seconds of one build in a new process on these cores."""
    given = json.dumps([str(folder), "large" if large else "shards", cores, jobs])
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.index_text", "--one", given], check=True, stdout=subprocess.PIPE, text=True
    )
    return float(done.stdout.split()[-1])


def _one(name: str, kind: str, cores: list[int], jobs: int) -> None:
    from tokenizers import Tokenizer

    os.sched_setaffinity(0, cores)
    folder = Path(name)
    tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    recipe = Recipe(image=None, audio=None, text=TextPreprocessor(tokenizer))
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        urls = sorted(map(str, (folder / kind).glob("*.jsonl")))
        first = folder / "shards" / "0.jsonl"
        with tempfile.TemporaryDirectory(dir=folder) as other:  # imports, and the tokenizer's start
            build_index([str(first)], recipe, cache=CacheFolder(other))
        begin = time.perf_counter()
        build_index(urls, recipe, cache=CacheFolder(cache), jobs=jobs)
        sys.stdout.write(f"{time.perf_counter() - begin}\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        _one(*json.loads(sys.argv[2]))
    else:
        run_command("benchmarks.index_text", IndexTextBench, run)
