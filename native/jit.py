"""How kernels are compiled: without the interpreter's lock, and kept on disk where there is a place to write.

numba and its compiler take 40 MiB and half a second to import, and a training process that has worker processes may
call no kernel at all. So a kernel is a `Kernel` until its first call, which imports numba and compiles it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(function: Function) -> Function:
    """Compile a function for nopython mode, when it is first called.

    numba keeps compiled code beside the source, or in NUMBA_CACHE_DIR or the user's cache folder. Where it may write
    nowhere (a container with an unknown user) it refuses to: then each process compiles anew.
    """
    return cast(Function, Kernel(function, _compiled))


def inlined(function: Function) -> Function:
    """A piece of kernels, written into those that call it.

    For pieces that take arrays inside of loops: a call counts references to each array, which keeps the loop from
    being vectorised and may take ten times as long as what it computes.
    """
    return cast(Function, Kernel(function, _inlined))


def load_numba() -> None:
    """Import what compiles kernels and loads compiled ones, all of it.

    numba prepares itself at the first of all compilations. In a process that others are forked off, they share that.
    """
    import numba  # first the whole: threads that import parts of a package at once may find it half made
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.registry import cpu_target

    config: Any = numba.config
    if not config.DISABLE_JIT:
        with global_compiler_lock:
            cpu_target.typing_context.refresh()
            cpu_target.target_context.refresh()


class Kernel:
    """A function that numba has when it is first called, by Python or in another kernel that is compiled.

    Attributes:
        py_func: the function.
    """

    def __init__(self, function: Callable[..., Any], compile_it: Callable[[Callable[..., Any]], Any]) -> None:
        functools.update_wrapper(self, function)
        self.py_func = function
        self._compile_it = compile_it

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.compiled()(*arguments, **named)

    def compiled(self) -> Any:
        """numba's dispatcher; the function itself under NUMBA_DISABLE_JIT."""
        try:
            return self.__dict__["_compiled"]
        except KeyError:
            # Two threads may both make one. No lock: `setdefault` keeps one of them, for all.
            return self.__dict__.setdefault("_compiled", self._compile_it(self.py_func))

    @property
    def _numba_type_(self) -> Any:
        """By which numba knows it in another kernel."""
        return self.compiled()._numba_type_

    def __getattr__(self, name: str) -> Any:
        # What protocols of Python look for, as copying does, also of one that is not made yet.
        if name.startswith("__") or name in ("py_func", "_compile_it"):
            raise AttributeError(name)
        return getattr(self.compiled(), name)

    def __reduce__(self) -> str | tuple[Any, ...]:
        name = self.py_func.__qualname__
        if getattr(sys.modules.get(self.py_func.__module__), name, None) is self:
            return name  # as functions are: by where they are found
        return _as_it_is, (self.compiled(),)


def _as_it_is(compiled: Any) -> Any:
    return compiled


def _compiled(function: Callable[..., Any]) -> Any:
    from numba import njit

    try:
        compiled = njit(nogil=True, cache=True)(function)
    except RuntimeError as error:
        if "locator" not in str(error):
            raise
        compiled = njit(nogil=True)(function)
    return _once_a_type(compiled)


def _inlined(function: Callable[..., Any]) -> Any:
    from numba import njit

    return njit(inline="always")(function)


def _once_a_type(compiled: Any) -> Any:
    """For types alone: called by a kernel with a constant, numba compiles it, and all it calls, for that value anew."""
    from numba.core.types import unliteral

    template = getattr(compiled, "get_call_template", None)
    if template is None:  # NUMBA_DISABLE_JIT
        return compiled
    plain: Callable[[Any], Any] = unliteral
    compiled.get_call_template = lambda types, named: template(
        tuple(map(plain, types)), {name: plain(each) for name, each in named.items()}
    )
    return compiled
