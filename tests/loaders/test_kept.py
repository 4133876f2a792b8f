"""The cache folder: a list by kind; old files of ours go; what is gone is read by who has it open, or made again."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import only_root
from fresh_index import content
from shard_factory import omni_shards
from typer.testing import CliRunner

import orchdata as od
from orchdata.cli import app
from orchdata.loaders.index import index as index_module
from orchdata.loaders.index.build import build_index
from orchdata.loaders.index.index import open_index
from orchdata.loaders.storage.cache import KINDS, CacheFolder, MappedArray, Pruned, prune

pytestmark = pytest.mark.usefixtures("no_hang")
DAY = 24 * 3600.0
DIGEST = "0123456789abcdef" * 2
"""Of the name of a kept file."""
ALL = {"facts": 3, "texts": 3, "costs": 3, "index": 1}


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    return omni_shards(tmp_path, shards=3, samples=9)


def kept(*folders: str) -> list[Path]:
    """The files of kinds, without notes and locks."""
    root = CacheFolder().root
    found = [path for folder in folders or KINDS for path in (root / folder).glob("*") if path.name[0] != "."]
    return sorted(found)


def age(path: Path, days: float) -> None:
    with suppress(FileNotFoundError):
        then = path.stat().st_mtime - days * DAY
        os.utime(path, (then, then))


def age_all(days: float) -> None:
    for path in [*kept(), *CacheFolder().root.glob("*/.*.verified")]:
        age(path, days)


def prune_all(**options: Any) -> Pruned:
    return prune(CacheFolder(), older_than_seconds=0.0, **options)


def counts(pruned: Pruned) -> dict[str, int]:
    return {name: amount.files for name, amount in pruned.removed.items()}


# --- what goes


def test_what_was_not_used_for_long_goes_and_is_made_again(shards: list[str]) -> None:
    before = content(build_index(shards, od.Recipe()))
    age_all(31)
    young = CacheFolder().file("packing", f"{DIGEST}.json")
    young.write_text("{}")
    dry = prune(CacheFolder(), older_than_seconds=30 * DAY, dry_run=True)
    assert len(kept()) == 11  # facts, counts of texts and costs of three shards, the index, and the young one
    pruned = prune(CacheFolder(), older_than_seconds=30 * DAY)
    assert pruned == dry and counts(pruned) == ALL
    assert (pruned.left.files, pruned.left.bytes) == (1, 2)
    assert kept() == [young] and not list((CacheFolder().root / "index").iterdir())  # no note and no mark is left
    assert open_index(shards, od.Recipe()) is None
    assert content(build_index(shards, od.Recipe())) == before


def test_each_use_of_a_shard_is_recorded(shards: list[str]) -> None:
    build_index(shards, od.Recipe())
    age_all(31)
    build_index(shards, od.Recipe(image=od.ImagePreprocessor(max_tokens=64)))  # reads the facts
    assert counts(prune(CacheFolder(), older_than_seconds=30 * DAY)) == {"costs": 3, "index": 1}


def test_each_use_of_an_index_is_recorded_and_that_of_a_run_each_day(
    shards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own time does not change: readers would take it for another file."""
    path = build_index(shards, od.Recipe()).path
    age(path, 31)
    (note,) = path.parent.glob(f".{path.name}.*.verified")
    note.unlink()
    open_index(shards, od.Recipe())  # verified, and noted
    age(note, 31)
    before = path.stat()
    index = open_index(shards, od.Recipe())
    assert index is not None and path.stat().st_ctime_ns == before.st_ctime_ns
    assert "index" not in counts(prune(CacheFolder(), older_than_seconds=30 * DAY))
    age(note, 31)
    index._used -= 2 * index_module._STILL_SECONDS
    index.check_unchanged()
    assert "index" not in counts(prune(CacheFolder(), older_than_seconds=30 * DAY))
    age(note, 31)
    index.check_unchanged()  # it was recorded just now
    assert counts(prune(CacheFolder(), older_than_seconds=30 * DAY)) == {"index": 1} and not kept("index")


