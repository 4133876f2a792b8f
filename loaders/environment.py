"""The Python environment: which package an exception is about, and what to do where one is missing or broken.

Python cuts the frames of its import machinery out of most tracebacks, so that an exception is known as one of an import
by what is left: a frame that stands at an `import` statement, the body of a module, or `importlib.import_module`.
"""

from __future__ import annotations

import dis
import importlib
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from importlib.util import find_spec
from types import FrameType, ModuleType
from typing import Final, NamedTuple

OWN: Final = "orchdata"
_IMPORTS: Final = frozenset(dis.opmap[name] for name in ("IMPORT_NAME", "IMPORT_FROM") if name in dis.opmap)
_BOOTSTRAP: Final = "<frozen importlib._bootstrap"
_MOST_CAUSES: Final = 16


class FailedImport(NamedTuple):
    """An import that failed: the package, as it is imported, "" where that is not known; and what it raised."""

    package: str
    cause: BaseException


def failed_import(error: BaseException) -> FailedImport | None:
    """The import that failed, where an exception, or what it was raised from, says so; else None."""
    cause: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if cause is None:
            return None
        cause = _of_lost_module(cause) or cause
        imported = list(map(_package, _imports(cause)))
        if imported or isinstance(cause, ImportError):
            return FailedImport(_at_fault(cause, imported), cause)
        cause = cause.__cause__
    return None


def _of_lost_module(error: BaseException) -> BaseException | None:
    """What importing a module raised, where another thread was importing it at the same time; else None.

    A thread that waits for an import of another one goes on with the module even if that import fails (CPython 3.11 to
    3.13). It then misses an attribute of a module that `sys.modules` no longer has. The import is tried once more here,
    because only its error says what is wrong.
    """
    module = error.obj if isinstance(error, AttributeError) else None
    if not isinstance(module, ModuleType) or sys.modules.get(module.__name__) is module:
        return None
    try:
        importlib.import_module(module.__name__)
    except Exception as failed:  # noqa: BLE001 - whatever a module raises
        return failed
    return ImportError(f"{module.__name__} could not be imported at first: {error}", name=module.__name__)


def _at_fault(error: BaseException, imported: list[str]) -> str:
    """The first package on the way that is not this one: what it lacks itself, the error says."""
    theirs = next((name for name in imported if name not in ("", OWN)), "")
    return theirs or _package(getattr(error, "name", None)) or (imported[0] if imported else "")


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _imports(error: BaseException) -> Iterator[str]:
    """Modules that were being imported when an exception was raised, from the outside in; "" for an unknown one."""
    traceback = error.__traceback__
    while traceback is not None:
        yield from _imported_by(traceback.tb_frame, traceback.tb_lasti)
        traceback = traceback.tb_next


def _imported_by(frame: FrameType, at: int) -> Iterator[str]:
    """The module that a frame is the body of, and the one that it imports by its instruction `at`."""
    code, known = frame.f_code, frame.f_globals
    if code.co_filename.startswith(_BOOTSTRAP) or code is importlib.import_module.__code__:
        yield str(frame.f_locals.get("name", ""))
    if code.co_name == "<module>" and known.get("__spec__") is not None and known.get("__name__") != "__main__":
        yield str(known["__name__"])
    if 0 <= at < len(code.co_code) and code.co_code[at] in _IMPORTS:
        found = next((each for each in dis.get_instructions(code) if each.offset == at), None)
        is_absolute = found is not None and found.opname == "IMPORT_NAME" and found.argval
        yield str(found.argval) if is_absolute and found else str(known.get("__package__") or "")


def requirements(extra: str = "") -> dict[str, str]:
    """What an extra of this library requires, or "" itself: distribution -> it with its bounds, "pillow<14,>=10.3"."""
    try:
        lines = requires(OWN) or []
    except PackageNotFoundError:  # on sys.path, and not installed
        return {}
    found = {}
    for line in lines:
        wanted, _, marker = (part.strip() for part in line.partition(";"))
        of_extra = re.search(r"extra == ['\"]([^'\"]+)", marker)
        if (of_extra[1] if of_extra else "") == extra:
            found[re.split(r"[<>=!~\[ ]", wanted)[0]] = wanted
    return found


def distribution_of(package: str) -> str | None:
    """What pip calls a package that is imported by this name, "pillow" for "PIL"; None if pip installed none."""
    found = _DISTRIBUTIONS.get(package) or next(iter(packages_distributions().get(package, ())), None)
    return None if found is None else re.sub(r"[-_.]+", "-", found).lower()


_DISTRIBUTIONS: Final = {"PIL": "pillow", "yaml": "pyyaml"}
_EXTRAS: Final = ("hf", "video")


def is_installed(package: str) -> bool:
    """Whether there is something to import by this name."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError, AttributeError):  # it is there, and no plain module
        return True


def way_out(package: str, error: BaseException | None = None) -> str:
    """A command that gets a package which is missing, gets one again that is broken, or shows what is wrong with it.

    Args:
        error: what importing it raised.
    """
    if not package:
        return "`orchdata doctor` tries each package"
    distribution = distribution_of(package)
    extra = next((name for name in _EXTRAS if (distribution or package) in requirements(name)), None)
    wanted = {**requirements(extra or ""), **requirements()}.get(distribution or package)
    if not is_installed(package):
        return f"pip install '{f'orchdata[{extra}]' if extra else wanted or package}'"
    lacks = _package(error.name) if isinstance(error, ModuleNotFoundError) else ""
    if lacks and lacks != package and not lacks.startswith("_") and not is_installed(lacks):
        return f"pip install '{lacks}'"
    if distribution is None:
        return f'`python -c "import {package}"` shows what is wrong with it'
    alone = "" if lacks else "--no-deps "  # a part that is missing may be another distribution's
    return f"pip install --force-reinstall {alone}'{wanted or distribution}'"
