"""A loader without a group: ranks that differ raise an error at the first step, with names (mesh_job.py, two ranks)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mesh_job import RECIPE, run_suite
from shard_factory import jpeg, omni_samples, write_shard

import orchdata as od

NUM_SAMPLES = 20
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    samples = omni_samples(NUM_SAMPLES)
    whole = jpeg(120, 90)
    half = whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2)
    broken = [{"__key__": f"broken{number}", "jpg": half, "txt": b"a picture"} for number in range(6)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORCHDATA_CACHE", str(folder / "cache"))
        for name, content in (("good", samples), ("unindexed", samples[:8]), ("bad", [*samples, *broken])):
            write_shard(folder / f"{name}.tar", content)
            if name != "unindexed":
                od.ShardDataset(folder / f"{name}.tar", recipe=RECIPE).index()
    return folder


@pytest.fixture(scope="module")
def ranks(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run_suite("world", 2, shards, tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize(
    ("scenario", "entry"),
    [
        ("seed", "order.seed is 1 on rank 0, 2 on rank 1"),
        ("node", "balance.group_size is 2 on rank 0, 1 on rank 1"),
        ("collate", 'collate_fn is "builtins.len" on rank 0, "builtins.sum" on rank 1'),
        ("subset", 'data.indices is "10 of them, '),
        ("split list", 'data.items is "4 of them, '),
    ],
)
def test_all_ranks_raise_both_values_of_a_difference(ranks: Ranks, scenario: str, entry: str) -> None:
    (error,) = {rank[scenario] for rank in ranks}
    assert error.startswith("ValueError: all ranks of a loader must plan the same steps: ")
    assert entry in error
    assert (
        "; if these are equal data under other paths or fingerprints, dp=(rank, size) is not compared)" in error
    ) == (entry.startswith("data."))


@pytest.mark.parametrize("scenario", ["equal subset", "same lambda", "equal state", "tuple", "another job"])
def test_equal_ranks_and_a_tuple_raise_no_error(ranks: Ranks, scenario: str) -> None:
    assert [rank[scenario] for rank in ranks] == [None, None]


def test_an_iteration_continued_after_an_error_on_one_rank_is_the_same_one(ranks: Ranks) -> None:
    assert [rank["fails once"] for rank in ranks] == [[None, None]] * 2


def test_equal_ranks_share_the_epoch(ranks: Ranks) -> None:
    keys = [key for rank in ranks for step in rank["alike"]["steps"] for _, key in step["keys"]]
    assert len(keys) == len(set(keys)) == NUM_SAMPLES


@pytest.mark.parametrize(
    ("scenario", "error"),
    [("no index", "MissingIndexError: no index"), ("argument", "ValueError: timeout is a number of seconds, 0 for no")],
)
def test_an_error_of_a_constructor_is_reported_to_the_others(ranks: Ranks, scenario: str, error: str) -> None:
    assert ranks[1][scenario].startswith(error)
    assert (
        f"RuntimeError: this loader needs all its ranks, and some could not make it: rank 1: {error}"
        in (ranks[0][scenario])
    )


@pytest.mark.parametrize(
    ("scenario", "entry"),
    [
        ("state", "step is 1 on rank 0, 2 on rank 1"),
        ("epoch", "epoch is 0 on rank 0, 1 on rank 1"),
        ("epoch in a group", "epoch is 0 on rank 0, 1 on rank 1"),
    ],
)
def test_ranks_at_different_steps_raise_an_error_before_the_first_step(ranks: Ranks, scenario: str, entry: str) -> None:
    (error,) = {rank[scenario] for rank in ranks}
    assert error.startswith(f"ValueError: all ranks of a loader must begin an iteration at the same step: {entry}")


def test_a_loader_of_one_rank_alone_raises_an_error_with_the_way_out(ranks: Ranks) -> None:
    alone = ranks[0]["alone"]
    assert alone["error"].startswith("RuntimeError: no word from rank 1, where rank 0 has made loader ")
    assert alone["error"].endswith("made with dp=(0, 1). Waited 1 seconds, the timeout of the process group")
    assert ["This rank waits 1 seconds" in warning for warning in alone["warned"]] == [True]
    assert alone["own"] == NUM_SAMPLES


def test_nothing_from_peers_is_unpickled(ranks: Ranks) -> None:
    failures = [rank["failures"] for rank in ranks]
    assert all(rank["own"] for rank in failures)  # both ranks have failures of their own
    assert sum(rank["own"] for rank in failures) == 6
    for rank in failures:
        assert rank["gathered"] == rank["of group"] == [[f"broken{number}", "jpg"] for number in range(6)]


@pytest.mark.slow
def test_a_reader_that_is_stopped_ends_its_peers_within_the_timeout(shards: Path, tmp_path: Path) -> None:
    error = run_suite("stopped", 2, shards, tmp_path, lost=[0])[1]["error"]
    assert error.startswith("RuntimeError: rank 1 got no step 1 of epoch 0 (rank 0 reads for ranks (1,)): ")
    assert "Timed out waiting 8000ms" in error
