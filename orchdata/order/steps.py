"""The steps of an epoch: how many samples of the order each takes, and the value that describes one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from orchdata.order.order import SampleOrder, Samples

StateGetter = Callable[[], dict[str, Any]]
"""Returns the state of a data set after the step that it came with."""
Draw = Mapping[str, Any]
"""Inputs of an epoch besides its number, such as a seed: JSON-safe."""


class StepTask(NamedTuple):
    """One optimizer step to plan and build; pickles, and has everything that a `BuildSpec` leaves open.

    Attributes:
        epoch, step: numbers of the step.
        rows: its samples, (num_samples,), if a torch sampler drew them: int64, or the objects of a sampler with other
            indices. None if the order computes them.
        begin: the first step of the present size, in an epoch that had another size before; None for its start.
        sampler_state: the sampler's state after it drew them; it is not sent to worker processes.
        samples: its samples if the order `travels`, so that only the process that iterates finds them; else None.
    """

    epoch: int
    step: int
    rows: NDArray[Any] | None = None
    begin: Begin | None = None
    sampler_state: Any = None
    samples: Samples | None = None


class Begin(NamedTuple):
    """The first step of an epoch that is cut in the present way, and its first position."""

    step: int
    position: int


_START = Begin(0, 0)
_EPOCHS_KEPT = 4


class Location(NamedTuple):
    """Where a step begins, for a state; None for what is not counted.

    Attributes:
        position: samples of the epoch before it; of windows, documents of the epoch that were delivered to their end.
        tokens: tokens of the epoch before it.
        document: of windows, the first one that is not delivered to its end, JSON-safe.
        token: of windows, its first token that is not delivered.
    """

    position: int | None = None
    tokens: int | None = None
    document: Mapping[str, Any] | None = None
    token: int | None = None

    def to_begin(self, epoch: int) -> tuple[int, int]:
        """Return the first sample of which nothing is delivered: its epoch and position, of a step of `epoch`."""
        if self.document is None:
            return epoch, self.position or 0
        return self.document["epoch"], self.document["position"] + bool(self.token)


class Batches(Protocol):
    """How an epoch is cut into global batches."""

    @property
    def drop_last(self) -> bool: ...

    def count(self, num_positions: int, epoch: int = 0, begin: Begin | None = None) -> int:
        """Return the optimizer steps of an epoch of `num_positions` samples, including those before `begin`."""

    def bounds(self, step: int, num_positions: int, epoch: int = 0, begin: Begin | None = None) -> tuple[int, int]:
        """Return the positions [start, stop) of a step. Raises IndexError outside the epoch."""

    def samples(self, order: SampleOrder, task: StepTask) -> Samples:
        """Return the samples of a step. Raises IndexError outside the epoch."""
        return order.samples(task.epoch, *self.bounds(task.step, order.length(task.epoch), task.epoch, task.begin))

    def location(self, step: int, length: Callable[[int], int], epoch: int, begin: Begin | None) -> Location:
        """Return where a step begins. `step` may be the number of steps, for the end of the epoch."""
        first, position = begin or _START
        return Location(self.bounds(step - 1, length(epoch), epoch, begin)[1] if step > first else position)

    def describe(self) -> dict[str, Any]:
        """Return the argument of a DataLoader that it was built from, JSON-safe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalBatches(Batches):
    """An epoch cut into global batches of `size` samples.

    Attributes:
        size: samples of a global batch, over all ranks.
        drop_last: whether the remainder of an epoch is dropped; else the last global batch is smaller.
    """

    size: int
    drop_last: bool = False

    def count(self, num_positions: int, epoch: int = 0, begin: Begin | None = None) -> int:
        step, position = begin or _START
        full, rest = divmod(max(0, num_positions - position), self.size)
        return step + full + (1 if rest and not self.drop_last else 0)

    def bounds(self, step: int, num_positions: int, epoch: int = 0, begin: Begin | None = None) -> tuple[int, int]:
        first, position = begin or _START
        _check_step(step, first, self.count(num_positions, epoch, begin))
        start = position + (step - first) * self.size
        return start, min(start + self.size, num_positions)

    def describe(self) -> dict[str, Any]:
        return {"global_batch_size": self.size}


