"""torchtitan's Trainer, with steps of as many microbatches as the loader's have.

loader's step --its microbatches--> gradient_accumulation_steps --> train_step --> as many (input_dict, labels)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from orchdata.torchtitan.loader import DataLoader, Item

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer as _Base
else:
    _Base = object

_NO_LABEL = -100


class TrainerMixin(_Base):
    """Lets torchtitan's Trainer step after each optimizer step of an `od.DataLoader`, with any number of microbatches.
    The Trainer counts, logs, schedules and saves by steps. Other dataloaders work as without the mixin::

        class Trainer(od.torchtitan.TrainerMixin, torchtitan.trainer.Trainer):
            @dataclass(kw_only=True, slots=True)
            class Config(torchtitan.trainer.Trainer.Config):
                pass

    Under pipeline parallelism a step has a multiple of the schedule's microbatches: the last is repeated without
    labels, which takes `od.Packed(length=...)`, as such schedules do.

    Raises:
        ValueError: gradient accumulation of torchtitan's own, which would join steps of the loader; CUDA graphs, which
            it captures by default in later versions, of microbatches of several lengths.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._whole_steps: Iterator[list[Item]] | None = None
        self._under_way: deque[Item] = deque()
        if not isinstance(self.dataloader, DataLoader):
            return
        if self.gradient_accumulation_steps != 1:
            raise ValueError(
                f"torchtitan's configuration makes {self.gradient_accumulation_steps} gradient accumulation steps, and "
                "a step of the DataLoader has as many microbatches as it needs: leave training.global_batch_size, or "
                "num_tokens_per_train_step, at -1, and give od.DataLoader the size of a step"
            )
        graphs = not getattr(config.training, "disable_cuda_graphs", True)
        if graphs and getattr(self.dataloader.loader.collate_fn, "length", None) is None:
            raise ValueError(
                "torchtitan captures CUDA graphs of one shape, and microbatches of the DataLoader have many: give it "
                "collate_fn=od.Packed(length=...), or set training.disable_cuda_graphs"
            )

    def batch_generator(self, data_iterable: Any) -> Iterator[Item]:
        if isinstance(data_iterable, DataLoader):
            self._whole_steps = data_iterable.optimizer_steps()
            data_iterable = self._items()
        batches: Iterator[Item] = super().batch_generator(data_iterable)
        return batches

    def train_step(self, data_iterator: Iterator[Item]) -> None:
        """Do torchtitan's train step with the loader's next step."""
        if self._whole_steps is not None:
            began = time.perf_counter()
            items = next(self._whole_steps, [])  # none left: torchtitan says so
            self.metrics_processor.data_loading_times.append(time.perf_counter() - began)
            self._under_way.extend(items)
            self.gradient_accumulation_steps = self._fill(items)
        super().train_step(data_iterator)

    def _fill(self, items: list[Item]) -> int:
        """Add items up to a multiple of what a pipeline takes at a time, and return how many times it takes them."""
        names = ("num_pp_microbatches", "num_pipeline_parallel_microbatches")  # the later version's first
        at_a_time: int = next((getattr(self, name) for name in names if hasattr(self, name)), 1)
        for _ in range(-len(items) % at_a_time):
            inputs, labels = items[-1]
            self._under_way.append((dict(inputs), torch.full_like(labels, _NO_LABEL)))
        return max(1, len(self._under_way) // at_a_time)

    def _items(self) -> Iterator[Item]:
        while self._under_way:
            yield self._under_way.popleft()
