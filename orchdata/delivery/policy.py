"""What a loader counts: samples that cannot be used, which raise an error or count against a budget; and statistics.

bad rows of the index --by source--> within the budget of the policy? --> a warning, or TooManyFailures
failures of a step    --FailureBudget--> Stats, or TooManyFailures
figures of a step     -----------------> Stats: balance achieved, time by stage
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fractions import Fraction
from math import ceil, sqrt
from os import PathLike
from typing import Any, Final, Literal, NamedTuple, cast

import torch.distributed as dist

from orchdata.building.step import STAGES, START, BuiltStep, added, plain_figures, shown
from orchdata.loaders.errors import DataError, TooManyFailures, reason_kind
from orchdata.loaders.storage.storage import ReadBytes
from orchdata.quarantine import sample_names
from orchdata.ranks.agreement import gather_json

DEFAULT_SHARE: Final = Fraction(1, 100)
"""The share of samples that may fail under on_error="skip"."""
_CHANCE: Final = 4
"""A rank may have this many standard deviations more failures than its part of the share."""
_UNKNOWN_FLOOR: Final = 10
"""Failures that a data set of unknown length may have, however few samples were delivered."""
_LISTED: Final = '`orchdata verify PATHS --out bad.jsonl` lists bad samples, and quarantine="bad.jsonl" leaves them out'


@dataclass(frozen=True, slots=True)
class ErrorPolicy:
    """Raise at the first failure, or skip failures within a budget.

    With "skip" the global batches and the loss denominator stay as planned: a sample that fails while decoding
    contributes nothing to the loss, and is counted and listed on its rank.

    Attributes:
        action: "raise" or "skip".
        max_failures: with "skip", the most samples that may fail: a count, or a Fraction of the data set's samples;
            by default Fraction(1, 100). None allows any number. Failures that the index lists count too, a damaged
            shard by its samples (estimated from its bytes if their number is unknown), and a sample that fails in each
            epoch counts once. Samples that a quarantine or a filter leaves out do not count. More failures raise
            TooManyFailures: when the loader is made, or at the step that has them.
        handler: called with each DataError, on the thread that iterates.
        blank: samples of shards that are delivered like one that fails to decode, under "raise" too: (shard, key)
            pairs, of a mixture (source, shard, key), or the path of a JSON Lines file of them. They are never read, do
            not count as failures, and give no loss; order and plan stay, so the list may change at any resume. All
            pieces and windows of a key are meant. Ranks need equal lists.

    What the index lists is compared with the share of each source of a mixture, on every rank. Later failures are
    compared with the share of all samples, on the rank that has them; of several ranks each may also have no more in an
    epoch than its part of the rest of the share, with four standard deviations of room for chance. A share
    above 0 allows at least one later failure if the index lists none. For a data set of unknown length a share is one
    of the samples delivered so far, and ten failures never raise.
    """

    action: Literal["raise", "skip"] = "raise"
    max_failures: int | Fraction | None = DEFAULT_SHARE
    handler: Callable[[DataError], None] | None = None
    blank: Iterable[tuple[str, ...]] | str | PathLike[str] = ()

    def __post_init__(self) -> None:
        if self.action not in ("raise", "skip"):
            raise ValueError(f"on_error must be 'raise', 'skip' or an od.ErrorPolicy, got {self.action!r}")
        allowed = self.max_failures
        most = 1 if isinstance(allowed, Fraction) else float("inf")
        if isinstance(allowed, bool) or not isinstance(allowed, int | Fraction | None):
            raise TypeError(
                f"max_failures must be a count (int) or a share (Fraction(1, 100) for 1 %), got {allowed!r}"
            )
        if allowed is not None and not 0 <= allowed <= most:
            raise ValueError(f"max_failures must be at least 0, and a share at most 1, got {allowed}")
        if self.handler is not None and not callable(self.handler):
            raise TypeError(f"handler must be callable with a DataError, got {self.handler!r}")
        if self.blank != ():
            object.__setattr__(self, "blank", tuple(sample_names(self.blank, "blank", 3)))

    @property
    def blank_names(self) -> tuple[tuple[str, ...], ...]:
        """The samples that are blank, as they are in the list."""
        return cast("tuple[tuple[str, ...], ...]", self.blank)

    def budget(self, num_samples: int) -> int | None:
        """Return the number of failures allowed over `num_samples` samples; None for no limit."""
        if isinstance(self.max_failures, Fraction):
            return int(self.max_failures * num_samples)
        return self.max_failures


@dataclass(eq=False)
class FailureBudget:
    """Counts a loader's failures in `stats`, and compares them with its policy. `num_samples` of the data set includes
    bad and lost ones; 0 if unknown.
    """

    policy: ErrorPolicy
    stats: Stats
    num_samples: int
    num_ranks: int = 1
    _num_listed: int = 0
    _epoch: int = -1
    _failed: set[tuple[str, str]] = field(default_factory=set)

    def start(self, failures: Sequence[DataError], *, lost: int = 0) -> None:
        """Count what is known before the first step: failures, and `lost` samples that damage hides.

        Raises the first one if the policy is "raise".
        """
        if failures:
            self._add(failures, lost)
            self._num_listed = self.stats.num_failed_samples

    def count(self, failures: Sequence[DataError], epoch: int) -> None:
        """Count the failures of a step of an epoch.

        Raises the first one if the policy is "raise", or TooManyFailures if it allows no more.
        """
        self._add(failures)
        if self.policy.max_failures is None:
            return
        # All that failed, of all samples.
        failed = self.stats.num_failed_samples
        if failed > self._most(failed):
            self._refuse(f"{failed:,}{self._of_all} samples failed", failed, failures[-1])
        # What failed in this epoch, of this rank's samples.
        if epoch != self._epoch:
            self._epoch, self._failed = epoch, set()
        self._failed.update((failure.shard, failure.key) for failure in failures)
        if (failed := len(self._failed)) > (most := self._most_of_rank()):
            what = f"{failed:,} samples of this rank failed in epoch {epoch}, its part of the budget is {most:,.0f}"
            self._refuse(f"{what}; of all{self._of_all} samples", failed * self.num_ranks, failures[-1])

    @property
    def _of_all(self) -> str:
        return f" of {self.num_samples:,}" if self.num_samples else ""

    def _most(self, failed: int) -> int:
        """Return how many samples may fail."""
        share = self.policy.max_failures
        if not isinstance(share, Fraction):
            return failed if share is None else share
        if not share:
            return 0
        if not self.num_samples:
            return max(_UNKNOWN_FLOOR, int(share * self.stats.num_samples))
        return max(1, int(share * self.num_samples))

    def _most_of_rank(self) -> float:
        """Return how many samples of this rank may fail in an epoch."""
        share = self.policy.max_failures
        if self.num_ranks == 1 or not isinstance(share, Fraction):
            return float("inf")
        mean = max(0.0, float(share * self.num_samples - self._num_listed) / self.num_ranks)
        return ceil(mean + _CHANCE * sqrt(mean)) + 1

    def _add(self, failures: Sequence[DataError], lost: int = 0) -> None:
        if self.policy.action == "raise":
            failures[0].add_note(f"Of shards, {_LISTED}.")
            raise failures[0]
        self.stats.add_failures(failures, lost=lost)
        if self.policy.handler is not None:
            for failure in failures:
                self.policy.handler(failure)

    def _refuse(self, what: str, count: int, last: DataError) -> None:
        reasons = most_frequent(self.stats.reasons)
        text = over_budget(
            self.policy, what, count=count, num_samples=self.num_samples, reasons=f"{reasons}; the last: {last}"
        )
        raise TooManyFailures(text) from last


def over_budget(policy: ErrorPolicy, what: str, *, count: int, num_samples: int, reasons: str) -> str:
    """Return the text of the error for more failures than a policy allows, with the way to allow more."""
    most = policy.max_failures
    share = most if isinstance(most, Fraction) else None
    allowed = f"{policy.budget(num_samples):,}" if num_samples or share is None else "a share"
    of = "" if share is None else f" ({float(100 * share):.4g} %)"
    more = f"{count}" if share is None or not num_samples else f"Fraction({ceil(100 * count / num_samples)}, 100)"
    return (
        f"{what}, the policy allows {allowed}{of}: {reasons}. Of shards, {_LISTED}; or repair them, or allow more: "
        f'on_error=od.ErrorPolicy("skip", max_failures={more}); None allows any number'
    )


def most_frequent(reasons: Counter[str]) -> str:
    """Return the three most frequent reasons with their counts, and how many samples have others."""
    shown = reasons.most_common(3)
    others = reasons.total() - sum(count for _, count in shown)
    return "; ".join(
        [f"{count:,} x {reason}" for reason, count in shown] + ([f"and {others:,} more"] if others else [])
    )


_EXPLAINED: Final = 1000
"""Bad samples with reasons that a warning or an error counts."""


class Unusable(NamedTuple):
    """Samples of one source that cannot be used.

    Attributes:
        failures: of those that are listed.
        num_lost: further ones, which damage hides.
        num_samples: of the source, with those that cannot be used.
        name: of the source in a mixture; empty for one data set.
    """

    failures: Sequence[DataError]
    num_lost: int
    num_samples: int
    name: str = ""

    @property
    def total(self) -> int:
        """All samples that cannot be used."""
        return len(self.failures) + self.num_lost


def refuse_above_budget(sources: Sequence[Unusable], policy: ErrorPolicy) -> None:
    """Under "skip", raise TooManyFailures for more samples than allowed: a share of each source, or a count of all."""
    if policy.action == "raise":
        return
    if isinstance(policy.max_failures, int) and len(sources) > 1:
        failures = [failure for source in sources for failure in source.failures[:_EXPLAINED]]
        num_lost = sum(source.total for source in sources) - len(failures)
        sources = [Unusable(failures, num_lost, sum(source.num_samples for source in sources))]
    for source in sources:
        allowed = policy.budget(source.num_samples)
        if allowed is None or source.total <= allowed or not source.failures:
            continue
        of = f" of source {source.name!r}" if source.name else ""
        text = over_budget(
            policy,
            f"{source.total:,} of {source.num_samples:,} samples{of} cannot be used",
            count=source.total,
            num_samples=source.num_samples,
            reasons=f"{reasons_of(source.failures)}; the first: {source.failures[0]}",
        )
        raise TooManyFailures(text)


def reasons_of(failures: Sequence[DataError]) -> str:
    """Return the most frequent reasons with their counts."""
    reasons = Counter(reason_kind(failure.reason) for failure in failures[:_EXPLAINED])
    shown = most_frequent(reasons)
    return f"of the first {_EXPLAINED:,}: {shown}" if len(failures) > _EXPLAINED else shown


_LISTED_FAILURES = 1000


@dataclass
class TorchCounts:
    """Counts of steps from torch's loader, which have no plan."""

    steps: int = 0
    samples: int = 0
    waiting_seconds: float = 0.0


