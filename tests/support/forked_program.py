"""Programs as forks of a process that has imported torch and orchdata, which takes a fresh interpreter some seconds.

They run as `python -c` runs them, but for how they end: no exit handler runs. See `rank_server`.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from rank_jobs import server

_numbers = itertools.count()


class ForkedProgram:
    """A program that has been started.

    Args:
        code: of the program.
        arguments: of it, as text.
        folder: takes the program, and what it writes to stderr.
        environment: of the program; default: this process's own.
    """

    def __init__(
        self, code: str, *arguments: object, folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        script = folder / f"program-{next(_numbers)}.py"
        script.write_text(code)
        self._log = script.with_suffix(".log")
        with self._log.open("wb") as log:
            command = [str(script), *map(str, arguments)]
            self._process = server(0).start(command, os.environ if environment is None else environment, log)
        self._process.stdin.close()

    def finish(self) -> subprocess.CompletedProcess[str]:
        """Wait for its end; return its exit code and what it wrote."""
        with self._process.stdout as stdout:
            written = stdout.read().decode()
        code = self._process.wait()
        return subprocess.CompletedProcess([], code, written, self._log.read_text(errors="replace"))


def run_forked(
    code: str, *arguments: object, folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, which must be a good one."""
    done = ForkedProgram(code, *arguments, folder=folder, environment=environment).finish()
    assert done.returncode == 0, done.stderr
    return done
