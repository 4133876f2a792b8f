"""Handling of samples that cannot be used: they raise an error, or count against a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from orchdata.delivery.stats import Stats
from orchdata.loaders.errors import DataError, TooManyFailures


@dataclass(frozen=True, slots=True)
class ErrorPolicy:
    """Raise at the first failure, or skip failures within a budget.

    With "skip" the global batches and the loss denominator stay as planned: a sample that fails while decoding
    contributes nothing to the loss, and is counted and listed on its rank.

    Attributes:
        action: "raise" or "skip".
        max_failures: with "skip", the most failures allowed: a count, or a Fraction of the data set's samples. None
            allows any number. Failures that the index lists count too, a damaged shard by its samples (estimated from
            its bytes if their number is unknown), and a sample that fails in each epoch counts once.
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
            raise TypeError(f"max_failures must be a count (int) or a share (fractions.Fraction), got {allowed!r}")
        if allowed is not None and allowed < 0:
            raise ValueError(f"max_failures must be at least 0, got {allowed}")
        if self.handler is not None and not callable(self.handler):
            raise TypeError(f"handler must be callable with a DataError, got {self.handler!r}")

    def budget(self, num_samples: int) -> int | None:
        """Return the number of failures allowed over `num_samples` samples; None for no limit."""
        if isinstance(self.max_failures, Fraction):
            return int(self.max_failures * num_samples)
        return self.max_failures


class FailureBudget:
    """Counts a loader's failures, and compares them with its policy.

    Args:
        policy: how to handle them.
        stats: counts and lists them.
        num_samples: of the data set, including bad and lost ones.
    """

    def __init__(self, policy: ErrorPolicy, stats: Stats, num_samples: int) -> None:
        self._policy = policy
        self._stats = stats
        self._allowed = policy.budget(num_samples)

    def count(self, failures: Sequence[DataError], *, lost: int = 0) -> None:
        """Count failures, and `lost` samples that damage hides.

        Raises the first one if the policy is "raise", or TooManyFailures if it allows no more.
        """
        if not failures:
            return
        if self._policy.action == "raise":
            raise failures[0]
        self._stats.add_failures(failures, lost=lost)
        if self._policy.handler is not None:
            for failure in failures:
                self._policy.handler(failure)
        failed = self._stats.num_failed_samples
        if self._allowed is not None and failed > self._allowed:
            raise TooManyFailures(
                f"{failed} samples failed, the policy allows {self._allowed}; the last: {failures[-1]}"
            ) from failures[-1]


def as_policy(value: str | ErrorPolicy) -> ErrorPolicy:
    """Return the policy of a DataLoader's argument `on_error=`."""
    return value if isinstance(value, ErrorPolicy) else ErrorPolicy(value)  # type: ignore[arg-type]
