"""What a trainer around a loader must know while it iterates.

Accelerate synchronizes gradients at every n-th batch and at the last batch of an epoch. It finds the last batch only of
loaders that register themselves: `known_to_accelerate` registers ours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from typing import Any

from orchdata.delivery.cursor import Failed


def accelerate_accumulation() -> tuple[int, bool]:
    """Over how many batches Accelerate accumulates gradients, and whether the count ends with a loader's epoch.

    (1, False) where no program of this process has imported Accelerate.
    """
    module = sys.modules.get("accelerate.state")
    if module is None or not hasattr(module, "GradientState"):  # it is being imported
        return 1, False
    state = module.GradientState()
    return state.num_steps, state.sync_with_dataloader


def check_accumulation(*, scales_loss: bool, knows_end: Callable[[], bool]) -> bool:
    """Whether Accelerate must be told of the last batch of an epoch.

    Args:
        scales_loss: whether batches carry a `loss_scale` that covers the whole optimizer step.
        knows_end: whether the number of batches of an epoch is known before its end.

    Raises:
        ValueError: gradients would be accumulated over other batches than those of an optimizer step, or the last batch
            is not known.
    """
    num_batches, ends_with_epoch = accelerate_accumulation()
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
            "1, accumulate by a larger global_batch_size and max_tokens, and iterate "
            "od.hf.accelerate(loader, accelerator). To evaluate, call iter() under torch.no_grad()"
        )
    if ends_with_epoch and not knows_end():
        raise ValueError(
            f"{accumulates} and synchronizes at the last batch of an epoch. This loader does not know its last batch "
            "before the data set ends. Give the data set, or its sampler, a __len__, or make the Accelerator with "
            f"GradientAccumulationPlugin(num_steps={num_batches}, sync_with_dataloader=False)"
        )
    return ends_with_epoch


def known_to_accelerate(
    items: Generator[Any, None, None], num_items_left: Callable[[], int]
) -> Generator[Any, None, None]:
    """The items, with the loader registered in Accelerate's gradient state while it iterates.

    Args:
        items: batches of one epoch.
        num_items_left: how many come after the item that was yielded last.

    Raises:
        RuntimeError: the epoch ended elsewhere than the length said, so that gradients of one epoch would be added to
            those of the next.
    """
    from accelerate.data_loader import DataLoaderStateMixin
    from accelerate.state import GradientState

    class Registered(DataLoaderStateMixin):  # type: ignore[misc]
        gradient_state = GradientState()

    registered, is_last, has_failed = Registered(), False, False
    registered.begin()
    try:
        for item in items:
            if isinstance(item, Failed):
                has_failed = True
                yield item
                continue
            if is_last:
                raise RuntimeError(_OTHER_LENGTH.format("more"))
            is_last = registered.end_of_dataloader = num_items_left() == 0
            held = [item]
            del item  # the caller decides how long it lives
            yield held.pop()
        if not (is_last or has_failed):
            raise RuntimeError(_OTHER_LENGTH.format("fewer"))
    finally:
        registered.end()
        items.close()


_OTHER_LENGTH = (
    "the epoch has {} batches than the length of its sampler says, so that Accelerate's count of accumulated gradients "
    "does not end with it: correct the sampler's __len__"
)
