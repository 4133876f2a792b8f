"""Every error of our own, in one tree; arguments of the wrong kind are plain ValueError or TypeError.

OrchdataError
├── DataError          one sample cannot be used: shard, key, field, reason
├── ShardError         a shard cannot be read at all (as a value it is a DataError with an empty key)
│   └── StaleIndexError  a shard is not the one that was indexed
├── MissingIndexError  more than one rank, and no index to plan from
│   └── DamagedIndexError  the file of the index is not what was written
├── StorageError       bytes could not be read, or kept in the cache, now: a full disk, a lost mount; no fault of data
├── PackageError       a package that is needed is missing or cannot be imported; an ImportError too; no fault of data
├── StateError         a state that belongs to another dataset, recipe or order
├── TooManyFailures    the failure budget of an ErrorPolicy is spent
└── StepError          no rank can go on with a step of post_balance; a RuntimeError too

WireError, of what another rank sent, and LaunchError, of ranks that a command started, derive from OrchdataError too,
and are in no public list: they lie in `ranks.wire` and `reference.launch`.

`FieldError` is the inner form of a DataError, raised where shard and key are not known;
whoever knows them turns it into a DataError with `FieldError.at`.

Whoever makes any exception over data a failure of those data lets `NOT_DATA` through first.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeGuard

from orchdata.loaders.environment import OWN, failed_import, way_out
from orchdata.loaders.memory import is_of_libav, pass_said_shortage
from orchdata.native import jit


class OrchdataError(Exception):
    """Base of all errors of our own."""


class DataError(OrchdataError):
    """One sample that cannot be used. Picklable, comparable by its four fields."""

    def __init__(self, shard: str, key: str, field: str, reason: str) -> None:
        super().__init__(shard, key, field, reason)
        self.shard = shard
        self.key = key
        self.field = field
        self.reason = reason

    def __str__(self) -> str:
        if not self.key and not self.field:  # a whole shard
            return f"{self.shard}: {self.reason}"
        return f"{self.shard}: sample {self.key!r}, field {self.field!r}: {self.reason}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DataError) and self.args == other.args

    def __hash__(self) -> int:
        return hash(self.args)


class ShardError(OrchdataError):
    """A shard that cannot be read at all."""

    def __init__(self, shard: str, reason: str) -> None:
        super().__init__(shard, reason)
        self.shard = shard
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.shard}: {self.reason}"


class MissingIndexError(OrchdataError):
    """No index exists and this process may not build one; the message names the command that does."""


class DamagedIndexError(MissingIndexError):
    """The file of the index is cut, altered, or of another format. A single process makes it again, with a warning.

    Attributes:
        path: the file.
        reason: what is wrong with it.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"the index {self.path} is damaged: {self.reason}; run `orchdata index` again"


class StaleIndexError(ShardError):
    """A shard differs from the one that was indexed (size or header checksum)."""


class StorageError(OrchdataError):
    """Bytes that could not be read, or written to the cache folder, now, however often it was tried.

    Whether the data are good is not known: it is never counted as a failure of a sample, and never written to an index.

    Attributes:
        url: the file it is about.
        reason: what the system said, and of what.
        errno: the system's number, or None.
    """

    def __init__(self, url: str, reason: str, number: int | None = None) -> None:
        super().__init__(url, reason, number)
        self.url = url
        self.reason = reason
        self.errno = number

    def __str__(self) -> str:
        return f"{self.url}: {self.reason}"


class PackageError(OrchdataError, ImportError):
    """A package that reading, measuring or decoding needs is missing or broken.

    It says nothing about the data: it is never counted as a failure of a sample, and never written to an index.

    Attributes:
        package: as it is imported; "" where that is not known.
        reason: what the import raised.
        hint: what to do.
        needed_by: what needs it; "" where that is not known.
    """

    def __init__(self, package: str, reason: str, hint: str, needed_by: str = "") -> None:
        super().__init__(package, reason, hint, needed_by)
        self.package = package
        self.reason = reason
        self.hint = hint
        self.needed_by = needed_by

    def __str__(self) -> str:
        what = f"the package {self.package!r}" if self.package else "a package"
        needed = f", which {self.needed_by} needs," if self.needed_by else ""
        return f"{what}{needed} cannot be used ({self.reason}): {self.hint}"


class StateError(OrchdataError):
    """A state_dict that belongs to another dataset, recipe, order or batch size; names the difference."""


class TooManyFailures(OrchdataError):
    """More samples failed than the ErrorPolicy allows."""


class StepError(OrchdataError, RuntimeError):
    """No rank can go on with a step of post_balance.

    Attributes:
        step: that could not be made.
        rank: of the group, where it is known which one caused it, else None.
    """

    def __init__(self, message: str, step: int, rank: int | None) -> None:
        super().__init__(message, step, rank)
        self.step = step
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])


NOT_DATA = (StorageError, StaleIndexError, DamagedIndexError, MemoryError, PackageError)
"""What says nothing about the data it was met in."""


