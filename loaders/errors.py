"""All errors of this library, in one tree; wrong arguments are plain ValueError or TypeError.

OrchdataError
├── DataError, StorageError, StateError, TooManyFailures
├── ShardError ── StaleIndexError
├── MissingIndexError ── DamagedIndexError
├── PackageError (also an ImportError), ContainerError and FunctionError (ValueErrors), StepError (a RuntimeError)
└── not public: ProcessError, `WireError` of ranks.wire, `LaunchError` of ranks that a command started

`FieldError` is the inner form of a DataError, raised where shard and key are not known; the caller that knows them
turns it into a DataError with `FieldError.at`.

Code that turns arbitrary exceptions into data failures lets `NOT_DATA` through first.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeGuard

from orchdata.loaders.environment import OWN, failed_import, way_out
from orchdata.loaders.memory import is_of_libav, pass_said_shortage
from orchdata.native import jit


class OrchdataError(Exception):
    """Base of all errors of this library."""


class DataError(OrchdataError):
    """One sample that cannot be used. Pickles; compares by its four fields."""

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
    """The index file is cut, altered, or of another format. A single process builds it again, with a warning.

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
    """Bytes cannot be read, or written to the cache folder, now, even after retries.

    It is not known whether the data are good: never counted as a failure of a sample, never written to an index.

    Attributes:
        url: the file.
        reason: the system's message, and what it is about.
        errno: the system's number, or None.
    """

    def __init__(self, url: str, reason: str, number: int | None = None) -> None:
        super().__init__(url, reason, number)
        self.url = url
        self.reason = reason
        self.errno = number

    @property
    def is_absent(self) -> bool:
        """Whether there is no such file."""
        return self.errno == errno.ENOENT

    @property
    def is_refused(self) -> bool:
        """Whether this user may not read it."""
        return self.errno in (errno.EACCES, errno.EPERM)

    def __str__(self) -> str:
        return f"{self.url}: {self.reason}"


class PackageError(OrchdataError, ImportError):
    """A package that reading, measuring or decoding needs is missing or broken.

    It says nothing about the data: never counted as a failure of a sample, never written to an index.

    Attributes:
        package: its import name; "" if unknown.
        reason: what the import raised.
        hint: what to do.
        needed_by: what needs it; "" if unknown.
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


class ProcessError(OrchdataError):
    """A process that measures shards for a build ended, twice with one shard, or cannot be used. It says nothing about
    the data: nothing of the shard is stored.
    """


class StateError(OrchdataError):
    """A state_dict that belongs to another dataset, recipe, order or batch size; names the difference."""


class TooManyFailures(OrchdataError):
    """More samples failed than the ErrorPolicy allows."""


class FunctionError(OrchdataError, ValueError):
    """A function of the user's that cannot be used: it is not deterministic, or its id belongs to another function."""


class ContainerError(OrchdataError, ValueError):
    """A container of the user's that breaks the rules of containers, for any data."""


class StepError(OrchdataError, RuntimeError):
    """No rank can continue with a step of post_balance.

    Attributes:
        step: the step that failed.
        rank: rank in the group that caused it, or None if unknown.
    """

    def __init__(self, message: str, step: int, rank: int | None) -> None:
        super().__init__(message, step, rank)
        self.step = step
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])


BLANK: Final = "it is in ErrorPolicy.blank"
"""The reason of a sample that the user has left out of a run."""
NOT_DATA = (
    *(StorageError, StaleIndexError, DamagedIndexError, MemoryError, PackageError, FunctionError, ContainerError),
    ProcessError,
)
"""Errors that say nothing about the data that was being read."""


class FieldError(Exception):
    """A field that cannot be used, before its shard and key are known. Internal."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)
        self.field = field
        self.reason = reason

    def at(self, shard: str, key: str) -> DataError:
        return DataError(shard, key, self.field, self.reason)


class DecodeError(Exception):
    """Bytes that cannot be decoded as the recipe and the index say. Internal. The caller that knows the field turns it
    into a FieldError with `at`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def at(self, field: str) -> FieldError:
        """Raises PackageError if this was raised from a failed import."""
        pass_broken_package(self)
        return FieldError(field, self.reason)


FAILURES = (DataError, FieldError, DecodeError)
"""Failures of data, with a reason."""

_MESSAGE_CHARACTERS = 400
OF_THE_FILE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG})
"""System errors about a path or the file there. Any other system error may pass."""
_OF_LIBAV = frozenset({errno.EMFILE, errno.ENFILE})
"""Numbers that libav takes from the system: its other numbers are about the data."""
_NO_THREAD = "can't start new thread"


