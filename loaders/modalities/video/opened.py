"""A file with pictures and sound, in memory and opened by PyAV.

libav reads a memory file directly, not bytes through Python callbacks: an exception of a signal handler in a function
that C calls would be lost. The same happens where PyAV raises, for example at the end of a file: its wheels run some
Python to build a traceback. Each file is decoded by the thread that uses it, without threads of libav.

Imported late: it loads FFmpeg's libraries.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import islice
from typing import Any, Final, TypeVar

import av

from orchdata.loaders.errors import DecodeError, StorageError, pass_trouble
from orchdata.loaders.interrupts import interrupts_deferred
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.video.containers import check_whole, format_of
from orchdata.loaders.modalities.video.mp4 import check_tables

TOGETHER: Final = 16
"""Number of packets that are read before Ctrl-C is handled."""
_AS_BYTES: Final[dict[str, Any]] = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
"""Titles and the like may have any encoding; PyAV 19 and later never decodes them."""
SAYS_DAMAGE: Final = {"err_detect": "crccheck+explode"}
"""Decoding is strict: otherwise decoders fill in damaged data without an error."""

Self = TypeVar("Self", bound="OpenedFile")


class OpenedFile:
    """An open file, to be closed; a context manager. Subclasses choose their stream in `choose` each time it is opened.

    Raises DecodeError.
    """

    def __init__(self, data: bytes | memoryview, limits: Limits) -> None:
        self._limits = limits
        self._format = format_of(data)
        check_whole(memoryview(data), self._format)
        if self._format == "mp4":
            check_tables(memoryview(data))
        self._container: Any = None
        self._stream: Any = None
        with interrupts_deferred():
            self._memory = os.memfd_create("orchdata-video", os.MFD_CLOEXEC)
            self._close_memory = weakref.finalize(self, os.close, self._memory)
        try:
            with open(self._memory, "wb", closefd=False) as file:
                file.write(data)
            self.open()
        except BaseException:
            self.close()
            raise

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        container, self._container = self._container, None
        if container is not None:
            container.close()
        self._close_memory()

    def open(self) -> None:
        """Open the file at its start, even if it is open."""
        if self._container is not None:
            self._container.close()
        path = f"/proc/self/fd/{self._memory}"
        options = {"max_pixels": str(self._limits.image_pixels)}
        try:
            with interrupts_deferred():
                self._container = av.open(path, format=self._format, options=options, **_AS_BYTES)
        except (FileNotFoundError, PermissionError) as error:  # from /proc: the memory file always exists
            raise StorageError(path, f"cannot be opened, and video is read through it: {error.strerror}") from error
        except av.FFmpegError as error:
            pass_trouble(error)
            raise DecodeError(f"not a readable video: {said(error)}") from None
        self.choose(options | SAYS_DAMAGE)

    def choose(self, options: dict[str, str]) -> None:
        """Set `_stream`, and its decoder with these options."""
        raise NotImplementedError

    @contextmanager
    def _demuxed(self) -> Iterator[Iterator[Any]]:
        """Yield PyAV's packets of the stream, from here on. Their memory is freed only by an explicit close."""
        packets = self._container.demux(self._stream)
        try:
            yield packets
        finally:
            with interrupts_deferred():
                packets.close()

    def _packets(self) -> Generator[Any]:
        """Yield packets of the stream from here on, and an empty one that flushes a decoder. Must be closed."""
        with self._demuxed() as packets:
            while True:
                with interrupts_deferred():
                    some = list(islice(packets, TOGETHER))
                yield from some
                if len(some) < TOGETHER:
                    return


def exact(rational: Any) -> Fraction:
    """A rational number of PyAV; 0 if the file does not contain it."""
    return Fraction(rational.numerator, rational.denominator) if rational else Fraction(0)


def said(error: Any) -> str:
    return str(error.strerror or error).split("\n")[0][:200]
