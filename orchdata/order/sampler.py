"""torch's samplers as an order: drawn lazily in the process that iterates; a step's rows go into its task.

    draw() -> what the epoch depends on -> tasks(...) -> StepTask, StepTask, ... until the sampler ends

A draw is JSON-safe: rank 0 sends it to the others, and states store it. So an epoch is the same on every rank and after
a restart.
"""

from __future__ import annotations

import base64
import operator
import sys
import zlib
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from orchdata.loaders.errors import StateError
from orchdata.order.order import SampleOrder, Samples
from orchdata.order.steps import Draw, GlobalBatches, Steps, StepTask, exhaust, is_stateful, restore_states, states_of

ENDED: Final = "ended"
"""Key in a sampler's state: whether it had ended when the state was taken."""
_MOST_STATE_BYTES: Final = 64 << 10
"""Limit for a generator's state, and for its text; the state of torch's CPU generator has 5,056 bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerOrder(SampleOrder):
    """What a plan knows of a sampler. The rows of a step come in its `StepTask`.

    Attributes:
        sampler: name of its class.
        num_samples: items of an epoch (indices, or whole batches of them) when the loader was created; `sys.maxsize`
            if they are known only at the end of an epoch.
    """

    sampler: str
    num_samples: int

    @classmethod
    def of(cls, sampler: Any, num_samples: Any) -> SamplerOrder:
        """Build it from a sampler, and from an object that has its length, if it has one."""
        try:
            length = len(num_samples)
        except (TypeError, NotImplementedError):
            length = sys.maxsize
        return cls(sampler=type(sampler).__name__, num_samples=length)

    def length(self, epoch: int) -> int:
        return self.num_samples

    def samples(self, epoch: int, start: int, stop: int) -> Samples:
        raise ValueError(f"{self.sampler} is drawn where the loader iterates: give the StepTask its rows")

    def describe(self) -> dict[str, object]:
        known = self.num_samples if self.num_samples != sys.maxsize else None
        return {"sampler": self.sampler, "num_samples": known}


class Source(Protocol):
    """A sampler whose draw can be replayed."""

    @property
    def sampler(self) -> Any: ...

    def __len__(self) -> int:
        """Items of an epoch. Raises TypeError if they are known only at its end."""

    def draw(self) -> Draw | None:
        """Draw the random inputs of the next epoch, from the generator that the sampler uses. None if it has none."""

    def items(self, draw: Draw | None, *, again: bool) -> Iterator[Any]:
        """Iterate the sampler lazily; `again=True` replays an earlier draw."""

    def state(self, items: Iterator[Any]) -> Any:
        """The sampler's own state after the items drawn so far; None if it has none."""

    def items_after(self, state: Any, *, is_over: bool) -> Iterator[Any]:
        """Iterate the items after the one at which `state` was taken.

        Args:
            state: result of `state()`, with `ENDED` if the sampler had already ended.
            is_over: whether that was the last item of its epoch: the items are then those of the next epoch.
        """

    @property
    def batch_size(self) -> int | None:
        """Items of each batch but the last, if the sampler's items are batches that torch builds; else None."""

    def replays(self, draw: Draw | None) -> bool:
        """Whether `items` can replay a draw without a change to any generator."""


