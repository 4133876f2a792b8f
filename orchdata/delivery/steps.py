"""A loader's optimizer steps as trainers count them: sized, iterated again and again, with a state.

len(steps) = items of iter(steps) = optimizer steps of the epoch      item: the step's microbatches, a list
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from orchdata.delivery.cursor import Cursor, Iteration, Steps
from orchdata.delivery.state import Position


@dataclass(frozen=True, kw_only=True, slots=True)
class Stepping:
    """What of a loader its steps are made of.

    Attributes:
        cursor: where it stands.
        begin: an iteration from there.
        run: yields the microbatches of each of its steps.
        count: optimizer steps of an epoch of which so much is known; raises TypeError where nobody knows.
        is_known: whether that is certain, as it is not of data sets that are iterated.
        goes_over: data sets go on, in the next epoch, with what they hold at the end of one.
        as_torch: see `Steps`.
        scales_loss: whether batches carry a `loss_scale` that covers the whole optimizer step.
        num_samples: usable samples of the data set.
        num_ranks: data-parallel ranks.
    """

    cursor: Cursor[Any]
    begin: Callable[[], Iteration[Any]]
    run: Callable[[Iteration[Any]], Generator[Any, None, None]]
    count: Callable[[Position], int]
    is_known: bool
    goes_over: bool
    as_torch: bool
    scales_loss: bool
    num_samples: int
    num_ranks: int


class OptimizerSteps:
    """What `DataLoader.steps()` gives: an iterable of optimizer steps, each the list of its microbatches.

    `iter()` goes through one epoch, from where the loader stands, and the next one begins the next epoch, as `iter()`
    of the loader does; both share one place. `len()` is the number of steps of the whole epoch that is under way, or
    begins next: it does not shrink when a state inside of an epoch was loaded, for trainers that resume go on counting
    where they were.

    Attributes:
        loader: whose steps they are.
        sampler, batch_sampler: the loader's, for trainers that tell samplers the epoch.
    """

    def __init__(self, loader: Any, stepping: Stepping) -> None:
        self.loader = loader
        self._stepping = stepping
        self._iteration: Iteration[Any] | None = None
        self._asked: Iterator[list[Any]] | None = None
        self.sampler, self.batch_sampler = loader.sampler, loader.batch_sampler

    def __next__(self) -> list[Any]:
        """The next step of an iteration that the first call begins; behind its end, the next call begins another."""
        if self._asked is None:
            self._asked = iter(self)
        try:
            return next(self._asked)
        except StopIteration:
            self._asked = None
            raise

    def __iter__(self) -> Iterator[list[Any]]:
        stepping = self._stepping
        self._iteration = stepping.begin()
        return Steps(stepping.run(self._iteration), as_torch=stepping.as_torch)

    def __len__(self) -> int:
        """Optimizer steps of an epoch, equal on every rank. Raises TypeError where the data set has no length."""
        stepping, iteration = self._stepping, self._iteration
        if iteration is not None and iteration.is_under_way:
            return stepping.count(iteration.origin)
        return stepping.count(stepping.cursor.begin)

    def __repr__(self) -> str:
        return f"{self.loader!r}.steps()"

    @property
    def scales_loss(self) -> bool:
        """Whether batches carry a `loss_scale` that covers the whole optimizer step."""
        return self._stepping.scales_loss

    @property
    def num_samples(self) -> int:
        """Usable samples of the data set."""
        return self._stepping.num_samples

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks, which share out each step."""
        return self._stepping.num_ranks

    def num_steps(self, epoch: int) -> int:
        """Optimizer steps of an epoch from its start. Raises TypeError where the data set has no length."""
        return self._stepping.count(Position(epoch))

    def state_dict(self) -> dict[str, Any]:
        """The loader's: see `DataLoader.state_dict`."""
        found: dict[str, Any] = self.loader.state_dict()
        return found

    def load_state_dict(self, state: dict[str, Any], *, allow: Sequence[str] = ()) -> None:
        """As `DataLoader.load_state_dict`, but that the end of an epoch is the start of the next one: the next
        iteration is never empty. `set_epoch` of the epoch that has ended leaves nothing of it.
        """
        self.loader.load_state_dict(state, allow=allow)
        stepping, begin = self._stepping, self._stepping.cursor.begin
        if stepping.is_known and begin.step and not begin.left and begin.step >= stepping.count(begin):
            stepping.cursor.pass_end(held=stepping.goes_over)

    def set_epoch(self, epoch: int) -> None:
        """The loader's: see `DataLoader.set_epoch`."""
        self.loader.set_epoch(epoch)
