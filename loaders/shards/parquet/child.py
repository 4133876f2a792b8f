"""The child process that measures Parquet and Arrow files: bytes read by its parent -> facts, or why there are none.

It opens no file: the parent reads blocks into memory that both map, so the errors of a storage stay in the parent. A
file that kills or hangs this process, or takes too much memory, only loses its own facts. Imports little: no torch.
"""

from __future__ import annotations

import importlib
import json
import math
import mmap
import os
import resource
import socket
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from orchdata.loaders.child_process import Channel, begin, lower_limit
from orchdata.loaders.environment import failed_import
from orchdata.loaders.errors import one_line, package_error
from orchdata.loaders.limits import Limits
from orchdata.loaders.memory import is_limited_below, measured_at
from orchdata.loaders.shards.fields import ColumnRules
from orchdata.loaders.shards.parquet.file import Refused
from orchdata.loaders.shards.parquet.scan import scan
from orchdata.loaders.storage.content_digest import BLOCK_BYTES

CPU_SECONDS = 60.0
_KEPT_BLOCKS = 48
_sending = threading.Lock()


class Ended(Exception):
    """The other side closed its end."""


def cpu_seconds(size: int, rows: int) -> float:
    """Return the processor time after which a file ends the build: a hundred times what files of its size take."""
    return CPU_SECONDS + size / (1 << 20) + rows / 1000


def memory_bytes(limits: Limits) -> int:
    """Return the memory that a file may take: some copies of its largest cell."""
    return (2 << 30) + 4 * limits.member_bytes


def main(end: int) -> None:
    """Serve requests until the parent closes its end of this channel. The first has a block of shared memory."""
    begin(socket.socket(fileno=end), _serve_all)


def _serve_all(channel: Channel, fds: list[int]) -> None:
    lower_limit(resource.RLIMIT_CORE, 0)
    os.dup2(2, 1)  # printed text is not a message
    (window,) = fds
    shared = mmap.mmap(window, BLOCK_BYTES, access=mmap.ACCESS_READ)
    try:
        _send(channel, {"ready": True})
        while True:
            _serve(_receive(channel), channel, shared)
    except Ended:
        return


def _send(channel: Channel, message: dict[str, Any], *contents: memoryview) -> None:
    """Send a message, and what follows it. Threads send one after another. Raises Ended."""
    try:
        with _sending:
            channel.send(json.dumps(message).encode())
            for content in contents:
                channel.send(content)
    except OSError as error:
        raise Ended from error


def _receive(channel: Channel) -> dict[str, Any]:
    received = channel.receive()
    if received is None:
        raise Ended
    message: dict[str, Any] = json.loads(received[0])
    return message


def _serve(request: dict[str, Any], channel: Channel, shared: mmap.mmap) -> None:
    limits = Limits(**request["limits"])
    size = int(request["size"])
    lower_limit(resource.RLIMIT_DATA, memory_bytes(limits))
    _allow_cpu(cpu_seconds(size, 0))
    module, name = request["reader"]
    reading = getattr(importlib.import_module(module), name)  # a RowReader
    # Scan the file; a failure is an answer too, except that the parent's end ends this process.
    try:
        names = tuple((old, new) for old, new in request["names"])
        rules = ColumnRules(names, bool(request["all"]), tuple(request["kept"]), tuple(request["only"]))
        reader = reading(_ParentFile(size, channel, shared), limits, rules)
        _send(channel, {"rows": reader.plausible_rows()})
        _allow_cpu(cpu_seconds(size, min(reader.plausible_rows(), limits.shard_rows)))
        table, ignored = scan(reader, limits)
        facts = _serialized(table.arrow())
    except Ended:
        raise
    except MemoryError as error:
        if is_limited_below(memory_bytes(limits)):
            _send(channel, {"short": measured_at(error, "").args})
            raise Ended from None
        reason = (
            f"takes more than {memory_bytes(limits)} bytes of memory to read "
            f"(four times Limits.member_bytes={limits.member_bytes} and 2 GiB)"
        )
        _send(channel, {"failure": reason})
        raise Ended from None  # this process may have little memory left
    except Refused as error:
        _send(channel, {"failure": str(error)})
    except Exception as error:  # noqa: BLE001 - pyarrow raises many kinds for damaged files
        broken = failed_import(error)
        if broken is None:
            _send(channel, {"failure": f"not a readable {reading.kind}: {one_line(error)}"})
        else:
            doing = f"reading {reading.kind.split()[0]}"
            _send(channel, {"broken": package_error(broken.cause, doing, broken.package).args})
    else:
        more = {"ignored": ignored, "met": reader.met}
        _send(channel, {"facts": more}, memoryview(facts))


def _serialized(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


class _ParentFile:
    """A Storage that requests its bytes from the parent."""

    url, version, changed_ns = "", "", 0

    def __init__(self, size: int, channel: Channel, shared: mmap.mmap) -> None:
        self.size = size
        self._channel = channel
        self._shared = shared
        self._blocks: OrderedDict[int, bytes] = OrderedDict()

    def read(self, offset: int, size: int) -> bytes:
        stop = min(offset + size, self.size)
        pieces = []
        while offset < stop:
            block, start = divmod(offset, BLOCK_BYTES)
            piece = self._block(block)[start : start + stop - offset]
            if not piece:
                break
            pieces.append(piece)
            offset += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        data = self.read(offset, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def expect(self, extents: Sequence[tuple[int, int]]) -> None:
        """Do nothing: the parent reads."""

    def check_unchanged(self) -> None:
        """Do nothing: the parent checks it."""

    def close(self) -> None: ...

    def _block(self, number: int) -> bytes:
        block = self._blocks.get(number)
        if block is None:
            _send(self._channel, {"block": number})
            block = self._shared[: int(_receive(self._channel)["got"])]
            self._blocks[number] = block
            if len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(number)
        return block


def _allow_cpu(seconds: float) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    lower_limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + seconds))