class TorchSampler:
    """A sampler, drawn as torch's loader draws it: at the first item, from its own generator or torch's default.

    For a RandomSampler without a generator the draw is one seed. For any other sampler it is the state of the generator
    that the sampler may use. A sampler that draws elsewhere (Python's `random`), or later, cannot be replayed.

    Args:
        sampler: yields indices, or whole batches of them.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        inner = sampler
        while type(inner) is BatchSampler:
            inner = inner.sampler
        self._inner = inner
        self._stateful = sampler if is_stateful(sampler) else inner

    def __len__(self) -> int:
        return len(self.sampler)

    @property
    def batch_size(self) -> int | None:
        return self.sampler.batch_size if type(self.sampler) is BatchSampler else None

    @property
    def _takes_seed(self) -> bool:
        return type(self._inner) is RandomSampler and self._inner.generator is None

    @property
    def _generator(self) -> torch.Generator | None:
        generator = getattr(self._inner, "generator", None)
        return generator if isinstance(generator, torch.Generator) else None

    @property
    def _is_plain(self) -> bool:
        return type(self._inner) in (SequentialSampler, list, tuple, range)

    def draw(self) -> Draw | None:
        if self._takes_seed:
            # The same call as in RandomSampler.__iter__, which then does not draw.
            return {"seed": int(torch.empty((), dtype=torch.int64).random_().item())}
        if self._is_plain:
            return None
        return {"state": _text(torch.get_rng_state() if self._generator is None else self._generator.get_state())}

    def items(self, draw: Draw | None, *, again: bool) -> Iterator[Any]:
        if draw is not None and "seed" in draw:
            return self._drawn_from(torch.Generator().manual_seed(int(draw["seed"])))
        if draw is None or not again:
            return self._iterate()
        generator = self._generator or torch.Generator()
        try:
            generator.set_state(generator_state(draw["state"]))
        except (ValueError, RuntimeError) as error:
            raise StateError(
                f"the state is damaged: the generator state from which its epoch was drawn is invalid: {error}"
            ) from error
        return self._iterate() if generator is self._generator else self._drawn_from(generator)

    def state(self, items: Iterator[Any]) -> Any:
        state = states_of(sampler=self._stateful, iterator=items.items if isinstance(items, _Batches) else items)
        return deepcopy(state) if state else None

    def items_after(self, state: Any, *, is_over: bool) -> Iterator[Any]:
        restore_states(state, sampler=self._stateful)
        if state.get(ENDED):  # with this state the sampler begins its next epoch
            return self._iterate() if is_over else iter(())
        items = self._iterate()
        restore_states(state, iterator=items.items if isinstance(items, _Batches) else items)
        if not is_over:
            return items
        exhaust(items)  # it has yielded its last item, and does not know yet that there is none
        return self._iterate()

    def replays(self, draw: Draw | None) -> bool:
        return self._is_plain if draw is None else self._takes_seed and "seed" in draw

    def _iterate(self) -> Iterator[Any]:
        """Begin a pass of the sampler. A user's sampler may have iterators with a state: `_Batches` exposes them."""
        sampler, inner = self.sampler, self._inner
        if type(sampler) is BatchSampler and sampler.sampler is inner and not _is_torchs(inner):
            return _Batches(sampler)
        return iter(sampler)

    def _drawn_from(self, generator: torch.Generator) -> Iterator[Any]:
        """Iterate a pass with this as torch's default generator. Samplers use it at their first item at the latest."""
        items = self._iterate()
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(generator.get_state())
            if not hasattr(self._inner, "generator"):
                first = list(islice(items, 1))
            else:
                given = self._inner.generator
                self._inner.generator = generator
                try:
                    first = list(islice(items, 1))
                finally:
                    self._inner.generator = given
        yield from first
        yield from items


class _Batches:
    """The batches of a torch BatchSampler, with access to the iterator of its sampler."""

    def __init__(self, batch_sampler: BatchSampler) -> None:
        self._batch_sampler = batch_sampler
        self._size = batch_sampler.batch_size
        self.items = iter(batch_sampler.sampler)

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> list[Any]:
        size = self._size if self._batch_sampler.drop_last else self._batch_sampler.batch_size
        batch = list(islice(self.items, size))
        if not batch or (self._batch_sampler.drop_last and len(batch) < size):
            raise StopIteration
        return batch


def _is_torchs(sampler: Any) -> bool:
    """Return whether its iterator certainly has no state."""
    return type(sampler) in (list, tuple, range) or type(sampler).__module__.partition(".")[0] == "torch"


class AllRanksSampler:
    """The permutation of a DistributedSampler over this loader's ranks; the loader splits it over ranks itself.

    It yields the samples of all ranks in the permutation's order, without those that a DistributedSampler repeats to
    equalize shares, and without the remainder that it drops.
    """

    def __init__(self, sampler: DistributedSampler[Any]) -> None:
        self.sampler = sampler

    batch_size = None

    def __len__(self) -> int:
        total = len(cast("Any", self.sampler.dataset))
        return total - total % self.sampler.num_replicas if self.sampler.drop_last else total

    def draw(self) -> Draw | None:
        return {"seed": self.sampler.seed + self.sampler.epoch} if self.sampler.shuffle else None

    def items(self, draw: Draw | None, *, again: bool) -> Iterator[int]:
        if draw is None or not self.sampler.shuffle:
            return iter(range(len(self)))
        # A state of one rank, where `TorchSampler` drew, has no seed.
        seed = int(draw.get("seed", self.sampler.seed + self.sampler.epoch))
        total = len(cast("Any", self.sampler.dataset))
        return iter(torch.randperm(total, generator=torch.Generator().manual_seed(seed))[: len(self)].tolist())

    def state(self, items: Iterator[Any]) -> Any:
        return None

    def items_after(self, state: Any, *, is_over: bool) -> Iterator[Any]:
        raise ValueError("a DistributedSampler that is shared over ranks has no state of its own")

    def replays(self, draw: Draw | None) -> bool:
        return draw is not None or not self.sampler.shuffle


