"""The process of a proxy (proxy.py): HTTP/1.1 between clients and a server, as little of it as counting needs.

It needs the standard library alone and ends when its stdin does, thus with the process that started it.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import parse_qs

PIECE_BYTES = 1 << 18
HEAD_BYTES = 1 << 20
_LISTS = {"list-type", "prefix", "delimiter", "marker", "pageToken", "max-keys", "maxResults"}
_REASONS = {429: "Too Many Requests", 500: "Internal Server Error", 503: "Service Unavailable", 403: "Forbidden"}


class Cut(Exception):
    """The client's connection is to end now."""

    def __init__(self, reset: bool) -> None:
        self.reset = reset


@dataclass
class Head:
    """The first line of a message, and its headers by names in lower case; `raw` is as it came."""

    raw: bytes
    first: list[str]
    headers: dict[str, str]

    @property
    def length(self) -> int | None:
        return int(self.headers["content-length"]) if "content-length" in self.headers else None

    @property
    def chunked(self) -> bool:
        return "chunked" in self.headers.get("transfer-encoding", "").lower()

    @property
    def closes(self) -> bool:
        return "close" in self.headers.get("connection", "").lower() or self.first[-1] == "HTTP/1.0"

    def with_length(self, length: int) -> bytes:
        """The head with another Content-Length."""
        lines = [line for line in self.raw.split(b"\r\n") if not line.lower().startswith(b"content-length:")]
        return b"\r\n".join([lines[0], b"Content-Length: %d" % length, *lines[1:]])


@dataclass
class Rule:
    """A fault, with what it has counted."""

    given: dict
    fitting: int = 0
    acted: int = 0

    def acts(self, kind: str, path: str) -> bool:
        given = self.given
        if (given["kinds"] and kind not in given["kinds"]) or given["key"] not in path:
            return False
        self.fitting += 1
        chosen = (given["every"] and self.fitting % given["every"] == 0) or self.fitting in given["ordinals"]
        if ((given["every"] or given["ordinals"]) and not chosen) or (
            given["times"] is not None and self.acted >= given["times"]
        ):
            return False
        self.acted += 1
        return True


