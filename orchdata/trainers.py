"""What trainers do with a loader, and what they must know of it."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable
from typing import Any, Final

from orchdata.loaders.errors import StateError
from orchdata.loop.loop import Position, TrainerEpochs
from orchdata.notices import calling_trainer, warn_once


def check_not_prepared() -> None:
    """Raise TypeError if Ray Train's `prepare_data_loader` is what calls the caller of this."""
    caller = str(sys._getframe(2).f_globals.get("__name__", ""))
    if caller.startswith("ray.train.") and caller.endswith(".train_loop_utils"):
        raise TypeError(
            "ray.train.torch.prepare_data_loader would build a torch DataLoader of the data set, or take batches ahead "
            "of the loader's state. This loader distributes its samples already: leave out the call, iterate over the "
            "loader itself, and move each batch with batch.to(ray.train.torch.get_device())"
        )


def check_not_skipped() -> None:
    """Raise TypeError if Accelerate's `skip_first_batches`, which takes torch's batches, calls the caller of this."""
    if sys._getframe(2).f_code.co_name == "skip_first_batches":
        raise TypeError(
            "skip_first_batches would read the samples again, in batches of torch's: this loader goes on where its "
            "load_state_dict, or accelerator.load_state after od.hf.accelerate(loader, accelerator), puts it"
        )


def check_counted_by_len(num_steps: int) -> None:
    """Warn a caller of `len(loader)` that steps may have several microbatches. Raises ValueError for a trainer."""
    if trainer := calling_trainer():
        raise ValueError(
            f"{trainer} takes len() of a loader for the number of items. The items here are microbatches, and each of "
            f"the {num_steps} steps may have several (accumulate, max_tokens, od.Packed(length=...)): the trainer "
            "would stop inside an epoch, and step inside a global batch. Give it loader.steps(), with whole steps as "
            "items, each the list of its microbatches; od.hf.TrainerMixin makes transformers' Trainer take them"
        )
    warn_once(
        "len of a loader with max_tokens",
        f"len() of a loader is its number of optimizer steps, {num_steps}; iterating yields microbatches, and with "
        "accumulate or max_tokens a step may have several. A trainer that counts batches by len() stops early, inside "
        "a global batch: let it iterate loader.steps(), which yields the microbatches of each step as a list",
    )


def check_accumulation(knows_end: Callable[[], bool], *, scales_loss: bool) -> bool:
    """Return whether Accelerate must know the last batch of an epoch; `scales_loss`, whether batches carry a
    `loss_scale` of the whole step; `knows_end`, whether the number of batches of an epoch is known before its end.

    Raises ValueError if gradients would be accumulated over other batches than those of an optimizer step, or the last
    batch is not known.
    """
    module = sys.modules.get("accelerate.state")
    if not hasattr(module, "GradientState"):  # no program of this process has it, or it is imported now
        return False
    state = module.GradientState()  # type: ignore[union-attr]
    num_batches, ends_with_epoch = state.num_steps, bool(state.sync_with_dataloader)
    if num_batches == 1:
        return False
    accumulates = f"Accelerate accumulates gradients over {num_batches} batches (gradient_accumulation_steps)"
    if scales_loss:
        import torch

        if not torch.is_grad_enabled():
            return False
        raise ValueError(
            f"{accumulates} and divides each loss by that number. The microbatches of this loader are parts of its own "
            "optimizer steps, and batch.loss_scale scales their losses already. Leave gradient_accumulation_steps at "
            "1, accumulate by DataLoader(accumulate=...) or by a larger global_batch_size and max_tokens, and iterate "
            "od.hf.accelerate(loader, accelerator). To evaluate, call iter() under torch.no_grad()"
        )
    if ends_with_epoch and not knows_end():
        raise ValueError(
            f"{accumulates} and synchronizes at the last batch of an epoch. This loader does not know its last batch "
            "before the data set ends. Give the data set, or its sampler, a __len__, or create the Accelerator with "
            f"GradientAccumulationPlugin(num_steps={num_batches}, sync_with_dataloader=False)"
        )
    return ends_with_epoch


