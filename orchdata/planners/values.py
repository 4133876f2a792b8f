"""Frozen values and JSON: a dataclass -> plain dicts, lists and numbers -> the same dataclass."""

from __future__ import annotations

import math
import types
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Self, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray


class Value:
    """A dataclass that JSON can hold."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-safe values by the names of the fields."""
        plain: dict[str, Any] = _plain(self)
        return plain

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """Return the value of which `to_dict` returned this. Raises ValueError for an unknown or missing field."""
        made: Self = _made(cls, given, cls.__name__)
        return made


def check_keys(given: Iterable[Any], known: Iterable[str], name: str) -> None:
    """Raise ValueError for a key that is none of those known."""
    known = list(known)
    if unknown := sorted(set(map(str, given)) - set(known)):
        raise ValueError(f"{name} has {unknown[0]!r}, which is none of its fields: {', '.join(known)}")


def checked_number(value: Any, name: str, *, least: float = 0.0, most: float = math.inf, above: bool = True) -> float:
    """Return a finite number above `least` (or from it on), and at most `most`. Raises ValueError for another."""
    good = isinstance(value, int | float | np.number) and not isinstance(value, bool) and math.isfinite(value)
    if not (good and (value > least if above else value >= least) and value <= most):
        limit = f"{'above' if above else 'of at least'} {least:g}" + (f", at most {most:g}" if most < math.inf else "")
        raise ValueError(f"{name} must be a finite number {limit}, got {value!r}")
    return float(value)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value) if field.init}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _made(kind: Any, value: Any, name: str) -> Any:
    """Return what JSON holds as a value of a type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        nested = [each for each in arguments if is_dataclass(each) or get_origin(each) in (tuple, Mapping)]
        return _made(nested[0], value, name) if nested and isinstance(value, Mapping | list) else value
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} must map its fields to values, got {value!r:.80}")
        known = {field.name: field for field in fields(kind) if field.init}
        check_keys(value, known, name)
        hints = get_type_hints(kind)
        given = {key: _made(hints[key], each, f"{name}.{key}") for key, each in value.items()}
        try:
            return kind(**given)
        except TypeError as error:
            raise ValueError(f"{name}: {error}") from None
    if origin is tuple and isinstance(value, list | tuple):
        inner = arguments[:1] * len(value) if arguments[1:] == (...,) else arguments
        return tuple(_made(each, item, name) for each, item in zip(inner, value, strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        key, of = arguments
        return {key(each): _made(of, item, f"{name}[{each}]") for each, item in value.items()}
    return np.asarray(value) if kind == NDArray[np.int64] or origin is np.ndarray else value
