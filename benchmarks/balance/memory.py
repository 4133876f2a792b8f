"""Peak memory of a call: how far resident memory rises while it runs, whoever allocates (Python, numpy, numba)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def peak_bytes(call: Callable[[], object]) -> int | None:
    """Resident memory at its highest during the call, above what it was before; None where it cannot be measured.

    Memory that the allocator keeps free for later is given back first, else it would hide what the call takes. What
    small Python objects find free in memory that Python itself holds is not seen. Linux with glibc only.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR.write_text("5")  # Sets the high-water mark to what is resident now.
    except (AttributeError, OSError):
        return None
    before = _status_bytes("VmRSS")
    call()
    return max(0, _status_bytes("VmHWM") - before)


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {field}")