class LightningFit:
    """An iteration in Lightning's fit loop, over the steps of a loader.

    If `configure_optimizers` asks for `trainer.estimated_stepping_batches`, Lightning begins the iteration before it
    reads its checkpoint, and does not load the states of loaders afterwards: they are loaded with the first item.
    `is_ahead`: a state inside an epoch was loaded, of data without a length, of which Lightning prefetches a batch.
    """

    def __init__(self, loop: Any, steps: Any) -> None:
        self.is_ahead = False
        self._loop = loop
        self._steps = steps

    def check_epochs(self, start: Position, num_steps: Callable[[int], int]) -> None:
        """Raise ValueError if epochs from a position on have other numbers of steps: Lightning asks only once."""
        trainer, loop = self._loop.trainer, self._loop
        length = num_steps(start.epoch)
        limit = trainer.limit_train_batches
        most = limit if isinstance(limit, int) else int(length * limit) if limit < 1 else math.inf
        epochs = math.inf if loop.max_epochs in (None, -1) else loop.max_epochs - loop.epoch_progress.current.processed
        if trainer.max_steps != -1:
            left = trainer.max_steps - trainer.global_step + start.step
            epochs = min(epochs, math.ceil(left / max(1, min(length, most))))
        compare_epochs("Lightning", lambda epoch: min(num_steps(epoch), most), start.epoch, epochs)

    def begin(self) -> None:
        """The first item is requested."""
        if self.is_ahead:
            raise StateError(
                "Lightning takes a batch ahead of data without a length: the state in its checkpoint is one batch "
                "further than the training. Give the data set a __len__ and train again, or resume at the end of an "
                "epoch"
            )
        loop = self._loop
        if loop.restarting and loop._combined_loader_states_to_load:
            loop._load_combined_loader_states()
            for sampler in (getattr(loader, "sampler", None) for loader in loop._combined_loader.flattened):
                if isinstance(sampler, TrainerEpochs):
                    sampler.set_epoch(loop.epoch_progress.current.processed)
        evaluated = getattr(loop.epoch_loop.val_loop._combined_loader, "flattened", ())
        if any(getattr(each, "_runtime", None) is self._steps for each in evaluated):
            raise ValueError(ONE_LOADER)
        self.check_accumulation()

    def item(self, position: Position) -> None:
        """An item is yielded. Raises StateError if a state came too late, and as `check_accumulation`."""
        if self._loop.restarting and self._loop._combined_loader_states_to_load:
            raise StateError(
                "Lightning has taken a batch before it read its checkpoint, so that the loader's state in it cannot be "
                "loaded: in configure_optimizers, trainer.estimated_stepping_batches of data without a length is "
                "trainer.max_steps, so use that, or give the data set a __len__"
            )
        self.check_accumulation()

    def check_accumulation(self) -> None:
        """Raise ValueError if Lightning joins steps, and divides losses that are scaled for one step."""
        trainer = self._loop.trainer
        schedules = [each for each in trainer.callbacks if hasattr(each, "going_to_accumulate_grad_batches")]
        joined = max(
            [trainer.accumulate_grad_batches, *(most for each in schedules for most in each.scheduling.values())]
        )
        if self._steps.scales_loss and joined > 1:
            raise ValueError(
                f"accumulate_grad_batches={joined} would join steps of the DataLoader, and divide losses that "
                "batch.loss_scale scales already for one step: leave it at 1, and give "
                f"DataLoader(batch_size=..., accumulate={self._steps.accumulate * joined}), or a larger "
                "global_batch_size or global_batch_tokens"
            )

    def failed(self) -> None: ...

    def end(self) -> None: ...

    def close(self) -> None: ...


def check_validation(trainer: Any, first: int, num_steps: Callable[[int], int]) -> None:
    """Raise ValueError if evaluations in Lightning's fit would have other numbers of steps: it asks only once."""
    limit = trainer.limit_val_batches
    most = limit if isinstance(limit, int) else math.inf
    if trainer.state.fn == "fit":
        compare_epochs("Lightning", lambda epoch: min(num_steps(epoch), most), first, math.inf, "limit_val_batches")