def test_the_least_recently_used_go_first() -> None:
    for number, days in ((1, 3), (2, 2), (3, 1)):
        path = CacheFolder().file("costs", f"{number:032x}.costs")
        path.write_bytes(bytes(1000))
        age(path, days)
    assert counts(prune(CacheFolder(), most_bytes=2500)) == {"costs": 1}
    assert [path.stem[-1] for path in kept()] == ["2", "3"]
    assert counts(prune(CacheFolder(), most_bytes=0)) == {"costs": 2}


def test_shards_of_the_user_in_a_folder_of_ours_stay(tmp_path: Path) -> None:
    """The cache folder may be the folder of the data, with the shards in `shards`."""
    cache = CacheFolder(tmp_path / "data", max_bytes=1)
    names = ("train-000.tar", "train-001.tar", "train-001.sum", "train-000.used", "rest.part", "train.index")
    for folder in ("shards", "index", "packing", "arrays"):
        for name in (*names, "labels.json", "tokens.int64"):
            path = cache.file(folder, name)
            path.write_bytes(b"mine")
            age(path, 100)
    with pytest.raises(ValueError, match="full"):
        cache.entry(DIGEST, full)
    assert prune(cache, older_than_seconds=0.0, most_bytes=0) == Pruned()
    assert len(list(cache.root.glob("*/*.*"))) == 32
    cache.entry(DIGEST, lambda file, limit: file.write(b"12") and None)
    assert list(prune(cache, most_bytes=0).removed) == ["shards"]
    assert len(list(cache.root.glob("*/[a-z]*.*"))) == 32


def full(*_: object) -> None:
    raise ValueError("full")


@only_root
def test_links_and_files_of_other_users_stay(tmp_path: Path) -> None:
    cache, target = CacheFolder(), tmp_path / f"{DIGEST}.costs"
    target.write_bytes(b"mine")
    cache.file("costs", f"{1:032x}.costs").symlink_to(target)
    (cache.make("costs") / f"{2:032x}.costs").mkdir()
    cache.file("costs", f"{3:032x}.costs").write_bytes(b"theirs")
    os.chown(cache.root / "costs" / f"{3:032x}.costs", 61_002, 61_002)
    (cache.root / "facts").symlink_to(tmp_path)
    assert prune_all() == Pruned() == prune(CacheFolder(tmp_path / "none"), most_bytes=0)
    assert target.exists() and len(kept("costs")) == 3


def test_leftovers_of_killed_writers_go_after_a_day() -> None:
    root = CacheFolder().make("costs")
    for name, days in ((".a.costs.0123.tmp", 2.0), (".b.costs.0123.tmp", 0.5), (".c.tar.0123.part", 2.0)):
        (root / name).write_bytes(b"1234")
        age(root / name, days)
    prune(CacheFolder(), older_than_seconds=30 * DAY)
    assert [path.name for path in root.iterdir()] == [".b.costs.0123.tmp"]


# --- what is gone while it is used


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:DataLoader worker")
def test_a_run_goes_on_after_its_folder_was_emptied_and_a_worker_killed(shards: list[str]) -> None:
    """The worker in its place, and those of the next epoch, get the index and arrays of the training process."""

    def begun() -> od.DataLoader:
        dataset = od.ShardDataset(shards)
        return od.DataLoader(dataset, batch_size=1, shuffle=True, num_workers=2, multiprocessing_context="forkserver")

    expected = [[batch.sample_ids for batch in epoch] for epoch in [begun()] for _ in range(2)]
    loader = begun()
    delivered: list[list[Any]] = [[], []]
    for number, batch in enumerate(loader):
        delivered[0].append(batch.sample_ids)
        if number == 1:
            prune_all()
            assert not kept("index", "arrays", "costs")
            workers = multiprocessing.active_children()
            assert workers
            for worker in workers:
                os.kill(worker.pid or 0, signal.SIGKILL)
    delivered[1] = [batch.sample_ids for batch in loader]
    assert delivered == expected and len(delivered[0]) == 27 and not kept("index")


