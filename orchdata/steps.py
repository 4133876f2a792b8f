"""A loader's optimizer steps as trainers count them: sized, iterable again and again, with a state.

len(steps) = items of iter(steps) = optimizer steps of the epoch      item: the list of the step's microbatches
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from orchdata.loop.loop import EpochLoop, LoaderIterator, Position, Progress
from orchdata.runtime import Runtime
from orchdata.trainers import check_not_skipped


class OptimizerSteps:
    """The result of `DataLoader.steps()`: an iterable of optimizer steps, each the list of its microbatches.

    `iter()` goes through one epoch, from the loader's position, and the next `iter()` starts the next epoch, as for the
    loader; both share one position. `len()` is the number of steps of the whole epoch that is under way, or starts
    next. It does not shrink after a state inside an epoch was loaded, because trainers that resume continue their
    count.

    Attributes:
        loader: the loader of these steps.
        sampler, batch_sampler: those of the loader, for trainers that set the epoch of samplers.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._runtime: Runtime = loader._runtime
        self._progress: Progress = loader._progress
        self._loop: EpochLoop | None = None
        self._iterator: Iterator[list[Any]] | None = None
        self.sampler, self.batch_sampler = loader.sampler, loader.batch_sampler

    def __next__(self) -> list[Any]:
        """Return the next step. The first call begins an iteration, and so does the first call after its end."""
        if self._iterator is None:
            self._iterator = iter(self)
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = None
            raise

    def __iter__(self) -> Iterator[list[Any]]:
        iterator: LoaderIterator = self.loader._iterate(whole_steps=True)
        self._loop = iterator.loop
        return iterator

    def __len__(self) -> int:
        """Return the optimizer steps of an epoch, equal on every rank. Raises TypeError if the data have no length."""
        self.loader._follow_sampler()
        loop = self._loop
        under_way = loop is not None and loop.is_under_way
        return self._runtime.count(loop.origin if loop is not None and under_way else self._progress.start.position)

    def __repr__(self) -> str:
        return f"{self.loader!r}.steps()"

    @property
    def dataset(self) -> Any:
        """There is none. Raises TypeError for Accelerate's `skip_first_batches`, which asks for it."""
        check_not_skipped()
        raise AttributeError("steps have no data set: that of their loader")

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
        """Data-parallel ranks that share each step."""
        return self._runtime.rank.size

    @property
    def repeats(self) -> bool:
        """Whether this rank has no sample of its own in the step delivered last, but one of another rank."""
        runtime, position = self._runtime, self._progress.position
        if self.num_ranks == 1 or position.step < runtime.count(position):
            return False
        return not len(self.loader.plan_at(position.epoch, position.step - 1).places(runtime.rank.rank))

    def check_ranks(self, num_ranks: int, trainer: str, first: str, instead: str) -> None:
        """Raise ValueError if a trainer, which makes `first`, has other data-parallel ranks than the loader. `instead`
        is what to do with an IterableDataset, of which each rank has its own.
        """
        if self.num_ranks == num_ranks:
            return
        if self._runtime.prepared.is_iterable:
            raise ValueError(
                f"an IterableDataset has a state on each rank, and {trainer} stores one for all: {instead}"
            )
        raise ValueError(
            f"the DataLoader is of {self.num_ranks} data-parallel ranks and {trainer} of {num_ranks}: make it after "
            f"{first}, which initializes torch.distributed, or give it the mesh"
        )

    def check_whole(self, trainer: str) -> None:
        """Raise ValueError for teams whose sequences the trainer cuts, for rounds and for peers: a trainer that gives
        `Batch.model_inputs` to a model trains whole sequences, encodes by micro-step, and averages gradients over
        data-parallel ranks alone.
        """
        balance = self._runtime.prepared.spec.plan.balance
        if self._runtime.rank.num_peers > 1:
            raise ValueError(
                f"{trainer} averages all gradients over the data-parallel ranks, and encoders that peers share have "
                "theirs on all peers: leave DataParallel.encoder_dims out, or wrap encoders by themselves in your own "
                "loop"
            )
        if balance.encode != "micro_step":
            raise ValueError(
                f"{trainer} runs the whole model on one microbatch after another, and encoders would not run once for "
                f"several, as Balance(encode={balance.encode!r}) plans: leave encode out, or loop with od.rounds"
            )
        if balance.teams is not None and balance.teams.cut == "trainer":
            raise ValueError(
                f"{trainer} trains whole sequences, and each member of a team would train all of a shared one: leave "
                'cut="trainer" out of od.Teams, or Balance(teams=...)'
            )

    def even_tail(self) -> None:
        """See `Runtime.even_tail`."""
        self._runtime.even_tail()

    def num_steps(self, epoch: int) -> int:
        """Return the optimizer steps of an epoch from its start. Raises TypeError if the data set has no length."""
        self.loader._follow_sampler()
        return self._runtime.count(Position(epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state: see `DataLoader.state_dict`."""
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any], *, allow: Sequence[str] = ()) -> None:
        """Load as `DataLoader.load_state_dict` does, but a state at the end of an epoch starts the next epoch, so that
        the next iteration is never empty. After `set_epoch` of the ended epoch nothing of it is left.
        """
        self.loader.load_state_dict(state, allow=allow)
        runtime, position = self._runtime, self._progress.start.position
        is_known = not runtime.prepared.is_iterable
        if is_known and position.step and not position.left and position.step >= runtime.count(position):
            self._progress.pass_end(keep_dataset_state=runtime.keep_dataset_state)

    def set_epoch(self, epoch: int) -> None:
        """Set the loader's epoch: see `DataLoader.set_epoch`."""
        self.loader.set_epoch(epoch)
