"""Messages over a pipe between a process and its child: a length, then JSON. Nothing in them is executed."""

from __future__ import annotations

import json
import os
import select
import struct
import time
from typing import Any

_LENGTH = struct.Struct("<I")
_MAX_BYTES = 64 << 20


class Ended(Exception):
    """The other side closed its end, or sent something that is not a message."""


class Silent(Exception):
    """The other side sent nothing for too long."""


def send(descriptor: int, message: dict[str, Any]) -> None:
    """Send a message. Raises Ended."""
    data = json.dumps(message).encode()
    send_bytes(descriptor, _LENGTH.pack(len(data)) + data)


def send_bytes(descriptor: int, data: bytes | memoryview) -> None:
    """Send bytes as they are. Raises Ended."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BrokenPipeError as error:
            raise Ended from error


def receive(descriptor: int, *, timeout: float | None = None) -> dict[str, Any]:
    """Receive the next message. Raises Ended or Silent."""
    (length,) = _LENGTH.unpack(receive_bytes(descriptor, _LENGTH.size, timeout=timeout))
    if length > _MAX_BYTES:
        raise Ended
    try:
        message = json.loads(receive_bytes(descriptor, length, timeout=timeout))
    except ValueError as error:
        raise Ended from error
    if not isinstance(message, dict):
        raise Ended
    return message


def receive_bytes(descriptor: int, size: int, *, timeout: float | None = None) -> bytes:
    """Receive `size` bytes that follow a message. Raises Ended, or Silent after `timeout` seconds without any."""
    pieces = []
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    while size:
        deadline = None if timeout is None else time.monotonic() + timeout
        if not waiting.poll(None if deadline is None else 1000 * timeout):  # type: ignore[operator]
            raise Silent
        piece = os.read(descriptor, min(size, 1 << 20))
        if not piece:
            raise Ended
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)
