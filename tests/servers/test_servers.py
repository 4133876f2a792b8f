"""The servers that tests of storage use: what each is asked and answers, and that each fault happens on the wire."""

from __future__ import annotations

import http.client
import select
import time
from collections.abc import Callable, Iterator
from itertools import count

import obstore
import pytest
from obstore.exceptions import GenericError, PermissionDeniedError, PreconditionError
from servers.fixtures import Proxied
from servers.http_server import HttpServer
from servers.proxy import Fault, Proxy
from servers.s3_server import S3Server
from store_checks import CONTENT, check_conditions, check_reads_and_lists, keys_of, read

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


class Wire:
    """A plain client, which keeps one connection."""

    def __init__(self, proxy: Proxy) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=20)

    def get(self, path: str, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
        self.connection.request("GET", path, headers=headers)
        answer = self.connection.getresponse()
        return answer, answer.read()


WireTo = Callable[[Proxy], Wire]


@pytest.fixture
def wire_to() -> Iterator[WireTo]:
    """Makes plain clients of a proxy, which end with the test."""
    made: list[Wire] = []

    def make(proxy: Proxy) -> Wire:
        made.append(Wire(proxy))
        return made[-1]

    yield make
    for wire in made:
        wire.connection.close()


class TestS3:
    def test_answers_as_s3_does(self, s3_server: S3Server, bucket: str) -> None:
        check_reads_and_lists(s3_server.store(bucket), "folder/object")
        check_conditions(s3_server.store(bucket), "folder/object")

    def test_a_changed_object_has_another_etag(self, s3_server: S3Server, bucket: str) -> None:
        before = obstore.head(s3_server.store(bucket), "folder/object")["e_tag"]
        assert s3_server.put(bucket, "folder/object", CONTENT[::-1]) != before
        with pytest.raises(PreconditionError):
            read(s3_server.store(bucket), "folder/object", 0, 9, if_match=before)

    def test_lists_more_than_one_page(
        self, s3_server: S3Server, new_bucket: Callable[[], str], proxied: Proxied
    ) -> None:
        proxy, name = proxied(s3_server), new_bucket()
        store = s3_server.store(name, endpoint=proxy.endpoint)
        keys = sorted(f"{number:04}" for number in range(1001))
        for key in keys:
            obstore.put(store, key, b"", use_multipart=False)
        assert keys_of(store) == keys
        assert proxy.counts() == {"PUT": 1001, "LIST": 2}

    def test_identities_have_the_rights_of_their_names(self, s3_server: S3Server, bucket: str) -> None:
        key = "folder/object"
        reader, lister, nothing = (s3_server.store(bucket, each) for each in ("reader", "lister", "nothing"))
        assert read(reader, key, 0, 5) == CONTENT[:5]
        assert keys_of(lister) == [key]
        for store in (lister, nothing):
            with pytest.raises(PermissionDeniedError):
                read(store, key, 0, 5)
        for store in (reader, nothing):
            with pytest.raises(GenericError, match="403 Forbidden"):
                keys_of(store)
        for store in (reader, lister, nothing):
            with pytest.raises(PermissionDeniedError):
                obstore.put(store, "new", b"", use_multipart=False)

    def test_a_wrong_secret_is_refused(self, s3_server: S3Server, bucket: str) -> None:
        from servers.stores import store_at

        wrong = store_at(f"s3://{bucket}/", s3_server.options | {"secret_access_key": "wrong"})
        with pytest.raises(PermissionDeniedError):
            read(wrong, "folder/object", 0, 5)

    def test_a_bucket_that_no_one_made_does_not_exist(self, s3_server: S3Server) -> None:
        with pytest.raises(FileNotFoundError):
            s3_server.put("never-made", "key", b"")

    @pytest.mark.slow
    def test_two_servers_have_nothing_in_common(self, s3_server: S3Server, bucket: str) -> None:
        with S3Server() as other:
            assert other.port != s3_server.port
            with pytest.raises(FileNotFoundError):
                other.get(bucket, "folder/object")


class TestHttp:
    def test_answers_ranges_without_etags(self, http_server: HttpServer, url: str) -> None:
        store, key = http_server.store(), url[1:]
        assert read(store, key, 250, 600) == CONTENT[250:600]
        assert obstore.head(store, key)["e_tag"] is None
        with pytest.raises(FileNotFoundError):
            read(store, "no-such-key", 0, 1)

    def test_cannot_list_or_write(self, http_server: HttpServer) -> None:
        with pytest.raises(GenericError, match="405"):
            keys_of(http_server.store())
        with pytest.raises(GenericError, match="405"):
            obstore.put(http_server.store(), "new", b"", use_multipart=False)

    def test_a_file_that_changes_is_served_as_it_is_now(self, http_server: HttpServer, url: str) -> None:
        assert read(http_server.store(), url[1:], 0, 5000) == CONTENT
        http_server.put(url[1:], b"shorter")
        assert read(http_server.store(), url[1:], 0, 5000) == b"shorter"
        http_server.delete(url[1:])
        with pytest.raises(FileNotFoundError):
            read(http_server.store(), url[1:], 0, 5)


class TestCounting:
    def test_each_request_is_counted_by_its_kind(self, s3_server: S3Server, bucket: str, proxied: Proxied) -> None:
        proxy = proxied(s3_server)
        store = s3_server.store(bucket, endpoint=proxy.endpoint)
        obstore.put(store, "new", bytes(300), use_multipart=False)
        obstore.head(store, "new")
        assert read(store, "folder/object", 10, 30) == CONTENT[10:30]
        obstore.get(store, "folder/object").bytes()
        keys_of(store)
        obstore.delete(store, "new")
        # obstore deletes one key and several by the same request: a POST.
        assert [each.kind for each in proxy.requests()][:5] == ["PUT", "HEAD", "RANGE", "GET", "LIST"]
        put, head, part, whole, listing = proxy.requests()[:5]
        assert (put.path, put.sent_bytes, put.body_bytes) == (f"/{bucket}/new", 300, 0)
        assert (head.status, head.body_bytes) == (200, 0)
        assert (part.status, part.range, part.body_bytes) == (206, "bytes=10-29", 20)
        assert (whole.status, whole.body_bytes) == (200, len(CONTENT))
        assert listing.path == f"/{bucket}"
        assert listing.query.startswith("list-type=2")
        assert proxy.body_bytes("RANGE", "GET") == 20 + len(CONTENT)
        proxy.clear()
        assert proxy.requests() == []

    def test_bytes_are_those_of_the_server(self, s3_server: S3Server, bucket: str, proxied: Proxied) -> None:
        content = bytes(range(251)) * 30_000  # more than one read of the proxy, in several chunks of the server
        s3_server.put(bucket, "large", content)
        proxy = proxied(s3_server)
        store = s3_server.store(bucket, endpoint=proxy.endpoint)
        assert bytes(obstore.get(store, "large").bytes()) == content
        assert read(store, "large", 1_000_001, 7_000_003) == content[1_000_001:7_000_003]
        assert proxy.body_bytes() == len(content) + 6_000_002

    def test_a_delay_is_one_of_each_request(
        self, http_server: HttpServer, url: str, proxied: Proxied, wire_to: WireTo
    ) -> None:
        proxy = proxied(http_server, delay=0.02)
        wire = wire_to(proxy)
        for _ in range(10):
            wire.get(url)
        assert all(each.seconds >= 0.02 for each in proxy.requests())
        assert proxy.most_at_once() == 1
        proxy.delay = 0
        proxy.clear()
        for _ in range(10):
            wire.get(url)
        assert min(each.seconds for each in proxy.requests()) < 0.02

    def test_counts_how_many_are_under_way(
        self, http_server: HttpServer, url: str, proxied: Proxied, wire_to: WireTo
    ) -> None:
        proxy = proxied(http_server, delay=0.5)
        wires = [wire_to(proxy) for _ in range(4)]
        for wire in wires:
            wire.connection.request("GET", url)
        for wire in wires:
            assert wire.connection.getresponse().read() == CONTENT
        assert proxy.most_at_once() == 4
        assert {each.connection for each in proxy.requests()} == {1, 2, 3, 4}


class TestFaults:
    def test_without_faults_all_comes(
        self, http_server: HttpServer, url: str, proxied: Proxied, wire_to: WireTo
    ) -> None:
        proxy = proxied(http_server)
        wire = wire_to(proxy)
        for _ in range(3):
            answer, content = wire.get(url, Range="bytes=0-999")
            assert (answer.status, content) == (206, CONTENT[:1000])
        assert [each.connection for each in proxy.requests()] == [1, 1, 1]

    @pytest.mark.parametrize("reset", [True, False])
    def test_cut_before_the_answer(
        self, http_server: HttpServer, url: str, proxied: Proxied, wire_to: WireTo, reset: bool
    ) -> None:
        proxy = proxied(http_server, Fault("cut", times=1, reset=reset))
        with pytest.raises(ConnectionResetError if reset else http.client.RemoteDisconnected):
            wire_to(proxy).get(url)
        assert (proxy.requests()[0].status, proxy.requests()[0].fault) == (0, "cut")
        assert wire_to(proxy).get(url)[1] == CONTENT

    def test_cut_in_the_body(self, http_server: HttpServer, url: str, proxied: Proxied, wire_to: WireTo) -> None:
        proxy = proxied(http_server, Fault("cut_body", times=1, after=100))
        wire = wire_to(proxy)
        wire.connection.request("GET", url)
        answer = wire.connection.getresponse()
        assert answer.read(100) == CONTENT[:100]
        with pytest.raises(ConnectionResetError):
            answer.read(1)
        assert proxy.requests()[0].body_bytes == 100
        assert wire_to(proxy).get(url)[1] == CONTENT

    def test_stall_in_the_body(self, http_server: HttpServer, url: str, proxied: Proxied, wire_to: WireTo) -> None:
        proxy = proxied(http_server, Fault("stall", times=1, seconds=1.0))
        wire = wire_to(proxy)
        wire.connection.request("GET", url)
        answer = wire.connection.getresponse()
        begin = time.monotonic()
        assert answer.read(len(CONTENT) // 2) == CONTENT[: len(CONTENT) // 2]
        assert select.select([wire.connection.sock], [], [], 0.1)[0] == []
        assert answer.read() == CONTENT[len(CONTENT) // 2 :]
        assert time.monotonic() - begin >= 0.9
        assert wire.get(url)[1] == CONTENT  # on the same connection

    def test_short_body(self, http_server: HttpServer, url: str, proxied: Proxied, wire_to: WireTo) -> None:
        proxy = proxied(http_server, Fault("short", times=1, after=10))
        with pytest.raises(http.client.IncompleteRead) as error:
            wire_to(proxy).get(url)
        assert (error.value.partial, error.value.expected) == (CONTENT[:10], len(CONTENT) - 10)

    def test_fewer_bytes_than_asked(self, http_server: HttpServer, url: str, proxied: Proxied, wire_to: WireTo) -> None:
        wire = wire_to(proxied(http_server, Fault("fewer", times=1, after=10)))
        answer, content = wire.get(url, Range="bytes=0-99")
        assert answer.headers["Content-Range"] == f"bytes 0-99/{len(CONTENT)}"
        assert content == CONTENT[:10]
        assert wire.get(url)[1] == CONTENT  # on the same connection

    def test_more_bytes_than_asked(self, http_server: HttpServer, url: str, proxied: Proxied, wire_to: WireTo) -> None:
        wire = wire_to(proxied(http_server, Fault("long", times=1, extra=7)))
        answer, content = wire.get(url, Range="bytes=0-99")
        assert answer.headers["Content-Range"] == f"bytes 0-99/{len(CONTENT)}"
        assert content == CONTENT[:100] + bytes(7)
        assert wire.get(url)[1] == CONTENT

    @pytest.mark.parametrize(("status", "retry_after"), [(500, None), (503, None), (503, 2), (429, 1)])
    def test_status(
        self, http_server: HttpServer, url: str, proxied: Proxied, wire_to: WireTo, status: int, retry_after: int | None
    ) -> None:
        proxy = proxied(http_server, Fault("status", times=1, status=status, retry_after=retry_after))
        wire = wire_to(proxy)
        answer, _ = wire.get(url)
        assert answer.status == status
        assert answer.headers["Retry-After"] == (None if retry_after is None else str(retry_after))
        assert wire.get(url)[1] == CONTENT
        assert [each.status for each in proxy.requests()] == [status, 200]

    def test_a_put_that_is_refused_does_not_reach_the_server(
        self, s3_server: S3Server, bucket: str, proxied: Proxied
    ) -> None:
        proxy = proxied(s3_server, Fault("status", kinds=("PUT",), times=1))
        store = s3_server.store(bucket, endpoint=proxy.endpoint)
        with pytest.raises(GenericError, match="503"):
            obstore.put(store, "new", bytes(3000), use_multipart=False)
        assert s3_server.list(bucket) == ["folder/object"]
        obstore.put(store, "new", bytes(3000), use_multipart=False)
        assert s3_server.list(bucket) == ["folder/object", "new"]

    def test_a_put_whose_answer_is_cut_has_reached_the_server(
        self, s3_server: S3Server, bucket: str, proxied: Proxied
    ) -> None:
        proxy = proxied(s3_server, Fault("cut", kinds=("PUT",)))
        with pytest.raises(GenericError):
            obstore.put(s3_server.store(bucket, endpoint=proxy.endpoint), "new", b"come", use_multipart=False)
        assert s3_server.get(bucket, "new") == b"come"

    @pytest.mark.parametrize(
        ("fault", "hit"),
        [
            (Fault("status", every=3), [3, 6, 9]),
            (Fault("status", ordinals=(2, 5)), [2, 5]),
            (Fault("status", every=2, times=2), [2, 4]),
            (Fault("status", first_of_each_key=True), [1, 2]),
            (Fault("status", key="odd"), [1, 3, 5, 7, 9]),
            (Fault("status", key="odd", every=2), [3, 7]),
            (Fault("status", kinds=("RANGE",)), [4, 8]),
            (Fault("status", kinds=("HEAD",)), []),
        ],
    )
    def test_which_requests_it_acts_on(
        self, http_server: HttpServer, proxied: Proxied, wire_to: WireTo, fault: Fault, hit: list[int]
    ) -> None:
        proxy = proxied(http_server, fault)
        wire = wire_to(proxy)
        for number in range(1, 10):
            wire.get("/odd" if number % 2 else "/even", **({"Range": "bytes=0-1"} if number in (4, 8) else {}))
        assert [each.number for each in proxy.requests() if each.fault] == hit
        assert [each.number for each in proxy.requests() if each.status == 503] == hit

    def test_the_first_fault_that_fits_acts(
        self, http_server: HttpServer, url: str, proxied: Proxied, wire_to: WireTo
    ) -> None:
        proxy = proxied(http_server, Fault("status", ordinals=(1,), status=500), Fault("status", status=429))
        wire = wire_to(proxy)
        assert [wire.get(url)[0].status for _ in range(2)] == [500, 429]
        proxy.faults = ()
        assert wire.get(url)[0].status == 200

    def test_connections_can_be_dropped(
        self, http_server: HttpServer, url: str, proxied: Proxied, wire_to: WireTo
    ) -> None:
        proxy = proxied(http_server)
        wire = wire_to(proxy)
        wire.get(url)
        proxy.drop_connections()
        with pytest.raises(ConnectionError):
            wire.get(url)
        assert wire_to(proxy).get(url)[1] == CONTENT
