"""What becomes of samples that cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from orchdata.loaders.errors import DataError


@dataclass(frozen=True, slots=True)
class ErrorPolicy:
    """Raise at the first failure, or skip failures within a budget.

    Under "skip" the global batches and the loss denominator stay as planned: a sample that fails while decoding
    contributes nothing to the loss, and is counted and listed on the rank that met it.

    Attributes:
        action: "raise" or "skip".
        max_failures: with "skip", the most failures to bear: a count, or a Fraction of the data set's samples.
            None bears any number. Failures found by the index count too, a damaged shard by its samples (by its bytes,
            where it does not tell how many it had), and a sample that fails in each epoch counts once.
        handler: called with each DataError, on the thread that iterates.
    """

    action: Literal["raise", "skip"] = "raise"
    max_failures: int | Fraction | None = None
    handler: Callable[[DataError], None] | None = None

    def __post_init__(self) -> None:
        if self.action not in ("raise", "skip"):
            raise ValueError(f"on_error must be 'raise', 'skip' or an od.ErrorPolicy, got {self.action!r}")
        allowed = self.max_failures
        if allowed is not None and (isinstance(allowed, bool) or not isinstance(allowed, (int, Fraction))):
            raise TypeError(f"max_failures is a count (int) or a share (fractions.Fraction), got {allowed!r}")
        if allowed is not None and allowed < 0:
            raise ValueError(f"max_failures must be at least 0, got {allowed}")
        if self.handler is not None and not callable(self.handler):
            raise TypeError(f"handler is called with each DataError, got {self.handler!r}")

    def budget(self, num_samples: int) -> int | None:
        """Failures allowed over `num_samples` samples; None for no limit."""
        if isinstance(self.max_failures, Fraction):
            return int(self.max_failures * num_samples)
        return self.max_failures


def as_policy(value: str | ErrorPolicy) -> ErrorPolicy:
    """The `on_error=` argument of a DataLoader."""
    return value if isinstance(value, ErrorPolicy) else ErrorPolicy(value)  # type: ignore[arg-type]
