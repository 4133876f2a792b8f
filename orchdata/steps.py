"""A loader's optimizer steps as trainers count them: sized, iterated again and again, with a state.

len(steps) = items of iter(steps) = optimizer steps of the epoch      item: the step's microbatches, a list
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from orchdata.loop.loop import EpochLoop, LoaderIterator
from orchdata.loop.position import Position, Progress
from orchdata.runtime import Runtime


class OptimizerSteps:
    """What `DataLoader.steps()` gives: an iterable of optimizer steps, each the list of its microbatches.

    `iter()` goes through one epoch, from where the loader stands, and the next one starts the next epoch, as `iter()`
    of the loader does; both share one position. `len()` is the number of steps of the whole epoch that is under way, or
    starts next: it does not shrink after a state inside an epoch was loaded, because trainers that resume continue
    counting where they were.

    Attributes:
        loader: the loader of these steps.
        sampler, batch_sampler: the loader's, for trainers that set the epoch of samplers.
    """

    def __init__(
        self, loader: Any, runtime: Runtime, progress: Progress, iterate: Callable[[], LoaderIterator]
    ) -> None:
        self.loader = loader
        self._runtime = runtime
        self._progress = progress
        self._iterate = iterate
        self._loop: EpochLoop | None = None
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
        iterator = self._iterate()
        self._loop = iterator.loop
        return iterator

    def __len__(self) -> int:
        """Optimizer steps of an epoch, equal on every rank. Raises TypeError if the data set has no length."""
        loop = self._loop
        under_way = loop is not None and loop.is_under_way
        return self._runtime.count(loop.origin if loop is not None and under_way else self._progress.start.position)

    def __repr__(self) -> str:
        return f"{self.loader!r}.steps()"

    @property
    def scales_loss(self) -> bool:
        """Whether batches carry a `loss_scale` that covers the whole optimizer step."""
        return self._runtime.scales_loss

    @property
    def num_samples(self) -> int:
        """Usable samples of the data set."""
        return self._runtime.prepared.num_samples

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks, which share out each step."""
        return self._runtime.rank.size

    def num_steps(self, epoch: int) -> int:
        """Optimizer steps of an epoch from its start. Raises TypeError where the data set has no length."""
        return self._runtime.count(Position(epoch))

    def state_dict(self) -> dict[str, Any]:
        """The loader's: see `DataLoader.state_dict`."""
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any], *, allow: Sequence[str] = ()) -> None:
        """As `DataLoader.load_state_dict`, but that the end of an epoch is the start of the next one: the next
        iteration is never empty. `set_epoch` of the epoch that has ended leaves nothing of it.
        """
        self.loader.load_state_dict(state, allow=allow)
        runtime, position = self._runtime, self._progress.start.position
        is_known = not runtime.prepared.is_iterable
        if is_known and position.step and not position.left and position.step >= runtime.count(position):
            self._progress.pass_end(keep_dataset_state=runtime.keep_dataset_state)

    def set_epoch(self, epoch: int) -> None:
        """The loader's: see `DataLoader.set_epoch`."""
        self.loader.set_epoch(epoch)
