"""Hostile files, real and made, as every kind of shard, member and cell: no crash, hang, or memory past its limits."""

from __future__ import annotations

import itertools
import os
import queue
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hostile import ARRIVES, FAILS, GOOD, GOOD_KEYS, HostileSample, HostileShard, add_member, tar_of
from hostile_media import hostile_samples
from hostile_shards import hostile_shards
from limited_runs import Runner, start_runners

SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".parquet")
IMAGE_FIELDS = ("jpg", "png", "webp", "gif", "bmp", "tiff", "ppm", "jp2", "avif")
AUDIO_FIELDS = ("wav", "flac", "mp3", "ogg", "opus", "aiff", "au", "w64", "caf")
TEXT_FIELDS = ("txt", "json", "jsonl", "txt.gz", "json.gz")
FIELDS = IMAGE_FIELDS + AUDIO_FIELDS + TEXT_FIELDS
COLUMNS = ("image", "audio", "text", "binary", "images", "audio_struct")
"""Columns of a Parquet file that every file is a cell of; see `cells`."""

CPU_SECONDS = 60


@dataclass(frozen=True)
class Batch:
    """Shards that run together, and what must come of them: `judge` gives what is wrong."""

    shards: list[str]
    judge: Callable[[dict[str, Any]], list[str]]


class Hunt:
    """Runs things in batches, and halves what ends badly until each finding has one thing's name."""

    def __init__(self, runners: Sequence[Runner], folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._runners: queue.SimpleQueue[Runner] = queue.SimpleQueue()
        for runner in runners:
            self._runners.put(runner)

    def findings(self, things: Sequence[Any], write: Callable[[Sequence[Any], Path], Batch]) -> list[str]:
        if not things:
            return []
        folder = self._folder / f"batch-{next(self._numbers)}"
        folder.mkdir()
        runner = self._runners.get()
        try:
            batch = write(things, folder)
            answer = runner.run(batch.shards, cpu_seconds=CPU_SECONDS)
        finally:
            self._runners.put(runner)
            shutil.rmtree(folder)
        if answer["end"] == "done":
            return [f"{wrong} (peak {answer['peak_bytes'] >> 20} MiB)" for wrong in batch.judge(answer)]
        if len(things) == 1:
            peak, seconds = answer["peak_bytes"] >> 20, answer["seconds"]
            return [f"{name_of(things[0])}: {answer['end']} (peak {peak} MiB, {seconds} s): {answer['text']}"]
        half = len(things) // 2
        return self.findings(things[:half], write) + self.findings(things[half:], write)


def name_of(thing: Any) -> str:
    if isinstance(thing, tuple):
        return " as ".join(name_of(each) for each in thing)
    return str(getattr(thing, "name", thing)) if not isinstance(thing, Path) else str(thing)


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Runner]]:
    runners = start_runners(*(tmp_path_factory.mktemp("runner") for _ in range(2)))
    yield runners
    for runner in runners:
        runner.close()


@pytest.fixture
def hunt(runners: list[Runner], tmp_path: Path) -> Hunt:
    return Hunt(runners, tmp_path)


@pytest.fixture(scope="module")
def hostile(fixtures_dir: Path) -> list[Path]:
    """Every file of the hostile fixtures, and ordinary media and shards for good measure."""
    folders = [fixtures_dir / name for name in ("hostile", "wds")]
    media = [fixtures_dir / "images/pillow", fixtures_dir / "speech"]
    files = sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())
    assert len(files) > 400
    return files + sorted(path for folder in media for path in folder.rglob("*") if path.is_file())[::3]


# What must hold of every run


def accounted(answer: dict[str, Any], good: Sequence[tuple[str, str]]) -> list[str]:
    """Every sample is delivered or failed for a reason, and the good ones are delivered once."""
    wrong = []
    delivered = [tuple(key) for key in answer["delivered"]]
    wrong += [
        f"{sample}: a good sample was delivered {delivered.count(sample)} times"
        for sample in good
        if delivered.count(sample) != 1
    ]
    for shard, key, field, reason in answer["failures"]:
        if not reason or not shard:
            wrong.append(f"{shard}: {key!r}, {field!r}: failed without a reason")
    failed = {(shard, key) for shard, key, _, _ in answer["failures"]}
    if len(delivered) + len(answer["failures"]) != answer["samples"]:
        wrong.append(f"{answer['samples']} samples, {len(delivered)} delivered, {len(answer['failures'])} failed")
    wrong += [f"{sample}: delivered, and failed" for sample in set(delivered) & failed if sample[1]]
    return wrong


def failures_of(answer: dict[str, Any], shard: str, key: str | None = None) -> list[str]:
    return [reason for where, its, _, reason in answer["failures"] if where == shard and key in (None, its)]


def judged(name: str, fate: str, reason: str, delivered: bool, reasons: list[str]) -> list[str]:
    """What is wrong with the fate of one hostile thing."""
    if fate == FAILS and delivered:
        return [f"{name}: delivered"]
    if fate == ARRIVES and not delivered:
        return [f"{name}: not delivered: {reasons}"]
    if not delivered and not reasons:
        return [f"{name}: neither delivered nor failed"]
    if fate == FAILS and not any(re.search(reason, found) for found in reasons):
        return [f"{name}: failed for another reason than {reason!r}: {reasons[:3]}"]
    return []


