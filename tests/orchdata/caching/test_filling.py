"""Processes of a node fill one folder: each shard is fetched once, whoever is killed, and never above the cap."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from rank_jobs import server
from rank_server import Rank
from servers.fixtures import Proxied
from servers.s3_server import S3Server
from shard_factory import RECIPE, omni_samples, write_shard

import orchdata as od
from orchdata.loaders.storage.files import FOLDER, SUFFIX

SUPPORT = Path(__file__).resolve().parents[2] / "support"
PROCESSES, KILLED, SHARDS = 8, 4, 12


class Folder:
    """The folder of a cache, looked at while it is filled."""

    def __init__(self, path: Path) -> None:
        self.path = path / FOLDER
        self.most_bytes = 0

    def look(self) -> int:
        """Return the bytes of all files in it."""
        found = 0
        with suppress(FileNotFoundError):
            for entry in os.scandir(self.path):
                with suppress(FileNotFoundError):  # renamed meanwhile
                    found += entry.stat(follow_symlinks=False).st_size
        self.most_bytes = max(self.most_bytes, found)
        return found

    @property
    def copies(self) -> list[Path]:
        return sorted(self.path.glob(f"*{SUFFIX}"))


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Callable[..., list[Rank]]]:
    with ExitStack() as stack:

        def start(*arguments: str) -> list[Rank]:
            """Processes that have imported all: each is a fork."""
            started = []
            for number in range(PROCESSES):
                log = stack.enter_context((tmp_path / f"{number}.log").open("wb"))
                process = server(number % 2).start([str(SUPPORT / "cache_job.py"), *arguments], os.environ, log)
                for end in (process.stdin, process.stdout):
                    stack.enter_context(end)
                stack.callback(process.wait)
                stack.callback(process.kill)
                started.append(process)
            for each in started:
                assert each.stdout.readline() == b"ready\n"
            return started

        yield start


@pytest.mark.parametrize("fits", [pytest.param(SHARDS, marks=pytest.mark.slow), SHARDS - 3])
def test_eight_processes_fill_one_folder_and_four_are_killed(
    s3_server: S3Server,
    new_bucket: Callable[[], str],
    proxied: Proxied,
    tmp_path: Path,
    processes: Callable[..., list[Rank]],
    fits: int,
) -> None:
    proxy, bucket = proxied(s3_server), new_bucket()
    sizes = []
    for number in range(SHARDS):
        path = write_shard(tmp_path / f"{number}.tar", omni_samples(4, prefix=f"s{number}-", seed=5))
        sizes.append(Path(path).stat().st_size)
        s3_server.put(bucket, f"{number}.tar", Path(path).read_bytes())
    options = s3_server.options_of("all", proxy.endpoint)
    urls = f"s3://{bucket}/*.tar"
    index = od.ShardDataset(urls, RECIPE, storage_options=options).index()
    cap = max(sizes) * fits + 2048 * SHARDS
    folder = Folder(tmp_path / "nvme")
    running = processes(str(tmp_path / "nvme"), str(cap), str(index.path), json.dumps(options))
    proxy.clear()
    proxy.delay = 0.5
    for each in running:
        each.stdin.write(b"\n")
    while len(proxy.requests("RANGE")) < PROCESSES:
        folder.look()
    for each in running[:KILLED]:
        each.send_signal(signal.SIGKILL)
    for each in running[KILLED:]:
        while each.poll() is None:
            folder.look()
        assert each.poll() == 0
    folder.look()

    whole = Counter(each.path.rpartition("/")[2] for each in proxy.requests("RANGE"))
    assert len(folder.copies) >= min(fits, SHARDS)
    assert sum(whole.values()) <= len(folder.copies) + KILLED
    assert max(whole.values()) <= 1 + KILLED
    assert folder.most_bytes <= cap
    assert not list(folder.path.glob(".*.part"))
    originals = {Path(tmp_path / f"{number}.tar").read_bytes() for number in range(SHARDS)}
    assert {path.read_bytes() for path in folder.copies} <= originals
