"""The pool of requests: order, limits, errors, and what is kept in memory."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from orchdata.loaders.errors import StorageError
from orchdata.loaders.storage.remote import objects as objects_module
from orchdata.loaders.storage.remote import requests as requests_module
from orchdata.loaders.storage.remote.objects import GAP_BYTES, ObjectRange, Objects
from orchdata.loaders.storage.remote.requests import Answer, Request, Requests, Trouble
from orchdata.loaders.storage.storage import FileVersion, RequestCounts

pytestmark = pytest.mark.usefixtures("no_hang")

URL = "s3://bucket/a.bin"
STEPS = [(0, 800), (300, 900), (300, 500), (850, 1700), (1699, 1700)]
"""Ranges that several steps read ahead."""


class FakeClient:
    """A client of one object in memory. Each get calls `before` with its range first."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.asked: list[tuple[int, int]] = []
        self.before: Callable[[int, int], None] = lambda start, stop: None
        self.given: list[weakref.ref[Any]] = []
        self._lock = threading.Lock()

    def get(self, key: str, start: int, stop: int, version: str) -> Answer:
        with self._lock:
            self.asked.append((start, stop))
        self.before(start, stop)
        data = np.frombuffer(self.content[start:stop], np.uint8).copy()  # which can be watched
        with self._lock:
            self.given.append(weakref.ref(data))
        return Answer(memoryview(data), start, FileVersion(len(self.content), "v1"))

    def refresh(self) -> bool:
        return False

    @property
    def alive(self) -> int:
        """How many of the answers are in memory."""
        gc.collect()
        return sum(each() is not None for each in self.given)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Requests:
    """A pool of this test's own."""
    pool = Requests()
    monkeypatch.setattr(requests_module, "HERE", pool)
    return pool


