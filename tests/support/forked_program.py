"""Programs as forks of a process that has imported torch and orchdata, which takes a fresh interpreter some seconds.

See `rank_server`.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from pathlib import Path

from rank_jobs import server

_numbers = itertools.count()


class ForkedProgram:
    """A program that has been started.

    Args:
        code: of the program.
        arguments: of it, as text.
        folder: takes the program, and what it writes to stderr.
        to_the_end: let the interpreter end as Python does, with exit handlers, which takes half a second; else the
            end of the program is that of its process.
    """

    def __init__(self, code: str, *arguments: object, folder: Path, to_the_end: bool = False) -> None:
        script = folder / f"program-{next(_numbers)}.py"
        script.write_text(code)
        self._log = script.with_suffix(".log")
        with self._log.open("wb") as log:
            command = [str(script), *map(str, arguments)]
            self._process = server(0).start(command, os.environ, log, to_the_end=to_the_end)
        self._process.stdin.close()

    def line(self) -> str:
        """Wait for the next line that it writes."""
        return self._process.stdout.readline().decode()

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def finish(self) -> subprocess.CompletedProcess[str]:
        """Wait for its end; return its exit code and what it wrote."""
        with self._process.stdout as stdout:
            written = stdout.read().decode()
        code = self._process.wait()
        return subprocess.CompletedProcess([], code, written, self._log.read_text(errors="replace"))


def run_forked(
    code: str, *arguments: object, folder: Path, to_the_end: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, which must be a good one."""
    done = ForkedProgram(code, *arguments, folder=folder, to_the_end=to_the_end).finish()
    assert done.returncode == 0, done.stderr
    return done
