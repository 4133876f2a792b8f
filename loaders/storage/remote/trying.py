"""Trying again: all requests of a process have one budget of time for an outage.

    Trouble "passing" --pause, longer each time--> another attempt, until the budget is over --> StorageError

An outage begins with the first request that fails and ends with the next that succeeds, or when no request is made
for a while. So a server that fails one request in twenty never uses the budget up, and one that answers none is given
up by all threads at the same time.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from orchdata.loaders.storage.remote import process
from orchdata.loaders.storage.remote.clients.trouble import Trouble
from orchdata.loaders.storage.remote.counts import RequestCounts

T = TypeVar("T")

RETRY_SECONDS: Final = 300.0
"""How long an outage may last."""
_FIRST_PAUSE: Final = 0.1
_THROTTLED_PAUSE: Final = 0.4
_LONGEST_PAUSE: Final = 8.0
_ODD_ATTEMPTS: Final = 5
_SAID_AFTER: Final = 5.0
_SAID_EVERY: Final = 60.0
_FRESH_SECONDS: Final = 1.0
"""How long a request is made again in any case: the outage of those before may just be over."""
_QUIET_SECONDS: Final = 2 * _LONGEST_PAUSE

_log = logging.getLogger("orchdata")


class Outage:
    """When the requests of this process began to fail; no time if the last one succeeded."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._last = self._said = 0.0
        self._lock = threading.Lock()

    def over(self) -> None:
        """Note that a request was answered."""
        if self._since is not None:
            with self._lock:
                self._since = None

    def lasts(self, url: str, reason: str, budget: float, asked: float) -> float:
        """Return for how many seconds requests fail; one that began at `asked` just did. Say so now and then."""
        now = time.monotonic()
        with self._lock:
            # Requests that were given up long before this one began say nothing about the time between.
            if self._since is None or asked - self._last > _QUIET_SECONDS:
                self._since, self._said = now, now + _SAID_AFTER - _SAID_EVERY
            self._last = now
            seconds = now - self._since
            says = now - self._said >= _SAID_EVERY
            if says:
                self._said = now
        if says:
            _log.warning("%s: %s; trying again for up to %g s", url, reason, budget)
        return seconds


def keep_trying(
    request: Callable[[], T],
    *,
    url: str,
    doing: str,
    budget: float,
    counts: RequestCounts,
    outage: Outage,
    refresh: Callable[[], bool],
    ended: Callable[[], bool] = lambda: False,
) -> T:
    """Return `request()`; make it again after trouble that may pass.

    Args:
        url, doing: for the error: the object, without secrets, and what failed.
        budget: seconds that an outage may last.
        refresh: reads credentials again; called once.
        ended: whether the result is no longer wanted.

    Raises:
        StorageError: it failed for a lasting reason, or for too long.
        StaleIndexError: the object is another one than was indexed.
    """
    pause, attempts, odd, refreshed, first_failure, began = _FIRST_PAUSE, 0, 0, False, None, time.monotonic()
    while True:
        attempts += 1
        process.check(url)
        asked = time.monotonic()
        try:
            result = request()
        except Trouble as raised:
            trouble = raised.with_traceback(None)  # whose frames have the bytes of the answer
            process.HERE.answered = True  # the client works in this process
        else:
            process.HERE.answered = True
            outage.over()
            return result
        if trouble.kind != "passing":
            outage.over()
            if trouble.kind == "credentials" and not refreshed and refresh():
                refreshed = True
                counts.add("again")
                continue
            raise trouble.as_error(url, doing, attempts)
        odd += trouble.is_odd
        now = time.monotonic()
        first_failure = now if first_failure is None else first_failure
        # A server that answers wrongly is no outage, for others.
        lasted = 0.0 if trouble.is_odd else outage.lasts(url, trouble.reason, budget, asked)
        left = max(budget - max(now - first_failure, lasted), min(budget, _FRESH_SECONDS) - (now - began))
        if left <= 0 or (trouble.is_odd and odd >= _ODD_ATTEMPTS) or ended():
            raise trouble.as_error(url, doing, attempts)
        least = _THROTTLED_PAUSE if trouble.throttled else 0.0
        time.sleep(min(left, max(least, pause) * random.uniform(0.5, 1.0)))
        pause = min(2 * pause, _LONGEST_PAUSE)
        counts.add("again")
