"""The proxy that tests of storage use: it counts what passes, and each fault happens on the wire to chosen requests."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterator
from itertools import count

import obstore
import pytest
from obstore.exceptions import GenericError
from servers.fixtures import Proxied
from servers.http_server import HttpServer
from servers.proxy import Fault
from servers.s3_server import S3Server

CONTENT = bytes(range(256)) * 8
RANGE = {"Range": "bytes=0-99"}
_numbers = count(1)


@pytest.fixture
def bucket(s3_server: S3Server, new_bucket: Callable[[], str]) -> str:
    """A bucket with one object."""
    name = new_bucket()
    s3_server.put(name, "folder/object", CONTENT)
    return name


@pytest.fixture
def url(http_server: HttpServer) -> str:
    """The path of a file on the server of HTTP."""
    key = f"file-{next(_numbers)}.bin"
    http_server.put(key, CONTENT)
    return f"/{key}"


Get = Callable[..., tuple[http.client.HTTPResponse, bytes]]


@pytest.fixture
def get() -> Iterator[Get]:
    """A plain client, which keeps one connection to each port until it is lost."""
    connections: dict[int, http.client.HTTPConnection] = {}

    def get(port: int, path: str, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
        connection = connections.setdefault(port, http.client.HTTPConnection("127.0.0.1", port, timeout=20))
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer, answer.read()
        except (OSError, http.client.HTTPException):
            connections.pop(port).close()
            raise

    yield get
    for connection in connections.values():
        connection.close()


def test_each_request_is_counted_by_its_kind(s3_server: S3Server, bucket: str, proxied: Proxied) -> None:
    proxy = proxied(s3_server)
    store = s3_server.store(bucket, endpoint=proxy.endpoint)
    obstore.put(store, "new", bytes(300), use_multipart=False)
    obstore.head(store, "new")
    part = obstore.get(store, "folder/object", options={"range": (10, 30)})
    assert bytes(part.bytes()) == CONTENT[10:30]
    assert bytes(obstore.get(store, "folder/object").bytes()) == CONTENT
    list(obstore.list(store))
    kinds = [each.kind for each in proxy.requests()]
    assert kinds == ["PUT", "HEAD", "RANGE", "GET", "LIST"] and proxy.counts() == dict.fromkeys(kinds, 1)
    put, head, ranged, whole, _ = proxy.requests()
    assert (put.path, put.sent_bytes, put.body_bytes) == (f"/{bucket}/new", 300, 0)
    assert (head.status, head.body_bytes) == (200, 0)
    assert (ranged.status, ranged.range, ranged.body_bytes) == (206, "bytes=10-29", 20)
    assert (whole.status, whole.body_bytes) == (200, len(CONTENT))
    assert proxy.body_bytes("RANGE", "GET") == 20 + len(CONTENT)
    proxy.clear()
    assert proxy.requests() == []


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault("cut", times=1), ConnectionResetError),
        (Fault("cut", times=1, reset=False), http.client.RemoteDisconnected),
        (Fault("cut_body", times=1, after=50), ConnectionResetError),
        (Fault("short", times=1, after=10), http.client.IncompleteRead),
    ],
)
def test_a_connection_that_is_lost(
    http_server: HttpServer, url: str, proxied: Proxied, get: Get, fault: Fault, error: type[Exception]
) -> None:
    proxy = proxied(http_server, fault)
    with pytest.raises(error):
        get(proxy.port, url)
    assert proxy.requests()[0].fault == fault.action
    assert get(proxy.port, url)[1] == CONTENT


@pytest.mark.parametrize(
    ("fault", "status", "content"),
    [
        (Fault("fewer", times=1, after=10), 206, CONTENT[:10]),
        (Fault("long", times=1, extra=7), 206, CONTENT[:100] + bytes(7)),
        (Fault("status", times=1, status=503, retry_after=2), 503, None),
        (Fault("stall", times=1, seconds=0.5), 206, CONTENT[:100]),
    ],
)
def test_an_answer_that_is_another(
    http_server: HttpServer, url: str, proxied: Proxied, get: Get, fault: Fault, status: int, content: bytes | None
) -> None:
    proxy, began = proxied(http_server, fault), time.monotonic()
    answer, found = get(proxy.port, url, **RANGE)
    assert answer.status == status and (content is None or found == content)
    if status == 206:
        assert answer.headers["Content-Range"] == f"bytes 0-99/{len(CONTENT)}"
    assert (answer.headers["Retry-After"] == "2") is (fault.action == "status")
    assert (time.monotonic() - began >= 0.45) or fault.action != "stall"
    assert get(proxy.port, url, **RANGE)[1] == CONTENT[:100]
    assert [each.connection for each in proxy.requests()] == [1, 1]


def test_a_put_that_is_refused_or_whose_answer_is_cut(s3_server: S3Server, bucket: str, proxied: Proxied) -> None:
    for action, key in (("status", "refused"), ("cut", "come")):
        proxy = proxied(s3_server, Fault(action, kinds=("PUT",)))  # type: ignore[arg-type]
        with pytest.raises(GenericError):
            obstore.put(s3_server.store(bucket, endpoint=proxy.endpoint), key, bytes(3000), use_multipart=False)
    assert s3_server.list(bucket) == ["come", "folder/object"]


@pytest.mark.parametrize(
    ("fault", "hit"),
    [
        (Fault("status", every=3), [3, 6, 9]),
        (Fault("status", ordinals=(2, 5)), [2, 5]),
        (Fault("status", every=2, times=2), [2, 4]),
        (Fault("status", key="odd", every=2), [3, 7]),
        (Fault("status", kinds=("RANGE",)), [4, 8]),
    ],
)
def test_which_requests_it_acts_on(
    http_server: HttpServer, proxied: Proxied, get: Get, fault: Fault, hit: list[int]
) -> None:
    proxy = proxied(http_server, fault)
    for number in range(1, 10):
        get(proxy.port, "/odd" if number % 2 else "/even", **(RANGE if number in (4, 8) else {}))
    assert [each.number for each in proxy.requests() if each.status == 503] == hit
