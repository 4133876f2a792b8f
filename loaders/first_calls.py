"""The first calls of a process to Intel's vector math, done by one thread before several threads can do them together.

torch passes cos, exp, log10, sqrt and the like to MKL, which chooses a kernel at the first call of each. Threads that
make that call at the same moment may get a kernel with a quarter of the digits: errors of 1e-4, in one result, without
a message (pytorch/pytorch#188792; oneMKL 2024.2, which is in torch's wheels). A window or kernel that is computed then
and kept stays wrong until the process ends.
"""

from __future__ import annotations

import threading
from typing import Final

# Functions for which torch has vector math, or which it builds on one of these.
_FUNCTIONS: Final = (
    *("acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "lgamma", "log"),
    *("log10", "log1p", "log2", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)
_VALUES: Final = 64  # a few vectors

_lock = threading.Lock()
_is_settled = False


def settle_first_calls() -> None:
    """Make these calls, once per process; a fork inherits the result. Takes some milliseconds."""
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
