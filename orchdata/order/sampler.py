"""torch's samplers as an order: drawn lazily by the process that iterates; a step's rows go into its task.

    tell() -> what the next draw depends on -> tasks(...) -> StepTask, StepTask, ... until the sampler ends

What a draw depends on is JSON-safe: rank 0 tells it to the others, and a state holds it. So one draw is the same on
every rank, and again after a restart.
"""

from __future__ import annotations

import base64
import operator
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from orchdata.loaders.errors import StateError
from orchdata.order.stateful import exhaust, give_back, held_by, is_stateful
from orchdata.order.steps import GlobalBatches, StepTask, Told

ENDED: Final = "ended"
"""Key in what a sampler held: whether it had ended when it was asked."""
_MOST_STATE_BYTES: Final = 64 << 10
"""Of a generator's state, and of its text; torch's of a CPU has 5,056 bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerOrder:
    """What a plan knows of a sampler. It is not asked for rows: those of a step come in its `StepTask`.

    Attributes:
        sampler: name of its class.
        num_samples: items of an epoch (indices, or whole batches of them) when the loader was made; `sys.maxsize`
            where nobody knows.
    """

    sampler: str
    num_samples: int

    def length(self, epoch: int) -> int:
        return self.num_samples

    def rows(self, epoch: int, start: int, stop: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        raise ValueError(f"{self.sampler} is drawn where the loader iterates: give the StepTask its rows")

    def drawn_from(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        return np.zeros(stop - start, np.int64)

    def describe(self) -> dict[str, object]:
        known = self.num_samples if self.num_samples != sys.maxsize else None
        return {"sampler": self.sampler, "num_samples": known}


class Source(Protocol):
    """A sampler, drawn again where it is told what a draw depended on."""

    @property
    def sampler(self) -> Any: ...

    def __len__(self) -> int:
        """Items of an epoch. Raises TypeError where nobody knows before the end."""

    def tell(self) -> Told | None:
        """What the next draw depends on, None for nothing; whatever it takes from a generator is taken."""

    def items(self, told: Told | None, *, again: bool) -> Iterator[Any]:
        """What the sampler gives then, drawn as it is asked for; `again` where `told` is not of this very moment."""

    def held(self, items: Iterator[Any]) -> Any:
        """What it holds of its own, `items` drawn so far; None for nothing."""

    def items_behind(self, held: Any, *, is_over: bool) -> Iterator[Any]:
        """What the sampler gives after the item at which it held that.

        Args:
            held: of `held`, with `ENDED` where the sampler had ended already.
            is_over: whether that was the last item of its epoch: then the items of the next epoch.
        """

    @property
    def batch_size(self) -> int | None:
        """Items of each batch but the last one, where it gives batches that torch makes; else None."""

    def replays(self, told: Told | None) -> bool:
        """Whether `items` finds what came of `told`, and leaves every generator as it is."""


class TorchSampler:
    """A sampler as torch's loader draws it: from its own generator, else from torch's default one, at the first item.

    The default generator tells a RandomSampler one seed; for any other sampler, the state of the generator it may draw
    from stands for the draw. One that draws elsewhere (Python's `random`), or later, is not drawn the same again.

    Args:
        sampler: gives indices, or whole batches of them.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        inner = sampler
        while type(inner) is BatchSampler:
            inner = inner.sampler
        self._inner = inner
        self._asked = sampler if is_stateful(sampler) else inner

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
        found = getattr(self._inner, "generator", None)
        return found if isinstance(found, torch.Generator) else None

    @property
    def _is_plain(self) -> bool:
        return type(self._inner) in (SequentialSampler, list, tuple, range)

    def tell(self) -> Told | None:
        if self._takes_seed:
            # Exactly what RandomSampler.__iter__ would draw, and in its place.
            return {"seed": int(torch.empty((), dtype=torch.int64).random_().item())}
        if self._is_plain:
            return None
        return {"state": _text(torch.get_rng_state() if self._generator is None else self._generator.get_state())}

    def items(self, told: Told | None, *, again: bool) -> Iterator[Any]:
        if told is not None and "seed" in told:
            return self._drawn_from(torch.Generator().manual_seed(int(told["seed"])))
        if told is None or not again:
            return iter(self.sampler)
        generator = self._generator or torch.Generator()
        try:
            generator.set_state(generator_state(told["state"]))
        except (ValueError, RuntimeError) as error:
            raise StateError(
                f"the state says that its epoch was drawn from no state of a generator: {error}"
            ) from error
        return iter(self.sampler) if generator is self._generator else self._drawn_from(generator)

    def held(self, items: Iterator[Any]) -> Any:
        held = held_by(sampler=self._asked, iterator=items)
        return deepcopy(held) if held else None

    def items_behind(self, held: Any, *, is_over: bool) -> Iterator[Any]:
        give_back(held, sampler=self._asked)
        if held.get(ENDED):  # what it held is what it begins the next epoch with
            return iter(self.sampler) if is_over else iter(())
        items: Iterator[Any] = iter(self.sampler)
        give_back(held, iterator=items)
        if not is_over:
            return items
        exhaust(items)  # it had drawn its last item, and not heard yet that there is none
        following: Iterator[Any] = iter(self.sampler)
        return following

    def replays(self, told: Told | None) -> bool:
        return self._is_plain if told is None else self._takes_seed and "seed" in told

    def _drawn_from(self, generator: torch.Generator) -> Iterator[Any]:
        """As if the default generator stood there. Those of torch have one of their own, read at the first item."""
        items = iter(self.sampler)
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


class TakenOver:
    """A DistributedSampler whose ranks are this loader's: its permutation, shared out by the loader.

    It gives the samples of all ranks, in its order; without what it would repeat to make the shares equal, and without
    the remainder that it drops.
    """

    def __init__(self, sampler: DistributedSampler[Any]) -> None:
        self.sampler = sampler

    batch_size = None

    def __len__(self) -> int:
        total = len(cast("Any", self.sampler.dataset))
        return total - total % self.sampler.num_replicas if self.sampler.drop_last else total

    def tell(self) -> Told | None:
        return {"seed": self.sampler.seed + self.sampler.epoch} if self.sampler.shuffle else None

    def items(self, told: Told | None, *, again: bool) -> Iterator[int]:
        total = len(cast("Any", self.sampler.dataset))
        if told is None:
            return iter(range(len(self)))
        permuted = torch.randperm(total, generator=torch.Generator().manual_seed(int(told["seed"])))
        return iter(permuted[: len(self)].tolist())

    def held(self, items: Iterator[Any]) -> Any:
        return None

    def items_behind(self, held: Any, *, is_over: bool) -> Iterator[Any]:
        raise ValueError("a DistributedSampler that is taken over holds nothing of its own")

    def replays(self, told: Told | None) -> bool:
        return told is not None or not self.sampler.shuffle


class Draws:
    """The steps that a sampler makes: as many as it gives items for, and no length unless it has one.

    Args:
        source: the sampler.
        batched: whether each item is the batch of a step; else as many items as the global batches hold are.
        batches: of the loader.
        usable: rows that the items are places in, int64 (num_usable,); None where they are rows themselves.
        integers: whether only integers will do, as costs need.
    """

    def __init__(
        self,
        source: Source,
        *,
        batched: bool,
        batches: GlobalBatches,
        usable: NDArray[np.int64] | None = None,
        integers: bool = False,
    ) -> None:
        self._source = source
        self._batched = batched
        self._batches = batches
        self._usable = usable
        self._integers = integers

    @property
    def order(self) -> SamplerOrder:
        """As the plan knows it."""
        try:
            length = len(self._source)
        except (TypeError, NotImplementedError):
            length = sys.maxsize
        return SamplerOrder(sampler=type(self._source.sampler).__name__, num_samples=length)

    def count(self, epoch: int, told: Told | None = None) -> int:
        return self._batches.count(len(self._source))

    def place(self, epoch: int, step: int, told: Told | None) -> dict[str, int]:
        return {}

    def tell(self) -> Told | None:
        return self._source.tell()

    def tasks(
        self, epoch: int, first: int, told: Mapping[str, Any] | None, *, again: bool, held: Any = None
    ) -> Iterator[StepTask]:
        size, begin = self._batches.size, 0 if held is None else first
        if held is None:
            items = self._source.items(told, again=again)
        else:
            items = self._source.items_behind(held, is_over=first == 0)
        # A batch may be a list that its sampler uses again.
        chunks: Iterable[list[Any]] = map(list, items) if self._batched else iter(lambda: [*islice(items, size)], [])
        full = self._source.batch_size if self._batched else size
        for step, chunk in enumerate(chunks, begin):
            if self._batches.drop_last and len(chunk) < size:
                return
            if step >= first:
                now = self._source.held(items)
                if now is not None and full is not None and len(chunk) < full:
                    now[ENDED] = True  # the sampler was asked for one item more, and said that there is none
                yield StepTask(epoch, step, self._rows(chunk), held=now)

    def again(self, epoch: int, step: int, told: Told | None) -> StepTask:
        if not self._source.replays(told):
            raise ValueError(
                f"what {type(self._source.sampler).__name__} gave in epoch {epoch} is not known: give a seed, as "
                "DataLoader(shuffle=True, seed=0), or load a state of that epoch, which tells what a RandomSampler was "
                "seeded with"
            )
        for task in self.tasks(epoch, step, told, again=True):
            return task._replace(held=None)
        raise IndexError(f"step {step} is outside epoch {epoch}")

    def _rows(self, items: list[Any]) -> NDArray[Any]:
        if self._integers or self._usable is not None:
            rows = np.array([_index(item) for item in items], np.int64)
            return rows if self._usable is None else self._usable[rows]
        if all(type(item) is int and -(1 << 63) <= item < 1 << 63 for item in items):
            return np.array(items, np.int64)
        found = np.empty(len(items), object)  # any object that the data set takes, as it is
        for place, item in enumerate(items):
            found[place] = item
        return found


def _index(item: Any) -> int:
    try:
        return operator.index(item)
    except TypeError:
        raise TypeError(
            "samples with costs, or shared over ranks, are integers from 0 to len(dataset) - 1; the sampler gave "
            f"{item!r}"
        ) from None


def _text(state: torch.Tensor) -> str:
    return base64.b85encode(zlib.compress(state.numpy().tobytes())).decode()


def generator_state(text: str) -> torch.Tensor:
    """The state of a generator that `Samplers.tell` told. Raises ValueError for what is none."""
    try:
        inflating = zlib.decompressobj()
        state = inflating.decompress(base64.b85decode(text[:_MOST_STATE_BYTES]), _MOST_STATE_BYTES)
    except zlib.error as error:
        raise ValueError(f"it does not decompress: {error}") from error
    if len(text) > _MOST_STATE_BYTES or not inflating.eof or inflating.unused_data or not state:
        raise ValueError(f"it is cut, or longer than {_MOST_STATE_BYTES} bytes")
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
