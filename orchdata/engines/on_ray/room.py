"""Is there room in the cluster for the actors of a loader? What is missing is said at once, and again each minute."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

_WARN_SECONDS: Final = 60.0
_SETTLE_SECONDS: Final = 10.0
"""In which a node takes an actor that it has room for, and those of an engine that has just closed give theirs back."""


class Waiting:
    """Actors that have not started yet.

    Args:
        options: of each actor, as Ray gets them.
        count: actors of this rank.
        num_ranks: of the loader, each with as many.
        num_threads: of an actor.
        start_timeout: seconds that they may wait.
        of, ways: whose they are, and the ways out, for messages.
    """

    def __init__(
        self,
        options: dict[str, Any],
        *,
        count: int,
        num_ranks: int,
        num_threads: int,
        start_timeout: float,
        of: str = "this loader",
        ways: str = "add nodes, or lower num_workers=, num_threads= or RayEngine(num_cpus=)",
    ) -> None:
        self._of = of
        self._ways = ways
        self._needs = {"CPU": options.get("num_cpus") or 0, "GPU": options.get("num_gpus") or 0}
        self._needs |= options.get("resources") or {}
        self._needs = {name: amount for name, amount in self._needs.items() if amount}
        self._count = count
        self._num_ranks = num_ranks
        self._num_threads = num_threads
        self._start_timeout = start_timeout
        self._begun = time.monotonic()
        self._warn_at = self._begun + (_SETTLE_SECONDS if self._fits() else 0.0)

    @property
    def seconds(self) -> float:
        """Seconds until `check` must be called again."""
        return max(0.0, min(self._warn_at, self._begun + self._start_timeout) - time.monotonic())

    def check(self, num_waiting: int, num_without_room: Callable[[], int], seen: str = "") -> str | None:
        """Return a warning that is due, else None. Raises RuntimeError after `start_timeout`.

        Args:
            num_waiting: actors that have not started.
            num_without_room: returns how many of them no node has taken.
            seen: what else is known, as of a node that was lost.
        """
        now = time.monotonic()
        waited = now - self._begun
        if now < self._warn_at and waited < self._start_timeout:
            return None
        self._warn_at = now + _WARN_SECONDS
        without_room = num_without_room()
        text = f"{without_room or num_waiting} of {self._count} Ray actors of {self._of} have not started{seen}"
        text += f": {self._missing()}" if without_room else ", and have a place on a node: is it slow to import?"
        if waited >= self._start_timeout:
            raise RuntimeError(f"{text}. Nothing changed for {self._start_timeout:g} seconds (start_timeout=)")
        if not without_room and waited < _WARN_SECONDS:
            return None
        return f"{text}. It waits for up to {self._start_timeout - waited:.0f} seconds more (start_timeout=)"

    def _fits(self) -> bool:
        import ray

        total = ray.cluster_resources()
        return all(amount * self._count <= total.get(name, 0) for name, amount in self._needs.items())

    def _missing(self) -> str:
        """Return the sum of what the actors need, and what the cluster has, as text."""
        import ray

        total, free = ray.cluster_resources(), ray.available_resources()
        parts = []
        for name, amount in self._needs.items():
            ranks = f"{self._num_ranks} ranks x " if self._num_ranks > 1 else ""
            each = f"{amount:g} {name}"
            if name == "CPU" and amount == self._num_threads:
                each = f"{amount:g} threads"
            needed = amount * self._count * self._num_ranks
            names = "CPUs" if name == "CPU" else name
            parts.append(
                f"{ranks}{self._count} actors x {each} = {needed:g} {names}, the cluster has {total.get(name, 0):g}, "
                f"{free.get(name, 0):g} of them free"
            )
        return f"{'; '.join(parts) or 'no node can start them'}. {self._ways[0].upper()}{self._ways[1:]}"
