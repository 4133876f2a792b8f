"""How kernels are compiled: without the interpreter's lock, and cached on disk if a folder is writable.

numba and its compiler take 40 MiB and half a second to import, and a training process that has worker processes may
call no kernel at all. So a kernel is a `Kernel` until its first call, which imports numba and compiles it.
"""

from __future__ import annotations

import functools
import logging  # noqa: F401 - before what is registered below
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

Function = TypeVar("Function", bound=Callable[..., Any])
Ints = NDArray[np.int64]
Ints32 = NDArray[np.int32]


def kernel(function: Function) -> Function:
    """Compile a function for nopython mode, when it is first called. numba caches it next to the source, or in
    NUMBA_CACHE_DIR or the user's cache folder; if none is writable (a container with an unknown user), each process
    compiles again.
    """
    return cast(Function, Kernel(function, _compiled))


def inlined(function: Function) -> Function:
    """Compile a function into the kernels that call it: a call counts references to each array, which prevents
    vectorisation and may take ten times as long as the computation.
    """
    return cast(Function, Kernel(function, _inlined))


# Locked while numba is imported and kernels are created. A process that is forked meanwhile, or while another thread
# compiles, would wait for a thread that it does not have: forking waits for both. Compiling takes numba's own lock
# first, then this one.
_making = threading.RLock()
_compiling: Any = None
"""numba's own lock, once numba is imported."""


def _locks() -> list[Any]:
    return [_making] if _compiling is None else [_compiling, _making]


def _before_fork() -> None:
    while True:
        locks = _locks()
        for lock in locks:
            lock.acquire()
        if locks == _locks():  # numba was not imported while this waited, and will not be until `_making` is released
            return
        _release(locks)


def _after_fork() -> None:
    _release(_locks())


def _release(locks: list[Any]) -> None:
    for lock in reversed(locks):
        lock.release()


# Before a fork, the last registered function runs first. The lock of `logging`, which importing numba takes, must come
# later than ours: that import registers it.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


def load_numba() -> None:
    """Import everything that compiles and loads kernels. numba prepares itself at the first compilation, and processes
    that are forked after that share it.
    """
    config: Any = (
        _numba().config
    )  # the whole package first: threads that import parts at the same time may see it incomplete
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.registry import cpu_target

    if not config.DISABLE_JIT:
        with global_compiler_lock:
            cpu_target.typing_context.refresh()
            cpu_target.target_context.refresh()


@functools.cache
def _numba() -> Any:
    """Import numba. Errors are an ImportError that names it, or the result of `broken`."""
    global _compiling
    try:
        with _making:
            import numba
            from numba.core.compiler_lock import global_compiler_lock
            from numba.core.typing.typeof import typeof

            cast(Any, typeof)(np.empty(0))  # the first array imports more modules, before any lock is taken
            _compiling = global_compiler_lock
    except Exception as error:
        if broken is not None:
            raise broken(error) from error
        raise ImportError(f"numba cannot be imported: {type(error).__name__}: {error}", name="numba") from error
    return numba


broken: Callable[[Exception], Exception] | None = None
"""What to raise where numba cannot be imported; set by the package above, which knows how to tell a user."""


class Kernel:
    """A function that numba compiles when it is first called, by Python or by another compiled kernel; `py_func` is the
    function.
    """

    def __init__(self, function: Callable[..., Any], compile_it: Callable[[Callable[..., Any]], Any]) -> None:
        functools.update_wrapper(self, function)
        self.py_func = function
        self._compile_it = compile_it

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.compiled()(*arguments, **named)

    def compiled(self) -> Any:
        """Return numba's dispatcher, or the function itself under NUMBA_DISABLE_JIT."""
        dispatcher = self.__dict__.get("_compiled")
        if dispatcher is None:
            with _making:
                dispatcher = self.__dict__.get("_compiled") or self._compile_it(self.py_func)
                self.__dict__["_compiled"] = dispatcher
        return dispatcher

    @property
    def _numba_type_(self) -> Any:
        """The type by which numba finds it in another kernel."""
        return self.compiled()._numba_type_

    def __getattr__(self, name: str) -> Any:
        # Protocols of Python, such as copying, look for these also before the kernel is compiled.
        if name.startswith("__") or name in ("py_func", "_compile_it"):
            raise AttributeError(name)
        return getattr(self.compiled(), name)

    def __reduce__(self) -> str | tuple[Any, ...]:
        name = self.py_func.__qualname__
        if getattr(sys.modules.get(self.py_func.__module__), name, None) is self:
            return name  # as functions do: by their name
        return _as_it_is, (self.compiled(),)


def _as_it_is(compiled: Any) -> Any:
    return compiled


def _compiled(function: Callable[..., Any]) -> Any:
    njit = _numba().njit
    try:
        compiled = njit(nogil=True, cache=True)(function)
        # Its cache depends on all sources here: numba checks only the kernel's file, and would use old code of a kernel
        # in another file that has changed.
        cache_file: Any = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
        if getattr(cache_file, "_source_stamp", None) is not None:
            cache_file._source_stamp = (cache_file._source_stamp, sources_stamp())
    except RuntimeError as error:
        if "locator" not in str(error):
            raise
        compiled = njit(nogil=True)(function)
    return _once_a_type(compiled)


@functools.cache
def sources_stamp() -> tuple[tuple[str, int, int], ...]:
    """Return path, size and time of change of each file of kernels."""
    root = Path(__file__).parent
    files = [(path, path.stat()) for path in sorted(root.rglob("[!.]*.py"))]  # editors add hidden files
    return tuple((path.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns) for path, stat in files)


def _inlined(function: Callable[..., Any]) -> Any:
    return _numba().njit(inline="always")(function)


def _once_a_type(compiled: Any) -> Any:
    """Compile for types only: for a kernel that passes a constant, numba would compile again for that value."""
    from numba.core.types import unliteral

    template = getattr(compiled, "get_call_template", None)
    if template is None:  # NUMBA_DISABLE_JIT
        return compiled
    plain: Callable[[Any], Any] = unliteral
    compiled.get_call_template = lambda types, named: template(
        tuple(map(plain, types)), {name: plain(each) for name, each in named.items()}
    )
    return compiled