# Ways to put a file into a dataset


def good_shard(folder: Path) -> tuple[str, list[tuple[str, str]]]:
    path = folder / "good.tar"
    path.write_bytes(tar_of(GOOD))
    return str(path), [(str(path), key) for key in GOOD_KEYS]


def as_shards(things: Sequence[tuple[Path, str]], folder: Path) -> Batch:
    """Each file under a suffix, and one good shard."""
    good, keys = good_shard(folder)
    shards = []
    for number, (path, suffix) in enumerate(things):
        shards.append(str(folder / f"{number}-{path.name.replace('.', '_')[:60]}{suffix}"))
        shutil.copy(path, shards[-1])
    return Batch([*shards, good], lambda answer: accounted(answer, keys))


def as_members(things: Sequence[tuple[Path, str]], folder: Path) -> Batch:
    """Each file as a member with a suffix, all in one tar, good samples before, between and after."""
    path = folder / "members.tar"
    good = []
    with tarfile.open(path, "w") as archive:
        for number, (file, field) in enumerate(things):
            if number % 50 == 0:
                good.append((str(path), f"good-{number}"))
                add_member(archive, f"good-{number}.txt", b"a good neighbour")
            add_member(archive, f"hostile-{number}.{field}", file.read_bytes())
            if field not in TEXT_FIELDS:
                add_member(archive, f"hostile-{number}.txt", b"text")
        add_member(archive, "good.txt", b"a good neighbour")
    return Batch([str(path)], lambda answer: accounted(answer, [*good, (str(path), "good")]))


def as_cells(things: Sequence[tuple[Path, str]], folder: Path) -> Batch:
    """Each file as a cell of a column, one column a Parquet file, a good row at each end."""
    shards, good = [], []
    for column in sorted({column for _, column in things}):
        contents = [path.read_bytes() for path, its in things if its == column]
        path = folder / f"{column}.parquet"
        cells: dict[str, Any] = {"__key__": ["first", *(f"hostile-{n}" for n in range(len(contents))), "last"]}
        cells |= column_of(column, contents)
        if column != "text":
            cells["caption"] = ["a good neighbour", *["text"] * len(contents), "a good neighbour"]
        pq.write_table(pa.table(cells), path, row_group_size=20)
        shards.append(str(path))
        good += [(str(path), "first"), (str(path), "last")]
    return Batch(shards, lambda answer: accounted(answer, good))


def column_of(column: str, contents: list[bytes]) -> dict[str, Any]:
    if column == "text":  # as written by somebody who does not check
        cells = [b"a good neighbour", *contents, b"a good neighbour"]
        offsets = np.cumsum([0, *map(len, cells)]).astype(np.int64)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(cells))]
        return {"text": pa.Array.from_buffers(pa.large_string(), len(cells), buffers)}
    if column == "binary":
        return {"payload": pa.array([None, *contents, None], pa.large_binary())}
    if column == "images":
        return {"images": pa.array([None, *([each, each] for each in contents), None], pa.list_(pa.large_binary()))}
    field = column.removesuffix("_struct")
    if column == "audio":
        return {field: pa.array([None, *contents, None], pa.large_binary())}
    struct = pa.struct({"bytes": pa.large_binary(), "path": pa.string()})
    return {field: pa.array([None, *({"bytes": each, "path": None} for each in contents), None], struct)}


def as_samples(things: Sequence[HostileSample], folder: Path) -> Batch:
    """Made samples in one tar, a good one before, between and after."""
    path = folder / "samples.tar"
    keys = [thing.key if thing.key is not None else f"hostile-{number}" for number, thing in enumerate(things)]
    with tarfile.open(path, "w") as archive:
        for number, thing in enumerate(things):
            add_member(archive, f"good-{number}.txt", b"a good neighbour")
            for field, data in thing.fields().items():
                add_member(archive, f"{keys[number]}.{field}", data)
        add_member(archive, "good.txt", b"a good neighbour")
    good = [(str(path), f"good-{number}") for number in range(len(things))] + [(str(path), "good")]

    def judge(answer: dict[str, Any]) -> list[str]:
        wrong = accounted(answer, good)
        for key, thing in zip(keys, things, strict=True):
            if thing.key is None:
                reasons = failures_of(answer, str(path), key)
                wrong += judged(thing.name, thing.fate, thing.reason, [str(path), key] in answer["delivered"], reasons)
        return wrong

    return Batch([str(path)], judge)


