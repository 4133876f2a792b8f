"""Attempts: which trouble is tried again, for how long, and what the last error says. The clock is made up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from orchdata.loaders.errors import StorageError
from orchdata.loaders.storage.remote import requests
from orchdata.loaders.storage.remote.requests import Trouble
from orchdata.loaders.storage.storage import RequestCounts

URL = "s3://bucket/a.tar"


class Clock:
    """Time passes only in pauses and requests."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(requests, "time", made)
    yield made


def tried(call: Callable[[], Any], is_wanted: Callable[[], bool] = lambda: True, **more: Any) -> Any:
    options: dict[str, Any] = {"retry_seconds": 300.0, "counts": RequestCounts(), "refresh": lambda: False}
    request = requests.Request(call=call, url=URL, doing="cannot be read at 0", **(options | more))
    return requests.Requests().keep_trying(request, is_wanted)


def failing(*troubles: Trouble, seconds: float = 0.0, clock: Clock | None = None) -> Callable[[], str]:
    """A request that fails in these ways, one after the other, and then succeeds."""
    left = iter(troubles)

    def request() -> str:
        if clock is not None:
            clock.now += seconds
        trouble = next(left, None)
        if trouble is not None:
            raise trouble
        return "bytes"

    return request


def always(trouble: Trouble, **more: Any) -> Callable[[], str]:
    return failing(*itertools.repeat(trouble, 100_000), **more)


PASSING = Trouble("passing", "the server failed (HTTP 500)")


def test_pauses_grow_to_a_limit(clock: Clock) -> None:
    counts = RequestCounts()
    assert tried(failing(*[PASSING] * 12), counts=counts) == "bytes"
    assert counts.as_dict() == {"again": 12}
    for number, pause in enumerate(clock.pauses):
        usual = min(0.1 * 2**number, 8.0)
        assert 0.5 * usual <= pause <= usual


def test_an_outage_ends_after_its_time(clock: Clock) -> None:
    with pytest.raises(StorageError, match=r"s3://bucket/a.tar: cannot be read at 0: .*HTTP 500. \(\d+ attempts\)$"):
        tried(always(PASSING))
    assert 300 <= clock.now - 1000 <= 301


def test_a_request_that_hangs_is_made_once_more_at_most(clock: Clock) -> None:
    with pytest.raises(StorageError):
        tried(always(PASSING, seconds=30.0, clock=clock))
    assert clock.now - 1000 <= 30 + 300 + 30  # from the first failure on


@pytest.mark.parametrize("kind", ["absent", "credentials", "final"])
def test_what_no_attempt_mends_is_asked_once(clock: Clock, kind: Any) -> None:
    with pytest.raises(StorageError, match="no$") as caught:
        tried(always(Trouble(kind, "no")))
    assert caught.value.__context__ is None
    assert not clock.pauses


def test_odd_answers_are_counted_by_themselves(clock: Clock) -> None:
    four = [PASSING, Trouble("odd", "no range")] * 4
    assert tried(failing(*four)) == "bytes"
    with pytest.raises(StorageError, match=r"no range \(10 attempts\)"):
        tried(failing(*four, *four))


def test_credentials_are_read_again_once(clock: Clock) -> None:
    refreshed: list[int] = []

    def refresh() -> bool:
        refreshed.append(1)
        return True

    expired = Trouble("credentials", "expired")
    assert tried(failing(expired), refresh=refresh) == "bytes"
    with pytest.raises(StorageError, match=r"expired \(2 attempts\)"):
        tried(always(expired), refresh=refresh)
    assert len(refreshed) == 2
