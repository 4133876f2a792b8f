"""Requests of a process: made by threads of their own, a limited number at a time, and again after trouble that passes.

    Pending --queue--> a thread of the pool: keep_trying(client.get) --> bytes, checked --> whoever waits
    exception of a client --trouble_of--> Trouble(kind, reason) --> another try, a StorageError, or a StaleIndexError

A client's call does not hear Ctrl-C, but waiting for another thread does. The pool refers weakly to what it makes: a
request that no one holds any more is not made, and not tried again. No client works in a child that was forked after
one was used, because its threads do not exist there. A child knows that the process that it was forked from used one
through this library, and refuses at once. If only the user's own code had used one, its first request is given up after
`FORKED_SECONDS`.
"""

from __future__ import annotations

import errno
import ftplib
import logging
import os
import random
import re
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

from orchdata.loaders import watch as waits
from orchdata.loaders.errors import StaleIndexError, StorageError, pass_trouble
from orchdata.loaders.memory import room
from orchdata.loaders.storage.remote.urls import ObjectUrl
from orchdata.loaders.storage.storage import FileVersion, RequestCounts
from orchdata.loaders.watch import here

T = TypeVar("T")

RETRY_SECONDS: Final = 300.0
"""How long a request is tried again."""
FORKED_SECONDS: Final = 10.0
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 8.0
_MOST_ODD: Final = 5  # answers without a range: a server may have none, and a proxy may make a single one
_SAID_EVERY: Final = 60.0
_MOST_IN_FLIGHT: Final = 64
"""Requests of a rank at the same time."""
_LEAST_IN_FLIGHT: Final = 4
_COPIES: Final = 3
"""Copies of an answer that are in memory at the same time: a client puts together what came in parts, and a reader
takes its part.
"""
_CLIENT_BYTES: Final = 8 << 20
"""Memory of a client that is not of answers: connections, and the stack of a thread."""
_WHY: Final = (
    "cannot be read: this process was forked from one that had used object storage, and no client works in it: start "
    'processes with multiprocessing_context="forkserver" or "spawn" instead of "fork"'
)

_log = logging.getLogger("orchdata")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Generic[T]):
    """A request, and how long it is made again.

    Attributes:
        call: one attempt. Raises Trouble.
        url, doing: for errors: the object, without secrets, and what failed.
        kind: under which `counts` counts it.
        retry_seconds: for how long after the first failure it is made again.
        counts: gets each attempt, and those after the first.
        refresh: reads credentials again; called once.
        num_bytes: memory that the result takes.
    """

    call: Callable[[], T]
    url: str
    doing: str
    retry_seconds: float
    counts: RequestCounts
    refresh: Callable[[], bool]
    kind: str = ""
    num_bytes: int = 0


class Pending(Future[T]):
    """The result of a request that a thread of the pool makes, as long as anyone holds this object."""

    def __init__(self, request: Request[T]) -> None:
        super().__init__()
        self.request = request


