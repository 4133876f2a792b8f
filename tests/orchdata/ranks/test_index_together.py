"""Ranks without an index build it together; another process does the work of one that is lost."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from index_job import __file__ as JOB
from rank_jobs import run_ranks
from shard_factory import RECIPE, omni_shards

import orchdata as od
from orchdata.loaders.index import build
from orchdata.loaders.index.build import build_index
from orchdata.loaders.index.facts import load_facts

FORK = multiprocessing.get_context("fork")
SHARDS = 9


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    return omni_shards(tmp_path, shards=SHARDS, samples=3)


def test_ranks_measure_each_shard_once_and_see_the_same(shards: list[str], tmp_path: Path) -> None:
    ranks = run_ranks(JOB, str(tmp_path), num_ranks=3, folder=tmp_path)
    measured = [name for rank in ranks for name in rank["measured"]]
    assert sorted(measured) == sorted(Path(shard).name for shard in shards)
    keys = [key for rank in ranks for key in rank["keys"]]
    assert len(keys) == len(set(keys)) == 3 * SHARDS


def test_ranks_that_may_not_build_raise_an_error(shards: list[str]) -> None:
    with pytest.raises(od.MissingIndexError, match="index='build'"):
        od.DataLoader(od.ShardDataset(shards, RECIPE), dp=(0, 2))
    with pytest.raises(ValueError, match="'build', 'require'"):
        od.DataLoader(od.ShardDataset(shards, RECIPE), index="never")  # type: ignore[arg-type]


@contextmanager
def at_a_shard(shards: list[str]) -> Iterator[int]:
    """A process that measures the first shard, and never ends."""
    at_it = FORK.Event()

    def stuck(url: str, *arguments: object, **options: object) -> object:
        if url == shards[0]:
            at_it.set()
            signal.pause()
        return load_facts(url, *arguments, **options)  # type: ignore[arg-type]

    def child() -> None:
        build.load_facts = stuck
        build_index(shards, RECIPE, num_threads=1)

    process = FORK.Process(target=child, daemon=True)
    process.start()
    assert at_it.wait(60)
    try:
        yield process.pid or 0
    finally:
        process.kill()
        process.join()


def test_another_process_measures_the_shard_of_a_lost_one(shards: list[str]) -> None:
    done: list[str] = []
    rest = threading.Event()

    def progress(built: build.BuildProgress) -> None:
        done.append(built.url)
        if len(done) == SHARDS - 1:
            rest.set()

    with at_a_shard(shards) as pid:
        ours = threading.Thread(target=build_index, args=(shards, RECIPE), kwargs={"progress": progress})
        ours.start()
        assert rest.wait(60)
        assert shards[0] not in done, "another process measures it"
        os.kill(pid, signal.SIGKILL)
        ours.join(60)
        assert not ours.is_alive()
    assert sorted(done) == sorted(shards)
    assert len(build_index(shards, RECIPE)) == 3 * SHARDS
