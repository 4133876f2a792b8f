"""Trying again: all requests of a process have one budget of time for an outage.

    Trouble "passing" --pause, longer each time--> another attempt, until the budget is over --> StorageError

An outage begins with the first request that fails and ends with the next that succeeds. So a server that fails one
request in twenty never uses the budget up, and one that answers none is given up by all threads at the same time.
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

_log = logging.getLogger("orchdata")


class Outage:
    """When the requests of this process began to fail; no time if the last one succeeded."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._said = 0.0
        self._lock = threading.Lock()

    def over(self) -> None:
        """Note that a request was answered."""
        if self._since is not None:
            with self._lock:
                self._since = None

    def lasts(self, url: str, reason: str, budget: float) -> float:
        """Return for how many seconds requests fail; this one just did. Say so now and then."""
        now = time.monotonic()
        with self._lock:
            if self._since is None:
                self._since, self._said = now, now + _SAID_AFTER - _SAID_EVERY
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
    pause, attempts, refreshed, first_failure = _FIRST_PAUSE, 0, False, None
    while True:
        attempts += 1
        process.check(url)
        try:
            result = request()
        except Trouble as trouble:
            if trouble.kind != "passing":
                outage.over()  # it was answered
                if trouble.kind == "credentials" and not refreshed and refresh():
                    refreshed = True
                    counts.add("again")
                    continue
                raise trouble.as_error(url, doing, attempts) from None
            now = time.monotonic()
            first_failure = now if first_failure is None else first_failure
            left = budget - max(now - first_failure, outage.lasts(url, trouble.reason, budget))
            if left <= 0 or (trouble.is_odd and attempts >= _ODD_ATTEMPTS) or ended():
                raise trouble.as_error(url, doing, attempts) from None
            least = _THROTTLED_PAUSE if trouble.throttled else 0.0
            time.sleep(min(left, max(least, pause) * random.uniform(0.5, 1.0)))
            pause = min(2 * pause, _LONGEST_PAUSE)
            counts.add("again")
        else:
            process.HERE.answered = True
            outage.over()
            return result
