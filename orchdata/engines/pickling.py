"""Names the members of a BuildSpec, or of a batch, that do not pickle and so cannot be sent to another process."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from orchdata.loaders.errors import ContainerError, OrchdataError

_MAX_DEPTH = 16
_WAY_OUT = (
    "Define it at the top level of a module, with functools.partial for its arguments, or pass multiprocessing_context="
    "'fork'; or build in this process, inline or with threads, where nothing is pickled"
)


def pickles(value: Any, dump: Callable[[Any], Any] = pickle.dumps) -> bool:
    try:
        dump(value)
    except Exception:  # noqa: BLE001 - pickling a user's object may raise anything
        return False
    return True


def explain_pickling(
    value: Any, error: Exception, *, pickles: Callable[[Any], bool] = pickles, way_out: str = _WAY_OUT
) -> None:
    """Raise TypeError if a member that does not pickle caused `error`: with its name and the way out.

    Args:
        pickles: whether a value can be pickled, by the pickler that raised.
    """
    if isinstance(error, OrchdataError) or pickles(value):
        return
    name, member = what_does_not_pickle(value, pickles)
    for ours in (".workers", ".spec", ".content", ".shards"):
        name = name.removeprefix(ours)
    raise TypeError(
        f"{name.removeprefix('.')} is {described(member)}, which cannot be sent to another process ({error}). {way_out}"
    ) from error


def pickle_container(container: object) -> bytes:
    """Return a container of the user's as bytes. Raises ContainerError that names the member that does not pickle."""
    try:
        return pickle.dumps(container, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        path, member = what_does_not_pickle(container, pickles)
        name = f"container {type(container).__qualname__}"
        what = f"{name}{path} is {described(member)}" if path else name
        raise ContainerError(
            f"{what}, which does not pickle, and worker processes get a copy ({error}). Define the class at the top "
            "level of a module, keep only plain values in it, and open files in open()"
        ) from error


def what_does_not_pickle(value: Any, pickles: Callable[[Any], bool]) -> tuple[str, Any]:
    """Return the innermost member that does not pickle, after the path to it, as in `.a[0]`."""
    path, member = "", value
    for _ in range(_MAX_DEPTH):
        inner = next(((part, each) for part, each in _members(member) if not pickles(each)), None)
        if inner is None:
            break
        path, member = path + inner[0], inner[1]
    return path, member


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the members of a value, each with the path to it."""
    if isinstance(value, FunctionType | type):
        return
    if isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, partial):
        yield ".func", value.func
        yield from ((f".args[{number}]", member) for number, member in enumerate(value.args))
        yield from ((f".keywords[{name!r}]", member) for name, member in value.keywords.items())
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", member) for key, member in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{number}]", member) for number, member in enumerate(value))
    for name in (*_slots(value), *getattr(value, "__dict__", ())):
        if hasattr(value, name):
            yield f".{name}", getattr(value, name)


def _slots(value: Any) -> Iterator[str]:
    for kind in type(value).__mro__:
        slots = getattr(kind, "__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots


def described(value: Any) -> str:
    """Return what a value is, as text."""
    if not isinstance(value, FunctionType):
        return f"an object of type {type(value).__name__}"
    code = value.__code__
    kind = "a lambda" if value.__name__ == "<lambda>" else f"the function {value.__qualname__}"
    return f"{kind} in line {code.co_firstlineno} of {code.co_filename}"
