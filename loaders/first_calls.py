"""The first calls of a process to Intel's vector math: made by one thread, before any two can make them together.

torch hands cos, exp, log10, sqrt and their like to MKL, which settles at the first call of each which kernel it takes.
Threads that make that call at the same moment may get one of a quarter of the digits instead: errors of 1e-4, in one
result, and nothing said (pytorch/pytorch#188792; oneMKL 2024.2, which torch's wheels hold). A window or a kernel that
is computed then and kept is wrong for as long as its process lives.
"""

from __future__ import annotations

import threading
from typing import Final

# Those that torch has vector math for, or that it makes of one that it has.
_FUNCTIONS: Final = (
    *("acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "lgamma", "log"),
    *("log10", "log1p", "log2", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)
_VALUES: Final = 64  # a few vectors

_lock = threading.Lock()
_is_settled = False


def settle_first_calls() -> None:
    """Make them, unless that was done in this process or the one that it was forked off. Takes some milliseconds."""
    global _is_settled
    if _is_settled:
        return
    import torch

    with _lock, torch.no_grad():
        if _is_settled:
            return
        for dtype in (torch.float32, torch.float64):
            values = torch.full((_VALUES,), 0.5, dtype=dtype)
            for name in _FUNCTIONS:
                getattr(torch, name)(values)
        _is_settled = True
