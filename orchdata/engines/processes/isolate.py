"""Does this sample crash or hang its process? It is loaded alone, in separate processes: it is marked bad after two
crashes or hangs, or after four SIGKILLs (the OOM killer sends those too). Where workers are forked, processes that are
not forked must confirm it: a fork copies locks that other threads hold, and whoever takes one of them hangs.

rows of lost workers --CrashSuspects--> one at a time: Trial, two processes --> why the sample is bad, or ""
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator

from orchdata.engines.processes.process import Process

START_SECONDS = 120.0
"""How long a process may take to start, if the loader's timeout is shorter."""
FORK_SECONDS = 30.0
"""A forked process that has not run our code after this time never will."""
_FRESH_SECONDS = 10.0
"""What a process that is not forked has at least for its first sample, which may import much."""
_RUNS, _KILLED_RUNS = 2, 4
_MAX_STARTS = 8
FORKED = (
    ". Workers are forked, and a fork copies locks that other threads hold (those of a library's pool): if a worker "
    "waits for one of them, pass multiprocessing_context='forkserver' or 'spawn'"
)


class Trial:
    """Loads one sample alone, in two processes at a time; the supervisor reports what happens to them.

    Args:
        start: starts a process that loads samples alone.
        timeout: seconds after which a process counts as hung; 0 for no limit.
        confirms: the verdict of forked processes that it is to confirm; "" for none.

    Attributes:
        row: of the sample.
        processes: those that are running.
        verdict: None while the trial runs; then why the sample is bad, or "" if it is not.
        untried: why no process could load the sample.
    """

    def __init__(self, row: int, start: Callable[[], Process], timeout: float, confirms: str = "") -> None:
        self.row = row
        self.confirms = confirms
        self.untried = ""
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
        """The process has started: have it load the sample."""
        try:
            process.load_alone(self.row)
        except OSError:  # it has ended: `ended` is called for it
            return
        self._begun[process] = time.monotonic()

    def survived(self, process: Process) -> None:
        """The process has loaded the sample, or raised an exception."""
        self.processes.remove(process)
        process.end()
        self._decide("")

    def ended(self, process: Process, how: str, *, is_killed: bool = False) -> None:
        """The process has ended; `is_killed`: by a SIGKILL of unknown origin."""
        loading = self.row in process.rows
        self.processes.remove(process)
        if self.confirms and not process.is_ready:
            self.untried = self.untried or how
            self._decide("")
        if loading:
            self._endings.append(how)
            self._is_by_itself |= not is_killed
            if len(self._endings) >= (_RUNS if self._is_by_itself else _KILLED_RUNS):
                self._decide(" and ".join(dict.fromkeys(self._endings)))
        # Another process replaces one that ended before it loaded the sample, or confirms the crashes of all so far.
        if self.verdict is None and (not loading or not self.processes):
            self._start_one()

    def overdue(self) -> list[Process]:
        """Return processes that have been loading the sample for longer than the timeout, or do not start."""
        now = time.monotonic()
        stuck = [each for each in self.processes if not each.has_begun and now - each.started >= FORK_SECONDS]
        if not self._timeout:
            return stuck
        self._begun |= {
            process: now for process in self.processes if process in self._begun and process.waits_for_storage
        }
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
        """End the processes without a verdict."""
        for process in self.processes:
            process.end()
        self.processes.clear()

    def _start_one(self) -> None:
        while self._starts < _MAX_STARTS:
            self._starts += 1
            try:
                self.processes.append(self._start())
                return
            except (EOFError, ConnectionError) as error:  # the fork server was lost: the next try starts one
                self.untried = repr(error)
            except Exception as error:
                if not self.confirms:
                    raise
                self.untried = f"the data set does not pickle: {type(error).__name__}: {error}"
                break
        self._decide("")

    def _decide(self, verdict: str) -> None:
        if self.verdict is None:
            self.verdict = verdict
            self.end()


class CrashSuspects:
    """Samples that were loading when a worker was lost; each gets a trial, one after another.

    Args:
        start, timeout: see `Trial`.
        start_fresh: starts a process that is not forked, where `start` forks one; else None.

    Attributes:
        trial: the one that is running; None if there is none.
    """

    def __init__(
        self, start: Callable[[], Process], timeout: float, start_fresh: Callable[[], Process] | None = None
    ) -> None:
        self.trial: Trial | None = None
        self._start = start
        self._start_fresh = start_fresh
        self._good: set[int] = set()  # loaded by processes that are not forked
        self._timeout = timeout
        self._rows: deque[int] = deque()
        self._seen: Counter[int] = Counter()

    def add(self, rows: Iterable[int], *, immediately: bool, known_bad: Container[int]) -> bool:
        """Add the rows that a lost worker was loading. Returns whether any is suspected.

        Args:
            immediately: suspect them the first time; else those that were loading at two losses.
            known_bad: rows that need no trial.
        """
        rows = list(rows)
        self._seen.update(rows)
        suspected = [row for row in rows if (immediately or self._seen[row] > 1) and row not in self._good]
        self._rows.extend(row for row in suspected if row not in known_bad and row not in self._rows)
        return bool(suspected)

    def run_trials(self) -> Iterator[tuple[int, str]]:
        """Yield each row with a finished trial, and its verdict; start the next trial if none is running."""
        while self._rows:
            if self.trial is None:
                self.trial = Trial(self._rows[0], self._start, self._timeout)
            if self.trial.verdict is None:
                return
            trial, row, self.trial = self.trial, self._rows[0], None
            if trial.verdict and self._start_fresh is not None and not trial.confirms:
                seconds = max(self._timeout, _FRESH_SECONDS) if self._timeout else 0.0
                self.trial = Trial(row, self._start_fresh, seconds, trial.verdict)
                continue
            verdict = (
                "" if not trial.verdict else f"{trial.confirms or trial.verdict}, whenever this sample was loaded alone"
            )
            if trial.confirms and trial.untried:
                verdict = (
                    f"{trial.confirms}, whenever this sample was loaded alone by a forked worker; whether one that is "
                    f"not forked can load it was not tried ({trial.untried}){FORKED}"
                )
            elif trial.confirms and not verdict:
                self._good.add(row)
            self._rows.popleft()
            self._seen.pop(row, None)
            yield row, verdict
