"""Distinguishes lack of memory from bad data: a decoder's failure for lack of memory says nothing about its sample.

Some decoders raise MemoryError, some have their own messages, and some only say that they failed. Under a memory limit,
such a failure counts as lack of memory if less memory is left than the decoder may have requested.
"""

from __future__ import annotations

import errno
import re
import resource
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

from orchdata.loaders.child_process import taken_bytes

DECODER_BYTES: Final = 1 << 30
"""Memory that a decoder may need if the size of its output is not known."""
_PROBED_BYTES: Final = 1 << 26
_PAGE_BYTES: Final = resource.getpagesize()
_OVERCOMMIT: Final = Path("/proc/sys/vm/overcommit_memory")
_WORDS: Final = re.compile(
    r"out of memory|(not enough|insufficient|no more|lack of) memory"
    r"|(cannot|can't|could not|couldn't|unable to|failed to|error) (allocat|reserv)|malloc|bad_alloc"
    r"|(memory|buffer) allocat|allocation (error|fail)|failed to map segment",
    re.IGNORECASE,
)


class Room(NamedTuple):
    """Memory that is left under a limit."""

    limit: str  # its name in messages
    left_bytes: int  # that this process may still allocate, at least 0
    is_own: bool = False  # this process has set the limit, as a worker does under `worker_memory=`


def room() -> Room | None:
    """Return the room under the tightest limit; None if nothing limits the memory that this process may request. The
    limit of a control group does not count: memory is granted there, and the process is killed.
    """
    rooms = []
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY:
        taken = int(Path("/proc/self/statm").read_bytes().split()[0]) * _PAGE_BYTES
        rooms.append(Room(f"RLIMIT_AS (ulimit -v) of {addresses} bytes", max(0, addresses - taken)))
    data, most = resource.getrlimit(resource.RLIMIT_DATA)
    if data != resource.RLIM_INFINITY:
        rooms.append(Room(f"RLIMIT_DATA (ulimit -d) of {data} bytes", max(0, data - taken_bytes()), data != most))
    rooms += _of_the_machine()
    return min(rooms, key=lambda one: one.left_bytes, default=None)


def is_limited_below(num_bytes: int) -> bool:
    """Whether a child process may get less than `num_bytes`, with any limit that it sets itself."""
    addresses, data = resource.getrlimit(resource.RLIMIT_AS)[0], resource.getrlimit(resource.RLIMIT_DATA)[1]
    limits = [limit for limit in (addresses, data) if limit != resource.RLIM_INFINITY]
    limits += [one.left_bytes for one in _of_the_machine()]
    return min(limits, default=num_bytes) < num_bytes


def _of_the_machine() -> list[Room]:
    with suppress(OSError):  # not every container has these files
        if _never_overcommits(int(time.monotonic())):
            lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
            values = {name: int(value.split()[0]) << 10 for name, value in (line.split(":") for line in lines)}
            limit = values["CommitLimit"]
            return [Room(f"vm.overcommit_memory=2 of {limit} bytes", max(0, limit - values["Committed_AS"]))]
    return []


@lru_cache(maxsize=1)
def _never_overcommits(second: int) -> bool:  # noqa: ARG001 - the file is read at most once a second
    """Return whether the machine grants no more memory than it has. Raises OSError."""
    return _OVERCOMMIT.read_bytes().strip() == b"2"


def is_of_libav(error: BaseException) -> bool:
    """Whether PyAV raised it for an error number of libav; such an exception may have a Python class too."""
    return any(base.__module__.partition(".")[0] == "av" for base in type(error).__mro__)


def says_memory(error: BaseException) -> bool:
    """Whether an exception of a library mentions lack of memory. A damaged file that requests too much causes these
    too.
    """
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return _WORDS.search(str(error)[:1000]) is not None


def pass_shortage(error: BaseException, need_bytes: int = DECODER_BYTES) -> None:
    """Raise a MemoryError if a decoder may have failed because less than `need_bytes` of memory are left."""
    if isinstance(error, MemoryError) and not is_of_libav(error):
        raise error
    left = room()
    if left is not None and left.left_bytes < need_bytes:
        raise MemoryError(
            f"it failed ({_words(error)}) with {left.left_bytes} bytes of memory left under {left.limit}, and may have "
            f"needed up to {need_bytes}: whether it is damaged is not known"
        ) from error


def pass_said_shortage(error: BaseException) -> None:
    """Call `pass_shortage` if an exception mentions lack of memory."""
    if not says_memory(error):
        return
    pass_shortage(error)
    try:
        bytearray(_PROBED_BYTES)
    except MemoryError as none:
        raise none from error


class UnmeasuredError(MemoryError):
    """There was too little memory to measure a sample. Its arguments are the shard ("" until it is known), the key and
    the field (both "" for a whole shard), and the reason with the way out.
    """

    def __str__(self) -> str:
        shard, key, field, reason = self.args
        where = f": sample {key!r}, field {field!r}" if key or field else ""
        return f"{shard}{where}: not enough memory to measure it: {reason}"


def measured_at(error: MemoryError, shard: str, key: str = "", field: str = "") -> UnmeasuredError:
    """Return the error for a sample, or a whole shard, that could not be measured for lack of memory."""
    if isinstance(error, UnmeasuredError):
        arguments = zip(error.args, (shard, key, field, ""), strict=True)
        return UnmeasuredError(*(known or given for known, given in arguments))
    limit = room()
    way_out = "lower Limits to leave it out, or index where there is more memory"
    if limit is not None:
        way_out = f"raise {limit.limit}, of which {limit.left_bytes} bytes are left, or {way_out}"
    return UnmeasuredError(shard, key, field, f"{_words(error) or type(error).__name__}; {way_out}")


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
