"""Exchange over gloo, of ranks and peers: one job for a number of ranks runs every check, and each test reads one."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import peers_job
import pytest
import torch
from exchange_job import CHECKS, IMPATIENCE
from exchange_job import __file__ as JOB
from rank_jobs import run_ranks

from benchmarks.exchange import ExchangeBench, run
from orchdata.planning.route import Route, make_route
from orchdata.ranks.exchange import exchange


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def results(num_ranks: int) -> list[dict[str, str]]:
        return run_ranks(JOB, "checks", num_ranks=num_ranks, folder=tmp_path_factory.mktemp("exchange"))

    return results


def assert_held(name: str, results: list[dict[str, str]]) -> None:
    for rank, result in enumerate(results):
        assert result.get(name, f"not reached: {result}") == "", f"rank {rank}: {result.get(name, result)}"


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CHECKS)
def test_between_ranks(checked: Any, name: str, num_ranks: int) -> None:
    assert_held(name, checked(num_ranks))


OF_EIGHT = "eight_processes"
OF_FOUR = [name for name in peers_job.CHECKS if name != OF_EIGHT]


@pytest.fixture(scope="module")
def of_four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_ranks(peers_job.__file__, *OF_FOUR, num_ranks=4, folder=tmp_path_factory.mktemp("peers"))


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_FOUR)
def test_between_peers_of_four_ranks(of_four_ranks: Any, name: str) -> None:
    assert_held(name, of_four_ranks)


@pytest.mark.slow
def test_context_and_tensor_parallel_at_once_on_eight_ranks(tmp_path: Path) -> None:
    assert_held(OF_EIGHT, run_ranks(peers_job.__file__, OF_EIGHT, num_ranks=8, folder=tmp_path))


def test_a_rank_that_dies_is_an_error_on_every_other_within_the_timeout(tmp_path: Path) -> None:
    for rank, results in enumerate(run_ranks(JOB, "killed", num_ranks=3, folder=tmp_path, lost=[2])[:2]):
        error = results["error"]
        assert f"forward of exchange (image of step 3) on rank {rank} of 3" in error
        assert "a rank died" in error
        assert results["seconds"] < 10 * IMPATIENCE.total_seconds()


def alone(**orders: Any) -> Route:
    return make_route(0, 1, encoder_rank=[0, 0], llm_rank=[0, 0], tokens=[1, 2], **orders)


def test_one_rank_needs_no_process_group() -> None:
    features = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    result = exchange(features, alone(llm_order=[1, 0]), requires_grad=True)
    assert result.flatten().tolist() == [2.0, 3.0, 1.0]  # the part of two rows first
    (result * torch.tensor([[10.0], [20.0], [30.0]])).sum().backward()
    assert features.grad is not None
    assert features.grad.flatten().tolist() == [30.0, 10.0, 20.0]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_features_changed_before_wait_raise_an_error(requires_grad: bool) -> None:
    features = torch.ones(3, 1)
    handle = exchange(features, alone(), requires_grad=requires_grad, async_op=True)
    features.zero_()
    with pytest.raises(RuntimeError, match="changed in place while they were sent"):
        handle.wait()


def test_a_graph_that_is_kept_may_run_backward_again() -> None:
    features = torch.ones(3, 1, requires_grad=True)
    result = exchange(features, alone(), requires_grad=True)
    for times in (1.0, 2.0):
        result.sum().backward(retain_graph=True)
        assert features.grad is not None
        assert features.grad.flatten().tolist() == [times] * 3


def test_a_route_of_several_ranks_needs_a_process_group() -> None:
    route = make_route(0, 2, encoder_rank=[0], llm_rank=[1], tokens=[1])
    with pytest.raises(ValueError, match="the route is of 2 ranks, but torch.distributed is not initialized"):
        exchange(torch.ones(1, 1), route, requires_grad=True)


@pytest.mark.slow
def test_the_benchmark_compares_the_same_rows_three_ways() -> None:
    """At a tiny size; nothing about time is asserted."""
    results = run(ExchangeBench(ranks=(2,), parts_per_rank=3, tokens=4, hidden=8, repeats=3))
    assert [result.unit for result in results] == ["x"] * 4 + ["GB/s"] * 5
    assert {len(result.values) for result in results} == {3}
    assert [result.demand for result in results][:4] == [0.9, None, None, None]  # other demands are for 4 ranks
