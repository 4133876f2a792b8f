"""`take(N)` and `[:N]` before anything is indexed: the rows of the full index, from the first shards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from fault_data import CONTAINERS, RECIPE, given
from shard_factory import SKIP_ANY, omni_samples, omni_shards, write_shard

import orchdata as od
from orchdata.loaders.errors import StateError
from orchdata.loaders.index.index import Index

pytestmark = pytest.mark.usefixtures("kept_parquet_processes")

TEXT = od.Recipe(image=None, audio=None)
SLOW = ("parquet", "feather")  # the latter is read as Arrow


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORCHDATA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def is_partial(index: Index, num_shards: int) -> bool:
    return len(index.shards) < num_shards or any(shard.reach for shard in index.shards)


def same_rows(index: Index, full: Index) -> None:
    """The rows of an index are the first ones of another, with all columns."""
    rows, parts = index.num_rows, int(index.part_offsets[-1])
    members = int(index.member_offsets[-1])
    assert [index.key(row) for row in range(rows)] == [full.key(row) for row in range(rows)]
    for name in ("shard", "llm_tokens", "loss_tokens", "piece", "cut_tokens", "text_start"):
        assert np.array_equal(getattr(index, name), getattr(full, name)[:rows]), name
    for name in ("part_modality", "part_member", "part_positions", "part_tokens", "part_rows", "part_extent"):
        assert np.array_equal(getattr(index, name), getattr(full, name)[:parts]), name
    for name in ("member_kind", "member_encoding", "member_offset", "member_size", "member_header"):
        assert np.array_equal(getattr(index, name), getattr(full, name)[:members]), name
    fields = [full.fields[number] for number in full.member_field[:members]]
    assert [index.fields[number] for number in index.member_field] == fields
    bad = index.bad_rows().tolist()
    assert bad == full.bad_rows()[full.bad_rows() < rows].tolist()
    assert [index.failure(row) for row in bad] == [full.failure(row) for row in bad]


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow) if each in SLOW else each for each in CONTAINERS]
)
def test_the_first_samples_are_those_of_the_full_index(name: str, tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    CONTAINERS[name](folder)
    paths, media_root = given(folder)

    def made() -> od.ShardDataset:
        return od.ShardDataset([str(path) for path in paths], RECIPE, media_root=media_root)

    for count in (2, 100):
        shutil.rmtree(cache, ignore_errors=True)
        first = made().take(count)
        index = first.index()
        keys = [ids for batch in od.DataLoader(first, batch_size=1, shuffle=True, seed=3) for ids in batch.sample_ids]
        full = made().index()
        same_rows(index, full)
        assert (index.path == full.path) == (not is_partial(index, len(full.shards)))
        assert count < full.num_samples or index.path == full.path
        assert len(first) == min(count, full.num_samples)
        again = made().take(count)
        assert again.index().path == full.path  # the full one is used where it is there
        loader = od.DataLoader(again, batch_size=1, shuffle=True, seed=3)
        assert [ids for batch in loader for ids in batch.sample_ids] == keys


def test_only_the_shards_that_are_needed_are_read(tmp_path: Path) -> None:
    urls = omni_shards(tmp_path, shards=6, samples=20)
    dataset = od.ShardDataset(urls)
    first = dataset.take(50)
    for url in urls[3:]:
        Path(url).write_bytes(b"not a tar")
    index = first.index()
    assert [Path(shard.url).name for shard in index.shards] == [Path(url).name for url in urls[:3]]
    assert [bool(shard.reach) for shard in index.shards] == [False, False, True] and index.num_rows == 50


@pytest.mark.parametrize("count", [5, 21])
def test_bad_samples_do_not_count(tmp_path: Path, count: int, cache: Path) -> None:
    samples = omni_samples(40)
    for number in (0, 1, 3, 4, 6, 8, 9, 19, 21):
        samples[number] = {"__key__": samples[number]["__key__"], "jpg": b"none", "txt": b"x"}
    url = write_shard(tmp_path / "a.tar", samples)
    first = od.ShardDataset(url).take(count)
    index = first.index()
    good = [s["__key__"] for s in samples if s.get("jpg") != b"none"][:count]
    assert [first[number].key for number in range(len(first))] == good
    state = od.DataLoader(first, batch_size=2, on_error=SKIP_ANY).state_dict()
    shutil.rmtree(cache)
    full = od.ShardDataset(url)
    same_rows(index, full.index())
    od.DataLoader(full.take(count), batch_size=2, on_error=SKIP_ANY).load_state_dict(state)


def test_a_state_loads_with_either_index_and_not_in_the_whole(tmp_path: Path) -> None:
    urls = omni_shards(tmp_path, shards=3, samples=20)

    def loader(chosen: od.ShardDataset) -> od.DataLoader:
        return od.DataLoader(chosen, batch_size=4, shuffle=True, seed=5)

    dataset = od.ShardDataset(urls)
    first = loader(dataset.take(30))
    steps = iter(first)
    for _ in range(3):
        next(steps)
    state = json.loads(json.dumps(first.state_dict()))
    rest = [batch.sample_ids for batch in steps]
    resumed = loader(od.ShardDataset(urls).take(30))
    resumed.load_state_dict(state)
    assert [batch.sample_ids for batch in resumed] == rest
    od.ShardDataset(urls).index()
    full = loader(od.ShardDataset(urls).take(30))
    full.load_state_dict(state)
    assert [batch.sample_ids for batch in full] == rest
    od.DataLoader(od.ShardDataset(urls)[:30], batch_size=4, shuffle=True, seed=5).load_state_dict(full.state_dict())
    for other in (od.ShardDataset(urls), od.ShardDataset(urls).take(31)):
        with pytest.raises(StateError, match="selection"):
            loader(other).load_state_dict(state)
    whole = loader(od.ShardDataset(urls)).state_dict()
    with pytest.raises(StateError, match="selection"):
        loader(od.ShardDataset(urls).take(30)).load_state_dict(whole)


def test_selections_after_it_work_on_these_rows_and_a_filter_before_it_indexes_all(tmp_path: Path) -> None:
    urls = omni_shards(tmp_path, shards=3, samples=20)
    full = od.ShardDataset(urls)
    chosen = {
        "filter": lambda it: it.take(25).filter("image_parts > 0"),
        "split": lambda it: it.take(25).split("train", 0.5),
        "select": lambda it: it.take(25).select([0, 3, 24]),
        "slice": lambda it: it[:25][3:9],
        "steps": lambda it: it[2:25:3],
        "last": lambda it: it.take(25)[-3:],
        "filter first": lambda it: it.filter("image_parts > 0").take(5),
    }
    before = {}
    for name, choose in chosen.items():
        dataset = choose(od.ShardDataset(urls))
        before[name] = [dataset[number].key for number in range(len(dataset))]
        assert is_partial(dataset.index(), 3) == (name != "filter first"), name
        if name == "filter first":
            continue
    full.index()
    for name, choose in chosen.items():
        dataset = choose(full)
        assert [dataset[number].key for number in range(len(dataset))] == before[name], name


def test_damage_after_the_first_samples_is_not_seen(tmp_path: Path) -> None:
    noise = [np.random.default_rng(seed).bytes(100_000).hex().encode() for seed in range(80)]
    good = write_shard(tmp_path / "plain", [{"__key__": f"{at:03d}", "txt": each} for at, each in enumerate(noise)])
    data = Path(good).read_bytes()
    (tmp_path / "a.tar").write_bytes(data[:-30_000])
    (tmp_path / "c.jsonl").write_text('{"text": "good"}\n' * 50 + "{no json\n" * 20)
    for name in ("a.tar", "c.jsonl"):
        first = od.ShardDataset(str(tmp_path / name), TEXT).take(20)
        loader = od.DataLoader(first, batch_size=5)
        assert len([ids for batch in loader for ids in batch.sample_ids]) == 20, name
        assert od.ShardDataset(str(tmp_path / name), TEXT).index().totals["bad"] > 0


def test_a_quarantine_may_name_samples_that_come_later(tmp_path: Path) -> None:
    urls = omni_shards(tmp_path, shards=2, samples=10)
    named = [(urls[0], "s0-0001"), (urls[1], "s1-0003")]
    loaders = [od.DataLoader(od.ShardDataset(urls).take(6), batch_size=3, quarantine=named)]
    od.ShardDataset(urls).index()
    loaders.append(od.DataLoader(od.ShardDataset(urls).take(6), batch_size=3, quarantine=named))
    first, full = ([key for batch in loader for _, key in batch.sample_ids] for loader in loaders)
    assert first == full == [f"s0-000{number}" for number in (0, 2, 3, 4, 5)]
    loaders[1].load_state_dict(loaders[0].state_dict())


def test_a_partial_index_is_never_taken_for_another(tmp_path: Path) -> None:
    urls = omni_shards(tmp_path, shards=3, samples=20)
    paths = {od.ShardDataset(urls).take(count).index().path for count in (10, 11, 25)}
    dataset = od.ShardDataset(urls)
    assert len(paths) == 3 and dataset.index().path not in paths
    assert len(dataset) == 60 and not is_partial(dataset.index(), 3)
    assert dataset.index().fingerprint not in {Index(path).fingerprint for path in paths}
