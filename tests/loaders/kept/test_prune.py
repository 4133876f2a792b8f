"""Pruning the cache folder: old files go, and nothing that a process uses; what is gone is made again."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import as_user, only_root
from shard_factory import omni_samples, omni_shards, write_shard

import orchdata as od
from orchdata.loaders.errors import StorageError
from orchdata.loaders.index.build import build_index
from orchdata.loaders.index.building import builder
from orchdata.loaders.index.first import build_first_index
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.locations import open_index
from orchdata.loaders.kept import prune as prune_module
from orchdata.loaders.kept.builds import building, builds
from orchdata.loaders.kept.kinds import KINDS
from orchdata.loaders.kept.prune import FOREIGN, IN_USE, NEWER, NO_LOCKS, OTHER_USERS, Pruned, prune
from orchdata.loaders.limits import Limits
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.mapped_array import MappedArray
from orchdata.loaders.storage.sealed import seal
from orchdata.loaders.storage.shared import use
from orchdata.loaders.versions import COSTS_FORMAT

pytestmark = pytest.mark.usefixtures("no_hang")
DAY = 24 * 3600.0
DIGEST = "0123456789abcdef" * 2
"""Of the name of a kept file."""
ALL = {"facts": 3, "texts": 3, "costs": 3, "index": 1}
BOB = 61_002


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    return omni_shards(tmp_path, shards=3, samples=9)


def content(index: Index) -> list[Any]:
    return [index.key(row) for row in range(index.num_rows)] + [index.llm_tokens.tolist(), index.totals]


def kept(*folders: str) -> list[Path]:
    """The files of kinds, without notes and locks."""
    root = CacheFolder().root
    wanted = folders or tuple(kind.folder for kind in KINDS)
    found = [path for folder in wanted for path in (root / folder).glob("*") if not path.name.startswith(".")]
    return sorted(found)


def age(path: Path, days: float) -> None:
    with suppress(FileNotFoundError):
        then = path.stat().st_mtime - days * DAY
        os.utime(path, (then, then))


def age_all(days: float) -> None:
    for path in kept():
        age(path, days)


def prune_all(**options: Any) -> Pruned:
    return prune(CacheFolder(), older_than_seconds=0.0, **options)


def counts(amounts: dict[str, Any]) -> dict[str, int]:
    return {name: amount.files for name, amount in amounts.items()}


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


def answer(child: subprocess.Popen[str]) -> str:
    """What a process says after the next line of its input."""
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write("\n")
    child.stdin.flush()
    return child.stdout.readline().strip()


# --- what goes


def test_what_was_not_used_for_long_goes_and_is_made_again(shards: list[str]) -> None:
    before = content(build_index(shards, od.Recipe()))
    age_all(31)
    young = CacheFolder().file("packing", f"{DIGEST}.json")
    young.write_text("{}")
    dry = prune(CacheFolder(), older_than_seconds=30 * DAY, dry_run=True)
    assert len(kept()) == 11  # facts, counts of texts and costs of three shards, the index, and the young one
    pruned = prune(CacheFolder(), older_than_seconds=30 * DAY)
    assert (
        pruned == dry
        and counts(pruned.removed) == {"facts": 3, "texts": 3, "costs": 3, "index": 1}
        and not pruned.stays
    )
    assert (pruned.left.files, pruned.left.bytes) == (1, 2)
    assert kept() == [young] and not list((CacheFolder().root / "index").iterdir())  # no note and no mark is left
    assert open_index(shards, od.Recipe()) is None
    assert content(build_index(shards, od.Recipe())) == before


def test_each_use_of_a_shard_is_recorded(shards: list[str]) -> None:
    build_index(shards, od.Recipe())
    age_all(31)
    build_index(shards, od.Recipe(image=od.ImagePreprocessor(max_tokens=64)))  # reads the facts
    assert counts(prune(CacheFolder(), older_than_seconds=30 * DAY).removed) == {"costs": 3, "index": 1}


def test_each_use_of_an_index_is_recorded_without_touching_it(shards: list[str]) -> None:
    path = build_index(shards, od.Recipe()).path
    age(path, 31)
    before = path.stat()
    assert open_index(shards, od.Recipe()) is not None
    after = path.stat()
    assert (after.st_mtime_ns, after.st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)
    assert path.with_suffix(use.USED_SUFFIX) in kept("index")
    assert not prune(CacheFolder(), older_than_seconds=30 * DAY).removed
    assert counts(prune_all().removed) == ALL
    assert not kept()


def test_a_run_that_goes_on_for_weeks_is_recorded(shards: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    index = build_index(shards, od.Recipe())
    index.check_unchanged()
    age(index.path, 31)
    index._opened = os.stat(index.path)
    index.check_unchanged()
    assert not index.path.with_suffix(use.USED_SUFFIX).exists()  # it was looked at just now
    monkeypatch.setitem(use._refreshed, str(index.path), -2 * use.MARK_SECONDS)
    index.check_unchanged()
    assert index.path.with_suffix(use.USED_SUFFIX).exists()


# --- what a process uses


OPENS_INDEX = """
import sys
from orchdata.loaders.index.index import Index
index = Index(sys.argv[1])
print("ready", flush=True)
for _ in sys.stdin:
    print(Index(sys.argv[1]).num_rows, flush=True)  # as a worker that starts now
