"""A proxy before a server: it counts requests and the bytes of bodies, and makes faults on chosen requests.

    client --HTTP/1.1--> proxy_process (a process of its own) --the same bytes--> server
                              ^ |
                 faults, delay| | records            Proxy, in the test: lines of JSON over stdin and stdout
                              | v

Host and all other headers reach the server as the client sent them, so that signatures over the proxy's address hold.
Bytes of bodies are never changed: a fault leaves some out or adds zeros after them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from servers.processes import end

PROGRAM = Path(__file__).with_name("proxy_process.py")

Action = Literal["cut", "cut_body", "stall", "short", "fewer", "long", "status"]
Kind = Literal["RANGE", "GET", "HEAD", "LIST", "PUT", "POST", "DELETE"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to some requests. Where several faults fit a request, the first of them acts.

    Actions:
        cut: the request reaches the server, and the connection ends before the answer.
        cut_body: the connection ends after `after` bytes of the body.
        stall: no byte comes for `seconds` after `after` bytes of the body; the rest comes then.
        short: the connection is closed in good order after `after` bytes, fewer than Content-Length says.
        fewer: the body ends after `after` bytes, and Content-Length says so. Content-Range says what it said.
        long: `extra` zeros follow the body, and Content-Length counts them. Content-Range says what it said.
        status: the proxy answers `status` by itself, with `retry_after` seconds in Retry-After unless that is None.

    Which requests: those of `kinds` (of all, if empty) whose path contains `key`. Of these, numbered from 1,
        every: each n-th one;
        ordinals: those with these numbers;
    or all, if neither is given. After `times` of them the fault acts no more.

    Args:
        after: bytes of the body that come through; half of it if None.
        reset: `cut` and `cut_body` end the connection with a reset; else with an end in good order.
    """

    action: Action
    kinds: tuple[Kind, ...] = ()
    key: str = ""
    every: int | None = None
    ordinals: tuple[int, ...] = ()
    times: int | None = None
    after: int | None = None
    seconds: float = 1.0
    extra: int = 100
    status: int = 503
    retry_after: int | None = None
    reset: bool = True


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the proxy saw it.

    Kinds: LIST is a GET that lists keys (of S3, Azure and Google) or a PROPFIND; RANGE is a GET with a range, and GET
    one without.
    """

    number: int  # from 1, in order of arrival
    connection: int  # a number of the client's connection
    kind: Kind
    method: str
    path: str
    query: str
    range: str
    if_match: str  # the header; empty if there was none
    status: int  # what the client got; 0 if it got none
    body_bytes: int  # of the answer, as the client got them
    sent_bytes: int  # of the request's body
    time: float  # of arrival, as `time.monotonic()` gives it
    seconds: float  # until the client was given its last byte, or lost the connection; -1 while it waits for the first
    fault: str  # the action of the fault that acted; empty if none did


class Proxy:
    """A proxy before the server at `target`, from `with` to its end."""

    def __init__(self, target: str, faults: Iterable[Fault] = (), delay: float = 0.0) -> None:
        parts = urlsplit(target)
        if parts.scheme != "http" or not parts.port:
            raise ValueError(f"a proxy needs a target such as http://127.0.0.1:8333, not {target!r}")
        self._target = (parts.hostname, parts.port)
        self._faults = tuple(faults)
        self._delay = delay
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            self.port: int = self._ask("listen", target=self._target)
            self._ask("delay", seconds=self._delay)
            self._tell_faults()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def faults(self) -> tuple[Fault, ...]:
        return self._faults

    @faults.setter
    def faults(self, faults: Iterable[Fault]) -> None:
        """Replace all faults: their requests are counted from 1 again."""
        self._faults = tuple(faults)
        self._tell_faults()

    @property
    def delay(self) -> float:
        """Seconds before each answer. Requests of other connections wait at the same time."""
        return self._delay

    @delay.setter
    def delay(self, seconds: float) -> None:
        self._delay = seconds
        self._ask("delay", seconds=seconds)

    def requests(self, *kinds: Kind) -> list[Request]:
        """Requests since the start or the last `clear`, of some kinds or of all, in order of arrival."""
        return [Request(**each) for each in self._ask("requests") if not kinds or each["kind"] in kinds]

    def counts(self) -> Counter[Kind]:
        """How many requests of each kind came."""
        return Counter(each.kind for each in self.requests())

    def body_bytes(self, *kinds: Kind) -> int:
        """Bytes of the answers' bodies to requests of some kinds or of all."""
        return sum(each.body_bytes for each in self.requests(*kinds))

    def clear(self) -> None:
        """Forget the requests seen so far. Faults go on counting."""
        self._ask("clear")

    def drop_connections(self) -> None:
        """Reset all open connections of clients, as a server does that starts again."""
        self._ask("drop")

    def _tell_faults(self) -> None:
        self._ask("faults", faults=[asdict(each) for each in self._faults])

    def _ask(self, what: str, **given: Any) -> Any:
        with self._lock:
            self._process.stdin.write(json.dumps({"what": what, **given}).encode() + b"\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
            answer = self._process.stdout.readline()  # type: ignore[union-attr]
        if not answer:
            raise RuntimeError(f"the process of the proxy ended with {self._process.wait()}: its stderr says why")
        return json.loads(answer)

    def _close(self) -> None:
        end(self._process)
        for pipe in (self._process.stdin, self._process.stdout):
            pipe.close()  # type: ignore[union-attr]
