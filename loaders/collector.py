"""Python's garbage collector."""

from __future__ import annotations

import atexit
import gc


def leave_out_what_is_loaded() -> None:
    """Let collections pass over all objects that exist now, until the interpreter ends.

    At its end they are freed as usual: otherwise libraries with nanobind, such as triton, print that objects leak.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)
