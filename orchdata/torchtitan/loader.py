"""torchtitan's BaseDataLoader around a DataLoader, and its Trainer, with steps of as many microbatches as the loader's.

Config(make=...) --build(dp_rank, dp_world_size, ...)--> make(...) --> od.DataLoader
its microbatches --> (input_dict, labels), epoch after epoch      its state --> text in torchtitan's checkpoints
"""

# No `from __future__ import annotations`: torchtitan's command line reads the types of Config's fields.

import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import torch
import tyro
from torch import Tensor
from torchtitan.trainer import BaseDataLoader  # where it is in all versions

from orchdata.batch.batch import Batch
from orchdata.batch.tensors import IGNORE, whole_lengths
from orchdata.dataloader import DataLoader as _DataLoader

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer as _Base
else:
    _Base = object

_LLM = frozenset(("input_ids", "labels", "shift_labels", "position_ids", "cu_seqlens", "max_seqlen"))

Item = tuple[dict[str, Any], Tensor]
"""What torchtitan takes of a microbatch: "input" and the model's other arguments, and labels."""


class DataLoader(BaseDataLoader):
    """A dataloader for torchtitan's `Trainer.Config`, around the `od.DataLoader` that a function of yours makes::

        def make_loader(*, dp_rank, dp_world_size, **_):
            return od.DataLoader(..., collate_fn=od.Packed(length=16_384), dp=(dp_rank, dp_world_size))

        Trainer.Config(..., dataloader=od.torchtitan.DataLoader.Config(make=make_loader))

    Epochs follow each other, each with its own order. A microbatch is packed, and becomes `input` and `positions` of
    shape (T,), (1, T) for a torchtitan that has rows, encoders' arrays under the names of `Batch.model_inputs`, and
    `labels` of the next token, -100 where there is no loss. Positions restart with each sample, by which torchtitan
    knows where attention ends; those of padding restart at the longest sequence that it was configured for, too.

    Of sequences that ranks share a rank has slices, and the model gets `teams` too, for `od.TeamAttention`.

    torchtitan divides the summed loss by the labels that it counts over all ranks and microbatches of its step. A
    sample that failed to decode is not among these, which `batch.loss_scale` would have kept as planned.

    Its state is one text, so that torch.distributed.checkpoint keeps all of it: the same on all ranks, for any number.

    Config:
        make: called with what torchtitan gives a dataloader: dp_rank, dp_world_size, tokenizer, and others.
        convert: a microbatch -> (input_dict, labels), for a model that has other names, a `collate_fn` of your own, or
            positions of three axes.
        for_validation: microbatches are counted by themselves, not by optimizer steps.
        repeat, infinite: False ends after one epoch; torchtitan's validator sets the one that its version knows.

    Raises:
        TypeError: `make` gives something else than an od.DataLoader; a `collate_fn` of your own without a `convert`.
        ValueError: a loader of other data-parallel ranks than torchtitan's; padded batches, or mrope; sources with loss
            weights; `Teams(cut="trainer")` without a `convert`; a sample that is longer than torchtitan's longest
            sequence; a step of several microbatches, where no `TrainerMixin` is there to take them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """See `DataLoader`."""

        make: Annotated[Callable[..., Any], tyro.conf.Suppress]
        convert: Annotated[Callable[[Any], Item] | None, tyro.conf.Suppress] = None
        for_validation: Annotated[bool, tyro.conf.Suppress] = False
        repeat: Annotated[bool, tyro.conf.Suppress] = True
        infinite: Annotated[bool, tyro.conf.Suppress] = True

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **others: Any) -> None:
        loader = config.make(dp_world_size=dp_world_size, dp_rank=dp_rank, **others)
        if not isinstance(loader, _DataLoader):
            raise TypeError(f"make gives an od.DataLoader, got {type(loader).__name__}")
        self.loader = loader
        self._steps = loader.steps()
        if self._steps.num_ranks != dp_world_size:
            raise ValueError(
                f"the DataLoader is of {self._steps.num_ranks} data-parallel ranks and torchtitan of {dp_world_size}: "
                "make it with dp=(dp_rank, dp_world_size), which make is called with"
            )
        if config.convert is None:
            self._steps.check_whole("torchtitan")
        self._convert = config.convert or self._packed
        self._for_validation = config.for_validation
        self._repeats = config.repeat and config.infinite
        self._has_rows = "num_tokens_per_batch" not in others
        self._longest = others.get("max_context_length", others.get("seq_len"))

    def __iter__(self) -> Iterator[Item]:
        """Items, a microbatch each."""
        for items in self.optimizer_steps():
            if len(items) > 1 and not self._for_validation:
                raise ValueError(
                    f"a step of the DataLoader has {len(items)} microbatches, inside of which torchtitan's own trainer "
                    "would step the optimizer: give it od.torchtitan.TrainerMixin, which takes as many as a step has. "
                    "A validator, which steps nothing, takes Config(for_validation=True)"
                )
            yield from items

    def optimizer_steps(self) -> Iterator[list[Item]]:
        """Steps, each the items of its microbatches."""
        while True:
            num_steps = 0
            for microbatches in self._steps:
                num_steps += 1
                yield [self._convert(batch) for batch in microbatches]
            if not self._repeats or not num_steps:
                return

    def state_dict(self) -> dict[str, Any]:
        return {"loader": json.dumps(self.loader.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self._steps.load_state_dict(json.loads(state_dict["loader"]))

    def close(self) -> None:
        self.loader.close()

    def _packed(self, batch: Any) -> Item:
        if not isinstance(batch, Batch) or batch.inputs is not None:
            raise TypeError(
                "a microbatch with a collate_fn of your own, or a model's own names, needs Config(convert=...), which "
                "gives torchtitan's input_dict and labels of it"
            )
        if batch.llm.attention_mask is not None or batch.llm.position_ids.ndim > 1:
            raise ValueError(
                "torchtitan takes packed batches with positions of one axis: collate_fn=od.Packed(...), not od.Padded, "
                'and for positions="mrope" Config(convert=...)'
            )
        if batch.loss_weights is not None:
            raise ValueError(
                "torchtitan counts each token with loss as one, and these are of sources with loss weights: leave "
                "loss_weight out of od.Source, and give the sources weights"
            )
        longest, positions = self._longest, batch.llm.position_ids
        if longest is not None:
            self._check_lengths(batch, longest)
            positions = positions % longest  # padding is a sequence of any length
        inputs = {"input": batch.llm.input_ids, "positions": positions}
        labels = batch.llm.next_labels
        if self._has_rows:
            inputs, labels = {name: value[None] for name, value in inputs.items()}, labels[None]
        others = {name: value for name, value in replace(batch, unnamed=()).model_inputs().items() if name not in _LLM}
        return inputs | others, labels

    def _check_lengths(self, batch: Batch, longest: int) -> None:
        lengths = whole_lengths(batch.llm, batch.teams) if batch.has_slices else batch.llm.lengths
        for (shard, key), length in zip(batch.sample_ids, lengths.tolist(), strict=False):
            if length > longest:
                raise ValueError(
                    f"sample {key} of {shard} has {length} tokens, and torchtitan is configured for sequences of "
                    f"{longest}: raise that, or leave such samples out, od.Balance(max_tokens={longest}, "
                    'oversize="drop")'
                )


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
            self._under_way.append((dict(inputs), torch.full_like(labels, IGNORE)))
        return max(1, len(self._under_way) // at_a_time)

    def _items(self) -> Iterator[Item]:
        while self._under_way:
            yield self._under_way.popleft()
