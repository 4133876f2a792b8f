"""Slabs: shared memory in which a worker builds a step, and from which the training process uses it.

    worker: reuses a free slab, or creates one --writes a step into it--> its number, and the locations of buffers
    parent: maps a slab once; when the last array over it is collected, its number goes back to the worker

A slab has no name, so nothing of it remains once both processes have ended, however they end.

Writing a page of shared memory takes 3 microseconds the first time, and 0.2 after; before that it uses no memory. So a
slab is created larger than its first step needs: larger steps fit too, and a few slabs serve all steps.
"""

from __future__ import annotations

import mmap
import os
import resource
import threading
from collections import deque
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from orchdata.building.step import Returns, size_class

Bytes = NDArray[np.uint8]
Location = tuple[int, int, int]
"""Of bytes of a step: the number of the step's slab, where they start in it, and how many they are."""

_ALIGNMENT = 64
_SMALLEST = 1 << 16
_SPARE = 4  # size of a slab, in multiples of the step it is created for
_RECENT = 16  # steps: memory above twice the largest of them goes back to the system
_HEADROOM = 1 << 16  # for what a step has besides the arrays that were reserved


_user_slabs = Returns[tuple[deque[int], int]]()
"""Slabs in use by the user, of all workers of this process: the queue that a slab's number goes back to, and the
number."""


