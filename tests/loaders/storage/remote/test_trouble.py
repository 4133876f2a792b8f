"""What exceptions of clients mean, of any package."""

from __future__ import annotations

import ftplib
import json
from types import SimpleNamespace
from typing import Any

import pytest

from orchdata.loaders.storage.remote.requests import trouble_of
from orchdata.loaders.storage.remote.urls import identity, same_name, without_secrets

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
    ("url", "name"),
    [
        ("s3://bucket/a?b", "s3://bucket/a?b"),
        ("S3://Bucket/a", "s3://Bucket/a"),
        ("https://me:word@h/a%20b?sig=1#part", "https://h/a%20b"),
        ("https://token@h/a", "https://h/a"),
        ("ftp://me:word@h/a", "ftp://h/a"),
        ("abfs://container@account/a", "abfs://container@account/a"),
    ],
)
def test_identity_has_no_secret(url: str, name: str) -> None:
    assert identity(url) == name
    assert identity(name) == name


def test_two_spellings_have_one_name() -> None:
    assert same_name("https://H/a%20b?x") == same_name("https://u:p@h/a b")
    assert same_name("s3://b/a%20b") != same_name("s3://b/a b")
    assert same_name("s3://b/a") != same_name("s3://B/a")


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
