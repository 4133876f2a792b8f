"""Keeps as many threads at work as are fastest together.

Many threads help when they wait for storage. Where storage is fast (the page cache), they slow one another down: each
short system call hands over the interpreter's lock, and two calls take twice the time of one. The throughput shows
which is the case, so it is measured during the work.

Samples of one large shard are spread over threads of a build that have no shard of their own: a tokenizer that works
without the interpreter's lock, as Hugging Face's do, uses several cores this way. Where threads would only wait for it,
`Pace` leaves this thread alone at work.

items --one after another, in this thread--> an idle thread, or this one --> results in the order of the items
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Final, TypeVar

from orchdata.loaders.watch import here

Item = TypeVar("Item", bound=Sized)
Result = TypeVar("Result")
Each = TypeVar("Each")

_WINDOW_SECONDS: Final = 0.15  # A rate is measured over at least this time,
_WINDOW_JOBS: Final = 4  # ... and over at least this number of jobs per thread.
_GAIN: Final = 1.1  # More threads must be faster by this factor; fewer need only be as fast.
_REST_SECONDS: Final = 15.0  # Pause after neither more nor fewer were faster; storage may change meanwhile.
_SHORT_SECONDS: Final = 1.0  # A thread that takes longer waits, or has large jobs: it is not counted.


FAR_THREADS: Final = 4
"""Least number of threads by default that read from object storage: some of them wait for it."""


def threads_or_default(num_threads: int | None, *, far: bool = False) -> int:
    """Return a number of threads; for None one for each CPU, at most 8; at least some to read from `far` storage."""
    if num_threads is not None:
        return num_threads
    return min(8, max(os.cpu_count() or 1, FAR_THREADS if far else 1))


def in_threads(do: Callable[[Each], Result], items: Sequence[Each], most: int) -> list[Result]:
    """Return `do` of each item, by at most so many threads; by this one where there is a single item."""
    if min(most, len(items)) <= 1:
        return [do(item) for item in items]
    with ThreadPoolExecutor(min(most, len(items)), thread_name_prefix="orchdata-each") as pool:
        return list(pool.map(do, items))


class Pace:
    """Finds by trial how many of `most` threads are fastest, `at_work`: it halves or doubles them while that helps."""

    def __init__(self, most: int, now: float) -> None:
        self._most = most
        self.at_work = self._best = most
        self._best_rate = 0.0
        self._rest_until = now
        self._downwards = True
        self._settling = 0
        self._open(now)

    def done(self, amount: float, now: float) -> None:
        """Record a job: its amount of work, and the time in seconds."""
        if self._settling:  # jobs that began before the last change
            self._settling -= 1
            if not self._settling:
                self._open(now)
            return
        self._amount += amount
        self._jobs += 1
        seconds = now - self._since
        if seconds >= _WINDOW_SECONDS and self._jobs >= _WINDOW_JOBS * self.at_work:
            rate = self._amount / seconds
            if self.at_work == self._best:
                self._best_rate = rate
                if now >= self._rest_until:
                    self._try_next(now)
            elif rate > self._best_rate * (1 if self._downwards else _GAIN):
                self._best, self._best_rate = self.at_work, rate
                self._try_next(now)
            else:
                self._change(self._best)
                self._turn_around(now)
            self._open(now)

    def _open(self, now: float) -> None:
        self._since, self._amount, self._jobs = now, 0.0, 0

    def _try_next(self, now: float) -> None:
        """Try half the best number, or twice the best."""
        tried = max(1, self._best // 2) if self._downwards else min(self._most, 2 * self._best)
        if tried == self._best:  # the minimum or maximum is reached
            self._turn_around(now)
        else:
            self._change(tried)

    def _turn_around(self, now: float) -> None:
        """Try the other direction next: more after fewer, fewer after more; then rest."""
        self._rest_until = now if self._downwards and self._best < self._most else now + _REST_SECONDS
        self._downwards = not self._downwards

    def _change(self, count: int) -> None:
        self._settling = max(self.at_work, count)
        self.at_work = count


class Turns:
    """Limits the threads in its block to `most`, or the number that `Pace` gives; long turns are not counted. Once it
    has `ended`, no thread may begin anything.
    """

    def __init__(self, most: int, *, paced: bool = True) -> None:
        self.ended = False
        self._paced = paced
        self._pace = Pace(most, time.monotonic())
        self._begun: dict[int, float] = {}  # by thread: when its turn began
        self._num_lent = 0
        self._is_alone = False
        self._changed = threading.Condition()

    def lend(self) -> bool:
        """Return whether a thread without a turn may help one that has it, until `give_back`: if fewer threads are at
        work than are fastest.
        """
        with self._changed:
            at_work = len(self._begun) + self._num_lent
            is_lent = not (self.ended or self._is_alone) and at_work < self._pace.at_work
            self._num_lent += is_lent
            return is_lent

    def give_back(self) -> None:
        """End what `lend` allowed."""
        with self._changed:
            self._num_lent -= 1

    @contextmanager
    def turn(self) -> Iterator[Callable[[float], None]]:
        """Wait for this thread's turn; call the yielded function with the amount of work done."""
        with self._changed:
            while not self.ended:
                if self._is_alone:
                    self._changed.wait()
                    continue
                now = time.monotonic()
                counted = [begun for begun in self._begun.values() if now - begun < _SHORT_SECONDS]
                if len(counted) < self._pace.at_work:
                    break
                self._changed.wait(min(counted) + _SHORT_SECONDS - now)
            self._begun[threading.get_ident()] = time.monotonic()
        amounts: list[float] = []
        try:
            yield amounts.append
        finally:
            with self._changed:
                del self._begun[threading.get_ident()]
                if amounts and self._paced:
                    self._pace.done(sum(amounts), time.monotonic())
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no thread has a turn, and let none begin one during the block."""
        with self._changed:
            while self._is_alone and not self.ended:
                self._changed.wait()
            self._is_alone = True
            while self._begun and not self.ended:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._is_alone = False
                self._changed.notify_all()

    def end(self) -> None:
        """End all waits."""
        with self._changed:
            self.ended = True
            self._changed.notify_all()


class Spread:
    """The idle threads of a build, which has `most`; `turns` says how many may work."""

    def __init__(self, turns: Turns, most: int) -> None:
        self._turns = turns
        self._most = most
        self._pool = ThreadPoolExecutor(max(1, most - 1), thread_name_prefix="orchdata-helper")

    def close(self) -> None:
        """Wait for the threads to end."""
        self._pool.shutdown()

    def in_order(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Result]:
        """Yield `function(item)` for each item, in order; the error of an item is raised in its place. Items are taken
        in this thread; their lengths are their amounts of work. At most one more than there are threads are under way.
        """
        source, pace = iter(items), Pace(self._most, time.monotonic())
        ahead: deque[Item] = deque()
        under_way: deque[tuple[int, Future[Result]]] = deque()
        given_up, build_ended = threading.Event(), here().ended  # a helping thread is to stop, or the whole build

        def ended() -> bool:
            return given_up.is_set() or (build_ended is not None and build_ended())

        def take(count: int) -> bool:
            while len(ahead) < count:
                try:
                    ahead.append(next(source))
                except StopIteration:
                    return False
            return True

        try:
            while True:
                # The next item is for an idle thread, if another one is left for this thread.
                helping = sum(not future.done() for _, future in under_way)
                has_room = helping < pace.at_work - 1 and len(under_way) <= self._most
                if has_room and self._turns.lend():
                    if take(2):
                        under_way.append((len(ahead[0]), self._lent(function, ahead.popleft(), ended)))
                        continue
                    self._turns.give_back()
                # Deliver the first result; meanwhile this thread works as well.
                if under_way and (under_way[0][1].done() or len(under_way) > self._most or not take(1)):
                    amount, first = under_way.popleft()
                    yield first.result()
                    pace.done(amount, time.monotonic())
                elif take(1):
                    under_way.append((len(ahead[0]), _done(function, ahead.popleft())))
                else:
                    return
        finally:
            given_up.set()
            wait([future for _, future in under_way])

    def _lent(self, function: Callable[[Item], Result], item: Item, ended: Callable[[], bool]) -> Future[Result]:
        shard = here().shard

        def work() -> Result:
            mine = here()
            mine.shard, mine.ended = shard, ended
            try:
                return function(item)
            finally:
                mine.key, mine.shard, mine.ended = None, "", None
                self._turns.give_back()

        return self._pool.submit(work)


def _done(function: Callable[[Item], Result], item: Item) -> Future[Result]:
    """Call the function in this thread. Its error is raised when its turn comes."""
    future: Future[Result] = Future()
    try:
        future.set_result(function(item))
    except Exception as error:  # noqa: BLE001 - raised by `result`
        future.set_exception(error)
    return future
