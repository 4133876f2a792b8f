"""Tokens of rows as orders ask for them, listed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass
class Listed:
    """Tokens of rows, listed; `asked` is how many were looked up."""

    tokens: Ints
    asked: int = 0

    def __call__(self, row: Ints) -> Ints:
        self.asked += len(row)
        return self.tokens[row]
