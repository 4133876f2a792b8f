"""Spreads the samples of one large shard over threads of a build that have no shard of their own.

items --one after another, in this thread--> an idle thread, or this one --> results in the order of the items

A tokenizer that works without the interpreter's lock, as Hugging Face's do, uses several cores this way. Where threads
would only wait for that lock, `Pace` leaves this thread alone at work.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sized
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from orchdata.loaders.pace import Pace, Turns
from orchdata.loaders.watch import here

Item = TypeVar("Item", bound=Sized)
Result = TypeVar("Result")


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