"""


def test_an_index_that_a_process_has_open_stays_until_the_process_ends(shards: list[str]) -> None:
    index = build_index(shards, od.Recipe())
    path, rows = index.path, index.num_rows
    del index
    age_all(100)
    with process(OPENS_INDEX, str(path)) as child:
        pruned = prune_all()
        assert counts(pruned.removed) == {"facts": 3, "texts": 3, "costs": 3} and counts(pruned.stays) == {IN_USE: 1}
        assert answer(child) == str(rows)
        child.send_signal(signal.SIGKILL)
    assert counts(prune_all().removed) == {"index": 1}


def test_workers_find_the_arrays_of_a_loader() -> None:
    values = np.arange(1000)
    data = pickle.dumps(MappedArray(values))
    (path,) = kept("arrays")
    age(path, 100)
    assert counts(prune_all().stays) == {IN_USE: 1}
    arrived = pickle.loads(data).array  # a worker
    del values
    assert counts(prune_all().stays) == {IN_USE: 1} and arrived[5] == 5
    del arrived
    assert counts(prune_all().removed) == {"arrays": 1}


def test_fields_of_an_index_stay_while_they_are_open(tmp_path: Path) -> None:
    samples = [{**sample, "cls": str(number).encode()} for number, sample in enumerate(omni_samples(4))]
    dataset = od.ShardDataset([write_shard(tmp_path / "a.tar", samples)], od.Recipe(), index_fields=("cls",))
    index = dataset.index()
    fields = dataset.open_fields(index)
    age_all(100)
    assert counts(prune_all().stays) == {IN_USE: 2}  # with the index
    assert [path.suffix for path in kept("fields")] == [".merged"]
    assert fields.column("cls", 0, 2).to_pylist() == [0, 1]


def test_a_prune_while_a_build_is_under_way_leaves_what_it_uses(shards: list[str]) -> None:
    build_index(shards, od.Recipe())
    with building(CacheFolder()) as own:
        assert builds(CacheFolder()) == [own]
        assert counts(prune_all().stays) == {IN_USE: 10}
        age_all(100)
        assert counts(prune_all().removed) == {
            "facts": 3,
            "texts": 3,
            "costs": 3,
            "index": 1,
        }  # all of it is older than the build
    assert not list((CacheFolder().root / "locks").glob("build-*"))


def test_what_killed_builds_leave_is_no_build() -> None:
    cache = CacheFolder()
    cache.file("locks", "build-0123").write_bytes(b"")
    assert not builds(cache) and (cache.root / "locks" / "build-0123").exists()
    cache.file("packing", f"{DIGEST}.json").write_text("{}")
    prune_all()
    assert not (cache.root / "locks" / "build-0123").exists()


def test_costs_that_go_before_they_are_merged_are_measured_again(
    shards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(build_index(shards, od.Recipe()))
    monkeypatch.setattr(builder, "_IN_MEMORY_BYTES", 0)  # so that costs are read again when they are merged
    merge = builder.merge_tables

    def late(*args: Any, **options: Any) -> None:
        if len(removed) < 2:
            removed.append(kept("costs")[0])
            removed[-1].unlink()
        merge(*args, **options)

    removed: list[Path] = []
    monkeypatch.setattr(builder, "merge_tables", late)
    assert content(build_index(shards, od.Recipe(), force=True)) == before
    assert len(removed) == 2


BUILDS = """
import json, sys
from orchdata.loaders.index.build import build_index
import orchdata as od
print("ready", flush=True)
for _ in sys.stdin:
    index = build_index(sys.argv[1:], od.Recipe(), num_threads=2)
    print(json.dumps([[index.key(row) for row in range(index.num_rows)], index.llm_tokens.tolist()]), flush=True)
