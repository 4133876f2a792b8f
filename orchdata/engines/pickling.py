"""What goes to another process and does not pickle, by its name: members of a BuildSpec, of a batch that comes back."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from orchdata.building.spec import BuildSpec
from orchdata.loaders.errors import OrchdataError

_MAX_DEPTH = 16


def pickle_spec(spec: BuildSpec) -> bytes:
    """The spec as bytes; `pickle.loads(...).open()` builds the same steps in a fresh process.

    Raises:
        TypeError: names the member that does not pickle, as in "recipe.text.tokenizer is a lambda", and the way out.
        StorageError: what travels as a file could not be written to the cache folder.
    """
    try:
        return pickle.dumps(spec, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        explain_pickling(spec, error)
        raise


def explain_pickling(value: Any, error: Exception) -> None:
    """Raise TypeError where `error` came of a member that does not pickle: by its name, with the way out."""
    if isinstance(error, OrchdataError) or _pickles(value):
        return
    name, found = what_does_not_pickle(value, _pickles)
    for ours in (".options", ".spec", ".content", ".shards"):
        name = name.removeprefix(ours)
    raise TypeError(
        f"{name.removeprefix('.')} is {described(found)}, which cannot be sent to another process ({error}). Define it "
        "at the top level of a module, with functools.partial for its arguments, or pass multiprocessing_context='fork'"
        "; or build in this process: inline or on threads anything goes"
    ) from error


def what_does_not_pickle(value: Any, pickles: Callable[[Any], bool]) -> tuple[str, Any]:
    """The innermost member that does not, and what is written behind the value's name to get there."""
    name, found = "", value
    for _ in range(_MAX_DEPTH):
        inside = next(((part, held) for part, held in _members(found) if not pickles(held)), None)
        if inside is None:
            break
        name, found = name + inside[0], inside[1]
    return name, found


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value holds, each with what is written behind the value's name to get there."""
    if isinstance(value, FunctionType | type):
        return
    if isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, partial):
        yield ".func", value.func
        yield from ((f".args[{place}]", held) for place, held in enumerate(value.args))
        yield from ((f".keywords[{name!r}]", held) for name, held in value.keywords.items())
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", held) for key, held in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{place}]", held) for place, held in enumerate(value))
    for name in (*_slots(value), *getattr(value, "__dict__", ())):
        if hasattr(value, name):
            yield f".{name}", getattr(value, name)


def _slots(value: Any) -> Iterator[str]:
    for kind in type(value).__mro__:
        slots = getattr(kind, "__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots


def _pickles(value: Any) -> bool:
    try:
        pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 - whatever a user's object raises when it is asked for its state
        return False
    return True


def described(value: Any) -> str:
    """What it is, in words."""
    if not isinstance(value, FunctionType):
        return f"an object of type {type(value).__name__}"
    code = value.__code__
    kind = "a lambda" if value.__name__ == "<lambda>" else f"the function {value.__qualname__}"
    return f"{kind} in line {code.co_firstlineno} of {code.co_filename}"
