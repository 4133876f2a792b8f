"""How kernels are compiled: without the interpreter's lock, and kept on disk where there is a place to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def kernel(function: Kernel) -> Kernel:
    """Compile a function for nopython mode.

    numba keeps compiled code beside the source, or in NUMBA_CACHE_DIR or the user's cache folder. Where it may write
    nowhere (a container with an unknown user) it refuses to import: then each process compiles anew.
    """
    try:
        compiled: Kernel = njit(nogil=True, cache=True)(function)
    except RuntimeError as error:
        if "locator" not in str(error):
            raise
        compiled = njit(nogil=True)(function)
    return compiled