"""


def test_an_index_is_right_after_prunes_at_any_moment_of_its_build(shards: list[str]) -> None:
    """Each time the folder is emptied again and again until the build, in a process of its own, has ended."""
    expected = build_index(shards, od.Recipe())
    rows = [[expected.key(row) for row in range(expected.num_rows)], expected.llm_tokens.tolist()]
    del expected
    with process(BUILDS, *shards) as child:
        assert child.stdin is not None and child.stdout is not None
        for _ in range(40):
            prune_all()
            child.stdin.write("\n")
            child.stdin.flush()
            said = ""
            while not said.endswith("\n"):
                age_all(1)  # so that nothing counts as used since the build began
                prune_all()
                assert child.poll() is None
                if select.select([child.stdout], [], [], 0.005)[0]:
                    said += os.read(child.stdout.fileno(), 1 << 16).decode()
            assert json.loads(said) == rows


PRUNES = """
import sys
from orchdata.loaders.kept.prune import prune
from orchdata.loaders.storage.cache import CacheFolder
print("ready", flush=True)
sys.stdin.readline()
pruned = prune(CacheFolder(), older_than_seconds=0.0)
print(sum(amount.files for amount in pruned.removed.values()), flush=True)
"""


def test_several_prunes_at_once_remove_each_file_once() -> None:
    for number in range(300):
        CacheFolder().file("packing", f"{number:032x}.json").write_text("{}")
    with process(PRUNES) as one, process(PRUNES) as other:
        for child in (one, other):
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        said = [int(child.stdout.readline()) for child in (one, other)]  # type: ignore[union-attr]
    assert sum(said) == 300 and not kept()


# --- a bound


def test_a_build_ends_within_its_bound_and_keeps_what_it_used(shards: list[str]) -> None:
    first = build_index(shards, od.Recipe())
    age_all(1)
    cache = CacheFolder(max_kept_bytes=1)
    recipe = od.Recipe(limits=Limits(sample_tokens=10_000_000))
    with pytest.warns(UserWarning, match="above the bound of 1 .ORCHDATA_CACHE_BYTES.: the rest is in use"):
        second = build_index(shards, recipe, cache=cache)
    assert first.path.exists() and second.path.exists()  # both are open
    costs = kept("costs")
    assert len(costs) == 3
    measured: list[bool] = []
    build_index(shards, recipe, progress=lambda done: measured.append(done.measured))
    assert measured == [False] * 3 and kept("costs") == costs


def test_the_index_of_first_samples_ends_within_its_bound_too(shards: list[str]) -> None:
    build_index(shards, od.Recipe())
    age_all(1)
    assert len(kept("costs")) == 3
    recipe = od.Recipe(limits=Limits(sample_tokens=10_000_000))
    with pytest.warns(UserWarning, match="above the bound of 1 .ORCHDATA_CACHE_BYTES.: the rest is in use"):
        first = build_first_index(shards, recipe, 2, cache=CacheFolder(max_kept_bytes=1))
    assert first.path.exists() and not kept("texts")


def test_the_least_recently_used_go_first_and_indexes_last() -> None:
    cache = CacheFolder()
    for name, folder, days in (("a", "costs", 3), ("b", "costs", 2), ("c", "facts", 1)):
        path = cache.file(folder, f"{name}.{folder}")
        path.write_bytes(seal(b"cost" if folder == "costs" else b"fact", 1, {}, [bytes(1000)])[0])
        age(path, days)
    index = cache.file("index", "d.index")
    index.write_bytes(seal(b"indx", 1, {}, [bytes(1000)])[0])
    age(index, 9)
    size = index.stat().st_size
    removed = [*prune(cache, most_bytes=3 * size).removed, *prune(cache, most_bytes=2 * size).removed]
    assert removed == ["costs", "costs"] and [path.name for path in kept()] == ["c.facts", "d.index"]
    assert list(prune(cache, most_bytes=0).removed) == ["facts", "index"]


def test_a_bound_is_a_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHDATA_CACHE_BYTES", "1.5GB")
    assert CacheFolder().max_kept_bytes == 1_500_000_000
    assert CacheFolder(max_kept_bytes=7).max_kept_bytes == 7
    monkeypatch.setenv("ORCHDATA_CACHE_BYTES", "much")
    with pytest.raises(ValueError, match="ORCHDATA_CACHE_BYTES is 'much', and should be a number of bytes, such as 50"):
        CacheFolder()


# --- what is not ours to remove


def test_files_of_a_newer_release_stay_unless_they_are_named() -> None:
    cache = CacheFolder()
    newer = cache.file("costs", "a.costs")
    newer.write_bytes(seal(b"cost", COSTS_FORMAT + 1, {"anything": 1}, [])[0])
    of_another_kind = cache.file("costs", "b.image")
    of_another_kind.write_bytes(seal(b"imgc", 1, {}, [])[0])
    of_another_folder = cache.file("later", "c.later")
    of_another_folder.write_bytes(seal(b"latr", 1, {}, [])[0])
    pruned = prune_all()
    assert counts(pruned.stays) == {NEWER: 3} and not pruned.removed
    assert counts(prune(cache, older_than_seconds=DAY, all_versions=True).removed) == {}
    assert counts(prune_all(all_versions=True).removed) == {"costs": 2, "later": 1}


def test_files_that_are_not_ours_and_links_stay(tmp_path: Path) -> None:
    cache = CacheFolder()
    target = tmp_path / "target.costs"
    target.write_bytes(seal(b"cost", 1, {}, [])[0])
    cache.file("costs", "link.costs").symlink_to(target)
    cache.file("costs", "notes.txt").write_text("mine")
    (cache.make("costs") / "folder.costs").mkdir()
    (cache.root / "index").symlink_to(tmp_path)
    pruned = prune_all(all_versions=True)
    assert not pruned.removed and counts(pruned.stays) == {FOREIGN: 3}
    assert target.exists() and len(kept("costs")) == 3


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
    pruned = prune(cache, older_than_seconds=0.0, all_versions=True)
    pruned_more = prune(cache, most_bytes=0, all_versions=True)
    assert not pruned.removed and not pruned_more.removed and len(list(cache.root.glob("*/*.*"))) == 32
    cache.entry(DIGEST, lambda file, limit: file.write(b"12") and None)
    assert len(list(cache.root.glob("shards/train*"))) == 5
    assert list(prune(cache, most_bytes=0).removed) == ["shards"]
    assert len(list(cache.root.glob("*/[a-z]*.*"))) == 32


def full(*_: object) -> None:
    raise ValueError("full")


@only_root
def test_files_of_other_users_stay_and_are_counted(shards: list[str]) -> None:
    build_index(shards, od.Recipe())
    os.chown(kept("costs")[0], BOB, BOB)
    os.chown(kept("index")[0], BOB, BOB)
    age_all(100)
    pruned = prune_all()
    assert counts(pruned.stays) == {OTHER_USERS: 2} and counts(pruned.removed) == {"facts": 3, "texts": 3, "costs": 2}
    before = kept("costs")[0].stat().st_mtime_ns
    build_index(shards, od.Recipe())
    assert kept("costs")[0].stat().st_mtime_ns == before or kept("costs")[0].stat().st_uid == 0  # or made again


@only_root
@pytest.mark.usefixtures("no_pauses")
def test_a_folder_that_cannot_be_written_is_one_error() -> None:
    def work(folder: Path) -> Callable[[], None]:
        def run() -> None:
            cache = CacheFolder(folder)
            path = cache.file("packing", f"{DIGEST}.json")
            path.write_text("{}")
            path.parent.chmod(0o500)
            with pytest.raises(StorageError, match=f"packing/{DIGEST}.json: cannot be removed: Permission denied"):
                prune(cache, older_than_seconds=0.0)
            assert counts(prune(cache, older_than_seconds=0.0, dry_run=True).removed) == {"packing": 1}
            path.parent.chmod(0o700)

        return run

    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        as_user(BOB, work(Path(folder)))


def test_a_missing_folder_keeps_nothing(tmp_path: Path) -> None:
    assert prune(CacheFolder(tmp_path / "none"), older_than_seconds=0.0) == Pruned()
    assert not (tmp_path / "none").exists()


def test_without_locks_what_processes_hold_stays_for_long(shards: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    path = build_index(shards, od.Recipe()).path
    age_all(89)
    pruned = prune_all()
    assert counts(pruned.stays) == {NO_LOCKS: 1} and counts(pruned.removed) == {"facts": 3, "texts": 3, "costs": 3}
    age(path, 2)
    assert counts(prune_all().removed) == {"index": 1}


def test_leftovers_of_killed_writers_go_after_a_day() -> None:
    root = CacheFolder().make("costs")
    for name, days in ((".a.costs.0123.tmp", 2.0), (".b.costs.0123.tmp", 0.5), (f"{DIGEST}.used", 2.0)):
        (root / name).write_bytes(b"1234")
        age(root / name, days)
    pruned = prune(CacheFolder(), older_than_seconds=30 * DAY)
    assert (pruned.removed["costs"].files, pruned.removed["costs"].bytes) == (2, 8)
    assert [path.name for path in root.iterdir()] == [".b.costs.0123.tmp"]


def test_a_file_that_is_used_before_it_is_locked_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    path = CacheFolder().file("packing", f"{DIGEST}.json")
    path.write_text("{}")
    age(path, 100)
    lock = prune_module.lock_alone

    def late(fd: int) -> bool:
        os.utime(path)
        return lock(fd)

    monkeypatch.setattr(prune_module, "lock_alone", late)
    assert counts(prune_all().stays) == {IN_USE: 1} and path.exists()
