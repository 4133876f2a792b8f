"""Checking that parsed JSON has the expected shape, when it is loaded and before it is used.

A shape is

    str, dict, ...      a value of exactly this type
    range(a, b)         an integer in the range
    [shape]             a list of any length, of values of this shape
    (shape, shape)      a list of two values
    {"name": shape}     an object with exactly these fields
    {str: shape}        an object with fields of any name

A build checks one small head for each of 100,000 shards, and lists of a million items: so values of the same shape are
checked together, and texts are only created for errors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final

COUNT: Final = range(1 << 62)
"""The shape of counts and of numbers of bytes."""

Check = Callable[[Any, str], None]
_CheckAll = Callable[[Collection[Any], str], None]


def check_shape(value: Any, shape: Any, name: str) -> None:
    """Raise ValueError if a value does not have a shape.

    Args:
        name: of the value, for the error.
    """
    check_of(shape)(value, name)


def check_of(shape: Any) -> Check:
    """Return a function (value, name) that checks many values like `check_shape`."""
    if isinstance(shape, dict):
        return _check_of_names(shape[str]) if str in shape else _check_of_fields(shape)
    if isinstance(shape, list):
        return _check_of_list(shape)
    if isinstance(shape, tuple):
        return _check_of_tuple(shape)
    check_all = _check_of_all(shape)
    return lambda value, name: check_all((value,), name)


def _check_of_fields(shape: dict[str, Any]) -> Check:
    simple = {inner for inner in shape.values() if isinstance(inner, range | type)}
    together = [(_check_of_all(inner), [name for name in shape if shape[name] == inner]) for inner in simple]
    alone = [(name, check_of(inner)) for name, inner in shape.items() if not isinstance(inner, range | type)]
    fields = shape.keys()

    def check(value: Any, name: str) -> None:
        if type(value) is not dict:
            raise _wrong(value, "an object with fields", name)
        if value.keys() != fields:
            raise ValueError(f"{name} has the fields {sorted(value)!r:.200}, and should have {sorted(fields)}")
        for check_all, names in together:
            check_all([value[field] for field in names], name)
        for field, check_one in alone:
            check_one(value[field], f"{name}.{field}")

    return check


def _check_of_names(inner: Any) -> Check:
    check_all = _check_of_all(inner)

    def check(value: Any, name: str) -> None:
        if type(value) is not dict:
            raise _wrong(value, "an object with fields", name)
        check_all(value.values(), name)

    return check


def _check_of_list(shape: list[Any]) -> Check:
    check_all = _check_of_all(shape[0])

    def check(value: Any, name: str) -> None:
        if type(value) is not list:
            raise _wrong(value, "a list", name)
        check_all(value, name)

    return check


def _check_of_tuple(shape: tuple[Any, ...]) -> Check:
    check_all = _check_of_all(shape)
    return lambda value, name: check_all((value,), name)


def _check_of_all(shape: Any) -> _CheckAll:
    """Return a function that checks several values of one shape."""
    if isinstance(shape, tuple):
        columns = list(map(_check_of_all, shape))

        def check(values: Collection[Any], name: str) -> None:
            if not set(map(type, values)) <= {list} or not set(map(len, values)) <= {len(columns)}:
                raise _wrong(values, f"lists of {len(columns)}", name)
            for column, check_all in zip(zip(*values, strict=True), columns, strict=bool(values)):
                check_all(column, name)
    elif isinstance(shape, range):
        first, last = shape[0], shape[-1]

        def check(values: Collection[Any], name: str) -> None:
            if not set(map(type, values)) <= {int} or (values and not first <= min(values) <= max(values) <= last):
                raise _wrong(values, f"numbers from {first} to {last}", name)
    elif isinstance(shape, type):

        def check(values: Collection[Any], name: str) -> None:
            if not set(map(type, values)) <= {shape}:
                raise _wrong(values, f"of type {shape.__name__}", name)
    else:
        check_one = check_of(shape)

        def check(values: Collection[Any], name: str) -> None:
            for number, each in enumerate(values):
                check_one(each, f"{name}[{number}]")

    return check


def _wrong(value: Any, otherwise: str, name: str) -> ValueError:
    return ValueError(f"{name} is {value!r:.120}, and should be {otherwise}")
