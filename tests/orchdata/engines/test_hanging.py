"""Threads that hang: the loader reports them, and the process ends with its own status and error."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import hanging_job
import hanging_rank_job
import pytest
import returning_job
from forked_program import ForkedProgram

from benchmarks.launch import LaunchError, torchrun


@pytest.mark.parametrize(
    ("ending", "status", "last_line"),
    [
        ("raise", 1, "RuntimeError: DataLoader timed out after 1 seconds, waiting for step 0 of epoch 0"),
        pytest.param("interrupt", -signal.SIGINT, "KeyboardInterrupt", marks=pytest.mark.slow),
        pytest.param("exit", 3, "", marks=pytest.mark.slow),
        pytest.param("catch", 0, "", marks=pytest.mark.slow),
    ],
)
def test_a_process_ends_although_threads_hang(tmp_path: Path, ending: str, status: int, last_line: str) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program = Path(hanging_job.__file__).read_text()
    job = ForkedProgram(program, ending, fifo, folder=tmp_path, to_the_end=True)
    if ending == "interrupt":
        assert job.line() == "hanging\n"
        job.send_signal(signal.SIGINT)
    ended = job.finish()
    assert ended.returncode == status
    assert ended.stdout.endswith("exit handlers ran\n")
    assert ended.stderr.strip().rpartition("\n")[2] == last_line


@pytest.mark.parametrize("left_by", ["pool", "store"])
def test_a_call_that_returns_while_the_interpreter_ends_changes_no_status(left_by: str, tmp_path: Path) -> None:
    program = Path(returning_job.__file__).read_text()
    ended = ForkedProgram(program, left_by, folder=tmp_path, to_the_end=True).finish()
    assert (ended.returncode, ended.stderr) == (3, "")


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["plain", "tidy"])
def test_the_rank_that_hangs_is_the_one_that_torchrun_names(tmp_path: Path, ending: str) -> None:
    with (tmp_path / "log").open("w+b") as log, pytest.raises(LaunchError, match="DataLoader timed out"):
        torchrun(
            [hanging_rank_job.__file__, "1", ending],
            num_ranks=2,
            environment={"PYTHONPATH": os.pathsep.join(sys.path)},
            log=log,
            progress=lambda done, total: None,
        )
    text = (tmp_path / "log").read_text()
    assert re.search(r"Root Cause.*?rank +: (\d+).*?exitcode +: (-?\d+)", text, re.DOTALL).groups() == ("1", "1")  # type: ignore[union-attr]
