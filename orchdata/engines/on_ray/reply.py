"""What an actor sends: a message and the buffers of its units, which Ray keeps in shared memory.

    units --pack--> [message, *buffers] --Ray--> read-only buffers --unpack--> units in writable memory of this process

Ray's arrays are read-only, and one reader's are another's. So the trainer copies them, once, into memory that is used
again when the batches over it are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from orchdata.engines.processes.message import Unit
from orchdata.ranks.wire import flat_bytes

_ALIGNMENT: Final = 64

Bytes = NDArray[np.uint8]


def pack(message: dict[str, Any], units: Sequence[Unit]) -> list[Any]:
    """Return a message and its units as values that Ray sends without a copy of their buffers in the pickle."""
    heads = [(unit.kind, unit.header, len(unit.buffers)) for unit in units]
    return [message | {"units": heads}, *(flat_bytes(buffer) for unit in units for buffer in unit.buffers)]


def unpack(reply: list[Any], take: Callable[[int], Bytes]) -> tuple[dict[str, Any], list[Unit]]:
    """Return the message and the units that `pack` was given; their buffers are copies, in memory from `take`.

    Args:
        take: number of bytes -> writable memory, uint8.
    """
    message, *buffers = reply
    sizes = [-(-len(buffer) // _ALIGNMENT) * _ALIGNMENT for buffer in buffers]
    memory = take(sum(sizes))
    copies, start = [], 0
    for buffer, size in zip(buffers, sizes, strict=True):
        copy = memory[start : start + len(buffer)]
        copy[:] = buffer
        copies.append(copy)
        start += size
    left = iter(copies)
    return message, [
        Unit(kind, header, [next(left) for _ in range(number)]) for kind, header, number in message["units"]
    ]
