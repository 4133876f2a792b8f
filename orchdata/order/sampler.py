"""A torch sampler as an order: drawn once an epoch by the process that iterates; a step's rows go into its task."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerOrder:
    """What a plan knows of a sampler. It is not asked for rows: those of a step come in its `StepTask`.

    Attributes:
        sampler: name of its class.
        num_samples: items of an epoch: indices, or whole batches of them.
    """

    sampler: str
    num_samples: int
    streams: int = 1

    def rows(self, epoch: int, start: int, stop: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        raise ValueError(f"{self.sampler} is drawn where the loader iterates: give the StepTask its rows")

    def describe(self) -> dict[str, object]:
        return {"sampler": self.sampler, "num_samples": self.num_samples}


class Draw:
    """What a sampler gave for one epoch."""

    def __init__(self, sampler: Any, *, batched: bool) -> None:
        items = cast("Iterable[Any]", sampler)
        self._batched = batched
        self._items = [list(item) for item in items] if batched else list(items)  # a batch may be a list that is reused

    def __len__(self) -> int:
        return len(self._items)

    def rows(self, start: int, stop: int) -> NDArray[np.int64]:
        """The indices in items [start, stop), int64. Raises TypeError for one that is no integer."""
        items = self._items[start:stop]
        return np.array([_index(item) for item in (chain.from_iterable(items) if self._batched else items)], np.int64)


class SamplerDraws:
    """Draws from a sampler, lazily: iterations of one epoch share a draw while one of them holds it.

    The last one is kept, so that an iteration that goes on after an error finds what was drawn.

    Raises TypeError for a sampler without a length, which counts the steps of an epoch.
    """

    def __init__(self, sampler: Any, *, batched: bool) -> None:
        if not hasattr(sampler, "__len__"):
            raise TypeError(
                f"{'batch_sampler' if batched else 'sampler'} has no len(), which counts the steps of an epoch: "
                f"give {type(sampler).__name__} a __len__, or list(sampler) for one draw"
            )
        self.order = SamplerOrder(sampler=type(sampler).__name__, num_samples=len(sampler))
        self._sampler = sampler
        self._batched = batched
        self._drawn: WeakValueDictionary[int, Draw] = WeakValueDictionary()
        self._last: Draw | None = None

    def draw(self, epoch: int) -> Draw:
        """What the sampler gives for `epoch`. Raises ValueError where that is not as many items as it said."""
        drawn = self._drawn.get(epoch)
        if drawn is None:
            drawn = Draw(self._sampler, batched=self._batched)
            if len(drawn) != self.order.num_samples:
                raise ValueError(
                    f"{self.order.sampler} gave {len(drawn)} items for epoch {epoch}, and its len() was "
                    f"{self.order.num_samples}: an epoch has as many steps as that says"
                )
            self._drawn[epoch] = drawn
        self._last = drawn
        return drawn


def _index(item: Any) -> int:
    try:
        return operator.index(item)
    except TypeError:
        raise TypeError(f"a sampler gives indices, integers from 0 to len(dataset) - 1; got {item!r}") from None
