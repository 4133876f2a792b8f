"""If ranks would plan different steps, all raise an error that names them: four gloo processes (mesh_job.py)."""

from __future__ import annotations

from typing import Any

import pytest
from mesh_job import RECIPE, run_suite
from shard_factory import omni_samples, write_shard

import orchdata as od
from orchdata.ranks.agreement import Agreement, find_difference
from orchdata.ranks.parallel import Rank

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("shards")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORCHDATA_CACHE", str(folder / "cache"))
        for seed, name in enumerate(("good", "other", "unindexed")):
            write_shard(folder / f"{name}.tar", omni_samples(20, seed=seed))
            if name != "unindexed":
                od.ShardDataset(folder / f"{name}.tar", recipe=RECIPE).index()
    return run_suite("agree", 4, folder, tmp_path_factory.mktemp("agree"))


@pytest.mark.parametrize(
    ("scenario", "entry"),
    [
        ("seed", "order.seed is 1 on ranks 0, 1, 3, 2 on rank 2"),
        ("world", "order.seed is 1 on ranks 0, 1, 3, 2 on rank 2"),
        ("size", "global_batch_size is 8 on ranks 0, 1, 3, 6 on rank 2"),
        ("dataset", "dataset"),
        ("cost", "cost is null on ranks 0, 1, 3, missing on rank 2; "),
        ("nodes", "ranks_per_node is 2 on ranks 0, 1, 3, 1 on rank 2"),
        ("balance", 'balance.scope is "global" on ranks 0, 1, 3, "none" on rank 2'),
        ("effort", "balance.effort is 1.0 on ranks 0, 1, 3, 2.0 on rank 2"),
    ],
)
def test_all_ranks_raise_the_difference_of_one_rank(ranks: Ranks, scenario: str, entry: str) -> None:
    (error,) = {rank[scenario] for rank in ranks}
    assert error.startswith(
        f"ValueError: all ranks of a loader must plan the same steps; rank 2 differs from the others: {entry}"
    )


def test_without_a_majority_all_ranks_are_named(ranks: Ranks) -> None:
    for rank in ranks:
        assert (
            "ranks 0, 1, 2, 3 differ from each other: order.seed is 0 on ranks 0, 2, 1 on ranks 1, 3" in rank["halves"]
        )


def test_a_rank_that_fails_to_start_stops_the_others(ranks: Ranks) -> None:
    errors = [rank["no index"] for rank in ranks]
    assert errors[2].startswith("MissingIndexError: ")
    for other in (0, 1, 3):
        assert errors[other].startswith(
            "RuntimeError: this loader needs all its ranks, and 1 could not make it: rank 2: MissingIndexError: "
        )


def test_equal_ranks_start(ranks: Ranks) -> None:
    assert {rank["alike"] for rank in ranks} == {None}
    assert {rank["nodes without parts"] for rank in ranks} == {None}  # No plan depends on nodes then.
    assert {rank["equal effort"] for rank in ranks} == {None}


def test_a_loader_with_a_tuple_is_not_compared(ranks: Ranks) -> None:
    assert {rank["tuple"] for rank in ranks} == {None}


@pytest.mark.parametrize(("scenario", "step"), [("first step", 0), ("compared step", 2)])
def test_all_ranks_name_a_rank_with_another_plan(ranks: Ranks, scenario: str, step: int) -> None:
    assert len({rank[scenario] for rank in ranks}) == 1
    for rank in ranks:
        assert rank[scenario].startswith(
            f"RuntimeError: ranks follow different plans at epoch 0, step {step} of this rank; rank 2 differs from the "
            'others: plan is "'
        )
        assert rank[scenario].endswith('" on ranks 0, 1, 3, "of another plan" on rank 2')


def test_plans_are_compared_at_an_interval_of_steps(ranks: Ranks) -> None:
    assert {rank["uncompared step"] for rank in ranks} == {None}


def test_a_rank_that_fails_at_a_compared_step_stops_the_others_and_all_continue(ranks: Ranks) -> None:
    for number, rank in enumerate(ranks):
        failure = "OSError: away for a moment"
        if number != 2:
            failure = (
                "RuntimeError: other ranks failed where plans are compared, at epoch 0, step 2: rank 2: " + failure
            )
        assert rank["fails at a compared step"] == failure
        # At a step without comparison other ranks do not learn of it, and the rank that continues alone asks none.
        assert rank["fails at another"] == ("OSError: away for a moment" if number == 2 else None)
        assert rank["left"] == (3 if number == 2 else 4)  # of 6


def test_all_ranks_name_a_rank_in_another_epoch(ranks: Ranks) -> None:
    for rank in ranks:
        assert "rank 2 differs from the others: epoch is 0 on ranks 0, 1, 3, 1 on rank 2" in rank["epoch"]


def test_a_receiver_compares_its_plan_with_the_reader(ranks: Ranks) -> None:
    errors = [rank["receiver"] for rank in ranks]
    assert errors[0] is errors[2] is errors[3] is None
    assert errors[1].startswith("RuntimeError: plan is '")
    assert "on rank 0, which reads for rank 1, and 'of another plan' there" in errors[1]


def test_of_many_ranks_the_first_are_named() -> None:
    by_rank = {rank: {"seed": int(rank >= 20)} for rank in range(30)}
    assert find_difference(by_rank) == (
        "ranks 20, 21, 22, 23, 24, 25, 26, 27 and 2 more differ from the others: "
        "seed is 0 on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more, 1 on ranks 20, 21, 22, 23, 24, 25, 26, 27 and 2 more"
    )


def test_equal_accounts_have_no_difference() -> None:
    assert find_difference({0: {"a": 1, "b": None}, 1: {"b": None, "a": 1}}) == ""


def test_without_groups_no_rank_is_asked() -> None:
    assert Agreement(Rank()).make(lambda: 7, lambda made: {}) == 7
