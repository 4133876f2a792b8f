"""Slabs: shared memory in which a worker builds a step, and from which the training process uses it.

    worker: lend a free slab, or make one --step written into it--> its number, and what lies where
    parent: maps a slab once; when the last array over it is collected, its number goes back to the worker

A slab has no name, so that nothing of it is left when both processes are gone, however they end.

A page of shared memory costs 3 microseconds when it is first written, and 0.2 each time after; until then it takes no
memory. So a slab is made larger than its first step needs: larger steps fit too, and a few slabs with their pages serve
all steps.
"""

from __future__ import annotations

import mmap
import os
import resource
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from orchdata.building.memory import Returns, size_class
from orchdata.ranks.wire import Buffer, flat_bytes

Bytes = NDArray[np.uint8]

_ALIGNMENT = 64
_SMALLEST = 1 << 16
_SPARE = 4  # a slab is so many times as large as what it is made for
_RECENT = 16  # steps: what exceeds the largest of them twice over goes back to the system
_HEADROOM = 1 << 16  # for what a step has beside the arrays that were reserved


@dataclass(frozen=True, slots=True)
class Place:
    """Where bytes of a step lie: so many from `start`, in the step's `slab`-th slab."""

    slab: int
    start: int
    num_bytes: int


_held = Returns[tuple[deque[int], int]]()
"""Slabs that the user holds, of all workers of this process: where the numbers of a worker's come back, and which."""


def _max_held() -> int:
    return min(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 16)


