"""Does this sample end its process? Tried alone, in processes of their own: it is to blame if two of them end, or four
where they are killed, which anybody may do.

rows of lost workers --Suspects--> one at a time: Trial, two processes --> why it is to blame, or ""
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator

from orchdata.engines.processes.process import Process

START_SECONDS = 120.0
"""What a process may take until it builds, with a timeout that is shorter."""
FORK_SECONDS = 30.0
"""Until a forked process runs our code, or never will."""
_RUNS, _KILLED_RUNS = 2, 4
_MAX_STARTS = 8


class Trial:
    """A sample tried alone, by two processes at once; whoever runs it tells it what becomes of them.

    Args:
        start: starts a process that loads samples alone.
        timeout: seconds after which a process counts as one that does not return; 0 for no limit.

    Attributes:
        row: of the sample.
        processes: those at work.
        verdict: None while it runs; then why the sample is to blame, or "" where it is not.
    """

    def __init__(self, row: int, start: Callable[[], Process], timeout: float) -> None:
        self.row = row
        self.processes: list[Process] = []
        self.verdict: str | None = None
        self._start = start
        self._timeout = timeout
        self._begun: dict[Process, float] = {}
        self._endings: list[str] = []
        self._is_by_itself = False
        self._starts = 0
        while self.verdict is None and len(self.processes) < _RUNS:
            self._start_one()

    def ready(self, process: Process) -> None:
        """The process has started: the sample is its to load."""
        try:
            process.load_alone(self.row)
        except OSError:  # it has ended, which is told in its turn
            return
        self._begun[process] = time.monotonic()

    def survived(self, process: Process) -> None:
        """The process has loaded the sample, or raised."""
        self.processes.remove(process)
        process.end()
        self._decide("")

    def ended(self, process: Process, how: str, *, is_killed: bool = False) -> None:
        """The process is gone; `is_killed` where it was sent SIGKILL by nobody knows whom."""
        loading = self.row in process.rows
        self.processes.remove(process)
        if loading:
            self._endings.append(how)
            self._is_by_itself |= not is_killed
            if len(self._endings) >= (_RUNS if self._is_by_itself else _KILLED_RUNS):
                self._decide(" and ".join(dict.fromkeys(self._endings)))
        if self.verdict is None and (not loading or not self.processes):  # before it came to the sample; to be sure
            self._start_one()

    def overdue(self) -> list[Process]:
        """Processes that have had the sample for longer than the timeout, or do not come to it."""
        now = time.monotonic()
        stuck = [each for each in self.processes if not each.has_begun and now - each.started >= FORK_SECONDS]
        if not self._timeout:
            return stuck
        return stuck + [
            process
            for process in self.processes
            if now - self._begun.get(process, now) >= self._timeout
            or (
                process.has_begun
                and not process.is_ready
                and now - process.started >= max(self._timeout, START_SECONDS)
            )
        ]

    def end(self) -> None:
        """Give up; nothing is decided."""
        for process in self.processes:
            process.end()
        self.processes.clear()

    def _start_one(self) -> None:
        while self._starts < _MAX_STARTS:
            self._starts += 1
            with contextlib.suppress(EOFError, ConnectionError):  # the fork server was lost: another try makes one
                self.processes.append(self._start())
                return
        self._decide("")

    def _decide(self, verdict: str) -> None:
        if self.verdict is None:
            self.verdict = verdict
            self.end()


class Suspects:
    """Samples that were loaded when a worker was lost, tried one after another.

    Args:
        start, timeout: see `Trial`.

    Attributes:
        trial: the one that runs; None where nobody is suspected.
    """

    def __init__(self, start: Callable[[], Process], timeout: float) -> None:
        self.trial: Trial | None = None
        self._start = start
        self._timeout = timeout
        self._rows: deque[int] = deque()
        self._seen: Counter[int] = Counter()

    def add(self, rows: Iterable[int], *, at_once: bool, but: Container[int]) -> bool:
        """Note the rows that a lost worker was loading; whether any is suspected: at once, or seen a second time.

        Args:
            but: known already to be to blame.
        """
        rows = list(rows)
        self._seen.update(rows)
        suspected = [row for row in rows if at_once or self._seen[row] > 1]
        self._rows.extend(row for row in suspected if row not in but and row not in self._rows)
        return bool(suspected)

    def go_on(self) -> Iterator[tuple[int, str]]:
        """Start the next trial where none runs; each row whose trial is over, and its verdict."""
        while self._rows:
            if self.trial is None:
                self.trial = Trial(self._rows[0], self._start, self._timeout)
            if self.trial.verdict is None:
                return
            verdict, row, self.trial = self.trial.verdict, self._rows.popleft(), None
            self._seen.pop(row, None)
            yield row, verdict
