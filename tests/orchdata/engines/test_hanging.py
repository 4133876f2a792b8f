"""Threads that hang: the loader reports them, and the process ends with its own status and error."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import hanging_job
import hanging_rank_job
import pytest
import returning_job

from orchdata.reference.launch import LaunchError, torchrun

LIMIT_SECONDS = 120


def heed_interrupts() -> None:
    """A shell's background job ignores them, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("ending", "status", "last_line"),
    [
        ("raise", 1, "RuntimeError: DataLoader timed out after 1 seconds, waiting for step 0 of epoch 0"),
        ("interrupt", -signal.SIGINT, "KeyboardInterrupt"),
        pytest.param("exit", 3, "", marks=pytest.mark.slow),
        pytest.param("catch", 0, "", marks=pytest.mark.slow),
    ],
)
def test_a_process_ends_although_threads_hang(tmp_path: Path, ending: str, status: int, last_line: str) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    command = [sys.executable, hanging_job.__file__, ending, str(fifo)]
    job = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts
    )
    try:
        assert job.stdout is not None
        if ending == "interrupt":
            assert job.stdout.readline() == "hanging\n"
            job.send_signal(signal.SIGINT)
        out, err = job.communicate(timeout=LIMIT_SECONDS)
    finally:
        job.kill()
        job.wait()
    assert job.returncode == status
    assert out.endswith("exit handlers ran\n")
    assert err.strip().rpartition("\n")[2] == last_line


@pytest.mark.parametrize("left_by", ["pool", "store"])
def test_a_call_that_returns_while_the_interpreter_ends_changes_no_status(left_by: str) -> None:
    command = [sys.executable, returning_job.__file__, left_by]
    job = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert (job.returncode, job.stderr) == (3, "")


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
