"""Failures of an index, as reports show them. It imports little: `orchdata index` starts without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DataError, reason_kind
from orchdata.loaders.index.index import Index

MOST_KINDS: Final = 10
MOST_EXAMPLES: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureExample:
    """A sample that cannot be used.

    Attributes:
        kind: the reason without quoted names and numbers, as in `Profile.bad_by_reason`.
    """

    kind: str
    shard: str
    key: str
    field: str
    reason: str


def failure_examples(failures: Iterable[DataError]) -> tuple[FailureExample, ...]:
    """Return at most three failures of each of the ten most frequent kinds, the most frequent first."""
    by_kind: dict[str, list[FailureExample]] = {}
    counts: Counter[str] = Counter()
    for failure in failures:
        kind = reason_kind(failure.reason)
        counts[kind] += 1
        examples = by_kind.setdefault(kind, [])
        if len(examples) < MOST_EXAMPLES:
            examples.append(
                FailureExample(
                    kind=kind, shard=failure.shard, key=failure.key, field=failure.field, reason=failure.reason
                )
            )
    return tuple(example for kind, _ in counts.most_common(MOST_KINDS) for example in by_kind[kind])


def count_reasons(failures: Iterable[DataError]) -> dict[str, int]:
    """Count failures by kind of reason, the most frequent first; kinds do not differ by quoted names and numbers."""
    return dict(Counter(reason_kind(failure.reason) for failure in failures).most_common())


def split_failures(index: Index, bad: NDArray[np.int64] | None = None) -> tuple[list[DataError], list[DataError]]:
    """Return the failures of samples, and those of whole shards (with an empty key), of `bad` rows or of all."""
    failures = [index.failure(int(row)) for row in (index.bad_rows() if bad is None else bad)]
    return [failure for failure in failures if failure.key], [failure for failure in failures if not failure.key]
