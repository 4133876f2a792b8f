"""A file with pictures and sound, in memory and opened by PyAV.

libav reads a file without a name, and not the bytes by way of Python: what a signal raises in a function that C calls
is forgotten there. So it is where PyAV raises, as at the end of a file: its wheels run a little Python to write a
traceback, and forget what is raised in that. Each file is decoded by the thread that asks, without threads of libav's.

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
from orchdata.loaders.interrupts import interrupts_held
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.video.containers import check_whole, format_of
from orchdata.loaders.modalities.video.mp4 import check_tables

TOGETHER: Final = 16
"""Packets that are taken before Ctrl-C is heard."""
_AS_BYTES: Final[dict[str, Any]] = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
"""Titles and the like are in any encoding; of PyAV 19 on they are never decoded."""
SAYS_DAMAGE: Final = {"err_detect": "crccheck+explode"}
"""Of decoders, which else make up what is damaged and do not say so."""

Self = TypeVar("Self", bound="OpenedFile")


class OpenedFile:
    """To be closed; a context manager. Subclasses choose their stream in `choose`, whenever it is opened.

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
        with interrupts_held():
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
        """At its start, also where it is open."""
        if self._container is not None:
            self._container.close()
        path = f"/proc/self/fd/{self._memory}"
        options = {"max_pixels": str(self._limits.image_pixels)}
        try:
            with interrupts_held():
                self._container = av.open(path, format=self._format, options=options, **_AS_BYTES)
        except (FileNotFoundError, PermissionError) as error:  # of /proc: a file of ours is always there
            raise StorageError(path, f"cannot be opened, and video is read by way of it: {error.strerror}") from error
        except av.FFmpegError as error:
            pass_trouble(error)
            raise DecodeError(f"not a readable video: {said(error)}") from None
        self.choose(options | SAYS_DAMAGE)

    def choose(self, options: dict[str, str]) -> None:
        """Set `_stream`, and its decoder, which takes these options."""
        raise NotImplementedError

    @contextmanager
    def _demuxed(self) -> Iterator[Iterator[Any]]:
        """PyAV's packets of the stream, from here on. What it holds for them is freed only where it is told so."""
        packets = self._container.demux(self._stream)
        try:
            yield packets
        finally:
            with interrupts_held():
                packets.close()

    def _packets(self) -> Generator[Any]:
        """Of the stream, from here on, and an empty one that asks a decoder for what it has kept. To be closed."""
        with self._demuxed() as packets:
            while True:
                with interrupts_held():
                    some = list(islice(packets, TOGETHER))
                yield from some
                if len(some) < TOGETHER:
                    return


def exact(told: Any) -> Fraction:
    """A rational number of PyAV's; 0 where the file does not tell it."""
    return Fraction(told.numerator, told.denominator) if told else Fraction(0)


def said(error: Any) -> str:
    return str(error.strerror or error).split("\n")[0][:200]