class FieldError(Exception):
    """A field that cannot be used, before its shard and key are known. Never reaches the user."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)
        self.field = field
        self.reason = reason

    def at(self, shard: str, key: str) -> DataError:
        return DataError(shard, key, self.field, self.reason)


class DecodeError(Exception):
    """Bytes that cannot be decoded as the recipe and the index say. Never reaches the user.

    Whoever knows the field turns it into a FieldError with `at`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def at(self, field: str) -> FieldError:
        """Raises PackageError where it was raised from an import that failed."""
        pass_broken_package(self)
        return FieldError(field, self.reason)


FAILURES = (DataError, FieldError, DecodeError)
"""Failures of data that have a reason already."""

_TOLD_CHARACTERS = 400
OF_THE_FILE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG})
"""What the system says of a name, or of what lies there. Whatever else it says may pass."""
_OF_LIBAV = frozenset({errno.EMFILE, errno.ENFILE})
"""What libav says of the system: its other numbers are words about the data."""
_NO_THREAD = "can't start new thread"


def pass_trouble(error: BaseException) -> None:
    """Raise what says nothing about the data: for whoever makes any other exception a failure of theirs.

    Readers of data have bytes in memory, so that what the system refuses them (a module to load, a thread) is not the
    data's doing: a StorageError. Lack of memory is a MemoryError. Nor is an import that failed, whatever it raised: a
    PackageError. Nor is a warning that a filter turned into an exception.
    """
    if isinstance(error, (*NOT_DATA, Warning)) and not is_of_libav(error):
        raise error
    pass_said_shortage(error)
    if is_refusal(error):
        what = "a decoder" if error.filename is None else str(error.filename)
        raise StorageError(what, f"cannot be used: {error.strerror}", error.errno) from error
    if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
        raise StorageError("a thread", "cannot be started: they are too many", errno.EAGAIN) from error
    pass_broken_package(error)


def is_refusal(error: BaseException) -> TypeGuard[OSError]:
    """Whether it is one of the system, which may be asked again.

    Decoders raise OSError for damaged data too: Pillow, pyarrow and gzip without a number, libav with one.
    """
    if not isinstance(error, OSError) or error.errno is None:
        return False
    if is_of_libav(error):
        return error.errno in _OF_LIBAV
    return error.errno not in OF_THE_FILE


def pass_broken_package(error: BaseException, needed_by: str = "", package: str = "") -> None:
    """Raise a PackageError where an exception, or what it was raised from, is of an import.

    Args:
        needed_by: what needs the package.
        package: which one it is; "" for what the exception tells.
    """
    found = failed_import(error)
    if found is None:
        return
    if isinstance(found.cause, RecursionError):  # of whoever called, many levels deep
        raise found.cause
    pass_said_shortage(found.cause)
    raise package_error(found.cause, needed_by, package or found.package) from error


def package_error(error: BaseException, needed_by: str, package: str) -> PackageError:
    """The error that an exception is, of a package that could not be imported."""
    if isinstance(error, PackageError):
        return error
    said = " ".join(str(error).split())[:_TOLD_CHARACTERS]
    reason = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return PackageError(package, reason, way_out(package, error), needed_by)


jit.broken = partial(package_error, needed_by="planning", package="numba")


def broken_package(error: Exception) -> PackageError | None:
    """What an exception is that importing this library raised: None unless another package is missing or broken."""
    found = failed_import(error)
    if found is None or found.package in ("", OWN):
        return None
    return package_error(found.cause, OWN, found.package)


def one_line(error: BaseException) -> str:
    """The message of an exception on one line, at most 200 characters; its class where it has no message."""
    text = " ".join(str(error).split())
    return text[:200] if text else type(error).__name__


@contextmanager
def as_failure(
    make: Callable[[str], Exception],
    doing: str,
    *,
    before: Callable[[Exception], None] = pass_trouble,
) -> Iterator[None]:
    """Turn an exception of the block into a failure of the data that it reads: `make("doing: message")`.

    Failures that the block makes itself pass, and so does what says nothing about the data.

    Args:
        make: the class of the failure, or a function of its reason.
        doing: how the reason begins, as "damaged audio".
        before: called first; it may raise something else.
    """
    try:
        yield
    except (*NOT_DATA, *FAILURES):
        raise
    except Exception as error:
        before(error)
        raise make(f"{doing}: {one_line(error)}") from error


def as_field_error(error: Exception, doing: str, field: str = "*") -> FieldError:
    """What an exception that nobody expected says of a sample, or a field of it, that could not be `doing` ("measured",
    "decoded").

    Raises as `pass_trouble`.
    """
    if isinstance(error, FieldError):
        return error
    pass_trouble(error)
    said = " ".join(str(error).split())[:200]
    return FieldError(field, f"cannot be {doing}: {type(error).__name__}: {said}")


def reason_kind(reason: str) -> str:
    """What reasons of one kind have in common: without quoted names and numbers (`UTF-8` and `MP3` are none)."""
    return _NUMBER.sub("N", _QUOTED.sub("'...'", reason))


_QUOTED = re.compile(r"'[^']*'(, '[^']*')*")
_NUMBER = re.compile(r"(?<![A-Z\d])(?<![A-Z]-)\d+(\.\d+)?")