def pass_trouble(error: BaseException, what: str = "a decoder") -> None:
    """Raise if an exception of `what` says nothing about the data; return if it may be a failure of the data. Readers
    of data have the bytes in memory. So an error of the system (while loading a module, starting a thread) becomes a
    StorageError, lack of memory a MemoryError, a failed import a PackageError. A warning that a filter turned into an
    exception passes unchanged.
    """
    if isinstance(error, (*NOT_DATA, Warning)) and not is_of_libav(error):
        raise error
    pass_said_shortage(error)
    if is_refusal(error):
        file = what if error.filename is None else f"{what}: {error.filename}"
        raise StorageError(file, f"cannot be used: {error.strerror}", error.errno) from error
    if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
        raise StorageError("a thread", "cannot be started: there are too many", errno.EAGAIN) from error
    pass_broken_package(error)


def is_refusal(error: BaseException) -> TypeGuard[OSError]:
    """Whether this is an error of the system, which a retry may avoid. Decoders raise OSError for damaged data too:
    Pillow, pyarrow and gzip without a number, libav with one.
    """
    if not isinstance(error, OSError) or error.errno is None:
        return False
    if is_of_libav(error):
        return error.errno in _OF_LIBAV
    return error.errno not in OF_THE_FILE


def pass_broken_package(error: BaseException, needed_by: str = "", package: str = "") -> None:
    """Raise a PackageError, of `package` or the one found, if an exception or a cause of it comes from an import."""
    failed = failed_import(error)
    if failed is None:
        return
    if isinstance(failed.cause, RecursionError):  # the caller's, many levels deep
        raise failed.cause
    pass_said_shortage(failed.cause)
    raise package_error(failed.cause, needed_by, package or failed.package) from error


def package_error(error: BaseException, needed_by: str, package: str) -> PackageError:
    """Return the PackageError for an exception of an import."""
    if isinstance(error, PackageError):
        return error
    said = " ".join(str(error).split())[:_MESSAGE_CHARACTERS]
    reason = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return PackageError(package, reason, way_out(package, error), needed_by)


jit.broken = partial(package_error, needed_by="planning", package="numba")


def broken_package(error: Exception) -> PackageError | None:
    """Return the error for a failed import of this library: None unless another package is missing or broken."""
    failed = failed_import(error)
    if failed is None or failed.package in ("", OWN):
        return None
    return package_error(failed.cause, OWN, failed.package)


def one_line(error: BaseException) -> str:
    """The message of an exception on one line, at most 200 characters; its class name if it has no message."""
    text = " ".join(str(error).split())
    return text[:200] if text else type(error).__name__


@contextmanager
def as_failure(
    make: Callable[[str], Exception], doing: str, *, before: Callable[[Exception], None] = pass_trouble
) -> Iterator[None]:
    """Turn an exception of the block into a failure of the data: `make("doing: message")`. Failures that the block
    raises itself pass unchanged, and so do errors that say nothing about the data. `before` is called first; it may
    raise something else.
    """
    try:
        yield
    except (*NOT_DATA, *FAILURES):
        raise
    except Exception as error:
        before(error)
        raise make(f"{doing}: {one_line(error)}") from error


def as_field_error(error: Exception, doing: str, field: str = "*") -> FieldError:
    """Return the failure of a sample, or of a field, for an unexpected exception. `doing` is "measured" or "decoded".
    Raises as `pass_trouble`.
    """
    if isinstance(error, FieldError):
        return error
    pass_trouble(error)
    said = " ".join(str(error).split())[:200]
    return FieldError(field, f"cannot be {doing}: {type(error).__name__}: {said}")


_VARYING = re.compile(
    r"(call the key '[^']*'|columns=\{[^}]*\}|sep(?:arated by |=)'[^']*'|to_csv\('[^']*'|'utf-8'|\b0x[0-9a-f]+)"
    r"|'[^']*'(?:, '[^']*')*"
    r"|(?<![A-Z\d])(?<![A-Z]-)\d+(?:\.\d+)?"
)


def reason_kind(reason: str) -> str:
    """A reason without quoted names and numbers, to group reasons of one kind. `UTF-8` and `MP3` are no numbers. What
    to do, and the values of bytes, stay as they are.
    """
    return _VARYING.sub(lambda found: found[1] or ("N" if found[0][0].isdigit() else "'...'"), reason)
