"""Frozen values and JSON: a dataclass -> plain dicts, lists and numbers -> the same dataclass."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, Self, get_args, get_origin, get_type_hints

import numpy as np


@dataclass(frozen=True, slots=True)
class Value:
    """A dataclass that JSON can hold."""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-safe values by the names of the fields."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self), default=lambda array: array.tolist()))
        return plain

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """Return the value of which `to_dict` returned this. Raises ValueError for an unknown or missing field."""
        made: Self = _made(cls, given, cls.__name__)
        return made


def check_keys(given: Iterable[Any], known: Iterable[str], name: str) -> None:
    """Raise ValueError for a key that is none of those known."""
    if unknown := sorted(set(map(str, given)) - set(known)):
        raise ValueError(f"{name} has {unknown[0]!r}, which is none of its fields: {', '.join(known)}")


def checked_number(value: Any, name: str, *, most: float = math.inf) -> float:
    """Return a finite number above 0, and at most `most`. Raises ValueError for another."""
    good = isinstance(value, int | float | np.number) and not isinstance(value, bool) and 0 < value <= most
    if not good or value == math.inf:
        limit = f", at most {most:g}" if most < math.inf else ""
        raise ValueError(f"{name} must be a finite number above 0{limit}, got {value!r}")
    return float(value)


def _made(kind: Any, value: Any, name: str) -> Any:
    """Return what JSON holds as a value of a type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if type(None) in arguments:
        return None if value is None else _made(arguments[0], value, name)
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} must map its fields to values, got {value!r:.80}")
        hints = get_type_hints(kind)
        check_keys(value, hints, name)
        try:
            return kind(**{key: _made(hints[key], each, f"{name}.{key}") for key, each in value.items()})
        except (AttributeError, TypeError) as error:
            raise ValueError(f"{name}: {error}") from None
    if origin is tuple:
        inner = arguments[:1] * len(value) if arguments[1:] == (...,) else arguments
        return tuple(_made(each, item, name) for each, item in zip(inner, value, strict=True))
    if origin is Mapping:
        key, of = arguments
        if not isinstance(value, Mapping) or not all(str(each).isdecimal() for each in value if key is int):
            raise ValueError(
                f"{name} must map {'whole numbers' if key is int else 'names'} to values, got {value!r:.80}"
            )
        return {key(each): _made(of, item, f"{name}[{each}]") for each, item in value.items()}
    if kind in (str, bool) and not isinstance(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, got {value!r:.80}")
    return np.asarray(value) if origin is np.ndarray else value
