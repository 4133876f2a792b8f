"""A loader with a cache: which shards a node fetches whole, what the server gives later, and equal batches."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from digests import global_batch
from servers.fixtures import Proxied
from servers.proxy import Proxy, Request
from servers.s3_server import S3Server
from shard_factory import RECIPE, omni_samples, omni_shards, write_shard

import orchdata as od
from orchdata.caching import own_streams
from orchdata.loaders.storage.files import FOLDER, SUFFIX, cache_of_environment
from orchdata.ranks.parallel import Rank

pytestmark = pytest.mark.usefixtures("kept_parquet_processes")

SHARDS, SAMPLES = 8, 8
GROUPED: dict[str, Any] = {
    "balance": od.Balance(scope="grouped", group_size=1),
    "shuffle": od.Shuffle(streams=4),
    "batch_size": 2,
}


class Remote:
    """Shards in a bucket, read through a proxy."""

    def __init__(self, server: S3Server, bucket: str, proxy: Proxy, sizes: dict[str, int]) -> None:
        self.proxy, self.sizes = proxy, sizes
        options = server.options_of("all", proxy.endpoint)
        self.dataset = od.ShardDataset(f"s3://{bucket}/*.tar", RECIPE, storage_options=options)
        self.dataset.index()
        proxy.clear()

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes.values())

    def loader(self, cache: od.Cache | None = None, **options: Any) -> od.DataLoader:
        given = {"batch_size": 4, "shuffle": True, "seed": 3, "num_threads": 0} | options
        return od.DataLoader(self.dataset, cache=cache, **given)

    def whole(self) -> list[str]:
        """Names of shards of which one request read all."""
        return [_name(each) for each in self.proxy.requests("RANGE", "GET") if self._is_whole(each)]

    def _is_whole(self, request: Request) -> bool:
        return request.body_bytes == self.sizes.get(_name(request))


def _name(request: Request) -> str:
    return request.path.rpartition("/")[2]


def epoch(loader: od.DataLoader) -> list[str]:
    """A digest of each step, and the end of what is fetched in the background."""
    found = [global_batch([step]) for step in loader.steps()]
    filled(loader)
    return found


def filled(loader: od.DataLoader) -> None:
    if loader._runtime._filler is not None:
        loader._runtime._filler.wait()


def copies(cache: od.Cache) -> list[Path]:
    return sorted((Path(cache.path) / FOLDER).glob(f"*{SUFFIX}"))


@pytest.fixture(scope="module")
def stored(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, int]]:
    """A bucket, and its shards with their sizes."""
    bucket, folder = s3_server.make_bucket("node-cache"), tmp_path_factory.mktemp("shards")
    sizes = {}
    for number in range(SHARDS):
        name = f"omni-{number}.tar"
        path = write_shard(folder / name, omni_samples(SAMPLES, prefix=f"s{number}-", seed=number))
        sizes[name] = Path(path).stat().st_size
        s3_server.put(bucket, name, Path(path).read_bytes())
    return bucket, sizes


@pytest.fixture
def remote(s3_server: S3Server, stored: tuple[str, dict[str, int]], proxied: Proxied, same_cache: None) -> Remote:
    return Remote(s3_server, stored[0], proxied(s3_server), stored[1])


@pytest.fixture(autouse=True)
def no_warnings_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchdata.notices._warned", set())


def test_a_single_node_reads_nothing_in_the_second_epoch(remote: Remote, tmp_path: Path) -> None:
    cache = od.Cache(tmp_path / "nvme", max_bytes=1 << 30)
    plain, loader = remote.loader(), remote.loader(cache)
    expected = [epoch(plain), epoch(plain)]
    remote.proxy.clear()
    first = epoch(loader)
    assert sorted(remote.whole()) == sorted(remote.sizes)
    remote.proxy.clear()
    before = loader.stats(reset=True)["reads"]
    second = epoch(loader)
    reads = loader.stats()["reads"]
    assert [first, second] == expected
    assert before["storage_bytes"] >= remote.num_bytes
    assert not remote.proxy.requests()
    assert reads["storage_bytes"] == 0 < reads["used_bytes"] <= reads["cache_bytes"]


@pytest.mark.slow
def test_workers_read_the_copies_that_the_training_process_makes(remote: Remote, tmp_path: Path) -> None:
    cache = od.Cache(tmp_path / "nvme", max_bytes=1 << 30)
    expected = epoch(remote.loader())
    filled_by = remote.loader(cache)
    epoch(filled_by)
    remote.proxy.clear()
    loader = remote.loader(cache, num_workers=1, num_threads=2)
    assert epoch(loader) == expected
    assert not remote.proxy.requests()
    assert loader.stats()["reads"]["cache_bytes"] > 0


def test_nodes_that_read_every_shard_fetch_none_whole_and_one_says_why(remote: Remote, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loaders = [
            remote.loader(
                od.Cache(tmp_path / f"node{rank}", max_bytes=1 << 30), dp=Rank(rank, 4, ranks_per_node=1), batch_size=2
            )
            for rank in range(4)
        ]
        for loader in loaders:
            epoch(loader)
    about_it = [str(each.message) for each in said if "cache=" in str(each.message)]
    assert len(about_it) == 1
    assert 'balance="grouped"' in about_it[0] and "shuffle=od.Shuffle(streams=...)" in about_it[0]
    assert not remote.whole()
    assert not list(tmp_path.rglob(f"*{SUFFIX}"))


@pytest.mark.slow
def test_grouped_nodes_read_their_own_shards_once(remote: Remote, tmp_path: Path) -> None:
    caches = [od.Cache(tmp_path / f"node{rank}", max_bytes=1 << 30) for rank in range(4)]
    ranks = [Rank(rank, 4, ranks_per_node=1) for rank in range(4)]
    plain = [remote.loader(dp=rank, **GROUPED) for rank in ranks]
    expected = [[epoch(loader) for loader in plain] for _ in range(2)]
    remote.proxy.clear()
    loaders = [remote.loader(cache, dp=rank, **GROUPED) for cache, rank in zip(caches, ranks, strict=True)]
    first = [epoch(loader) for loader in loaders]
    assert sorted(remote.whole()) == sorted(remote.sizes)  # each by one node
    once = remote.proxy.body_bytes()
    remote.proxy.clear()
    second = [epoch(loader) for loader in loaders]
    assert [first, second] == expected
    assert remote.proxy.body_bytes() <= 0.05 * once
    assert [len(copies(cache)) for cache in caches] == [2, 2, 2, 2]


@pytest.mark.slow
def test_a_full_cache_keeps_its_own_shards_and_costs_no_batch(remote: Remote, tmp_path: Path) -> None:
    cap = remote.num_bytes // 2
    cache = od.Cache(tmp_path / "nvme", max_bytes=cap)
    plain, loader = remote.loader(), remote.loader(cache)
    expected = [epoch(plain), epoch(plain), epoch(plain)]
    found = [epoch(loader)]
    kept = copies(cache)
    assert 0 < len(kept) < SHARDS
    found += [epoch(loader), epoch(loader)]
    assert found == expected
    assert copies(cache) == kept
    assert _bytes_in(cache) <= cap


def test_a_cap_below_a_shard_costs_one_warning_and_keeps_smaller_ones(remote: Remote, tmp_path: Path) -> None:
    largest = max(remote.sizes.values())
    cache = od.Cache(tmp_path / "nvme", max_bytes=largest)
    loader = remote.loader(cache)
    with pytest.warns(UserWarning, match=f"holds {largest:,} bytes, less than the shard s3://"):
        epoch(loader)
    assert copies(cache)
    assert _bytes_in(cache) <= largest
    small = od.Cache(tmp_path / "small", max_bytes=10)
    assert epoch(remote.loader(small)) == epoch(remote.loader())
    assert not copies(small)


def _bytes_in(cache: od.Cache) -> int:
    return sum(path.stat().st_size for path in (Path(cache.path) / FOLDER).iterdir())


def test_copies_of_other_data_give_way(remote: Remote, tmp_path: Path, s3_server: S3Server) -> None:
    cache = od.Cache(tmp_path / "nvme", max_bytes=remote.num_bytes + SHARDS * 1024)
    first = remote.loader(cache)
    epoch(first)
    of_first = copies(cache)
    assert len(of_first) == SHARDS
    some = od.ShardDataset(list(remote.dataset.urls[:1]), RECIPE, storage_options=remote.dataset.files.options)
    shard = some.urls[0]
    bucket = shard.split("/")[2]
    other = write_shard(tmp_path / "other.tar", omni_samples(SAMPLES, prefix="o", seed=77))
    s3_server.put(bucket, "other/other.tar", Path(other).read_bytes())
    others = od.ShardDataset(f"s3://{bucket}/other/*.tar", RECIPE, storage_options=remote.dataset.files.options)
    second = od.DataLoader(others, batch_size=4, num_threads=0, cache=cache)
    # While the first loader lives, its shards are this run's too.
    epoch(second)
    assert copies(cache) == of_first
    first.close()
    del first
    second = od.DataLoader(others, batch_size=4, num_threads=0, cache=cache)
    epoch(second)
    assert len(set(copies(cache)) - set(of_first)) == 1
    assert _bytes_in(cache) <= cache.max_bytes


def test_a_full_disk_costs_one_warning_and_leaves_no_half_file(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pauses: None
) -> None:
    expected = epoch(remote.loader())
    written = 0

    def write(self: Any, data: Any) -> int:
        nonlocal written
        written += len(data)
        if written > remote.num_bytes // 2:
            raise OSError(28, "No space left on device")
        return int(self._file.write(data))

    monkeypatch.setattr("orchdata.loaders.storage.cache._Summed.write", write)
    cache = od.Cache(tmp_path / "nvme", max_bytes=1 << 30)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loader = remote.loader(cache)
        assert epoch(loader) == expected
    assert len([each for each in said if "No space left" in str(each.message)]) == 1
    assert not list((Path(cache.path) / FOLDER).glob("*.part"))
    assert not list((Path(cache.path) / FOLDER).glob(".*.part"))


@pytest.mark.slow_cases("False")
@pytest.mark.parametrize("damaged", [False, True])
def test_copies_removed_or_damaged_in_the_middle_cost_no_batch(remote: Remote, tmp_path: Path, damaged: bool) -> None:
    cache = od.Cache(tmp_path / "nvme", max_bytes=1 << 30)
    plain, loader = remote.loader(), remote.loader(cache)
    expected = [epoch(plain), epoch(plain)]
    assert epoch(loader) == expected[0]
    remote.proxy.clear()
    steps = iter(loader.steps())
    found = [global_batch([next(steps)])]
    for path in copies(cache) if damaged else ():
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
    if not damaged:
        Path(cache.path).rename(tmp_path / "removed")  # nothing is written there while it is removed
        shutil.rmtree(tmp_path / "removed")
    found += [global_batch([step]) for step in steps]
    assert found == expected[1]
    assert damaged or remote.proxy.requests("RANGE")  # the store is read instead


def test_what_fills_the_cache_ends_with_the_loader(remote: Remote, tmp_path: Path) -> None:
    loader = remote.loader(od.Cache(tmp_path / "nvme", max_bytes=1 << 30))
    remote.proxy.delay = 0.05
    next(iter(loader))
    filler = loader._runtime._filler
    assert filler is not None and filler._thread is not None
    loader.close()
    assert not filler._thread.is_alive()
    assert not list((tmp_path / "nvme").rglob("*.part"))


def test_workers_that_are_forked_fetch_nothing_and_a_warning_says_so(remote: Remote, tmp_path: Path) -> None:
    cache = od.Cache(tmp_path / "nvme", max_bytes=1 << 30)
    with pytest.warns(UserWarning, match="fetches no shard: workers that are forked"):
        loader = remote.loader(cache, num_workers=1, multiprocessing_context="fork")
    assert loader._runtime._filler is None


def test_a_shard_that_was_replaced_is_not_copied(
    s3_server: S3Server, new_bucket: Callable[[], str], proxied: Proxied, tmp_path: Path
) -> None:
    bucket, proxy = new_bucket(), proxied(s3_server)
    for number in range(2):
        path = write_shard(tmp_path / "shard.tar", omni_samples(4, prefix=f"s{number}-", seed=1))
        s3_server.put(bucket, f"{number}.tar", Path(path).read_bytes())
    options = s3_server.options_of("all", proxy.endpoint)
    dataset = od.ShardDataset(f"s3://{bucket}/*.tar", RECIPE, storage_options=options)
    cache = od.Cache(tmp_path / "nvme", max_bytes=1 << 30)
    loader = od.DataLoader(dataset, batch_size=2, num_threads=0, cache=cache)
    path = write_shard(tmp_path / "shard.tar", omni_samples(4, prefix="t1-", seed=2))
    s3_server.put(bucket, "1.tar", Path(path).read_bytes())
    with pytest.raises((od.StaleIndexError, od.StepError)):
        list(loader)
    filled(loader)
    assert len(copies(cache)) == 1


@pytest.mark.slow_cases("parquet")
@pytest.mark.parametrize("suffix", ["parquet", "arrow", "jsonl"])
def test_shards_of_each_container_are_read_from_their_copies(
    s3_server: S3Server, new_bucket: Callable[[], str], proxied: Proxied, tmp_path: Path, suffix: str
) -> None:
    bucket, proxy = new_bucket(), proxied(s3_server)
    for number in range(2):
        table = pa.table({"text": [f"sample {number} {row} " + "word " * row for row in range(12)]})
        path = tmp_path / f"{number}.{suffix}"
        if suffix == "parquet":
            pq.write_table(table, path)
        elif suffix == "arrow":
            with pa.ipc.new_file(path, table.schema) as file:
                file.write_table(table)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
        s3_server.put(bucket, path.name, path.read_bytes())
    options = s3_server.options_of("all", proxy.endpoint)
    dataset = od.ShardDataset(f"s3://{bucket}/*.{suffix}", storage_options=options)
    cache = od.Cache(tmp_path / "nvme", max_bytes=1 << 30)
    given: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_threads": 0}
    other = od.Cache(tmp_path / "other", max_bytes=1 << 30) if suffix == "arrow" else None  # which needs one
    plain, loader = od.DataLoader(dataset, cache=other, **given), od.DataLoader(dataset, cache=cache, **given)
    expected = [epoch(plain), epoch(plain)]
    found = [epoch(loader)]
    proxy.clear()
    del loader, plain
    loader = od.DataLoader(dataset, cache=cache, **given)  # it opens its shards again
    loader.set_epoch(1)
    assert [*found, epoch(loader)] == expected
    assert not proxy.requests()
    assert loader.stats()["reads"]["cache_bytes"] > 0


def grouped(group_size: int) -> od.Balance:
    return od.Balance(scope="grouped", group_size=group_size)


@pytest.mark.parametrize(
    ("rank", "balance", "streams", "own"),
    [
        (Rank(0, 1), od.Balance(), 1, range(1)),
        (Rank(3, 8, ranks_per_node=8), od.Balance(), 3, range(3)),  # the only node
        (Rank(3, 8, ranks_per_node=2), od.Balance(), 4, None),
        (Rank(3, 8, ranks_per_node=2), od.Balance(scope="grid", group_size=2), 4, None),
        (Rank(3, 8, ranks_per_node=2), od.Balance(scope="none"), 4, None),
        (Rank(3, 8, ranks_per_node=2), grouped(2), 1, None),
        (Rank(3, 8, ranks_per_node=2), grouped(2), 4, range(1, 2)),
        (Rank(3, 8, ranks_per_node=2), grouped(2), 8, range(2, 4)),
        (Rank(3, 8, ranks_per_node=2), grouped(2), 6, None),  # streams 1 and 4 are of two nodes
        (Rank(6, 8, ranks_per_node=4), grouped(2), 4, range(2, 4)),  # two groups on a node
        (Rank(6, 8, ranks_per_node=2), grouped(4), 4, None),  # a group on two nodes
        (Rank(6, 8), grouped(2), 4, range(3, 4)),  # a group is a node where nothing else is known
        (Rank(6, 8), od.Balance(), 4, None),
        (Rank(4, 5, ranks_per_node=2), grouped(2), 5, range(4, 5)),  # the last node is smaller
        (Rank(4, 5, ranks_per_node=2), grouped(2), 3, None),
    ],
)
def test_streams_of_a_node(rank: Rank, balance: od.Balance, streams: int, own: range | None) -> None:
    assert own_streams(rank, balance, streams) == own


@pytest.mark.parametrize(
    ("path", "max_bytes"), [("", 1), (3, 1), ("s3://bucket/x", 1), ("/x", 0), ("/x", "2TiB"), ("/x", True)]
)
def test_a_bad_cache_is_refused(path: Any, max_bytes: Any) -> None:
    with pytest.raises(ValueError, match="Cache.max_bytes" if path == "/x" else "Cache.path must be"):
        od.Cache(path, max_bytes=max_bytes)


def test_the_environment_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_of_environment() is None
    monkeypatch.setenv("ORCHDATA_SHARD_CACHE", "/nvme")
    with pytest.raises(ValueError, match="ORCHDATA_SHARD_CACHE is given without ORCHDATA_SHARD_CACHE_BYTES"):
        cache_of_environment()
    monkeypatch.setenv("ORCHDATA_SHARD_CACHE_BYTES", "2TiB")
    assert cache_of_environment() == od.Cache("/nvme", max_bytes=2 << 40)
    monkeypatch.setenv("ORCHDATA_SHARD_CACHE_BYTES", "much")
    with pytest.raises(ValueError, match="ORCHDATA_SHARD_CACHE_BYTES is 'much'"):
        cache_of_environment()
    monkeypatch.delenv("ORCHDATA_SHARD_CACHE")
    with pytest.raises(ValueError, match="without ORCHDATA_SHARD_CACHE,"):
        cache_of_environment()


def test_a_loader_refuses_what_is_no_cache_and_data_without_shards(tmp_path: Path) -> None:
    dataset = od.ShardDataset(omni_shards(tmp_path, shards=1, samples=5))
    with pytest.raises(ValueError, match=r"cache must be an od.Cache\("):
        od.DataLoader(dataset, cache="/nvme")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cache= is for an od.ShardDataset"):
        od.DataLoader([1, 2, 3], cache=od.Cache("/nvme", max_bytes=1))


def test_local_shards_are_not_copied(tmp_path: Path) -> None:
    shards = omni_shards(tmp_path, shards=2, samples=5)
    cache = od.Cache(tmp_path / "nvme", max_bytes=1 << 30)
    loader = od.DataLoader(od.ShardDataset(shards), batch_size=2, num_threads=0, cache=cache, dp=(0, 1))
    assert sum(len(batch.sample_ids) for batch in loader) == 10
    assert not (tmp_path / "nvme").exists()