class Requests:
    """The threads of this process that make requests, `most` at a time. They start when they are needed, and end with
    the process. `parent`: those of the process that this one was forked from.
    """

    def __init__(self, parent: Requests | None = None) -> None:
        self.counts = RequestCounts()
        self.most = _MOST_IN_FLIGHT
        self._queue: deque[weakref.ref[Pending[Any]]] = deque()
        self._changed = threading.Condition()
        self._threads = self._idle = self._running = self._running_bytes = 0
        self._said = -_SAID_EVERY
        self._is_used = self._has_answer = False
        self._is_forked = parent is not None
        self._refuses: bool = parent is not None and (parent._is_used or parent._refuses)

    def check(self, url: str) -> None:
        """Note that this process uses a client. Raises StorageError if none can work in it."""
        if self._refuses:
            raise StorageError(url, _WHY)
        self._is_used = True

    def share(self, processes: int) -> None:
        """Divide the number in flight among so many processes of the rank."""
        self.most = max(_LEAST_IN_FLIGHT, _MOST_IN_FLIGHT // max(1, processes))

    def begin(self, request: Request[T]) -> Pending[T]:
        """Have a thread make a request. Return its result, which the caller must hold."""
        pending = Pending(request)
        with self._changed:
            self._queue.append(weakref.ref(pending))
            if len(self._queue) > self._idle and self._threads < self.most:
                try:
                    threading.Thread(target=self._serve, name="orchdata-requests", daemon=True).start()
                    self._threads += 1
                except RuntimeError as error:  # the system has no thread left
                    if not self._threads:
                        reason = f"no thread can be started that makes requests ({error})"
                        raise StorageError("object storage", reason, errno.EAGAIN) from error
            self._changed.notify()
        return pending

    def wait(self, pending: Pending[T]) -> T:
        """Return the result of a request. Raises its error, and StorageError where no client works."""
        started = time.monotonic()
        with waits.for_storage():
            while not pending.done():
                with suppress(TimeoutError):
                    pending.exception(min(1.0, FORKED_SECONDS))
                here().check()
                if self._is_forked and not self._has_answer and time.monotonic() - started >= FORKED_SECONDS:
                    raise StorageError(pending.request.url, _WHY)
        return pending.result()

    @property
    def bytes_in_flight(self) -> int:
        """Memory that the results of all requests will take which are queued or under way."""
        with self._changed:
            queued = [each() for each in self._queue]
            return sum(each.request.num_bytes for each in queued if each is not None) + self._running_bytes

    def keep_trying(self, request: Request[T], is_wanted: Callable[[], bool] = lambda: True) -> T:
        """Make a request; make it again after trouble that may pass. Raises StorageError if it failed for a lasting
        reason, or for too long; StaleIndexError if the object is another one than was indexed.
        """
        pause, attempts, num_odd, is_refreshed, until = _FIRST_PAUSE, 1, 0, False, None
        while True:
            request.counts.add(request.kind)
            try:
                result = request.call()
            except Trouble as raised:
                trouble = raised.with_traceback(None)  # whose frames have the bytes of the answer
                self._has_answer = True  # the client works in this process
            else:
                self._has_answer = True
                return result

            if trouble.kind == "credentials" and not is_refreshed and request.refresh():
                is_refreshed = True
            else:
                now = time.monotonic()
                until = now + request.retry_seconds if until is None else until
                num_odd += trouble.kind == "odd"
                may_pass = trouble.kind == "passing" or (trouble.kind == "odd" and num_odd < _MOST_ODD)
                if not may_pass or now >= until or not is_wanted():
                    raise trouble.as_error(request.url, request.doing, attempts)
                if attempts > 5 and now - self._said >= _SAID_EVERY:
                    self._said = now
                    limit = request.retry_seconds
                    _log.warning("%s: %s; trying again for up to %g s", request.url, trouble.reason, limit)
                time.sleep(min(until - now, pause * random.uniform(0.5, 1.0)))
                pause = min(2 * pause, _LONGEST_PAUSE)
            attempts += 1
            request.counts.add("again")

    def _serve(self) -> None:
        """Make requests, one after the other; a thread runs this."""
        while True:
            with self._changed:
                self._idle += 1
                while (pending := self._taken()) is None:
                    self._changed.wait()
                self._idle -= 1
                request, reference = pending.request, weakref.ref(pending)
                self._running += 1
                self._running_bytes += request.num_bytes
            del pending  # others decide how long it is wanted
            self._make(request, reference)
            with self._changed:
                self._running -= 1
                self._running_bytes -= request.num_bytes
                self._changed.notify()

    def _make(self, request: Request[T], reference: weakref.ref[Pending[T]]) -> None:
        """Make a request, and give its result to whoever still holds the object for it."""
        try:
            result = self.keep_trying(request, lambda: reference() is not None)
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            if (pending := reference()) is not None:
                pending.set_exception(error)
                del pending  # the error refers to this frame
        else:
            if (pending := reference()) is not None:
                pending.set_result(result)

    def _taken(self) -> Pending[Any] | None:
        """Return the next request; None if none may begin now."""
        while self._queue and self._running < self.most:
            if (pending := self._queue[0]()) is None:  # no one wants it
                self._queue.popleft()
                continue
            try:
                left = room() if self._running else None
            except (OSError, MemoryError):  # no file or memory is left to look: as if there were no room
                return None
            if left is not None and left.left_bytes < needed_bytes(self._running_bytes + pending.request.num_bytes):
                return None
            self._queue.popleft()
            return pending
        return None


def needed_bytes(num_bytes: int) -> int:
    """Return the memory that is needed to read this number of bytes."""
    return _COPIES * num_bytes + _CLIENT_BYTES


HERE = Requests()


def _in_child() -> None:
    """A forked process has none of the threads."""
    global HERE
    HERE = Requests(HERE)


os.register_at_fork(after_in_child=_in_child)

Kind = Literal["passing", "odd", "credentials", "absent", "changed", "key", "final"]

_NUMBERS: Final[dict[str, int]] = {
    "absent": errno.ENOENT,
    "credentials": errno.EACCES,
    "key": errno.EILSEQ,
}
_ABSENT: Final = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_REFUSED: Final = (PermissionError, ftplib.error_perm)
_MISTAKES: Final = (TypeError, ValueError, AttributeError, LookupError, ImportError, AssertionError, MemoryError)

_STATUS: Final = re.compile(r"status code: (\d{3})|status: (\d{3})\b")
_CODE: Final = re.compile(r"<Code>([A-Za-z0-9]+)</Code>")
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s)\"']+")
_PATH: Final = re.compile(r"pars(e|ing) path|invalid path|control character", re.IGNORECASE)
_METADATA: Final = ("169.254.169.254", "metadata.google.internal", "fd00:ec2::254")
_LOGIN: Final = ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired", "InvalidToken")
_REGION: Final = ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException")
_BUSY: Final = re.compile(
    r"""[>("'](RequestTimeout|SlowDown|TooManyRequests|PriorRequestNotComplete|\w*(Throttl|LimitExceeded))\w*[<)"']""",
    re.I,
)
"""Codes, of any status, with which a server asks for another try."""
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound")
_NETWORK: Final = (
    (r"dns error|failed to lookup|name or service not known", "the name of the host cannot be resolved"),
    (r"certificate", "the server's certificate is not trusted"),
    (r"timed ?out|kind: timeout\b", "the server did not answer in time"),
    (r"refused", "the server cannot be reached: refused"),
    (r"kind: connect\b", "the server cannot be reached"),
    (r"request or response body|incomplete ?body|kind: (decode|body)\b", "the answer was cut"),
    (r"error sending request|connection", "the connection was lost"),
    (r"content.range|requested (range )?\S+\.\.", "the answer has other bytes than were asked for"),
)
_NAMED: Final = "name the shards with braces, as in train-{000000..000127}.tar"
_NO_CREDENTIALS: Final = (
    "no credentials were found (the address of cloud metadata was asked last): name them in storage_options or in the "
    "environment, or pass anonymous=true for public data"
)


