"""Peers over gloo: one job of four ranks runs every check of peers_job.py, and each test reads one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peers_job import CHECKS
from peers_job import __file__ as JOB
from rank_jobs import run_ranks

LARGE = ["eight_processes"]
SMALL = [name for name in CHECKS if name not in LARGE]


@pytest.fixture(scope="module")
def of_four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_ranks(JOB, *SMALL, num_ranks=4, folder=tmp_path_factory.mktemp("peers"))


def assert_held(name: str, results: list[dict[str, str]]) -> None:
    for rank, result in enumerate(results):
        assert result.get(name, f"not reached: {result}") == "", f"rank {rank}: {result.get(name, result)}"


@pytest.mark.parametrize("name", SMALL)
def test_on_four_ranks(of_four_ranks: Any, name: str) -> None:
    assert_held(name, of_four_ranks)


@pytest.mark.slow
def test_context_and_tensor_parallel_at_once_on_eight_ranks(tmp_path: Path) -> None:
    for name in LARGE:
        assert_held(name, run_ranks(JOB, name, num_ranks=8, folder=tmp_path))
