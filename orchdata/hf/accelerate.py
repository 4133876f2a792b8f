"""A DataLoader in an Accelerate loop.

    accelerate(loader, accelerator) --marked as prepared--> batches on the accelerator's device, state in save_state()

`Accelerator.prepare` would shard a loader that it knew a second time: here every rank's batches are its own already.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from orchdata.batch.batch import Batch
from orchdata.dataloader import DataLoader
from orchdata.steps import OptimizerSteps


class Prepared:
    """What `od.hf.accelerate` gives: the loader, or its steps, with batches on the accelerator's device.

    To Accelerate it is a prepared loader with a state: `prepare` leaves it as it is, `save_state` keeps its place.
    """

    _is_accelerate_prepared = True
    use_stateful_dataloader = True
    dataset = None  # Accelerate asks whether it is one that it shards

    def __init__(self, loader: DataLoader | OptimizerSteps, accelerator: Any) -> None:
        self.loader, self._accelerator = loader, accelerator
        self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict
        self.set_epoch = loader.set_epoch

    def __iter__(self) -> Iterator[Any]:
        from accelerate.utils import send_to_device

        accelerator = self._accelerator
        for item in self.loader:
            accumulated = accelerator.step
            if not accelerator.device_placement:
                yield item
            else:
                batch = item[0] if isinstance(item, list) and item else item
                is_pinned = isinstance(batch, Batch) and batch.llm.input_ids.is_pinned()
                yield send_to_device(item, accelerator.device, non_blocking=is_pinned)
            if accelerator.step != accumulated and isinstance(item, Batch) and not item.is_last_microbatch:
                raise ValueError(
                    "accelerator.accumulate steps the optimizer after each microbatch, and this one was not the last "
                    "of its step: under accelerator.no_sync(model) until batch.is_last_microbatch, and step then, or "
                    "give od.hf.accelerate the loader's steps()"
                )

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def sampler(self) -> Any:
        """Raises TypeError: asked for by `accelerator.skip_first_batches`, which would read what a state passes by."""
        raise TypeError(
            "a DataLoader has no batches skipped: accelerator.load_state, or its own load_state_dict, puts it where it "
            "is to go on"
        )


def accelerate(loader: DataLoader | OptimizerSteps, accelerator: Any) -> Prepared:
    """A loader for a loop of Accelerate's: its batches on the accelerator's device, its state in the accelerator's.

    The loop::

        loader = od.hf.accelerate(loader, accelerator)
        model, optimizer = accelerator.prepare(model, optimizer)
        for batch in loader:
            with contextlib.nullcontext() if batch.is_last_microbatch else accelerator.no_sync(model):
                accelerator.backward(model(**batch.model_inputs()).loss_sum * batch.loss_scale)

    Args:
        loader: a DataLoader, whose items are microbatches, or its `steps()`, whose items are lists of them.
        accelerator: made before the loader, so that torch.distributed was initialized when it was.

    Raises:
        TypeError: any other loader; `accelerator.prepare` is for torch's.
        ValueError: a loader of other data-parallel ranks than the accelerator's; or gradient accumulation of the
            accelerator's own around batches with a `loss_scale`, as it would divide the loss a second time.
    """
    steps = loader.steps() if isinstance(loader, DataLoader) else loader
    if not isinstance(steps, OptimizerSteps):
        raise TypeError(
            f"od.hf.accelerate takes an od.DataLoader or its steps(), got {type(loader).__name__}: "
            "accelerator.prepare is for loaders of torch's"
        )
    if steps.scales_loss and accelerator.gradient_accumulation_steps != 1:
        raise ValueError(
            f"the accelerator divides losses by gradient_accumulation_steps={accelerator.gradient_accumulation_steps}, "
            "and a step's loss is scaled already: leave it at 1, and give DataLoader(accumulate=...)"
        )
    config = getattr(accelerator, "parallelism_config", None)
    num_ranks = accelerator.num_processes // (1 if config is None else config.non_data_parallel_size)
    instead = (
        "iterate the loader itself, move batches to accelerator.device, and save loader.state_dict() for each rank"
    )
    steps.check_ranks(num_ranks, "the accelerator", "the Accelerator", instead)
    if accelerator.num_processes > 1:
        steps.even_tail()
        from accelerate.utils.operations import gather_object, get_shape

        # The accelerator compares shapes before it gathers tensors: of others a rank is aborted, or waits forever.
        def checked(tensor: Any, gather: Any = accelerator.gather) -> Any:
            shapes = gather_object([get_shape(tensor)])
            if any(shape != shapes[0] for shape in shapes):
                raise ValueError(
                    f"ranks hold tensors of other shapes, which cannot be gathered: {', '.join(map(str, shapes))}. Use "
                    "accelerator.gather_for_metrics(..., use_gather_object=True)"
                )
            return gather(tensor)

        if "gather" not in vars(accelerator):
            accelerator.gather = checked
    prepared: Prepared = accelerator.prepare_data_loader(Prepared(loader, accelerator))
    return prepared