class Trouble(Exception):
    """A request that failed. Internal.

    Attributes:
        kind: "passing": it is made again; "odd": it is, some times; "credentials": they are read again, once;
            "absent": there is no such object or bucket; "changed": the object is another one than was indexed;
            "key": the client cannot have a key, its own or one in a page of a listing; "final": no other try helps.
        reason: on one line, without secrets.
    """

    def __init__(self, kind: Kind, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason

    def as_error(self, url: str, doing: str, attempts: int) -> StorageError | StaleIndexError:
        """Return the error to raise, of an object without secrets, with what failed ("cannot be read")."""
        if self.kind == "changed":
            way_out = "run `orchdata index` again, with --out if it is an index_file"
            return StaleIndexError(url, f"{self.reason}: {way_out}")
        tried = f" ({attempts} attempts)" if attempts > 1 else ""
        # A build does not wait once more for what was waited for here.
        return StorageError(url, f"{doing}: {self.reason}{tried}", _NUMBERS.get(self.kind, errno.ETIME))


def trouble_of(error: Exception, name: str, words: str) -> Trouble:
    """Return what an exception of a client means. A status of HTTP decides, where there is one: obstore says it in its
    text, packages of fsspec have it in attributes. Without one, what no list here names is taken for something that may
    pass. `words`: the exception without secrets. Raises as `pass_trouble` for a mistake of a program.
    """
    text = _URL.sub("", str(error))  # words of a key say nothing
    status = next(filter(None, map(_status, _came_from(error, "__cause__"))), 0)
    if "redirect without location" in text.lower():
        status = 301
    code = match[1] if (match := _CODE.search(text)) else ""
    if any(address in str(error) for address in _METADATA):
        if status == 429 or status >= 500:
            return Trouble("passing", f"the cloud metadata, which has the credentials, failed (HTTP {status})")
        return Trouble("final", _NO_CREDENTIALS)
    if status >= 300:
        return _of_status(status, code, text, name)
    kind = type(error).__name__
    if kind == "PreconditionError":
        return Trouble("changed", "was replaced since it was indexed")
    if kind == "InvalidPathError" or _PATH.search(text):
        return Trouble("key", f"a key has parts or characters that obstore cannot have: {words}: {_NAMED}")

    # Some filesystems say that there is no such file for any failure of the network, and name that as the cause.
    causes = _came_from(error, "__cause__", "__context__")[1:]
    if all(isinstance(each, (*_ABSENT, *_REFUSED, *_MISTAKES)) for each in causes):
        if isinstance(error, _ABSENT):
            return Trouble("absent", "no such object")
        if isinstance(error, _REFUSED):
            return Trouble("credentials", f"may not be read with these credentials ({words})")
    if isinstance(error, _MISTAKES) and not any(map(_is_of_network, (error, *causes))):
        pass_trouble(error)
        return Trouble("final", words)

    if "BadScheme" in text or "builder error" in text:
        return Trouble(
            "final", "the endpoint is http://, which is not encrypted: allow it with storage_options allow_http=true"
        )
    if "to load lib" in text:  # of hdfs://
        return Trouble("final", f"{words}: set HADOOP_HOME and JAVA_HOME")
    if kind == "NotSupportedError" or "non-partial response" in text.lower():
        return Trouble("odd", f"the server does not answer ranges of bytes as asked ({words})")
    known = (said for pattern, said in _NETWORK if re.search(pattern, text, re.IGNORECASE))
    return Trouble("passing", next(known, words))


def _of_status(status: int, code: str, text: str, name: str) -> Trouble:
    """Return what an answer of HTTP means that is an error."""
    said = f"HTTP {status} {code}".rstrip()
    if code in _REGION or status in (301, 307):
        where = "name it, as storage_options region=... or AWS_REGION"
        return Trouble("final", f"the bucket is in another region ({said}): {where}")
    if status >= 500 or status in (408, 409, 425, 429) or _BUSY.search(text):
        return Trouble("passing", f"the server failed ({said})")
    if status in (401, 403) or code in _LOGIN:
        if "list request" in text:
            way_out = f"allow it, or {_NAMED}"
            return Trouble("credentials", f"may not be listed with these credentials ({said}): {way_out}")
        return Trouble("credentials", f"may not be read with these credentials ({said})")
    if code in _NO_BUCKET:
        return Trouble("absent", f"there is no bucket {name} ({said})")
    if status in (404, 410):
        return Trouble("absent", f"no such object ({said})")
    if status == 412:
        return Trouble("changed", "was replaced since it was indexed")
    if status == 416:
        return Trouble("changed", "is shorter than when it was indexed (HTTP 416)")
    if status < 400:
        return Trouble("final", f"the server redirects to where no request may go ({said})")
    return Trouble("final", f"the server refuses ({said})")


def _status(error: BaseException) -> int:
    """Return the status of HTTP that an exception has, where its package keeps it; 0 if it has none."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):  # of botocore
        values = [response.get("ResponseMetadata", {}).get("HTTPStatusCode")]
    else:
        names = ("status_code", "status", "code", "http_status")
        values = [getattr(where, name, None) for where in (response, error) for name in names]
    values += [found[1] or found[2]] if (found := _STATUS.search(_URL.sub("", str(error)))) else []
    return next((int(each) for each in values if re.fullmatch(r"[1-5]\d\d", str(each))), 0)


def _came_from(error: BaseException, *names: str) -> list[BaseException]:
    """Return an exception and those from which it came, by these attributes, with the members of groups."""
    found: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop(0)
        if each is not None and each not in found:
            found.append(each)
            left += [getattr(each, name) for name in names]
            left += each.exceptions if isinstance(each, BaseExceptionGroup) else ()
    return found


def _is_of_network(error: BaseException) -> bool:
    return isinstance(error, OSError) or any("timeout" in each.__name__.lower() for each in type(error).__mro__)


Buffer = bytes | memoryview


class Answer(NamedTuple):
    """Bytes of an object, where they begin in it, and what it was when they were read."""

    data: Buffer
    start: int
    file: FileVersion


class Listed(NamedTuple):
    """An object of a listing."""

    key: str
    file: FileVersion


class Client(ABC):
    """Requests to one bucket, container or host. Safe from many threads; each call is one attempt, and raises Trouble,
    without secrets.
    """

    _url: ObjectUrl

    def _called(self, call: Callable[[], T]) -> T:
        """Return `call()`. Raises Trouble, which does not refer to an exception of the client: these have secrets."""
        try:
            return call()
        except (MemoryError, Trouble):
            raise
        except Exception as error:  # noqa: BLE001 - each kind is mapped
            trouble = trouble_of(error, self._url.root, self._words(error))
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of obstore
                raise
            trouble = Trouble("final", f"obstore failed: {self._words(error)}")
        raise trouble

    @abstractmethod
    def _words(self, error: BaseException) -> str:
        """Return an exception on one line, without secrets."""

    @abstractmethod
    def get(self, key: str, start: int, stop: int, version: str) -> Answer:
        """Read bytes of an object, which must have this version if the server can be asked for it; "" is any. The
        version in the answer is compared by the caller.
        """

    @abstractmethod
    def head(self, key: str) -> FileVersion:
        """Return size and version of an object."""

    @abstractmethod
    def pages(self, folder: str, after: str, *, deep: bool = True) -> Iterator[list[Listed]]:
        """Yield the objects whose keys begin with `folder` (with "/" at its end, or empty), by key, after one, about
        1,000 at a time. Without `deep`, the server passes over those in folders below it, and may make one page of all.
        """

    @abstractmethod
    def put(self, key: str, data: Buffer) -> None:
        """Write an object."""

    def refresh(self) -> bool:
        """Read credentials again; return False if that cannot help."""
        return False