class _Slab:
    """One of a worker's.

    Attributes:
        file: the descriptor until the parent has it.
        written: bytes from the start whose pages may be there.
    """

    def __init__(self, number: int, num_bytes: int) -> None:
        try:
            self.file: int | None = os.memfd_create("orchdata-slab", os.MFD_CLOEXEC)
            os.ftruncate(self.file, num_bytes)
            memory = mmap.mmap(self.file, num_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise MemoryError(f"cannot map {num_bytes} bytes of shared memory: {error}") from error
        with suppress(OSError):  # where the system gives shared memory none
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.number = number
        self.written = 0
        self.array = np.frombuffer(memory, np.uint8)
        self._memory = memory

    def trim(self, num_bytes: int) -> None:
        """Give the pages behind so many bytes back to the system."""
        start = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if start < self.written:
            with suppress(OSError):  # a kernel that cannot: they stay
                self._memory.madvise(mmap.MADV_REMOVE, start, len(self.array) - start)
            self.written = start

    def close_file(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None


class Slabs:
    """A worker's slabs, for all its threads.

    Args:
        max_free: how many to keep that nobody uses.
    """

    def __init__(self, max_free: int) -> None:
        self._max_free = max_free
        self._free: list[_Slab] = []
        self._lent: dict[int, _Slab] = {}
        self._dropped: list[int] = []
        self._made = 0
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._lock = threading.Lock()

    def lend(self, num_bytes: int) -> _Slab:
        """The free one that has the fewest pages to spare, or the most of those to write, or a new one.

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
            self._lent[slab.number] = slab
            return slab

    def _new(self, num_bytes: int) -> _Slab:
        self._made += 1
        needed = max(num_bytes, _SMALLEST)
        try:
            return _Slab(self._made, size_class(_SPARE * needed))
        except MemoryError:  # addresses are limited here
            return _Slab(self._made, size_class(needed))

    def give_back(self, numbers: list[int]) -> None:
        """Nobody uses these any more."""
        with self._lock:
            back = [self._lent.pop(number) for number in numbers if number in self._lent]
            for slab in back:  # one large step is not to hold its memory for ever
                slab.trim(2 * max(self._recent))
            self._free += back
            while len(self._free) > self._max_free:
                slab = self._free.pop(0)
                slab.close_file()
                self._dropped.append(slab.number)

    def drop(self, numbers: list[int]) -> None:
        """Nobody is to have these again, for they may still be written to."""
        with self._lock:
            for number in numbers:
                self._lent.pop(number).close_file()
            self._dropped += numbers

    def take_dropped(self) -> list[int]:
        """Numbers of those that will not come again."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
            return dropped


class StepMemory:
    """Memory of one step, in slabs; see `building.memory.Memory`."""

    def __init__(self, slabs: Slabs) -> None:
        self.slabs: list[_Slab] = []
        self._pool = slabs
        self._used: list[int] = []
        self._starts: list[int] = []
        self._lock = threading.Lock()

    @property
    def used(self) -> list[int]:
        """Bytes of each slab that are in use."""
        return self._used

    def reserve(self, num_bytes: int) -> None:
        if num_bytes:
            with self._lock:
                self._grow(num_bytes + _HEADROOM)

    def take(self, num_bytes: int) -> Bytes:
        with self._lock:
            place = self._place(num_bytes)
            return self.slabs[place.slab].array[place.start : place.start + num_bytes]

    def place_of(self, buffer: Buffer) -> Place:
        """Where the bytes of a buffer lie; bytes from elsewhere are copied in first. Raises MemoryError."""
        start, num_bytes = _address(buffer)
        if not num_bytes:
            return Place(0, 0, 0)
        for number, (slab, first) in enumerate(zip(self.slabs, self._starts, strict=True)):
            if first <= start and start + num_bytes <= first + len(slab.array):
                return Place(number, start - first, num_bytes)
        flat = flat_bytes(buffer)
        with self._lock:
            place = self._place(len(flat))
        self.slabs[place.slab].array[place.start : place.start + len(flat)] = flat
        return place

    def drop(self) -> None:
        """The step came to nothing, of which other threads may not have heard yet."""
        self._pool.drop([slab.number for slab in self.slabs])

    def _place(self, num_bytes: int) -> Place:
        for number, slab in enumerate(self.slabs):
            start = -(-self._used[number] // _ALIGNMENT) * _ALIGNMENT
            if start + num_bytes <= len(slab.array):
                return self._put(number, start, num_bytes)
        self._grow(num_bytes)
        return self._put(len(self.slabs) - 1, 0, num_bytes)

    def _put(self, number: int, start: int, num_bytes: int) -> Place:
        self._used[number] = start + num_bytes
        self.slabs[number].written = max(self.slabs[number].written, start + num_bytes)
        return Place(number, start, num_bytes)

    def _grow(self, num_bytes: int) -> None:
        slab = self._pool.lend(num_bytes)
        self.slabs.append(slab)
        self._used.append(0)
        self._starts.append(slab.array.__array_interface__["data"][0])


def _address(buffer: Buffer) -> tuple[int, int]:
    """Where the bytes of a buffer begin, and how many there are; -1 where they do not lie in C order."""
    if isinstance(buffer, torch.Tensor):
        plain = buffer.is_contiguous() and not buffer.is_conj() and not buffer.is_neg()
        return buffer.data_ptr() if plain else -1, buffer.nbytes
    if isinstance(buffer, np.ndarray):
        return buffer.__array_interface__["data"][0] if buffer.flags.c_contiguous else -1, buffer.nbytes
    return -1, len(buffer) if isinstance(buffer, bytes | bytearray) else buffer.nbytes


class MappedSlabs:
    """A worker's slabs as its parent has them.

    So many of all workers together the user may hold; what comes then is copied out of its slab, since each takes a
    descriptor.
    """

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self._returned: deque[int] = deque()

    def add(self, number: int, file: int, num_bytes: int) -> None:
        """Map one that is new. The descriptor is closed."""
        try:
            self._maps[number] = mmap.mmap(file, num_bytes)
        except OSError as error:
            hint = "raise `ulimit -n`, or take fewer workers"
            raise OSError(error.errno, f"a worker's batch cannot be mapped: {error.strerror}; {hint}") from error
        finally:
            os.close(file)

    def drop(self, numbers: list[int]) -> None:
        """Forget those that will not come again."""
        for number in numbers:
            self._maps.pop(number, None)

    def arrays(self, slabs: list[tuple[int, int]]) -> list[Bytes]:
        """The bytes in use of some slabs, by number and size. What is small or too much is copied, and others return
        when nobody has an array over them any more.
        """
        views = [np.frombuffer(self._maps[number], np.uint8)[:used] for number, used in slabs]
        if sum(used for _, used in slabs) < _SMALLEST or len(_held) + len(slabs) > _max_held():
            self._returned.extend(number for number, _ in slabs)
            return [view.copy() for view in views]
        bases = [np.frombuffer(self._maps[number], np.uint8) for number, _ in slabs]
        for base, (number, _) in zip(bases, slabs, strict=True):
            _held.expect(base, (self._returned, number))
        return [base[:used] for base, (_, used) in zip(bases, slabs, strict=True)]

    @property
    def has_returned(self) -> bool:
        """Whether there are some that the worker may use again."""
        _sort_returned()
        return bool(self._returned)

    def take_returned(self) -> list[int]:
        """Numbers of those that the worker may use again."""
        _sort_returned()
        found = []
        while self._returned:
            found.append(self._returned.popleft())
        return found


def _sort_returned() -> None:
    for returned, number in _held.take():
        returned.append(number)
