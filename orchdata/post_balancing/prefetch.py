"""Builds steps of post_balance in a thread, a few ahead of the training loop."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

from orchdata.post_balancing.group import POLL_SECONDS, LostRanksError
from orchdata.post_balancing.step import ReadyStep, StepMaker


class Prefetcher:
    """Steps of one maker, in order.

    Args:
        maker: only the thread uses it from now on.
        depth: number of steps that are ready or under way.
    """

    def __init__(self, maker: StepMaker, depth: int) -> None:
        self._maker = maker
        self._depth = depth
        self._ready: deque[ReadyStep] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._over = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="orchdata-post-balance", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[ReadyStep]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._over)
                if not self._ready:
                    break
                made = self._ready.popleft()
                self._changed.notify_all()
            yield made
            del made  # else the last step would stay in memory during the wait for the next
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self, timeout: float | None) -> bool:
        """Ask the thread to end, which informs the other ranks, and wait for it. Return whether it has ended."""
        with self._changed:
            self._closing = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def leave(self) -> None:
        """Leave the reason for the others, as this process ends before they reach the step."""
        self._maker.group.leave(f"ended before step {self._maker.step}: leave the loop after one step on all ranks")

    def _run(self) -> None:
        try:
            while True:
                closing = not self._wait_for_room()
                made = self._maker.make(closing=closing)
                with self._changed:
                    if made is None:
                        break
                    if not self._closing:
                        self._ready.append(made)
                    self._changed.notify_all()
                del made
        except BaseException as error:  # noqa: BLE001 - raised by the training loop
            self._error = error
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        """Wait until a step may be built. Return False if no more are needed."""
        group = self._maker.group
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closing or len(self._ready) < self._depth, POLL_SECONDS):
                    return not self._closing
            try:
                group.check_others()
            except LostRanksError as error:
                raise group.explain_loss(self._maker.step, error) from error
