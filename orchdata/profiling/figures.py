"""Named figures, in the shape of `orchdata profile --json`, and those of failures.

It imports little: `orchdata index` starts without torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DataError
from orchdata.loaders.failures import reason_kind
from orchdata.loaders.index.index import Index

MOST_KINDS: Final = 10
MOST_EXAMPLES: Final = 3


class Figures(dict[str, Any]):
    """Figures by name: `figures["samples"]` is `figures.samples`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no figure {name!r}") from None


def failure_examples(failures: Iterable[DataError]) -> tuple[Figures, ...]:
    """Return at most three failures of each of the ten most frequent kinds, the most frequent first."""
    by_kind: dict[str, list[DataError]] = {}
    for failure in failures:
        by_kind.setdefault(reason_kind(failure.reason), []).append(failure)
    frequent = sorted(by_kind.items(), key=lambda kind: -len(kind[1]))[:MOST_KINDS]
    return tuple(
        Figures(kind=kind, shard=each.shard, key=each.key, field=each.field, reason=each.reason)
        for kind, examples in frequent
        for each in examples[:MOST_EXAMPLES]
    )


def count_reasons(failures: Iterable[DataError]) -> dict[str, int]:
    """Count failures by kind of reason, the most frequent first; kinds do not differ by quoted names and numbers."""
    return dict(Counter(reason_kind(failure.reason) for failure in failures).most_common())


def split_failures(index: Index, bad: NDArray[np.int64] | None = None) -> tuple[list[DataError], list[DataError]]:
    """Return the failures of samples, and those of whole shards (with an empty key), of `bad` rows or of all."""
    failures = [index.failure(int(row)) for row in (index.bad_rows() if bad is None else bad)]
    return [failure for failure in failures if failure.key], [failure for failure in failures if not failure.key]
