"""The launcher of rank jobs tells which ranks failed and why, and leaves no process running."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from rank_jobs import RanksFailed, run_ranks

SCRIPT = """
import os, threading
import torch.distributed as dist
from rank_jobs import run_rank

def work(what):
    rank = dist.get_rank()
    print("pid", os.getpid(), "of rank", rank)
    if what == "lost" and rank == 1:
        os._exit(7)
    if what == "fails" and rank == 1:
        raise OSError("the disk is gone")
    if what in ("fails", "hangs"):
        threading.Event().wait()
    return {"rank": rank, "of": dist.get_world_size(), "what": what}

run_rank(work)
"""


def run(folder: Path, what: str, **options: Any) -> list[Any]:
    (folder / "job.py").write_text(SCRIPT)
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    return run_ranks(str(folder / "job.py"), what, num_ranks=2, folder=folder, environment=environment, **options)


def alive(folder: Path) -> list[str]:
    """Ranks whose process is still there."""
    logs = [(folder / f"{rank}.log").read_text() for rank in range(2)]
    return [log for log in logs if "pid" in log and Path("/proc", log.split("pid ")[1].split()[0]).exists()]


def test_every_rank_gets_the_arguments_and_gives_its_result(tmp_path: Path) -> None:
    assert run(tmp_path, "all") == [{"rank": rank, "of": 2, "what": "all"} for rank in range(2)]


def test_a_rank_that_fails_ends_the_job_with_what_it_wrote(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"(?s)ranks \[1\] ended without a result.*OSError: the disk is gone"):
        run(tmp_path, "fails")
    assert alive(tmp_path) == []


def test_ranks_are_lost_only_where_that_is_expected(tmp_path: Path) -> None:
    assert run(tmp_path, "lost", lost=[1])[1] is None
    with pytest.raises(RanksFailed, match=r"ranks \[1\] ended without a result"):
        run(tmp_path, "lost")
    with pytest.raises(RanksFailed, match=r"ranks \[0, 1\] were to be lost, and have results"):
        run(tmp_path, "all", lost=[0, 1])
