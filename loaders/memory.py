"""Lack of memory, told from bad data: what a decoder raises for want of memory says nothing of its sample.

Some decoders raise MemoryError, some say it in words of their own, and some only say that they failed. Under a limit of
memory, such a failure counts as lack of memory wherever less is left than the decoder may have asked for.
"""

from __future__ import annotations

import errno
import re
import resource
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from orchdata.loaders.limited_process import taken_bytes

DECODER_BYTES: Final = 1 << 30
"""What a decoder may need where nobody knows the size of what it decodes."""
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
    """What a limit of memory leaves.

    Attributes:
        limit: as a message names it.
        left_bytes: that this process may still take, at least 0.
        is_own: whether this process has set it, as a worker does under `worker_memory=`.
    """

    limit: str
    left_bytes: int
    is_own: bool = False


def room() -> Room | None:
    """Of the limit that leaves least; None where nothing limits the memory that this process may ask for.

    The limit of a control group is none of these: memory is granted there, and the process is killed.
    """
    found = []
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY:
        taken = int(Path("/proc/self/statm").read_bytes().split()[0]) * _PAGE_BYTES
        found.append(Room(f"RLIMIT_AS (ulimit -v) of {addresses} bytes", max(0, addresses - taken)))
    data, most = resource.getrlimit(resource.RLIMIT_DATA)
    if data != resource.RLIM_INFINITY:
        found.append(Room(f"RLIMIT_DATA (ulimit -d) of {data} bytes", max(0, data - taken_bytes()), data != most))
    found += _of_the_machine()
    return min(found, key=lambda one: one.left_bytes, default=None)


def is_limited_below(num_bytes: int) -> bool:
    """Whether a child process may not get so many bytes, whatever limit it sets itself."""
    addresses, data = resource.getrlimit(resource.RLIMIT_AS)[0], resource.getrlimit(resource.RLIMIT_DATA)[1]
    limits = [limit for limit in (addresses, data) if limit != resource.RLIM_INFINITY]
    limits += [one.left_bytes for one in _of_the_machine()]
    return min(limits, default=num_bytes) < num_bytes


def _of_the_machine() -> list[Room]:
    with suppress(OSError):  # not every container shows these
        if _OVERCOMMIT.read_bytes().strip() == b"2":
            lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
            told = {name: int(value.split()[0]) << 10 for name, value in (line.split(":") for line in lines)}
            limit = told["CommitLimit"]
            return [Room(f"vm.overcommit_memory=2 of {limit} bytes", max(0, limit - told["Committed_AS"]))]
    return []


def is_of_libav(error: BaseException) -> bool:
    """Whether PyAV made it of a number of libav's, which may be of any class of Python's too."""
    return any(base.__module__.partition(".")[0] == "av" for base in type(error).__mro__)


def says_memory(error: BaseException) -> bool:
    """Whether an exception of a library speaks of a lack of memory: a damaged file that asks for too much does too."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return _WORDS.search(str(error)[:1000]) is not None


def pass_shortage(error: BaseException, need_bytes: int = DECODER_BYTES) -> None:
    """Raise a MemoryError where a decoder may have failed because less than `need_bytes` of memory are left.

    Args:
        error: what the decoder raised, or what was made of it.
    """
    if isinstance(error, MemoryError) and not is_of_libav(error):
        raise error
    left = room()
    if left is not None and left.left_bytes < need_bytes:
        raise MemoryError(
            f"it failed ({_words(error)}) with {left.left_bytes} bytes of memory left under {left.limit}, and may have "
            f"needed up to {need_bytes}: whether it is damaged is not known"
        ) from error


def pass_said_shortage(error: BaseException) -> None:
    """`pass_shortage`, of an exception that may have nothing to do with memory: for those that say so."""
    if not says_memory(error):
        return
    pass_shortage(error)
    try:
        bytearray(_PROBED_BYTES)
    except MemoryError as none:
        raise none from error


class UnmeasuredError(MemoryError):
    """There was too little memory to measure a sample.

    Its arguments are the shard ("" while it is not known), the key and the field ("" of a whole shard), and the reason:
    what was short of memory, and what can be done.
    """

    def __str__(self) -> str:
        shard, key, field, reason = self.args
        where = f": sample {key!r}, field {field!r}" if key or field else ""
        return f"{shard}{where}: not enough memory to measure it: {reason}"


def measured_at(error: MemoryError, shard: str, key: str = "", field: str = "") -> UnmeasuredError:
    """The error of a sample, or of a whole shard, that could not be measured for lack of memory."""
    if isinstance(error, UnmeasuredError):
        known = zip(error.args, (shard, key, field, ""), strict=True)
        return UnmeasuredError(*(told or given for told, given in known))
    limit = room()
    way_out = "lower Limits so that it is left out, or index where there is more memory"
    if limit is not None:
        way_out = f"raise {limit.limit}, of which {limit.left_bytes} bytes are left, or {way_out}"
    return UnmeasuredError(shard, key, field, f"{_words(error) or type(error).__name__}; {way_out}")


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
