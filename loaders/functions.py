"""Functions of the user's: their ids, which are part of a recipe's fingerprint, and calls with errors that name them.

An id says what a function computes, and must not depend on the process or on the version of Python. It is given, or a
hash of the function's source text. The text says everything only if the function uses nothing but its arguments,
builtins and modules of installed packages; for any other function the id must be given.
"""

from __future__ import annotations

import builtins
import dis
import hashlib
import importlib.util
import inspect
import io
import sys
import sysconfig
import textwrap
import tokenize
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

from orchdata.loaders.environment import OWN
from orchdata.loaders.errors import DecodeError, FunctionError, pass_trouble
from orchdata.loaders.memory import pass_shortage

_ID_BYTES: Final = 16
_PLAIN: Final = (type(None), bool, int, float, str, bytes)
_LATE: Final = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
_OUTSIDE: Final = frozenset("open input eval exec compile globals __import__".split())
"""Builtins that bring in what no source text says, such as the content of a file."""
_LAYOUT: Final = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)


@dataclass(frozen=True, eq=False)
class UserFunction:
    """A function of the user's."""

    argument: str  # name of the argument that it was given for, such as "Recipe.record"
    function: Callable[..., Any]
    id: str  # its identity, in fingerprints
    digest: str  # of its source text without comments; "" if the text is not available

    @classmethod
    def of(cls, argument: str, function: Any, id: str | None) -> UserFunction:
        """Check a function and its id (None: from the source text). The id's argument is called `<argument>_id`.

        Raises TypeError for no function or id, and ValueError if no id is given and the source text does not say all.
        """
        if not callable(function):
            raise TypeError(f"{argument} must be a function, got {type(function).__name__}")
        if any(each(function) for each in _LATE):
            raise TypeError(f"{argument} must return its result, and a function with `async` or `yield` does not")
        if id is not None and (not isinstance(id, str) or not id):
            raise TypeError(f"{argument}_id must be a string that is not empty, got {id!r}")
        if id is None:
            source = _source(function)
            problem = _unknown_part(function) or (None if source else "its source text is not available")
            if problem is not None or source is None:
                name = getattr(function, "__qualname__", type(function).__name__)
                raise ValueError(
                    f"{argument}: the id of {name} cannot be made from its source text: {problem}. Give "
                    f'{argument.rpartition(".")[2]}_id="...", a string that you change whenever the function returns '
                    "something else; it is part of the fingerprint of indexes and states"
                )
            # The modules that it uses are a part of the id, by the names that it uses.
            used = {name: function.__globals__.get(name) for name in sorted(set(_used(function.__code__, "GLOBAL")))}
            modules = [f"{name}={value.__name__}" for name, value in used.items() if isinstance(value, ModuleType)]
            id = "source:" + _digest([source, *modules])
        return cls(argument, function, id, source_digest(function))

    @property
    def name(self) -> str:
        """The function's own name."""
        return str(getattr(self.function, "__qualname__", type(self.function).__name__))

    def __call__(self, *arguments: Any) -> Any:
        """Call it. Raises DecodeError, with the function and the line, for any exception that is about the data."""
        try:
            return self.function(*arguments)
        except Exception as error:
            where = self._at(line_in(error, self.function))
            pass_shortage(error)
            pass_trouble(error, where)
            said = " ".join(str(error).split())[:200]
            raise DecodeError(f"{where}: {type(error).__name__}{f': {said}' if said else ''}") from error

    def wrong(self, reason: str) -> DecodeError:
        """Return the error for a result that cannot be used, with the function and the line where it begins."""
        code = getattr(self.function, "__code__", None)
        return DecodeError(f"{self._at(None if code is None else code.co_firstlineno)} {reason}")

    def _at(self, line: int | None) -> str:
        return f"{self.argument}: {self.name}{'' if line is None else f', line {line}'}"

    def unfit(self, reason: str) -> FunctionError:
        """Return the error for a function that cannot be used with any data."""
        return FunctionError(f"{self.argument}: {self.name} {reason}")


def source_digest(function: Any) -> str:
    """Return a digest of a function's source text without comments; "" if the text is not available."""
    source = _source(function)
    if source is None:
        return ""
    with suppress(tokenize.TokenError, SyntaxError):
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
        source = " ".join(token.string for token in tokens if token.type not in _LAYOUT)
    return _digest([source])


def _digest(texts: list[str]) -> str:
    return hashlib.blake2b("\0".join(texts).encode("utf-8", "surrogateescape"), digest_size=_ID_BYTES).hexdigest()


def _source(function: Any) -> str | None:
    """Return the source text of a function, without its indentation and white space at line ends."""
    try:
        lines, _ = inspect.getsourcelines(function)
    except (OSError, TypeError):
        return None
    return "\n".join(line.rstrip() for line in textwrap.dedent("".join(lines)).splitlines()).strip()


def _unknown_part(function: Any) -> str | None:
    """Return what a function uses that its source text does not contain, or None."""
    if not isinstance(function, FunctionType):
        return f"it is a {type(function).__name__}, not a function that `def` makes"
    if function.__name__ == "<lambda>":
        return "a lambda has no source text of its own; write it with `def`"
    if function.__closure__:
        return f"it uses {', '.join(function.__code__.co_freevars)} of the function around it"
    if hasattr(function, "__wrapped__"):
        return "it is wrapped by a decorator"
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    if not all(isinstance(value, _PLAIN) for value in defaults):
        return "an argument has a default that is no string or number"
    for name in _used(function.__code__, "GLOBAL"):
        if name in function.__globals__:
            value = function.__globals__[name]
            if value is function:
                continue
            if not isinstance(value, ModuleType):
                return f"it uses {name}, which is defined outside of it"
            if not _is_installed(value.__name__):
                return f"it uses the module {name}, which is code of your own"
        elif not hasattr(builtins, name):
            return f"it uses {name}, which is not defined"
        elif name in _OUTSIDE:
            return f"it uses {name}, and what that brings in is not in the text"
    own = next((name for name in _used(function.__code__, "IMPORT_NAME") if not _is_installed(name)), None)
    return None if own is None else f"it imports {own}, which is code of your own, or not installed"


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and of the functions and classes in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _used(code: CodeType, operation: str) -> list[str]:
    """Return the names in instructions of this kind, in a function and in what is defined in it."""
    instructions = [instruction for each in _codes(code) for instruction in dis.get_instructions(each)]
    return [str(instruction.argval) for instruction in instructions if operation in instruction.opname]


def _is_installed(module: str) -> bool:
    """Return whether a module belongs to Python, to an installed package, or to this library."""
    package = module.partition(".")[0]
    if package == OWN or package in sys.stdlib_module_names:
        return True
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    folders = {Path(path).resolve() for name in ("purelib", "platlib") if (path := sysconfig.get_path(name))}
    return any(place is not None and folders & {*Path(place).resolve().parents} for place in places)


def line_in(error: BaseException, function: Any) -> int | None:
    """Return the line of a function at which an exception left it."""
    code = getattr(function, "__code__", None)
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code is code]
    return lines[-1] if lines else None