def as_made_shards(things: Sequence[HostileShard], folder: Path) -> Batch:
    """Made shards, and a good one."""
    good_path, good = good_shard(folder)
    shards = []
    for number, thing in enumerate(things):
        path = folder / f"hostile-{number}{thing.suffix}"
        thing.write(path)
        shards.append(str(path))
        good += [(str(path), key) for key in thing.good]

    def judge(answer: dict[str, Any]) -> list[str]:
        wrong = accounted(answer, good)
        for shard, thing in zip(shards, things, strict=True):
            arrived = any(where == shard and key not in thing.good for where, key in answer["delivered"])
            if thing.fate == FAILS:
                wrong += judged(thing.name, FAILS, thing.reason, arrived, failures_of(answer, shard))
        for shard, thing in zip(shards, things, strict=True):
            wrong = [text.replace(shard, f"{thing.name} ({Path(shard).name})") for text in wrong]
        return wrong

    return Batch([*shards, good_path], judge)


def in_batches(hunt: Hunt, things: Sequence[Any], write: Callable[[Sequence[Any], Path], Batch], size: int) -> None:
    batches = [things[start : start + size] for start in range(0, len(things), size)]
    with ThreadPoolExecutor(2) as pool:
        found = [text for each in pool.map(lambda batch: hunt.findings(batch, write), batches) for text in each]
    assert not found, f"{len(found)} findings:\n" + "\n\n".join(found)


# Tests


@pytest.mark.parametrize(
    "way, end",
    {"abort": "signal SIGABRT", "spin": "signal SIGKILL", "hang": "no end after 2 s", "allocate": "raised"}.items(),
)
@pytest.mark.slow
def test_how_a_child_ends_is_said(way: str, end: str, runners: list[Runner]) -> None:
    answer = runners[0].run(
        [], cpu_seconds=1 if way == "spin" else 30, wall_seconds=2 if way == "hang" else 60, misbehave=way
    )
    assert answer["end"] == end
    assert answer["peak_bytes"] < 4 << 30
    assert way != "allocate" or "MemoryError" in answer["text"]


def test_a_lost_or_doubled_sample_is_found() -> None:
    sound = {"delivered": [["s", "a"], ["s", "b"]], "failures": [["s", "c", "txt", "cut"]], "samples": 3}
    good = [("s", "a"), ("s", "b")]
    assert accounted(sound, good) == []
    assert "delivered 0 times" in accounted(sound, [("s", "other")])[0]
    assert "delivered 2 times" in accounted(sound | {"delivered": [["s", "a"]] * 2}, [("s", "a")])[0]
    assert "4 samples, 2 delivered, 1 failed" in accounted(sound | {"samples": 4}, good)[0]
    assert "without a reason" in accounted(sound | {"failures": [["s", "c", "txt", ""]]}, good)[0]


def sampled(things: Sequence[Any], most: int) -> list[Any]:
    return [things[i] for i in sorted({round(n * (len(things) - 1) / (most - 1)) for n in range(most)})]


def product(files: Sequence[Path], ways: Sequence[str]) -> list[tuple[Path, str]]:
    return [(path, way) for way in ways for path in files]


@pytest.mark.slow
def test_hostile_files_as_shards(hunt: Hunt, hostile: list[Path]) -> None:
    own = [(path, suffix) for suffix in SHARD_SUFFIXES for path in hostile if path.name.endswith(suffix)]
    in_batches(hunt, own + sampled(product(hostile, SHARD_SUFFIXES), 15), as_shards, 100)


@pytest.mark.slow
def test_hostile_files_as_members(hunt: Hunt, hostile: list[Path]) -> None:
    in_batches(hunt, sampled(product(hostile, FIELDS), 300), as_members, 150)


def test_hostile_files_as_cells(hunt: Hunt, hostile: list[Path]) -> None:
    in_batches(hunt, sampled(product(hostile, COLUMNS), 150), as_cells, 75)


def test_made_samples_fail_alone(hunt: Hunt) -> None:
    in_batches(hunt, [each for each in hostile_samples() if not each.heavy], as_samples, 80)


@pytest.mark.slow
def test_made_shards_fail_alone(hunt: Hunt) -> None:
    in_batches(hunt, [each for each in hostile_shards() if not each.heavy], as_made_shards, 80)


SHARE = 1 if os.environ.get("ORCHDATA_EVERY_POINT") else 3
"""Of how many names each file is tried under one: most names of a kind are read by the same code."""
EVERY = {
    "shards": (as_shards, SHARD_SUFFIXES, 100),
    "members": (as_members, FIELDS, 400),
    "cells": (as_cells, COLUMNS, 300),
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("way, name", [(way, name) for way, (_, names, _) in EVERY.items() for name in names])
def test_every_hostile_file_and_every_name(way: str, name: str, hunt: Hunt, hostile: list[Path]) -> None:
    make, names, at_once = EVERY[way]
    mine = [path for number, path in enumerate(hostile) if (number + names.index(name)) % SHARE == 0]
    in_batches(hunt, product(mine, [name]), make, at_once)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_heavy_samples_fail_alone(hunt: Hunt) -> None:
    in_batches(hunt, [each for each in hostile_samples() if each.heavy], as_samples, 1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_heavy_shards_fail_alone(hunt: Hunt) -> None:
    in_batches(hunt, [each for each in hostile_shards() if each.heavy], as_made_shards, 1)