class Proxy:
    """What all connections share."""

    def __init__(self) -> None:
        self.target: tuple[str, int] = ("", 0)
        self.delay = 0.0
        self.rules: list[Rule] = []
        self.records: list[dict] = []
        self.number = 0
        self.connections = 0
        self.writers: set[asyncio.StreamWriter] = set()

    async def listen(self, target: list) -> int:
        self.target = (target[0], target[1])
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0, limit=HEAD_BYTES, backlog=1024)
        return server.sockets[0].getsockname()[1]

    def fault_of(self, kind: str, path: str) -> dict:
        """The first fault that acts; all count the request."""
        acting = [rule.given for rule in self.rules if rule.acts(kind, path)]
        return acting[0] if acting else {"action": ""}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        connection = Connection(self, self.connections, reader, writer)
        self.writers.add(writer)
        try:
            await connection.run()
        except Cut as cut:
            if cut.reset:
                _reset(writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            pass  # one of the two sides is gone: so is the connection
        finally:
            self.writers.discard(writer)
            for each in (writer, connection.to_server):
                if each:
                    each.close()


class Connection:
    """One connection of a client, and the one to the server that belongs to it."""

    def __init__(self, proxy: Proxy, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.proxy = proxy
        self.number = number
        self.reader = reader
        self.writer = writer
        self.from_server: asyncio.StreamReader | None = None
        self.to_server: asyncio.StreamWriter | None = None

    async def run(self) -> None:
        while (head := await read_head(self.reader)) is not None:
            record = self._recorded(head)
            fault = self.proxy.fault_of(record["kind"], record["path"])
            record["fault"] = fault["action"]
            try:
                if fault["action"] == "status":
                    await self._answer_by_itself(head, record, fault)
                else:
                    await self._forward(head, record, fault)
            finally:
                if record["seconds"] < 0:
                    _count(record)
            if head.closes:
                return

    def _recorded(self, head: Head) -> dict:
        method, target = head.first[0], head.first[1]
        path, _, query = target.partition("?")
        has_range = next((head.headers[name] for name in ("range", "x-ms-range") if name in head.headers), "")
        self.proxy.number += 1
        record = {
            "number": self.proxy.number,
            "connection": self.number,
            "kind": kind_of(method, path, query, has_range),
        }
        record |= {"method": method, "path": path, "query": query, "range": has_range}
        record |= {"if_match": head.headers.get("if-match", ""), "status": 0, "body_bytes": 0, "sent_bytes": 0}
        record |= {"time": time.monotonic(), "seconds": -1.0, "fault": ""}
        self.proxy.records.append(record)
        return record

    async def _answer_by_itself(self, head: Head, record: dict, fault: dict) -> None:
        if "expect" not in head.headers:
            async for piece in body_of(self.reader, head, has_body=has_body(head)):
                record["sent_bytes"] += piece.content
        elif has_body(head):
            head.headers["connection"] = "close"  # the body that was announced does not come
        await asyncio.sleep(self.proxy.delay)
        status = fault["status"]
        said = b"" if head.first[0] == "HEAD" else b"<Error><Code>Fault</Code><Message>of the proxy</Message></Error>"
        lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Fault')}", "Content-Type: application/xml"]
        lines += [f"Content-Length: {len(said)}"]
        if fault["retry_after"] is not None:
            lines.append(f"Retry-After: {fault['retry_after']}")
        record["status"] = status
        _count(record, len(said))
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + said)
        await self.writer.drain()

    async def _forward(self, head: Head, record: dict, fault: dict) -> None:
        await self._connect()
        assert self.from_server
        assert self.to_server
        self.to_server.write(head.raw)
        sending = asyncio.create_task(self._send_body(head, record))
        try:
            answer = await read_head(self.from_server)
            while answer is not None and answer.first[1].startswith("1"):  # 100 Continue
                self.writer.write(answer.raw)
                answer = await read_head(self.from_server)
            if answer is None:
                raise Cut(reset=False)
            if not sending.done() and has_body(head) and int(answer.first[1]) >= 300:
                head.headers["connection"] = "close"  # refused before its body came
            else:
                await sending
        finally:
            sending.cancel()
        await asyncio.sleep(self.proxy.delay)
        if fault["action"] == "cut":
            raise Cut(fault["reset"])
        await self._give(head, answer, record, fault)
        if answer.closes:
            raise Cut(reset=False)

    async def _send_body(self, head: Head, record: dict) -> None:
        assert self.to_server
        async for piece in body_of(self.reader, head, has_body=has_body(head)):
            record["sent_bytes"] += piece.content
            self.to_server.write(piece.raw)
            await self.to_server.drain()

    async def _give(self, head: Head, answer: Head, record: dict, fault: dict) -> None:
        """The server's answer, to the client."""
        assert self.from_server
        has_one = head.first[0] != "HEAD" and answer.first[1] not in ("204", "304")
        length = (answer.length or 0) if has_one else 0
        action = fault["action"] if length else ""
        after = length // 2 if fault.get("after") is None else min(fault["after"], length)
        raw = answer.raw
        if action == "fewer":
            raw = answer.with_length(after)
        elif action == "long":
            raw = answer.with_length(length + fault["extra"])
        record["status"] = int(answer.first[1])
        _count(record)
        self.writer.write(raw)
        until = after if action in ("cut_body", "stall", "short", "fewer") else None
        async for piece in body_of(self.from_server, answer, has_body=has_one, to_the_end=True):
            given = piece.raw
            if until is not None and record["body_bytes"] + len(given) > until:
                room = until - record["body_bytes"]
                await self._write(given[:room], record, room)
                if action == "stall":
                    await asyncio.sleep(fault["seconds"])
                elif action != "fewer":
                    await self._flush()
                    raise Cut(action == "cut_body" and fault["reset"])
                else:
                    await self._drop_server()
                    return
                given, until = given[room:], None
                await self._write(given, record, len(given))
            else:
                await self._write(given, record, piece.content)
        if action == "long":
            await self._write(bytes(fault["extra"]), record, fault["extra"])

    async def _write(self, raw: bytes, record: dict, content: int) -> None:
        """Give bytes to the client. They are counted before: who has the bytes sees the count."""
        _count(record, content)
        self.writer.write(raw)
        await self.writer.drain()

    async def _flush(self) -> None:
        """Wait until the system has taken all: a reset would lose what it has not."""
        while self.writer.transport.get_write_buffer_size():
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)  # and the client, what the system has

    async def _connect(self) -> None:
        if self.from_server and not self.from_server.at_eof():
            return
        await self._drop_server()
        self.from_server, self.to_server = await asyncio.open_connection(*self.proxy.target, limit=HEAD_BYTES)

    async def _drop_server(self) -> None:
        if self.to_server:
            self.to_server.close()
        self.from_server = self.to_server = None


