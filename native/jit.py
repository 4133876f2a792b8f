"""How kernels are compiled: without the interpreter's lock, and kept on disk where there is a place to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit
from numba.core.types import unliteral

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def kernel(function: Kernel) -> Kernel:
    """Compile a function for nopython mode.

    numba keeps compiled code beside the source, or in NUMBA_CACHE_DIR or the user's cache folder. Where it may write
    nowhere (a container with an unknown user) it refuses to import: then each process compiles anew.
    """
    return _compiled(function)


def inlined(function: Kernel) -> Kernel:
    """A piece of kernels, written into those that call it.

    For pieces that take arrays inside of loops: a call counts references to each array, which keeps the loop from
    being vectorised and may take ten times as long as what it computes.
    """
    piece: Kernel = njit(inline="always")(function)
    return piece


def kernel_at_import(signature: str) -> Callable[[Kernel], Kernel]:
    """Compile a function for one signature where it is defined, or load it from disk.

    For the first kernel that everybody calls: numba prepares itself at the first of all compilations, which takes a
    quarter of a second that belongs to importing and not to the first step.
    """
    return lambda function: _compiled(function, signature)


def _compiled(function: Kernel, signature: str | None = None) -> Kernel:
    try:
        compiled = njit(signature, nogil=True, cache=True)(function)
    except RuntimeError as error:
        if "locator" not in str(error):
            raise
        compiled = njit(signature, nogil=True)(function)
    kept: Kernel = _once_a_type(compiled)
    return kept


def _once_a_type(compiled: Any) -> Any:
    """For types alone: called by a kernel with a constant, numba compiles it, and all it calls, for that value anew."""
    template = getattr(compiled, "get_call_template", None)
    if template is None:  # NUMBA_DISABLE_JIT
        return compiled
    plain: Callable[[Any], Any] = unliteral
    compiled.get_call_template = lambda types, named: template(
        tuple(map(plain, types)), {name: plain(each) for name, each in named.items()}
    )
    return compiled
