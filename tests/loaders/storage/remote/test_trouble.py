"""What exceptions of clients mean, which trouble is tried again, and for how long. The clock is made up."""

from __future__ import annotations

import ftplib
import itertools
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from orchdata.loaders.errors import StorageError
from orchdata.loaders.storage.remote import requests
from orchdata.loaders.storage.remote.requests import Trouble, trouble_of
from orchdata.loaders.storage.remote.urls import without_secrets
from orchdata.loaders.storage.storage import RequestCounts

METADATA = "Error getting credentials from http://169.254.169.254/latest/: Server returned error status: {status}"


class Unknown(Exception):
    """Of a package that no list of ours names."""


class ReadTimeout(Exception):
    """Of a package that no list of ours names."""


def with_status(status: int, kind: type[Exception] = Unknown) -> Exception:
    error = kind("no")
    error.response = SimpleNamespace(status_code=status)  # type: ignore[attr-defined]
    return error


def of_botocore(status: int) -> Exception:
    error = Unknown("no")
    error.response = {"ResponseMetadata": {"HTTPStatusCode": status}}  # type: ignore[attr-defined]
    return error


def raised(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


def handling(error: Exception, other: BaseException) -> Exception:
    error.__context__ = other
    return error


PASSING: list[Any] = [
    *(Unknown("lost"), RuntimeError("closed"), EOFError(), OSError("broken"), TimeoutError(), ftplib.error_temp("421")),
    *(with_status(each) for each in (408, 409, 425, 429, 500, 502, 503, 504)),
    of_botocore(503),
    raised(FileNotFoundError("a"), with_status(503)),
    raised(FileNotFoundError("a"), ConnectionResetError()),
    raised(ValueError("bad"), ConnectionResetError()),
    handling(KeyError("bad"), ReadTimeout()),
    raised(TypeError("bad"), ExceptionGroup("some", [Unknown("a"), OSError("b")])),
    Unknown("status code: 409 Conflict: <Code>OperationAborted</Code>"),
    *(Unknown(f"status code: {each}</Code>") for each in ("400: <Code>RequestTimeout", "403: <Code>SlowDown")),
    Unknown('status code: 403 Forbidden: {"reason": "userRateLimitExceeded"}'),
    *map(Unknown, ("Content-Range header not present in partial response", "Requested 1536..1636, got 1539..1639")),
    *(Unknown(METADATA.format(status=each)) for each in (429, 503)),
]
FINAL: list[tuple[Any, str]] = [
    *((with_status(each), "final") for each in (400, 405, 422)),
    *((with_status(each), "credentials") for each in (401, 403)),
    *((with_status(each), "absent") for each in (404, 410)),
    (with_status(416), "changed"),
    (of_botocore(404), "absent"),
    (raised(FileNotFoundError("a"), with_status(404)), "absent"),
    (handling(FileNotFoundError("a"), KeyError("not in the cache")), "absent"),
    (PermissionError("a"), "credentials"),
    (ftplib.error_perm("530 login"), "credentials"),
    *((kind("a mistake"), "final") for kind in (TypeError, ValueError, AttributeError, LookupError, AssertionError)),
    (KeyError("a"), "final"),
    (json.JSONDecodeError("a page of HTML", "<", 0), "final"),
    (handling(ValueError("a mistake"), Unknown("before")), "final"),
    (Unknown("status code: 400 Bad Request: <Code>InvalidArgument</Code>"), "final"),
    (Unknown("status code: 403: <Code>AccessDenied</Code><Key>a/SlowDown.tar</Key>"), "credentials"),
    (OSError("Prior attempt to load libhdfs failed"), "final"),
    (Unknown("Received non-partial response when range requested"), "odd"),
    (Unknown(METADATA.format(status=404)), "final"),
]


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_what_is_tried_again(error: Exception) -> None:
    assert trouble_of(error, "host", "words").kind == "passing"


@pytest.mark.parametrize(("error", "kind"), FINAL, ids=repr)
def test_what_is_not(error: Exception, kind: str) -> None:
    assert trouble_of(error, "host", "words").kind == kind


@pytest.mark.parametrize("error", [MemoryError(), ImportError("no module")], ids=repr)
def test_what_passes_through(error: Exception) -> None:
    with pytest.raises(type(error)):
        trouble_of(error, "host", "words")


# URLs: their parts, the names without secrets, and messages without them.


@pytest.mark.parametrize(
    "text",
    [
        "at https://h/a?X-Sig=SECRET&b=c: no",
        "(https://h/a?sig=SECRET)",
        "https://h/a?sig=a,SECRET",
        "https://h/a?a=b)SECRET",
        "'https://me:SECRET@h/a'",
        "https://me:p@SECRET@h/a",
        "HTTPS://SECRET@h/a",
        "ftp://me:SECRET@h/a",
        "two: https://h/a?SECRET and https://h/b?SECRET",
        "the key is SECRET",
    ],
)
def test_messages_have_no_secret(text: str) -> None:
    shown = without_secrets(text, ["SECRET"] if "key" in text else [])
    assert "SECRET" not in shown
    assert shown.endswith("no") or "h/" in shown or "key" in shown


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


LOST = Trouble("passing", "the server failed (HTTP 500)")


def test_pauses_grow_to_a_limit(clock: Clock) -> None:
    counts = RequestCounts()
    assert tried(failing(*[LOST] * 12), counts=counts) == "bytes"
    assert counts.as_dict() == {"again": 12}
    for number, pause in enumerate(clock.pauses):
        usual = min(0.1 * 2**number, 8.0)
        assert 0.5 * usual <= pause <= usual


def test_an_outage_ends_after_its_time(clock: Clock) -> None:
    with pytest.raises(StorageError, match=r"s3://bucket/a.tar: cannot be read at 0: .*HTTP 500. \(\d+ attempts\)$"):
        tried(always(LOST))
    assert 300 <= clock.now - 1000 <= 301


def test_a_request_that_hangs_is_made_once_more_at_most(clock: Clock) -> None:
    with pytest.raises(StorageError):
        tried(always(LOST, seconds=30.0, clock=clock))
    assert clock.now - 1000 <= 30 + 300 + 30  # from the first failure on


def test_odd_answers_are_counted_by_themselves(clock: Clock) -> None:
    four = [LOST, Trouble("odd", "no range")] * 4
    assert tried(failing(*four)) == "bytes"
    with pytest.raises(StorageError, match=r"no range \(10 attempts\)"):
        tried(failing(*four, *four))
