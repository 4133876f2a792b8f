"""Records: what the user's function `Recipe.record` gets, and what it returns.

the fields of a sample --Recipe.record--> str, list of turns or dict --> a record as in JSON Lines
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.functions import UserFunction

RECORD_FIELD: Final = "__record__.json"
"""The field of a record that the function has made already: in files of records it is called before media are read."""
LEFT_OUT: Final = "*"
"""The name under which samples that the function leaves out are counted, among the fields that are ignored."""
ADDED_FIELDS: Final = "fields"
"""The key of a record under which the function adds fields of its own, for `Recipe.keep`."""
_CHECKED_SAMPLES: Final = 3


@dataclass(frozen=True, slots=True)
class Media:
    """A reference to one media item of a sample, in place of its bytes.

    Attributes:
        field: name of the field, or column.
        number: of the item in its list; 0 if the field has one item.
    """

    field: str
    number: int = 0


class LeftOut(Exception):
    """The user's function leaves the sample out."""


def made_record(function: UserFunction, record: dict[str, Any]) -> dict[str, Any]:
    """Return the record that the function makes, as a copy: a text under "text", a list of turns under "messages".
    Raises LeftOut if it returned None; DecodeError.
    """
    made = function(record)
    if made is None:
        raise LeftOut
    if not isinstance(made, str | list | tuple | Mapping):
        raise function.wrong(
            f"returned {_article(type(made).__name__)}: return a string, a list of turns, a dict as in JSON Lines, or "
            "None to leave the sample out"
        )
    try:
        plain = _plain(made, function, "")
    except RecursionError:
        raise function.wrong("returned a value that is nested too deeply") from None
    if isinstance(plain, str):
        return {"text": plain}
    if isinstance(plain, dict) and not isinstance(plain.get(ADDED_FIELDS, {}), dict):
        raise function.wrong(
            f'returned "{ADDED_FIELDS}" that is {_article(type(plain[ADDED_FIELDS]).__name__)}: return a dict of name '
            "-> value there, for Recipe.keep, or another name"
        )
    return plain if isinstance(plain, dict) else {"messages": plain}


def check_function(function: UserFunction, number: int, record: Callable[[], dict[str, Any]]) -> None:
    """Call the function twice for the first samples of a shard. Raises FunctionError if it changes its record, or gives
    another result the second time.
    `record` returns a new record each time, equal to the others.
    """
    if number >= _CHECKED_SAMPLES:
        return
    given, untouched = record(), record()
    first = _outcome(function, given)
    if repr(given) != repr(untouched):
        raise function.unfit("changes the record that it gets: return a new one, such as {**record, ...}")
    if repr(first) != repr(_outcome(function, untouched)):
        raise function.unfit(
            "returns something else when it is called again with an equal record. It is called once for the index and "
            "once for each batch, and must return the same: let it use nothing but its record (no random numbers, "
            "counters, time or order of a set)"
        )


def _outcome(function: UserFunction, record: dict[str, Any]) -> Any:
    try:
        return made_record(function, record)
    except (LeftOut, DecodeError) as error:
        return error


def _plain(value: Any, function: UserFunction, where: str) -> Any:
    """Return a copy made of dicts, lists, strings, numbers, booleans, None and Media. Raises DecodeError."""
    if value is None or isinstance(value, bool | Media):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return _plain(value.item(), function, where)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise function.wrong(f"returned a dict{where} with a key that is no string")
        return {str(key): _plain(item, function, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, function, f"{where}[{number}]") for number, item in enumerate(value)]
    raise function.wrong(
        f"returned {_article(type(value).__name__)} at {where or 'the top'}: use dicts, lists, strings, numbers and "
        "od.Media"
    )


def _article(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