class Stats:
    """Sums over delivered steps. Ratios are ratios of sums: the sum of largest loads over the sum of mean loads shows
    the time that the whole epoch loses to waiting; a mean of per-step ratios does not.

    `reads` counts the bytes read from shards; None if samples are not in shards.
    """

    def __init__(self, reads: ReadBytes | None = None) -> None:
        self._reads = reads
        self.torch = TorchCounts()
        self.failures: list[DataError] = []
        self.reasons: Counter[str] = Counter()
        self._failed: set[tuple[str, str]] = set()
        self._lost = self.num_failures = self.num_blank = 0
        self._begin()

    def _begin(self) -> None:
        """Begin an interval."""
        self._since = datetime.now(UTC).isoformat(timespec="seconds")
        self.num_steps, self._waiting_seconds = 0, 0.0
        self._seconds: Counter[str] = Counter()
        self._totals = START
        self._read_before = None if self._reads is None else self._reads.as_dict()
        vars(self.torch).update(vars(TorchCounts()))  # streams of torch's loader keep this object

    def add_step(self, built: BuiltStep, waiting_seconds: float) -> None:
        self.num_steps += 1
        self._waiting_seconds += waiting_seconds
        self._seconds.update(built.seconds)
        self._totals = added(self._totals, built.figures)

    def add_failures(self, failures: Sequence[DataError], *, lost: int = 0) -> None:
        """Count failures, and `lost` samples, which cannot be listed because damage hides them."""
        self._lost += lost
        self.num_failures += len(failures)
        self.reasons.update(reason_kind(failure.reason) for failure in failures)
        self._failed.update((failure.shard, failure.key) for failure in failures)
        self.failures.extend(failures[: _LISTED_FAILURES - len(self.failures)])

    @property
    def num_samples(self) -> int:
        """Number of samples that were delivered, or failed."""
        return int(self._totals["samples"])

    @property
    def num_failed_samples(self) -> int:
        """Number of distinct failed samples, with lost ones: a sample that fails in every epoch counts once."""
        return len(self._failed) + self._lost

    def gather_failures(self, group: Any = None) -> list[DataError]:
        """Return the listed failures of all ranks: see `DataLoader.gather_failures`."""
        by_rank = [[list(failure.args) for failure in self.failures]]
        if dist.is_available() and dist.is_initialized():
            by_rank = gather_json(by_rank[0], dist.group.WORLD if group is None else group)
        return sorted({DataError(*args) for each in by_rank for args in each}, key=lambda failure: failure.args)

    def as_dict(self, *, reset: bool = False) -> dict[str, Any]:
        """Return plain values, of which docs/stats.md describes every key. `reset` begins to count again, once they are
        read; failures are counted since the loader was made. Reads include those of prefetched steps.
        """
        torch, num_steps = self.torch, self.num_steps + self.torch.steps
        steps, totals = max(1, num_steps), self._totals
        if torch.steps:
            totals = added(totals, plain_figures(torch.steps, torch.samples))
        reads = self._reads_since()
        found = {
            "since": self._since,
            "steps": num_steps,
            **shown(totals, steps),
            "read_amplification": reads["storage_bytes"] / reads["used_bytes"]
            if reads and reads["used_bytes"]
            else None,
            "reads": reads,
            "milliseconds": {
                "waiting": 1000 * (self._waiting_seconds + torch.waiting_seconds) / steps,
                **{stage: 1000 * self._seconds[stage] / steps for stage in STAGES},
            },
            "failures": {
                "count": self.num_failures + self._lost,
                "lost": self._lost,
                "blank": self.num_blank,
                "by_reason": dict(self.reasons.most_common()),
                "samples": [
                    {"shard": f.shard, "key": f.key, "field": f.field, "reason": f.reason} for f in self.failures
                ],
            },
        }
        if reset:
            self._begin()
        return found

    def _reads_since(self) -> dict[str, Any] | None:
        """Return the bytes read in this interval; None if samples are not in shards."""
        if self._reads is None or self._read_before is None:
            return None
        now, before = self._reads.as_dict(), self._read_before
        requests, requests_before = now.pop("requests", {}), before.get("requests", {})
        found = {name: value - before[name] for name, value in now.items()}
        if requests:  # there is object storage
            found["requests"] = {kind: count - requests_before.get(kind, 0) for kind, count in requests.items()}
        return found


def flattened(stats: Mapping[str, Any], above: str = "") -> dict[str, int | float]:
    """Return the numbers of `Stats.as_dict` with nested keys joined by "/", without those of single reasons."""
    found: dict[str, int | float] = {}
    for name, value in stats.items():
        if isinstance(value, Mapping) and name != "by_reason":
            found |= flattened(value, f"{above}{name}/")
        elif isinstance(value, int | float):
            found[f"{above}{name}"] = value
    return found