class _Slab:
    """A slab of a worker."""

    def __init__(self, number: int, num_bytes: int) -> None:
        try:  # the parent gets its descriptor
            self.file: int | None = os.memfd_create("orchdata-slab", os.MFD_CLOEXEC)
            os.ftruncate(self.file, num_bytes)
            memory = mmap.mmap(self.file, num_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise MemoryError(f"cannot map {num_bytes} bytes of shared memory: {error}") from error
        with suppress(OSError):  # if the system has none for shared memory
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.number = number
        self.written = 0  # bytes from the start that may have pages
        self.array = np.frombuffer(memory, np.uint8)
        self._memory = memory

    def trim(self, num_bytes: int) -> None:
        """Return the pages after the first `num_bytes` to the system."""
        start = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if start < self.written:
            with suppress(OSError):  # some kernels cannot: the pages stay
                self._memory.madvise(mmap.MADV_REMOVE, start, len(self.array) - start)
            self.written = start

    def close_file(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None


class Slabs:
    """A worker's slabs, for all its threads; of those not in use it keeps `max_free`."""

    def __init__(self, max_free: int) -> None:
        self._max_free = max_free
        self._free: list[_Slab] = []
        self._in_use: dict[int, _Slab] = {}
        self._dropped: list[int] = []
        self._made = 0
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._lock = threading.Lock()

    def allocate(self, num_bytes: int) -> _Slab:
        """Return the free slab with the fewest spare pages, else the one with the most pages, else a new one.

        Raises MemoryError.
        """
        with self._lock:
            self._recent.append(num_bytes)
            fitting = [slab for slab in self._free if len(slab.array) >= num_bytes]
            if fitting:
                slab = min(fitting, key=lambda each: (each.written < num_bytes, abs(each.written - num_bytes)))
                self._free.remove(slab)
            else:
                slab = self._new(num_bytes)
            self._in_use[slab.number] = slab
            return slab

    def _new(self, num_bytes: int) -> _Slab:
        self._made += 1
        needed = max(num_bytes, _SMALLEST)
        try:
            return _Slab(self._made, size_class(_SPARE * needed))
        except MemoryError:  # the address space is limited
            return _Slab(self._made, size_class(needed))

    def take_back(self, numbers: list[int]) -> None:
        """Make slabs free that are no longer in use."""
        with self._lock:
            back = [self._in_use.pop(number) for number in numbers if number in self._in_use]
            for slab in back:  # or one large step would keep its memory for ever
                slab.trim(2 * max(self._recent))
            self._free += back
            while len(self._free) > self._max_free:
                slab = self._free.pop(0)
                slab.close_file()
                self._dropped.append(slab.number)

    def drop(self, numbers: list[int]) -> None:
        """Never reuse these slabs: other threads may still write to them."""
        with self._lock:
            for number in numbers:
                self._in_use.pop(number).close_file()
            self._dropped += numbers

    def take_dropped(self) -> list[int]:
        """Return the numbers of slabs that will not be used again, once."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
            return dropped


class StepMemory:
    """Memory of one step, in slabs; see `building.step.Memory`."""

    def __init__(self, slabs: Slabs) -> None:
        self.slabs: list[_Slab] = []
        self._pool = slabs
        self.used: list[int] = []  # bytes of each slab that are in use
        self._starts: list[int] = []
        self._lock = threading.Lock()

    def reserve(self, num_bytes: int) -> None:
        if num_bytes:
            with self._lock:
                self._grow(num_bytes + _HEADROOM)

    def take(self, num_bytes: int) -> Bytes:
        with self._lock:
            number, start, _ = self._location_for(num_bytes)
            return self.slabs[number].array[start : start + num_bytes]

    def location_of(self, buffer: Bytes) -> Location:
        """Return the location of bytes; those from elsewhere are copied in first. Raises MemoryError."""
        start, num_bytes = buffer.__array_interface__["data"][0], len(buffer)
        if not num_bytes:
            return 0, 0, 0
        for number, (slab, first) in enumerate(zip(self.slabs, self._starts, strict=True)):
            if first <= start and start + num_bytes <= first + len(slab.array):
                return number, start - first, num_bytes
        with self._lock:
            at = self._location_for(num_bytes)
        self.slabs[at[0]].array[at[1] : at[1] + num_bytes] = buffer
        return at

    def drop(self) -> None:
        """Drop the slabs of a failed step, which other threads may still be building."""
        self._pool.drop([slab.number for slab in self.slabs])

    def _location_for(self, num_bytes: int) -> Location:
        for number, slab in enumerate(self.slabs):
            start = -(-self.used[number] // _ALIGNMENT) * _ALIGNMENT
            if start + num_bytes <= len(slab.array):
                break
        else:
            self._grow(num_bytes)
            number, start = len(self.slabs) - 1, 0
        self.used[number] = start + num_bytes
        self.slabs[number].written = max(self.slabs[number].written, start + num_bytes)
        return number, start, num_bytes

    def _grow(self, num_bytes: int) -> None:
        slab = self._pool.allocate(num_bytes)
        self.slabs.append(slab)
        self.used.append(0)
        self._starts.append(slab.array.__array_interface__["data"][0])


class MappedSlabs:
    """A worker's slabs in its parent.

    The user may keep a limited number of slabs of all workers, since each takes a descriptor; beyond that, steps are
    copied out of their slabs.
    """

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self._returned: deque[int] = deque()

    def add(self, number: int, file: int, num_bytes: int) -> None:
        """Map a new slab. Closes the descriptor."""
        try:
            self._maps[number] = mmap.mmap(file, num_bytes)
        except OSError as error:
            hint = "raise `ulimit -n`, or use fewer workers"
            raise OSError(error.errno, f"a worker's batch cannot be mapped: {error.strerror}; {hint}") from error
        finally:
            os.close(file)

    def drop(self, numbers: list[int]) -> None:
        """Forget slabs that will not be used again."""
        for number in numbers:
            self._maps.pop(number, None)

    def arrays(self, slabs: list[tuple[int, int]]) -> list[Bytes]:
        """Return the used bytes of slabs, given by number and size. Small steps, and those over the limit, are copied;
        other slabs go back to the worker once no array over them is alive.
        """
        views = [np.frombuffer(self._maps[number], np.uint8)[:used] for number, used in slabs]
        most = min(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 16)
        if sum(used for _, used in slabs) < _SMALLEST or len(_user_slabs) + len(slabs) > most:
            self._returned.extend(number for number, _ in slabs)
            return [view.copy() for view in views]
        bases = [np.frombuffer(self._maps[number], np.uint8) for number, _ in slabs]
        for base, (number, _) in zip(bases, slabs, strict=True):
            _user_slabs.expect(base, (self._returned, number))
        return [base[:used] for base, (_, used) in zip(bases, slabs, strict=True)]

    @property
    def has_returned(self) -> bool:
        """Whether there are slabs that the worker may use again."""
        _collect_returned()
        return bool(self._returned)

    def take_returned(self) -> list[int]:
        """Return the numbers of slabs that the worker may use again, once."""
        _collect_returned()
        return [self._returned.popleft() for _ in range(len(self._returned))]


def _collect_returned() -> None:
    for returned, number in _user_slabs.take():
        returned.append(number)
