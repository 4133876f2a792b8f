"""The child process that measures Parquet and Arrow files: bytes read by its parent -> facts, or why there are none.

It opens no file: the parent reads blocks into memory that both map, so the errors of a storage stay in the parent. A
file that kills or hangs this process, or takes too much memory, only loses its own facts. Imports little: no torch.
"""

from __future__ import annotations

import importlib
import math
import mmap
import os
import resource
import signal
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa

from orchdata.loaders.environment import failed_import
from orchdata.loaders.errors import one_line, package_error
from orchdata.loaders.limited_process import die_with_parent, lower_limit
from orchdata.loaders.limits import Limits
from orchdata.loaders.memory import is_limited_below, measured_at
from orchdata.loaders.shards.fields import ColumnRules
from orchdata.loaders.shards.parquet.file import Refused
from orchdata.loaders.shards.parquet.framing import Ended, receive, send, send_bytes
from orchdata.loaders.shards.parquet.scan import scan
from orchdata.loaders.storage.content_digest import BLOCK_BYTES

CPU_SECONDS = 60.0
_KEPT_BLOCKS = 48
_sending = threading.Lock()


def cpu_seconds(size: int, rows: int) -> float:
    """Return the processor time after which a file ends the build: a hundred times what files of its size take."""
    return CPU_SECONDS + size / (1 << 20) + rows / 1000


def memory_bytes(limits: Limits) -> int:
    """Return the memory that a file may take: some copies of its largest cell."""
    return (2 << 30) + 4 * limits.member_bytes


def main(window: int, life: int) -> None:
    """Serve requests until the parent closes its end.

    Args:
        window: descriptor of a block of shared memory, which the parent fills.
        life: reading end of a pipe; the parent has the other end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    die_with_parent(life)
    lower_limit(resource.RLIMIT_CORE, 0)
    replies = os.dup(1)
    os.dup2(2, 1)  # printed text is not a message
    shared = mmap.mmap(window, BLOCK_BYTES, access=mmap.ACCESS_READ)
    _send(replies, {"ready": True})

    with suppress(Ended):
        while True:
            _serve(receive(0), replies, shared)


def _send(replies: int, message: dict[str, Any], content: memoryview | None = None) -> None:
    """Send a message, and bytes that follow it. Threads send one after another. Raises Ended."""
    with _sending:
        send(replies, message)
        if content is not None:
            send_bytes(replies, content)


def _serve(request: dict[str, Any], replies: int, shared: mmap.mmap) -> None:
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
        reader = reading(_ParentFile(size, replies, shared), limits, rules)
        _send(replies, {"rows": reader.plausible_rows()})
        _allow_cpu(cpu_seconds(size, min(reader.plausible_rows(), limits.shard_rows)))
        table, ignored = scan(reader, limits)
        facts = _serialized(table.arrow())
    except Ended:
        raise
    except MemoryError as error:
        if is_limited_below(memory_bytes(limits)):
            _send(replies, {"short": measured_at(error, "").args})
            raise Ended from None
        reason = (
            f"takes more than {memory_bytes(limits)} bytes of memory to read "
            f"(four times Limits.member_bytes={limits.member_bytes} and 2 GiB)"
        )
        _send(replies, {"failure": reason})
        raise Ended from None  # this process may have little memory left
    except Refused as error:
        _send(replies, {"failure": str(error)})
    except Exception as error:  # noqa: BLE001 - pyarrow raises many kinds for damaged files
        broken = failed_import(error)
        if broken is None:
            _send(replies, {"failure": f"not a readable {reading.kind}: {one_line(error)}"})
        else:
            doing = f"reading {reading.kind.split()[0]}"
            _send(replies, {"broken": package_error(broken.cause, doing, broken.package).args})
    else:
        more = {"ignored": ignored, "met": reader.met}
        _send(replies, {"facts": {"bytes": len(facts), **more}}, memoryview(facts))


def _serialized(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


class _ParentFile:
    """A Storage that requests its bytes from the parent."""

    url, version, changed_ns = "", "", 0

    def __init__(self, size: int, replies: int, shared: mmap.mmap) -> None:
        self.size = size
        self._replies = replies
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
            _send(self._replies, {"block": number})
            block = self._shared[: int(receive(0)["got"])]
            self._blocks[number] = block
            if len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(number)
        return block


def _allow_cpu(seconds: float) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    lower_limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + seconds))
