"""Local shards that were rewritten: measured again by a new data set, refused by what began before."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
from changed_job import __file__ as JOB
from rank_jobs import run_ranks
from shard_factory import RECIPE, omni_samples, omni_shards, write_shard

import orchdata as od
from orchdata.loaders.limits import Limits
from orchdata.loaders.shards import open as changes
from orchdata.loaders.shards.open import find_changes
from orchdata.loaders.storage.cache import CacheFolder

AGAIN = "changed since the index was built: measured again"


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    (tmp_path / "data").mkdir()
    shards = omni_shards(tmp_path / "data", shards=3, samples=4)
    od.ShardDataset(shards, RECIPE).index()
    return shards


def rewrite(shards: list[str], samples: int = 6) -> None:
    """The second shard, with other samples."""
    write_shard(Path(shards[1]), omni_samples(samples, prefix="other", seed=9))


def loader(shards: list[str], **options: Any) -> od.DataLoader:
    return od.DataLoader(od.ShardDataset(shards, RECIPE), global_batch_size=4, num_threads=0, **options)


def keys_of(loader: od.DataLoader) -> list[Any]:
    return sorted(key for batch in loader for key in batch.sample_ids)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_new_data_set_measures_a_rewritten_shard_again(shards: list[str], on_error: str) -> None:
    rewrite(shards)
    with pytest.warns(UserWarning, match=rf"omni-000001\.tar {AGAIN}"):
        reloaded = loader(shards, on_error=on_error)
    assert reloaded.dataset.index().num_samples == len(keys_of(reloaded)) == 4 + 6 + 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(od.ShardDataset(shards, RECIPE)) == 14  # nothing is measured a second time


def test_other_content_of_the_same_size_is_found(shards: list[str]) -> None:
    size = os.path.getsize(shards[1])
    write_shard(Path(shards[1]), omni_samples(4, prefix="t1-", seed=1))  # the same files under other names
    assert os.path.getsize(shards[1]) == size
    with pytest.warns(UserWarning, match=AGAIN):
        keys_of(loader(shards))


def test_a_copy_with_another_time_of_change_is_not_measured_again(shards: list[str]) -> None:
    os.utime(shards[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(keys_of(loader(shards))) == 12


def test_copies_beyond_the_compared_ones_are_reported(shards: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MOST_SHARDS", 2)
    for shard in shards:
        os.utime(shard)
    index = od.ShardDataset(shards, RECIPE).index(check=False)
    assert find_changes(index.shards, limits=Limits(), cache=CacheFolder()) == ([], 1)
    with pytest.warns(UserWarning, match="1 shard of the same size .* compared when it is opened"):
        loader(shards)


def test_one_that_is_gone_is_named_by_who_opens_it(shards: list[str]) -> None:
    index = od.ShardDataset(shards, RECIPE).index()
    os.unlink(shards[1])
    assert find_changes(index.shards, limits=Limits(), cache=CacheFolder()) == ([], 0)


def test_require_and_a_run_under_way_refuse(shards: list[str]) -> None:
    under_way = loader(shards)
    rewrite(shards)
    with pytest.raises(od.StaleIndexError, match=r"omni-000001\.tar"):
        keys_of(loader(shards, index="require"))
    with pytest.raises(od.StaleIndexError, match=r"omni-000001\.tar"):
        keys_of(under_way)


def test_a_state_of_before_is_refused(shards: list[str]) -> None:
    before = loader(shards)
    next(iter(before))
    state = before.state_dict()
    rewrite(shards)
    with pytest.warns(UserWarning, match=AGAIN):
        after = loader(shards)
    with pytest.raises(
        od.StateError,
        match=r"contents, or how .* differs.*shards is '3 shards \(omni-000000.tar to .* in the state and '3 shards",
    ):
        after.load_state_dict(state)


def test_one_rank_of_a_job_looks_and_all_measure_again(shards: list[str], tmp_path: Path) -> None:
    rewrite(shards)
    by_rank = run_ranks(JOB, str(tmp_path / "data"), num_ranks=3, folder=tmp_path)
    assert sum(rank["looked"] for rank in by_rank) == 2  # the old index, and the new one
    assert len({key for rank in by_rank for key in rank["keys"]}) == 14
    assert sum(len(rank["keys"]) for rank in by_rank) == 14
    assert [rank["warned"] for rank in by_rank].count(True) == 1
