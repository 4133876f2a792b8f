"""A server that cannot start is an error with what it said, and one whose port was taken starts with another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from servers import processes
from servers.processes import Ended, end, program, start, starting, wait_until


def test_one_that_never_starts_is_an_error_with_its_words(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tries = []

    def attempt() -> subprocess.Popen[bytes]:
        process = start([sys.executable, "-c", "import sys; print('no disk'); sys.exit(3)"], log)
        tries.append(process)
        wait_until(lambda: False, process, log)
        return process

    with pytest.raises(Ended, match=r"(?s)ended with 3.*no disk"):
        starting(attempt)
    assert len(tries) == processes.TRIES


def test_one_whose_port_was_taken_starts_with_another(tmp_path: Path) -> None:
    log = tmp_path / "log"
    programs = iter(["import sys; sys.exit(1)", "import time; print('up', flush=True); time.sleep(60)"])

    def attempt() -> subprocess.Popen[bytes]:
        process = start([sys.executable, "-c", next(programs)], log)
        wait_until(lambda: "up" in processes.last_words(log), process, log)
        return process

    process = starting(attempt)
    assert process.poll() is None
    end(process)
    assert process.returncode == -9


def test_one_that_is_never_ready_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "START_SECONDS", 0.2)
    process = start([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log")
    with pytest.raises(TimeoutError, match="not ready"):
        wait_until(lambda: False, process, tmp_path / "log")
    assert process.returncode == -9


def test_a_program_that_is_not_installed_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="never-written"):
        program("never-written")
