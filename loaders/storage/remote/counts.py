"""How many requests were made, by kind."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

KINDS = ("get", "head", "list", "put", "again", "second")
"""Reads, looks, pages of listings, writes; of these, those that were repeated after an error, and those that were made
a second time because the first took long."""


class RequestCounts:
    """Requests so far, from many threads."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, kind: str, number: int = 1) -> None:
        with self._lock:
            self._counts[kind] += number

    def merge(self, counts: Mapping[str, int]) -> None:
        """Add the counts of another process."""
        with self._lock:
            self._counts.update(counts)

    def as_dict(self) -> dict[str, int]:
        """Return the number of each kind that was made."""
        with self._lock:
            return {kind: self._counts[kind] for kind in KINDS if self._counts[kind]}