def test_another_process_opens_what_this_one_lends(shards: list[str]) -> None:
    """And nothing else: by a descriptor that is another file now, it finds what has the name, or an error."""
    index, array = build_index(shards, od.Recipe()), MappedArray(np.arange(1000))
    rows, data = index.num_rows, pickle.dumps([index, array])
    prune_all()
    assert not kept("index", "arrays")
    program = "import pickle, sys; one, two = pickle.load(sys.stdin.buffer); print(one.num_rows, two.array.sum())"
    run = [sys.executable, "-c", program]
    assert subprocess.run(run, input=data, capture_output=True, check=True).stdout.split() == [
        str(rows).encode(),
        str(999 * 500).encode(),
    ]
    del index, array
    with open("/dev/null", "rb"), open(shards[0], "rb"), open(shards[1], "rb"):
        failed = subprocess.run(run, input=data, capture_output=True, check=False)
    assert failed.returncode == 1 and b"was removed: run `orchdata index` again" in failed.stderr


BUILDS = """
import json, sys
from orchdata.loaders.index.build import build_index
import orchdata as od
print("ready", flush=True)
for _ in sys.stdin:
    index = build_index(sys.argv[1:], od.Recipe(), num_threads=2)
    print(json.dumps([[index.key(row) for row in range(index.num_rows)], index.llm_tokens.tolist()]), flush=True)
"""


@contextmanager
def process(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has printed a line, and waits for lines of its input."""
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


@pytest.mark.slow
def test_an_index_is_right_after_prunes_at_any_moment_of_its_build(shards: list[str]) -> None:
    """Each time the folder is emptied again and again until the build, in a process of its own, has ended."""
    expected = build_index(shards, od.Recipe())
    rows = [[expected.key(row) for row in range(expected.num_rows)], expected.llm_tokens.tolist()]
    del expected
    with process(BUILDS, *shards) as child:
        assert child.stdin is not None and child.stdout is not None
        for _ in range(15):
            prune_all()
            child.stdin.write("\n")
            child.stdin.flush()
            said = ""
            while not said.endswith("\n"):
                prune_all()
                assert child.poll() is None
                if select.select([child.stdout], [], [], 0.005)[0]:
                    said += os.read(child.stdout.fileno(), 1 << 16).decode()
            assert json.loads(said) == rows


# --- the commands


def test_the_commands(shards: list[str], private_cache: Path) -> None:
    run = CliRunner()
    assert run.invoke(app, ["cache"]).output == f"nothing is kept in {private_cache}\n"
    build_index(shards, od.Recipe())
    output = run.invoke(app, ["cache"]).output
    assert "costs of a shard under a recipe" in output and "just now" in output
    found = json.loads(run.invoke(app, ["cache", "--json"]).output)["kinds"]
    assert found["costs"]["files"] == 3 and found["index"]["last_used"].endswith("+00:00")
    assert run.invoke(app, ["cache", "prune"]).output.startswith("removed 0 files, 0 B, from")
    assert "would remove 10 files" in run.invoke(app, ["cache", "prune", "--older-than", "0s", "--dry-run"]).output
    output = run.invoke(app, ["cache", "prune", "--max-bytes", "0"]).output
    assert "removed 10 files" in output and "  costs: 3 files" in output
    again = json.loads(run.invoke(app, ["cache", "prune", "--older-than", "0s", "--json"]).output)
    assert again["removed"] == {} and again["left"] == {"files": 0, "bytes": 0}
    for option, value, words in (
        ("--older-than", "30", "--older-than is '30', and should be a time with its unit, such as 30d"),
        ("--max-bytes", "lots", "--max-bytes is 'lots', and should be a number of bytes, such as 50GB"),
    ):
        failed = run.invoke(app, ["cache", "prune", option, value])
        assert failed.exit_code == 1 and words in failed.output