def is_loaded_by_trainer() -> bool:
    """Return whether a trainer loads a state, also if a user's object around the loader passes it on."""
    names = (frame.f_code.co_name for frame, _ in traceback.walk_stack(None))
    return calling_trainer() is not None or "_load_combined_loader_states" in names


def lightnings_loop() -> Any:
    """Return the loop of Lightning's Trainer that leads to this call, a `_FitLoop` or `_EvaluationLoop`, or None."""
    frame = sys._getframe(1) if "lightning" in sys.modules or "pytorch_lightning" in sys.modules else None
    while frame is not None:
        # The local variables of a user's frame are not read: it would keep them, a loader among them, alive.
        if str(frame.f_globals.get("__name__")).partition(".")[0] in ("lightning", "pytorch_lightning"):
            loop = frame.f_locals.get("self")
            if type(loop).__name__ in ("_EvaluationLoop", "_FitLoop"):
                return loop
        frame = frame.f_back
    return None


def compare_epochs(
    trainer: str, num_steps: Callable[[int], float], first: int, num_epochs: float, limit: str = "max_steps"
) -> None:
    """Raise ValueError if epochs from `first` on have different numbers of steps, for a trainer that asks only once."""
    length = num_steps(first)
    for epoch in range(first + 1, first + int(min(num_epochs, _EPOCHS_COMPARED))):
        if (other := num_steps(epoch)) != length:
            raise ValueError(
                f"epochs {first} and {epoch} of this DataLoader have {length} and {other} steps, and {trainer} takes "
                f"all for as long as the first: give {limit}={length} or less, or steps of one size"
            )


_EPOCHS_COMPARED: Final = 64
ONE_LOADER: Final = (
    "one DataLoader trains and evaluates, so that an evaluation would move the place from which training goes on: make "
    "a second DataLoader for the evaluation, of the same data set if you like"
)


class AccelerateEnd:
    """Registers an iteration in Accelerate's gradient state, and tells it when a batch is the last one, where it
    synchronizes gradients.

    `num_steps` returns the number of steps of the epoch: its items; `num_in_tail` the samples of the last one, which
    come before repeats in what Accelerate gathers of it, -1 if nothing is repeated.
    """

    def __init__(self, num_steps: Callable[[], int], num_in_tail: Callable[[], int]) -> None:
        self._num_steps = num_steps
        self._num_in_tail = num_in_tail
        self._registered: Any = None
        self._is_last: bool | None = None  # no item yet
        self._has_failed = False

    def begin(self) -> None:
        """The first item is requested."""
        from accelerate.data_loader import DataLoaderStateMixin
        from accelerate.state import GradientState

        class Registered(DataLoaderStateMixin):  # type: ignore[misc]
            gradient_state = GradientState()

        self._registered = Registered()
        self._registered.begin()

    def item(self, position: Position) -> None:
        """An item is yielded, and this is the position after it. Raises RuntimeError if the one before was the last."""
        if self._is_last:
            raise RuntimeError(_OTHER_LENGTH.format("more"))
        self._is_last = self._registered.end_of_dataloader = position.step >= self._num_steps() and not position.left
        if self._is_last:
            self._registered.remainder = self._num_in_tail()

    def failed(self) -> None:
        """A step failed, and the iteration continues after it."""
        self._has_failed = True

    def end(self) -> None:
        """The epoch is over. Raises RuntimeError if its last item was not reported as the last.

        Gradients of one epoch would be added to those of the next.
        """
        self.close()
        if self._is_last is False and not self._has_failed:
            raise RuntimeError(_OTHER_LENGTH.format("fewer"))

    def close(self) -> None:
        """The iteration is over."""
        if self._registered is not None:
            self._registered.end()
            self._registered = None


_OTHER_LENGTH = (
    "the epoch has {} batches than the length of its sampler says, so that Accelerate's count of accumulated gradients "
    "does not end with it: correct the sampler's __len__"
)
