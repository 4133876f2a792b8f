"""The Python environment: finds the package that an exception comes from, and the fix for a missing or broken one.

Python removes the frames of its import machinery from most tracebacks. So an exception of an import is recognized by
the remaining frames: the body of a module, or `importlib.import_module`.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from importlib.util import find_spec
from traceback import walk_tb
from types import ModuleType
from typing import Final, NamedTuple

OWN: Final = "orchdata"
_BOOTSTRAP: Final = "<frozen importlib._bootstrap"
_MOST_CAUSES: Final = 16


class FailedImport(NamedTuple):
    """A failed import: the import name of the package ("" if unknown) and the exception."""

    package: str
    cause: BaseException


def failed_import(error: BaseException) -> FailedImport | None:
    """Return the import that failed if an exception, or one of its causes, comes from one; else None."""
    cause: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if cause is None:
            return None
        cause = _of_lost_module(cause) or cause
        imported = list(map(_package, _imports(cause)))
        if imported or isinstance(cause, ImportError):
            # The first package in the chain that is not this one: its error names any package that it lacks.
            theirs = next((name for name in imported if name not in ("", OWN)), "")
            at_fault = theirs or _package(getattr(cause, "name", None)) or (imported[0] if imported else "")
            return FailedImport(at_fault, cause)
        cause = cause.__cause__
    return None


def _of_lost_module(error: BaseException) -> BaseException | None:
    """Return the exception of importing a module that another thread was importing at the same time; else None. CPython
    3.11 to 3.13 lets the waiting thread continue with the module even if that import failed: it misses an attribute.
    Only the error of another import says what is wrong.
    """
    module = error.obj if isinstance(error, AttributeError) else None
    if not isinstance(module, ModuleType) or sys.modules.get(module.__name__) is module:
        return None
    try:
        importlib.import_module(module.__name__)
    except Exception as failed:  # noqa: BLE001 - a module may raise anything
        return failed
    return ImportError(f"{module.__name__} could not be imported at first: {error}", name=module.__name__)


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _imports(error: BaseException) -> Iterator[str]:
    """Yield the modules that were being imported when an exception was raised, outermost first; "" if unknown."""
    for frame, _ in walk_tb(error.__traceback__):
        code, known = frame.f_code, frame.f_globals
        if code.co_filename.startswith(_BOOTSTRAP) or code is importlib.import_module.__code__:
            yield str(frame.f_locals.get("name", ""))
        if code.co_name == "<module>" and known.get("__spec__") is not None and known.get("__name__") != "__main__":
            yield str(known["__name__"])  # whose body it is


def requirements(extra: str = "") -> dict[str, str]:
    """Return the requirements of an extra, or of "" itself: distribution -> requirement, "pillow<14,>=10.3"."""
    try:
        lines = requires(OWN) or []
    except PackageNotFoundError:  # on sys.path, but not installed
        return {}
    required = {}
    for line in lines:
        wanted, _, marker = (part.strip() for part in line.partition(";"))
        of_extra = re.search(r"extra == ['\"]([^'\"]+)", marker)
        if (of_extra[1] if of_extra else "") == extra:
            required[re.split(r"[<>=!~\[ ]", wanted)[0]] = wanted
    return required


def distribution_of(package: str) -> str | None:
    """Return the pip name of a package, "pillow" for "PIL"; None if it was not installed with pip."""
    name = _DISTRIBUTIONS.get(package) or next(iter(packages_distributions().get(package, ())), None)
    return None if name is None else re.sub(r"[-_.]+", "-", name).lower()


_DISTRIBUTIONS: Final = {
    "PIL": "pillow",
    "yaml": "pyyaml",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "sklearn": "scikit-learn",
}
"""Package -> its pip name, where they differ and the package may be missing."""
_EXTRAS: Final = ("hf", "video", "remote", "ray", "plots")


def is_installed(package: str) -> bool:
    """Whether a module of this name can be imported."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError, AttributeError):  # it exists, but is no plain module
        return True


def way_out(package: str, error: BaseException | None = None) -> str:
    """Return a command that installs a missing package, reinstalls a broken one, or shows what is wrong with it."""
    if not package:
        return "`orchdata doctor` tries each package"
    distribution = distribution_of(package)
    extra = next((name for name in _EXTRAS if (distribution or package) in requirements(name)), None)
    wanted = {**requirements(extra or ""), **requirements()}.get(distribution or package)
    if not is_installed(package):
        lacking = (
            requirements(extra).values() if extra else [wanted or distribution or package]
        )  # no index may have orchdata itself
        return "pip install " + " ".join(f"'{each}'" for each in lacking)
    lacks = _package(error.name) if isinstance(error, ModuleNotFoundError) else ""
    if lacks and lacks != package and not lacks.startswith("_") and not is_installed(lacks):
        return way_out(lacks)
    if distribution is None:
        return f'`python -c "import {package}"` shows what is wrong with it'
    alone = "" if lacks else "--no-deps "  # a missing module may belong to another distribution
    return f"pip install --force-reinstall {alone}'{wanted or distribution}'"