@dataclass
class Piece:
    """Bytes of a body as they are on the wire, and how many of them are content."""

    raw: bytes
    content: int


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """The head of the next message; None if the connection ended before it."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    first, *lines = raw[:-4].decode("latin-1").split("\r\n")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return Head(raw, first.split(" ", 2), headers)


def has_body(head: Head) -> bool:
    """Whether a request has one."""
    return head.chunked or bool(head.length)


async def body_of(
    reader: asyncio.StreamReader, head: Head, *, has_body: bool, to_the_end: bool = False
) -> AsyncIterator[Piece]:
    """The pieces of a body.

    Args:
        to_the_end: without a length the body goes on until the connection ends, as that of an answer does.
    """
    if not has_body:
        return
    if head.chunked:
        size = -1
        while size:
            line = await reader.readuntil(b"\r\n")
            size = int(line.split(b";")[0], 16)
            rest = await reader.readexactly(size + 2) if size else await _trailers(reader)
            yield Piece(line + rest, size)
        return
    left = head.length
    if left is None and not to_the_end:
        return
    while left is None or left:
        raw = await reader.read(PIECE_BYTES if left is None else min(PIECE_BYTES, left))
        if not raw:
            if left is None:
                raise Cut(reset=False)
            raise asyncio.IncompleteReadError(b"", left)
        if left is not None:
            left -= len(raw)
        yield Piece(raw, len(raw))


async def _trailers(reader: asyncio.StreamReader) -> bytes:
    read = b""
    while not read.endswith(b"\r\n\r\n") and read != b"\r\n":
        read += await reader.readuntil(b"\r\n")
    return read


def kind_of(method: str, path: str, query: str, has_range: str) -> str:
    if method == "PROPFIND":
        return "LIST"
    if method != "GET":
        return method
    given = parse_qs(query, keep_blank_values=True)
    if given.keys() & _LISTS or "list" in given.get("comp", []) or path in ("", "/"):
        return "LIST"
    return "RANGE" if has_range else "GET"


def _count(record: dict, content: int = 0) -> None:
    record["body_bytes"] += content
    record["seconds"] = time.monotonic() - record["time"]


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with a reset, as a machine does that knows it no more."""
    made = writer.get_extra_info("socket")
    with suppress(OSError):
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def controlled(proxy: Proxy) -> None:
    """Do what the lines of stdin say, until it ends; answer each with a line."""
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := await commands.readline():
        given = json.loads(line)
        answer = None
        match given["what"]:
            case "listen":
                answer = await proxy.listen(given["target"])
            case "delay":
                proxy.delay = given["seconds"]
            case "faults":
                proxy.rules = [Rule(each) for each in given["faults"]]
            case "requests":
                answer = proxy.records
            case "clear":
                proxy.records = []
            case "drop":
                for writer in proxy.writers:
                    _reset(writer)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(controlled(Proxy()))
    os._exit(0)  # without a wait for connections