class SamplerSteps(Steps):
    """The steps of a sampler, until it ends. They have a length only if the sampler has one.

    Args:
        source: the sampler.
        batched: whether each item is the batch of a step; otherwise a step takes as many items as a global batch has.
        batches: the loader's global batches.
        usable: rows, int64 (num_usable,), with the items as indices into them; None if items are rows.
        integers: whether items must be integers, as costs require.
        as_drawn: whether the rows of a task are a list of the sampler's own indices.
    """

    def __init__(
        self,
        source: Source,
        *,
        batched: bool,
        batches: GlobalBatches,
        usable: NDArray[np.int64] | None = None,
        integers: bool = False,
        as_drawn: bool = False,
    ) -> None:
        self._source = source
        self._batched = batched
        self._batches = batches
        self._usable = usable
        self._integers = integers
        self._as_drawn = as_drawn

    def follow(self, sampler: Any) -> None:
        """Draw from this sampler from now on, if the user has replaced the loader's."""
        if isinstance(self._source, TorchSampler) and sampler is not self._source.sampler:
            self._source = TorchSampler(sampler)

    def count(self, epoch: int, draw: Draw | None = None) -> int:
        return len(self._source) if self._batched else self._batches.count(len(self._source))

    def draw(self) -> Draw | None:
        return self._source.draw()

    def tasks(
        self, epoch: int, first: int, draw: Draw | None, *, again: bool, sampler_state: Any = None
    ) -> Iterator[StepTask]:
        if sampler_state is None:
            items, skipped = self._source.items(draw, again=again), first
        else:
            items, skipped = self._source.items_after(sampler_state, is_over=first == 0), 0
        size, drop_last = self._batches.size, self._batches.drop_last
        batches: Iterable[Any] = items
        if not self._batched:
            batches = iter(lambda: [*islice(items, size)], [])
            if drop_last:
                batches = (batch for batch in batches if len(batch) == size)
        for step, batch in enumerate(islice(batches, skipped, None), first):
            rows: Any = list(batch)  # a copy: the sampler may use its list again
            state = self._state(items, len(rows))
            yield StepTask(epoch, step, rows if self._as_drawn else self._rows(rows), sampler_state=state)

    def again(self, epoch: int, step: int, draw: Draw | None) -> StepTask:
        if not self._source.replays(draw):
            sampler = self._source.sampler
            sampler = sampler.sampler if type(sampler) is BatchSampler else sampler
            raise ValueError(
                f"the items of {type(sampler).__name__} in epoch {epoch} are not known: pass a seed, as in "
                "DataLoader(shuffle=True, seed=0), or load a state of that epoch, which stores the seed of a "
                "RandomSampler"
            )
        for task in self.tasks(epoch, step, draw, again=True):
            rows = self._rows(cast("Any", task.rows)) if self._as_drawn else task.rows
            return task._replace(rows=rows, sampler_state=None)
        raise IndexError(f"step {step} is outside epoch {epoch}")

    def _state(self, items: Iterator[Any], num_items: int) -> Any:
        """Return the sampler's state after a step of `num_items` items was taken from its iterator `items`."""
        state = self._source.state(items)
        full = self._source.batch_size if self._batched else self._batches.size
        if state is not None and full is not None and num_items < full:
            state[ENDED] = True  # one more item was requested, and the sampler had none
        return state

    def _rows(self, items: list[Any]) -> NDArray[Any]:
        if self._integers or self._usable is not None:
            rows = np.array([_index(item) for item in items], np.int64)
            return rows if self._usable is None else self._usable[rows]
        if all(type(item) is int and -(1 << 63) <= item < 1 << 63 for item in items):
            return np.array(items, np.int64)
        rows = np.empty(len(items), object)  # any object that the data set takes
        for number, item in enumerate(items):
            rows[number] = item
        return rows


def _index(item: Any) -> int:
    try:
        return operator.index(item)
    except TypeError:
        raise TypeError(
            "samples with costs, or split over ranks, must be integers from 0 to len(dataset) - 1; the sampler gave "
            f"{item!r}"
        ) from None


def _text(state: torch.Tensor) -> str:
    return base64.b85encode(zlib.compress(state.numpy().tobytes())).decode()


def generator_state(text: str) -> torch.Tensor:
    """Return the state of a generator from its text in a draw. Raises ValueError for any other text."""
    try:
        inflating = zlib.decompressobj()
        state = inflating.decompress(base64.b85decode(text[:_MOST_STATE_BYTES]), _MOST_STATE_BYTES)
    except zlib.error as error:
        raise ValueError(f"it does not decompress: {error}") from error
    if len(text) > _MOST_STATE_BYTES or not inflating.eof or inflating.unused_data or not state:
        raise ValueError(f"it is cut, or longer than {_MOST_STATE_BYTES} bytes")
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
