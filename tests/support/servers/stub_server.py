"""A small HTTP/1.1 server in threads of this process, that records what it was asked; what it answers is a subclass's.

client --> thread of its connection --Seen--> StubServer.answer --Answer--> client
"""

from __future__ import annotations

import re
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


@dataclass(frozen=True, slots=True)
class Seen:
    """A request."""

    method: str
    path: str  # without the query, unquoted
    query: dict[str, str]  # the last value of each name
    headers: dict[str, str]  # by names in lower case
    body: bytes = field(default=b"", repr=False)  # of the request

    @property
    def range(self) -> str:
        return self.headers.get("range", "")

    def span(self, size: int) -> tuple[int, int] | None:
        """The bytes asked of `size` ones, as start and end; None if all are asked."""
        found = _RANGE.fullmatch(self.range)
        if not found or found.groups() == ("", ""):
            return None
        first, last = found.groups()
        start, stop = (int(first), int(last) + 1 if last else size) if first else (max(0, size - int(last)), size)
        if start >= min(stop, size):
            raise ValueError(f"no byte of {size} is in {self.range}")
        return start, min(stop, size)


@dataclass(slots=True)
class Answer:
    """What is sent. Content-Length is added, unless it is among the headers."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    closes: bool = False


def part_of(content: bytes, seen: Seen, headers: dict[str, str] | None = None) -> Answer:
    """The answer of a server that knows ranges: 200 with all, 206 with a part, or 416."""
    headers = {"Accept-Ranges": "bytes", **(headers or {})}
    try:
        span = seen.span(len(content))
    except ValueError:
        return Answer(416, b"", {**headers, "Content-Range": f"bytes */{len(content)}"})
    if span is None:
        return Answer(200, content, headers)
    start, stop = span
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
    return Answer(206, content[start:stop], headers)


class StubServer:
    """A server on a free loopback port, from `with` to its end."""

    def __init__(self) -> None:
        self._seen: list[Seen] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler(), bind_and_activate=False)
        self._server.request_queue_size = 256
        self._server.daemon_threads = True
        self._server.block_on_close = False

    def __enter__(self) -> Self:
        self._server.server_bind()
        self._server.server_activate()
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def requests(self, method: str | None = None, path: str = "") -> list[Seen]:
        """Requests since the start or the last `clear`: of a method or of all, whose path contains `path`."""
        return [each for each in list(self._seen) if method in (None, each.method) and path in each.path]

    def clear(self) -> None:
        """Forget the requests seen so far."""
        self._seen = []

    def answer(self, seen: Seen) -> Answer:
        raise NotImplementedError

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # head and body go out together
            disable_nagle_algorithm = True

            def log_message(self, format: str, *args: object) -> None:
                pass

            def __getattr__(self, name: str) -> object:
                if name.startswith("do_"):
                    return self._any
                raise AttributeError(name)

            def _any(self) -> None:
                seen = self._read()
                stub._seen.append(seen)
                self._write(stub.answer(seen))

            def _read(self) -> Seen:
                parts = urlsplit(self.path)
                headers = {name.lower(): value for name, value in self.headers.items()}
                query = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
                body = self.rfile.read(int(headers.get("content-length", 0)))
                return Seen(self.command, unquote(parts.path), query, headers, body)

            def _write(self, answer: Answer) -> None:
                headers = {"Content-Length": str(len(answer.body)), **answer.headers}
                self.send_response(answer.status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if answer.closes:
                    self.send_header("Connection", "close")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer.body)
                self.close_connection = self.close_connection or answer.closes

            def handle(self) -> None:
                with suppress(ConnectionError):  # a client that gives up is none of the server's faults
                    super().handle()

        return Handler