@pytest.fixture
def client(pool: Requests, monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    made = FakeClient(bytes(range(256)) * 4096)  # 1 MiB
    monkeypatch.setattr(Objects, "_opened", lambda objects, parts: made)
    return made


@pytest.fixture
def objects(client: FakeClient) -> Objects:
    return Objects({"retry_seconds": 0.2}, None, {})


def whole(client: FakeClient) -> FileVersion:
    return FileVersion(len(client.content), "v1")


def read(objects: Objects, client: FakeClient, start: int, stop: int) -> bytes:
    return bytes(objects.read(ObjectRange(URL, whole(client), start, stop)))


def made(call: Callable[[], Any]) -> Request[Any]:
    return Request(call=call, url=URL, doing="", retry_seconds=0.0, counts=RequestCounts(), refresh=lambda: False)


class Gate:
    """Holds requests until they may go on."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self._arrived = threading.Semaphore(0)
        self.now = self.most = 0
        self._lock = threading.Lock()

    def __call__(self, start: int, stop: int) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        self._arrived.release()
        self.opened.wait()
        with self._lock:
            self.now -= 1

    def wait_for(self, count: int) -> None:
        for _ in range(count):
            self._arrived.acquire()


class TestReadingAhead:
    def test_near_ranges_are_one_request(self, objects: Objects, client: FakeClient) -> None:
        wanted = [ObjectRange(URL, whole(client), start, start + 100) for start in (0, 100 + GAP_BYTES // 2, 50)]
        wanted.append(ObjectRange(URL, whole(client), 500_000, 500_100))
        ahead = objects.expect(wanted)
        for each in wanted:
            assert bytes(objects.read(each)) == client.content[each.start : each.stop]
        assert sorted(client.asked) == [(0, 200 + GAP_BYTES // 2), (500_000, 500_100)]
        ahead.clear()

    def test_large_ranges_are_pieces(
        self, objects: Objects, client: FakeClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(objects_module, "PIECE_BYTES", 1000)
        assert read(objects, client, 500, 4700) == client.content[500:4700]
        assert sorted(client.asked) == [(500, 1500), (1500, 2500), (2500, 3500), (3500, 4500), (4500, 4700)]

    def test_ranges_of_several_steps_overlap(self, objects: Objects, client: FakeClient) -> None:
        aheads = [objects.expect([ObjectRange(URL, whole(client), start, stop)]) for start, stop in STEPS]
        for start, stop in STEPS:
            assert read(objects, client, start, stop) == client.content[start:stop]
        assert {*client.asked} <= {*STEPS}  # one inside of another need not have begun
        for start in range(0, 1700, 50):
            for stop in range(start + 50, 1701, 150):
                assert read(objects, client, start, stop) == client.content[start:stop]
        for ahead in aheads:
            ahead.clear()

    def test_what_no_one_reads_is_not_asked_for(self, objects: Objects, client: FakeClient, pool: Requests) -> None:
        gate = client.before = Gate()
        pool.most = 4
        wanted = [ObjectRange(URL, whole(client), start, start + 10) for start in range(0, 900_000, 90_000)]
        ahead = objects.expect(wanted)
        gate.wait_for(4)
        ahead.clear()
        gate.opened.set()
        assert read(objects, client, 7, 9) == client.content[7:9]
        assert len(client.asked) == 5  # the six that had not begun were dropped

    def test_a_reader_gets_a_range_that_is_dropped_while_it_waits(
        self, objects: Objects, client: FakeClient, pool: Requests
    ) -> None:
        gate = client.before = Gate()
        pool.most = 4
        wanted = [ObjectRange(URL, whole(client), start, start + 10) for start in range(0, 900_000, 90_000)]
        ahead = objects.expect(wanted)
        gate.wait_for(4)
        with ThreadPoolExecutor(len(wanted)) as readers:
            found = [readers.submit(objects.read, each) for each in wanted]
            ahead.clear()
            gate.opened.set()
        assert [bytes(each.result()) for each in found] == [client.content[each.start : each.stop] for each in wanted]

    def test_a_range_that_failed_is_read_again(self, objects: Objects, client: FakeClient) -> None:
        def fails(start: int, stop: int) -> None:
            raise Trouble("final", "no")

        client.before = fails
        ahead = objects.expect([ObjectRange(URL, whole(client), 0, 100)])
        with pytest.raises(StorageError, match="cannot be read at 0: no"):
            read(objects, client, 0, 100)
        client.before = lambda start, stop: None
        assert read(objects, client, 0, 100) == client.content[:100]
        ahead.clear()

    def test_retries_end_with_the_last_reader(self, objects: Objects, client: FakeClient) -> None:
        objects = Objects({"retry_seconds": 1e9}, None, {})
        failed = threading.Event()

        def fails(start: int, stop: int) -> None:
            failed.set()
            raise Trouble("passing", "away")

        client.before = fails
        ahead = objects.expect([ObjectRange(URL, whole(client), 0, 100)])
        failed.wait()
        ahead.clear()
        while requests_module.HERE._running:
            threading.Event().wait(0.01)
        asked = len(client.asked)
        client.before = lambda start, stop: None
        assert read(objects, client, 0, 10) == client.content[:10]
        assert len(client.asked) == asked + 1

    @pytest.mark.parametrize("change", [{"start": 1}, {"file": FileVersion(5, '"v1"')}], ids=["start", "size"])
    def test_a_wrong_content_range_is_asked_for_again(
        self, objects: Objects, client: FakeClient, change: dict[str, Any]
    ) -> None:
        get, changes = client.get, iter([change])
        file = FileVersion(len(client.content), '"v1"')
        client.get = lambda *asked: get(*asked)._replace(**{"file": file} | next(changes, {}))  # type: ignore[method-assign, assignment]
        assert bytes(objects.read(ObjectRange(URL, file, 0, 10))) == client.content[:10]
        assert len(client.asked) == 2


class TestMemory:
    def test_a_dropped_range_is_freed(self, objects: Objects, client: FakeClient) -> None:
        ahead = objects.expect([ObjectRange(URL, whole(client), 0, 100)])
        data = read(objects, client, 0, 100)
        assert client.alive == 1
        ahead.clear()
        assert client.alive == 0
        assert len(data) == 100
        assert not any(each() for known in objects._ahead.values() for each in known)


class TestThePool:
    def test_no_more_are_in_flight_than_are_allowed(self, objects: Objects, client: FakeClient, pool: Requests) -> None:
        gate = client.before = Gate()
        pool.most = 8
        wanted = [ObjectRange(URL, whole(client), start, start + 10) for start in range(0, 1_000_000, 50_000)]
        ahead = objects.expect(wanted)
        gate.wait_for(8)
        gate.opened.set()
        for each in wanted:
            objects.read(each)
        assert gate.most == 8
        ahead.clear()

    def test_many_threads_read_and_drop_at_the_same_time(self, objects: Objects, client: FakeClient) -> None:
        wrong: list[int] = []

        def work(seed: int) -> None:
            for number in range(60):
                start = (seed * 7919 + number * 104_729) % 900_000
                wanted = [ObjectRange(URL, whole(client), start + gap, start + gap + 500) for gap in (0, 300, 50_000)]
                ahead = objects.expect(wanted)
                for each in wanted[: number % 4]:
                    if bytes(objects.read(each)) != client.content[each.start : each.stop]:
                        wrong.append(each.start)
                if number % 3:
                    ahead.clear()
                del ahead

        with ThreadPoolExecutor(12) as pool:
            list(pool.map(work, range(12)))
        assert not wrong
        gc.collect()
        assert not any(each() for known in objects._ahead.values() for each in known)