class Sums(Protocol):
    """Tokens along an order: see `TokenSums`."""

    def of_epoch(self, epoch: int) -> int: ...

    def of_epochs_before(self, epoch: int) -> int: ...

    def before(self, epoch: int, position: int) -> int: ...

    def position(self, epoch: int, tokens: int) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBatches(Batches):
    """An epoch cut into global batches by tokens.

    With E(p) the tokens of the samples up to and with position p, and a budget of B, the sample at p belongs to step
    (E(p) - 1) // B: no step is empty, because no sample is above the budget.

    Attributes:
        sums: token sums of the order that is cut.
        budgets: pairs (training tokens from which it applies, tokens of a step); the first from 0 on. A budget applies
            from the first step on that begins at or after its bound.
        drop_last: see `GlobalBatches`.
    """

    sums: Sums
    budgets: tuple[tuple[int, int], ...]
    drop_last: bool = False
    _cut: dict[tuple[int, Begin | None], list[tuple[int, int, int]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def count(self, num_positions: int, epoch: int = 0, begin: Begin | None = None) -> int:
        first, cut, budget = self._stretches(epoch, begin)[-1]
        full, rest = divmod(max(0, self.sums.of_epoch(epoch) - cut), budget)
        return first + full + (1 if rest and not self.drop_last else 0)

    def bounds(self, step: int, num_positions: int, epoch: int = 0, begin: Begin | None = None) -> tuple[int, int]:
        stretches = self._stretches(epoch, begin)
        _check_step(step, stretches[0][0], self.count(num_positions, epoch, begin))
        first, cut, budget = next(stretch for stretch in reversed(stretches) if stretch[0] <= step)
        start = cut + (step - first) * budget
        stop = min(start + budget, self.sums.of_epoch(epoch))
        return self.sums.position(epoch, start), self.sums.position(epoch, stop)

    def location(self, step: int, length: Callable[[int], int], epoch: int, begin: Begin | None) -> Location:
        (position, *_) = Batches.location(self, step, length, epoch, begin)
        return Location(position, self.sums.before(epoch, position or 0))

    def describe(self) -> dict[str, Any]:
        (_, first), *later = self.budgets
        return {"global_batch_tokens": [list(bound) for bound in self.budgets] if later else first}

    def _stretches(self, epoch: int, begin: Begin | None) -> list[tuple[int, int, int]]:
        """Return the stretches of steps with one budget each: first step, tokens of the epoch before it, budget.

        The last ones are kept: computing them again would move the token sums away from the current step.
        """
        stretches = self._cut.get((epoch, begin))
        if stretches is None:
            stretches = self._cut_into(epoch, begin)
            if len(self._cut) >= _EPOCHS_KEPT:
                self._cut.clear()
            self._cut[epoch, begin] = stretches
        return stretches

    def _cut_into(self, epoch: int, begin: Begin | None) -> list[tuple[int, int, int]]:
        step, position = begin or _START
        total, cut, stretches = self.sums.of_epoch(epoch), self.sums.before(epoch, position), []
        if len(self.budgets) == 1:
            return [(step, cut, self.budgets[0][1])]
        before = self.sums.of_epochs_before(epoch)
        while True:
            done = before + cut
            budget = next(size for bound, size in reversed(self.budgets) if bound <= done)
            stretches.append((step, cut, budget))
            later = [bound - done for bound, _ in self.budgets if bound > done]
            steps = -(-later[0] // budget) if later else 0
            if not later or cut + steps * budget >= total:
                return stretches
            step, cut = step + steps, cut + steps * budget


def _check_step(step: int, first: int, count: int) -> None:
    if not 0 <= step < count:
        raise IndexError(f"step {step} is outside the epoch of {count} steps")
    if step < first:
        raise IndexError(
            f"step {step} is before step {first}, and those steps were cut in another way: use a loader with the "
            "former size and weights, and a state from before the change"
        )


class Steps(Protocol):
    """The steps of each epoch."""

    def count(self, epoch: int, draw: Draw | None = None) -> int:
        """Return the number of steps of an epoch, as known now. Raises TypeError if it is known only at its end."""

    def draw(self) -> Draw | None:
        """Draw the random inputs of the next epoch: rank 0 sends them to the others, and states store them.

        None if its samples depend on nothing random.
        """
        return None

    def location(self, epoch: int, step: int, draw: Draw | None) -> Location:
        """Return where a step begins. `step` may be the number of steps, for the end of the epoch."""
        return Location()

    def tasks(
        self, epoch: int, first: int, draw: Draw | None, *, again: bool, sampler_state: Any = None
    ) -> Iterator[StepTask]:
        """Iterate the steps of an epoch from step `first` on lazily.

        Args:
            draw: result of `draw()`.
            again: whether it was drawn on another rank or in another iteration, and is now replayed.
            sampler_state: the sampler's state after step `first - 1`; after the epoch before if `first` is 0.
        """

    def again(self, epoch: int, step: int, draw: Draw | None) -> StepTask:
        """Return one step of an epoch with a known draw. Draws nothing and changes nothing.

        Raises IndexError outside the epoch, and ValueError if steps can only be read in sequence.
        """

    def filled(self, task: StepTask) -> StepTask:
        """Return a task with what only the process that iterates finds."""
        return task


@dataclass(frozen=True, kw_only=True)
class OrderedSteps(Steps):
    """Steps of an order that computes the samples at any position independently.

    Attributes:
        batches: how an epoch is cut into steps.
        check: raises an exception if the data set has changed since.
    """

    batches: Batches
    order: SampleOrder
    check: Callable[[], None] | None = None

    def count(self, epoch: int, draw: Draw | None = None) -> int:
        return self.batches.count(self.order.length(epoch), epoch, begin_of(draw))

    def location(self, epoch: int, step: int, draw: Draw | None) -> Location:
        return self.batches.location(step, self.order.length, epoch, begin_of(draw))

    def bounds(self, task: StepTask) -> tuple[int, int]:
        """Return the positions [start, stop) of a step. Raises IndexError outside the epoch."""
        return self.batches.bounds(task.step, self.order.length(task.epoch), task.epoch, task.begin)

    def tasks(
        self, epoch: int, first: int, draw: Draw | None, *, again: bool, sampler_state: Any = None
    ) -> Iterator[StepTask]:
        if self.check is not None:
            self.check()
        begin = begin_of(draw)
        return (StepTask(epoch, step, begin=begin) for step in range(first, self.count(epoch, draw)))

    def again(self, epoch: int, step: int, draw: Draw | None) -> StepTask:
        if self.check is not None:
            self.check()
        task = StepTask(epoch, step, begin=begin_of(draw))
        self.bounds(task)
        return task

    def filled(self, task: StepTask) -> StepTask:
        return task._replace(samples=self.batches.samples(self.order, task)) if self.order.travels else task


def draw_of_cut(begin: Begin) -> Draw:
    """Return what a state stores of an epoch that is cut in another way from its middle on."""
    return {"cut": list(begin)}


def begin_of(draw: Draw | None) -> Begin | None:
    return None if draw is None else Begin(*draw["cut"])


@dataclass(kw_only=True)
class StreamSteps(Steps):
    """Steps of an IterableDataset: they end when it ends.

    Attributes:
        length: returns the data set's length, at each call of `count`; raises TypeError if it has none.
        batches: how an epoch is cut into steps.
        asked_length: number of steps that `len()` returned to the user; None if it was not called.
    """

    length: Callable[[], int]
    batches: GlobalBatches
    asked_length: int | None = None

    def count(self, epoch: int, draw: Draw | None = None) -> int:
        return self.batches.count(self.length())

    def tasks(
        self, epoch: int, first: int, draw: Draw | None, *, again: bool, sampler_state: Any = None
    ) -> Iterator[StepTask]:
        raise ValueError("an IterableDataset is iterated: its steps are not planned")

    def again(self, epoch: int, step: int, draw: Draw | None) -> StepTask:
        raise ValueError("an IterableDataset yields its samples in sequence, so no single step of it can be built")


# States of the user's data sets and samplers, by torchdata's convention: `state_dict` and `load_state_dict`.


def is_stateful(owner: Any) -> bool:
    """Return whether a data set, a sampler, or an iterator of one has a state."""
    return callable(getattr(owner, "state_dict", None)) and callable(getattr(owner, "load_state_dict", None))


def states_of(**owners: Any) -> dict[str, Any]:
    """Return name -> state of each owner that has one."""
    return {name: owner.state_dict() for name, owner in owners.items() if is_stateful(owner)}


def restore_states(states: Any, **owners: Any) -> None:
    """Load what `states_of` returned for the same owners."""
    for name, owner in owners.items():
        if name in states and is_stateful(owner):
            owner.load_state_dict(states[name])


def exhaust(items: Iterator[Any]) -> None:
    """Take all items that are left, without `iter()`, which may start from the beginning."""
    end = object()
    while next(items, end) is not end:
        pass
