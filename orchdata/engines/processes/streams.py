"""Worker processes that each iterate a copy of their own: their batches in turn, without those that have ended.

As torch's loader does it: requests go round the workers that still have something, and their answers are handed out in
the order of the requests; one that finds a worker at its end is dropped, and made anew of the next.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from concurrent.futures import Future
from itertools import islice

from orchdata.building.assembler import EndOfData
from orchdata.building.step import BuiltStep
from orchdata.engines.engine import Resumed
from orchdata.engines.processes.engine import ProcessEngine
from orchdata.order.steps import StepTask


class StreamEngine:
    """An engine whose steps are what its workers give next.

    Args:
        engine: of workers that remember.
        num_workers: of it.
        in_order: whether answers are handed out in the order of the requests; else as they come, and a worker is
            asked for more when it has few requests left.
        resumed: where its workers go on.
    """

    keeps_time = True

    def __init__(
        self, engine: ProcessEngine, num_workers: int, *, in_order: bool = True, resumed: Resumed | None = None
    ) -> None:
        self.depth = engine.depth
        self._engine = engine
        self._num_workers = num_workers
        self._in_order = in_order
        self._turns = deque(range(num_workers))
        self._last: StepTask | None = None
        self._error: BaseException | None = None  # of a batch that was skipped
        self._tasks: dict[Future[BuiltStep], StepTask] = {}
        self._requests: deque[Future[BuiltStep]] = deque()
        self._waiting: deque[Future[BuiltStep]] = deque()
        self._workers: dict[Future[BuiltStep], int] = {}
        self._is_awaited = False  # the next one that is handed out
        self._lock = threading.RLock()
        if resumed is not None:
            self._turns.rotate(-1 - resumed.worker)
            for number in range(num_workers):
                for task in resumed.skipped(number):
                    engine.submit(task, number).add_done_callback(self._skip)

    def submit(self, task: StepTask) -> Future[BuiltStep]:
        future: Future[BuiltStep] = Future()
        with self._lock:
            last, self._last = self._last, task
            if last is not None and task.epoch != last.epoch:
                self._turns = deque(range(self._num_workers))
            self._waiting.append(future)
            self._request(task)
        self._hand_out()
        return future

    def expect(self, future: Future[BuiltStep]) -> None:
        with self._lock:
            self._is_awaited = bool(self._requests)
            if self._is_awaited:
                self._engine.expect(self._requests[0])

    def take_notes(self) -> list[str]:
        return self._engine.take_notes()

    def close(self) -> None:
        self._engine.close()

    def _skip(self, skipped: Future[BuiltStep]) -> None:
        error = skipped.exception()
        if not isinstance(error, EndOfData | None):
            self._error = self._error or error

    def _request(self, task: StepTask) -> None:
        """Ask the worker whose turn it is."""
        if not self._turns:
            return
        if not self._in_order:
            asked = Counter(self._workers.values())
            self._turns.rotate(-self._turns.index(min(self._turns, key=lambda worker: asked[worker])))
        worker = self._turns[0]
        self._turns.rotate(-1)
        request = self._engine.submit(task, worker)
        self._tasks[request], self._workers[request] = task, worker
        self._requests.append(request)
        request.add_done_callback(lambda _: self._hand_out())

    def _hand_out(self) -> None:
        """Give what has arrived to those who wait for it."""
        with self._lock:
            while (request := self._next_done()) is not None:
                self._requests.remove(request)
                task, worker = self._tasks.pop(request), self._workers.pop(request)
                error = self._error or request.exception()
                if isinstance(error, EndOfData):
                    if worker in self._turns:
                        self._turns.remove(worker)
                    self._request(task)
                elif error is not None:
                    self._waiting.popleft().set_exception(error)
                else:
                    self._waiting.popleft().set_result(request.result())
                self._is_awaited &= isinstance(error, EndOfData)
                if self._is_awaited and self._requests:
                    self._engine.expect(self._requests[0])
            while self._waiting and not self._requests:
                self._waiting.popleft().set_exception(EndOfData())

    def _next_done(self) -> Future[BuiltStep] | None:
        """The request whose answer is handed out next, once it is there."""
        candidates = islice(self._requests, 1) if self._in_order else self._requests
        return next((request for request in candidates if request.done()), None)
