"""transformers' Trainer, and TRL's SFTTrainer, over a DataLoader.

    class Trainer(od.hf.TrainerMixin, transformers.Trainer): ...      Trainer(model, args, train_dataset=loader)

    loader.steps() --an item, a step--> training_step: each microbatch --model_inputs--> compute_loss --> backward
    state_dict() --> trainer_state.json of each checkpoint --> load_state_dict

To the Trainer a batch is a whole optimizer step, so that its counts, its schedule and its checkpoints are of steps.
SFTTrainer's constructor is given a data set of one tokenized row that stands for the loader, until it would read it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from copy import copy
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import get_last_checkpoint

from orchdata.batch.batch import Batch
from orchdata.batch.tensors import IGNORE
from orchdata.dataloader import DataLoader
from orchdata.dataset.mixture import Mixture
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.hf.inputs import Inputs, as_rows, encode
from orchdata.hf.inputs import loss as scaled_loss
from orchdata.loaders.errors import StateError
from orchdata.loop.state import State
from orchdata.steps import OptimizerSteps
from orchdata.trainers import ONE_LOADER, compare_epochs

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object

_STATE: Final = "orchdata.DataLoader"
"""What the loader's state is called in trainer_state.json."""
_BATCH: Final = "orchdata_batch"
"""Key of the batch among the model's arguments."""
_WITHOUT: Final = ShardDataset | Mixture
"""Data that a loader is made of."""


class TrainerMixin(_Base):
    """Lets `transformers.Trainer` train on, and evaluate on, an `od.DataLoader`, given as `train_dataset` and
    `eval_dataset`: `class Trainer(od.hf.TrainerMixin, transformers.Trainer)`. Other data sets are left to it.

    A step of the Trainer is an optimizer step of the loader, of however many microbatches. The loss is scaled by
    `batch.loss_scale`: gradients and logged losses are those of the plain loop.

    Checkpoints hold the loader's state, and `train(resume_from_checkpoint=...)` loads it, on any number of ranks;
    `ignore_data_skip=True` leaves it out. `eval_loss` is the mean over the loss tokens of the whole evaluation set.

    The model is Hugging Face's with `collate_fn=od.hf.Inputs(config)`, per phase too, or any whose outputs have a
    `loss_sum`. `compute_loss_func` and label smoothing are given unshifted labels, of slices with one position more,
    and the number that makes a summed loss the scaled one. An overridden `compute_loss` gets the model's arguments,
    with `num_items_in_batch` counted as the Trainer does. Batches of a `collate_fn` of your own, or of map-style data,
    go to it as they are.

    With TRL's `SFTTrainer` in its place the loss is SFTTrainer's own, over the planned count of loss tokens.

    Raises:
        ValueError: before the first step, where arguments of the Trainer, or of `SFTConfig`, would change what a step
            is; for a loader of other ranks, or whose epochs have different numbers of steps.
        StateError: a checkpoint without the loader's state, or of another place than its own.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        args, kwargs = tuple(map(_counted, args)), {name: _counted(value) for name, value in kwargs.items()}
        kinds = type(self).__mro__
        self._is_sft = any(each.__name__ == "SFTTrainer" and each.__module__.startswith("trl.") for each in kinds)
        if self._is_sft:
            given = (*args, *kwargs.values())
            if any(isinstance(each, OptimizerSteps) for each in given):
                for each, (name, instead) in product(given, _OPTIONS.items()):
                    if isinstance(each, TrainingArguments) and getattr(each, name, None):
                        raise ValueError(
                            f"{name} of SFTConfig changes rows of a data set before they are batches, and does nothing "
                            f"to batches of a DataLoader: leave it out, {instead}"
                        )
            args, kwargs = tuple(map(stand_in, args)), {name: stand_in(value) for name, value in kwargs.items()}
        super().__init__(*args, **kwargs)
        if self._is_sft:
            self.train_dataset, self.eval_dataset = stands_for(self.train_dataset), stands_for(self.eval_dataset)
        self._evaluated = [0.0, 0.0]
        self._weights_of = ""
        self.add_callback(_EpochOfSteps)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does, with steps of the loader."""
        self.train_dataset = steps = _counted(self.train_dataset)
        ignores = self.args.ignore_data_skip
        if isinstance(steps, OptimizerSteps):
            self._check(steps)
            if resume_from_checkpoint and not ignores:
                self._load(steps, resume_from_checkpoint)
            if self.args.world_size > 1 and self.model_wrapped is self.model:
                # evaluate() has marked it as prepared, without DDP: each rank would train a model of its own.
                model: Any = self.model
                model._is_accelerate_prepared = False
            self.args.ignore_data_skip = True  # the loader stands where it is to go on
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.args.ignore_data_skip = ignores

    def get_train_dataloader(self) -> Any:
        steps = _counted(self.train_dataset)
        return steps if isinstance(steps, OptimizerSteps) else super().get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        given: Any = self.eval_dataset
        chosen = given if eval_dataset is None else eval_dataset
        steps = _counted(given[chosen] if isinstance(chosen, str) else chosen)
        if not isinstance(steps, OptimizerSteps):
            return super().get_eval_dataloader(eval_dataset)
        return self._whole(steps)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        steps = _counted(test_dataset)
        if not isinstance(steps, OptimizerSteps):
            return super().get_test_dataloader(test_dataset)
        if not self.args.prediction_loss_only:
            raise ValueError(
                "predict() over a DataLoader gives the loss alone, without predictions: set prediction_loss_only=True, "
                "or give it a data set of torch's"
            )
        return self._whole(steps)

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """SFTTrainer's preparation of rows; a loader, and what stands for one, needs none."""
        if isinstance(stands_for(dataset), DataLoader | OptimizerSteps):
            return dataset
        prepare: Any = super()
        return prepare._prepare_dataset(dataset, *args, **kwargs)

    def num_examples(self, dataloader: Any) -> int:
        return dataloader.num_samples if isinstance(dataloader, OptimizerSteps) else super().num_examples(dataloader)

    def get_total_train_batch_size(self, args: Any) -> int:
        steps = self.train_dataset
        if not isinstance(steps, OptimizerSteps):
            return super().get_total_train_batch_size(args)
        return steps.loader.global_batch_size or round(steps.num_samples / max(1, len(steps)))

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """One item: the microbatches of a step."""
        if not isinstance(self.train_dataset, OptimizerSteps):
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        microbatches = next(epoch_iterator, None)
        if microbatches is None:
            return [], None
        if isinstance(microbatches[0], Batch):
            return [microbatches], self._num_items(microbatches[0])
        own, num_items = super().get_batch_samples(iter(microbatches), len(microbatches), device)
        return [own], num_items

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of all microbatches of a step; their summed loss."""
        if not isinstance(inputs, list):
            return super().training_step(model, inputs, num_items_in_batch)
        losses = []
        for number, batch in enumerate(inputs, start=1):
            is_last = number == len(inputs)
            self.accelerator.gradient_state._set_sync_gradients(is_last)
            # As the Trainer's own: DeepSpeed synchronises by itself, and FSDP saves memory with sync_each_batch.
            kept = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
            syncs = is_last or kept or self.accelerator.distributed_type == "DEEPSPEED"
            with nullcontext() if syncs else self.accelerator.no_sync(model=model):
                losses.append(super().training_step(model, self._arguments(batch), num_items_in_batch))
        return torch.stack(losses).sum()

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The batch's part of the mean over the loss tokens of the global batch."""
        batch = inputs.get(_BATCH)
        if batch is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        arguments = {name: value for name, value in inputs.items() if name != _BATCH}
        own_loss = self.compute_loss_func
        if self.label_smoother is not None and own_loss is None:
            own_loss = partial(self.label_smoother, shift_labels=True)
        computes_loss = own_loss is not None or (self._is_sft and isinstance(batch.inputs, Inputs))
        if computes_loss and batch.loss_weights is not None:
            raise ValueError(
                "sources with loss weights take the model's own loss: no compute_loss_func, no smoothing, and "
                "transformers' Trainer in place of SFTTrainer"
            )
        if own_loss is not None:
            counted = {"labels", "shift_labels", "num_items_in_batch"}
            arguments = {name: arguments[name] for name in arguments.keys() - counted}
        if isinstance(batch.inputs, Inputs) and batch.routes:
            arguments["mm_encoder_outputs"] = encode(model, batch)
        if computes_loss and own_loss is None:
            num_items: Any = self._num_items(batch)
            return super().compute_loss(model, sft_arguments(arguments, batch), return_outputs, num_items)
        outputs = model(**arguments)
        if own_loss is not None:
            loss = own_loss(*_unshifted(outputs, batch), num_items_in_batch=1 / batch.loss_scale)
        elif not isinstance(batch.inputs, Inputs):
            loss = outputs.loss_sum * batch.loss_scale
        else:
            loss = outputs.loss if "labels" in arguments else scaled_loss(outputs, batch)
        return (loss, outputs) if return_outputs else loss

    def floating_point_ops(self, inputs: Any) -> int:
        if not isinstance(inputs, list):
            return super().floating_point_ops(inputs)
        return sum(super(TrainerMixin, self).floating_point_ops(self._main_input(batch)) for batch in inputs)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        self._evaluated, self._evaluating = [0.0, 0.0], dataloader
        output: Any = super().evaluation_loop(dataloader, *args, **kwargs)
        if not isinstance(dataloader, OptimizerSteps):
            return output
        sums = torch.tensor(self._evaluated, dtype=torch.float64, device=self.args.device)
        if self.args.world_size > 1:
            sums = self.accelerator.reduce(sums, "sum")
        loss, weight = sums.tolist()
        output.metrics[f"{kwargs.get('metric_key_prefix', 'eval')}_loss"] = loss / max(1, weight)
        return output

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        if not isinstance(inputs, list):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        with torch.no_grad(), self.compute_loss_context_manager():
            losses = [
                self.compute_loss(model, self._prepare_inputs(self._arguments(batch))).detach() for batch in inputs
            ]
        if isinstance(inputs[0], Batch):
            losses, weights = [torch.stack(losses).sum()], [inputs[0].global_loss_tokens]
        elif self._evaluating.repeats:
            weights = [0]
        else:
            weights = [find_batch_size(batch) or 1 for batch in inputs]
        for loss, weight in zip(losses, weights, strict=True):
            self._evaluated[0] += loss.item() * weight
            self._evaluated[1] += weight
        return torch.stack(losses).mean(), None, None

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if isinstance(self.train_dataset, OptimizerSteps):
            kept: Any = self.state.stateful_callbacks  # by name, of all that have a state
            kept[_STATE] = {"loader": self.train_dataset.state_dict()}
        super()._save_checkpoint(model, trial)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._weights_of = resume_from_checkpoint
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        self._weights_of = str(self.state.best_model_checkpoint)
        super()._load_best_model()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Checkpoints of some models (Qwen-VL, LLaVA) have the names of published weights, by which the Trainer finds
        none of the model's own, and would go on with those that it was made with: `from_pretrained` knows both.
        """
        if not (load_result.missing_keys and load_result.unexpected_keys and isinstance(self.model, PreTrainedModel)):
            super()._issue_warnings_after_load(load_result)
            return
        config, dtype = self.model.config, self.model.dtype
        self.model.load_state_dict(
            type(self.model).from_pretrained(self._weights_of, config=config, dtype=dtype).state_dict()
        )

    def _track_num_input_tokens(self, inputs: Any) -> None:
        track: Any = super()._track_num_input_tokens
        for batch in inputs if isinstance(inputs, list) else [inputs]:
            track(self._main_input(batch))

    def _load(self, steps: OptimizerSteps, checkpoint: str | bool) -> None:
        """Load the loader's state from the checkpoint, and compare its step with the Trainer's. Raises StateError."""
        folder = get_last_checkpoint(self.args.output_dir) if isinstance(checkpoint, bool) else checkpoint
        if folder is None:
            return  # the Trainer says so
        state = TrainerState.load_from_json(str(Path(folder, TRAINER_STATE_NAME)))
        stored = (state.stateful_callbacks or {}).get(_STATE)
        if stored is None:
            raise StateError(
                f"{folder} holds no state of a DataLoader, since a Trainer without od.hf.TrainerMixin wrote it: "
                "ignore_data_skip=True goes on with its weights, from the start of the epoch"
            )
        steps.load_state_dict(stored["loader"])
        theirs, ours = divmod(state.global_step, len(steps)), State.from_json(steps.state_dict()).position
        if (ours.epoch, ours.step) != theirs:
            raise StateError(
                f"{folder} is of step {theirs[1]} of epoch {theirs[0]}, by the {len(steps)} steps that an epoch has "
                f"here, and its loader of step {ours.step} of epoch {ours.epoch}: begin training with the loader "
                "at the start of epoch 0"
            )

    def _check(self, steps: OptimizerSteps) -> None:
        """Raise ValueError where the Trainer would make other steps of the loader's."""
        args = self.args
        steps.check_whole("the Trainer")
        if args.gradient_accumulation_steps != 1:
            raise ValueError(
                f"gradient_accumulation_steps={args.gradient_accumulation_steps} would join steps of the DataLoader, "
                "whose loss is scaled for one: leave it at 1, and give DataLoader(accumulate=...)"
            )
        if args.auto_find_batch_size:
            raise ValueError(
                "auto_find_batch_size cannot change the batches of a DataLoader: give od.Balance(max_tokens=...)"
            )
        if args.n_gpu > 1:
            raise ValueError(
                f"this process has {args.n_gpu} GPUs, among which the Trainer would split each batch by rows: start a "
                "process for each with torchrun, or set CUDA_VISIBLE_DEVICES"
            )
        if self.get_cp_size() * self.get_sp_size() > 1:
            raise ValueError(
                "the Trainer's context and sequence parallelism split each batch as one sequence: batches of a "
                "DataLoader are several, and their cu_seqlens and positions would not be split with them"
            )
        num_ranks = args.world_size // self.get_tp_size()
        instead = "give it the data set itself, not split by rank, or write a loop, and save a state for each rank"
        steps.check_ranks(num_ranks, "the Trainer", "TrainingArguments", instead)
        evaluated = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        if args.eval_strategy != "no" or args.eval_on_start:
            for each in evaluated.values():
                self._check_own_loader(_counted(each))
        try:
            first = len(steps)
        except TypeError as error:
            raise ValueError(
                "the Trainer finds its place in a training by the steps of an epoch, and this DataLoader's data set "
                "has no length: give it a __len__"
            ) from error
        epochs = math.ceil(args.max_steps / max(1, first) if args.max_steps > 0 else args.num_train_epochs)
        compare_epochs("the Trainer", steps.num_steps, 0, epochs)

    def _check_own_loader(self, steps: Any) -> None:
        if isinstance(steps, OptimizerSteps) and steps.loader is getattr(_counted(self.train_dataset), "loader", None):
            raise ValueError(ONE_LOADER)

    def _whole(self, steps: OptimizerSteps) -> OptimizerSteps:
        """The same samples at each evaluation."""
        steps.check_whole("the Trainer")
        if self.compute_metrics is not None:
            raise ValueError(
                "compute_metrics takes predictions of one row a sample; batches of a DataLoader are packed, and give "
                "eval_loss alone: leave it out, or evaluate on a data set of torch's"
            )
        if self.is_in_train:
            self._check_own_loader(steps)
        steps.set_epoch(0)
        return steps

    def _arguments(self, batch: Any) -> Any:
        if not isinstance(batch, Batch):
            return batch
        batch = batch.to(self.args.device, non_blocking=True)
        return batch.model_inputs() | {_BATCH: batch}

    def _main_input(self, batch: Any) -> Any:
        if not isinstance(batch, Batch):
            return batch
        name = getattr(self.model, "main_input_name", "input_ids")
        mask = batch.llm.attention_mask
        return {name: batch.llm.input_ids} | ({} if mask is None else {"attention_mask": mask})

    def _num_items(self, batch: Batch) -> float:
        """Loss tokens by which the Trainer divides a summed loss, before it multiplies by the ranks, or does not."""
        return batch.global_loss_tokens if self.args.average_tokens_across_devices else 1 / batch.loss_scale


def _unshifted(outputs: Any, batch: Batch) -> tuple[Any, Tensor]:
    """Return a model's outputs, and labels for a loss that shifts them. Where labels were shifted before the cut they
    move back, with one position more: its logits predict nothing.
    """
    if not batch.has_slices:
        return outputs, as_rows(batch.llm.any_labels)
    padded = copy(outputs)
    padded["logits"] = torch.nn.functional.pad(outputs["logits"], (0, 0, 0, 1))
    return padded, torch.nn.functional.pad(as_rows(batch.llm.any_labels), (1, 0), value=IGNORE)


class _EpochOfSteps(TrainerCallback):
    """The fraction of an epoch, which the Trainer counts from where it resumed."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        steps = kwargs.get("train_dataloader")
        if isinstance(steps, OptimizerSteps):
            state.epoch = state.global_step / len(steps)


def _counted(dataset: Any) -> Any:
    """A loader as its steps, also by name; anything else as it is. Raises TypeError for data without a loader."""
    if isinstance(dataset, _WITHOUT):
        raise TypeError(
            f"od.hf.TrainerMixin takes an od.DataLoader, got a {type(dataset).__name__}: give "
            "od.DataLoader(dataset, batch_size=..., collate_fn=od.hf.Inputs(model.config))"
        )
    if isinstance(dataset, dict) and any(isinstance(each, DataLoader | _WITHOUT) for each in dataset.values()):
        return {name: _counted(each) for name, each in dataset.items()}
    return dataset.steps() if isinstance(dataset, DataLoader) else dataset


_OPTIONS: Final = {
    **dict.fromkeys(("packing", "eval_packing", "padding_free"), "collate_fn=od.hf.Inputs(config) packs already"),
    **dict.fromkeys(("assistant_only_loss", "completion_only_loss"), "the recipe says which tokens are trained"),
}
"""Options of SFTConfig about the rows of a data set -> what does the same for a loader."""


def stand_in(given: Any) -> Any:
    """Return a data set of one row for the steps of a loader, also by name; anything else as it is."""
    if isinstance(given, dict) and any(isinstance(each, OptimizerSteps) for each in given.values()):
        return {name: stand_in(each) for name, each in given.items()}
    if not isinstance(given, OptimizerSteps):
        return given
    rows: Any = import_module("datasets").Dataset.from_dict({"input_ids": [[0, 0]], "labels": [[0, 0]]})
    rows.stands_for = given
    return rows


def stands_for(dataset: Any) -> Any:
    """Return the steps of a loader that a data set stands for, also by name; anything else as it is."""
    if isinstance(dataset, dict):
        return {name: stands_for(each) for name, each in dataset.items()}
    return getattr(dataset, "stands_for", dataset)


def sft_arguments(arguments: dict[str, Any], batch: Batch) -> dict[str, Any]:
    """Return a model's arguments as SFTTrainer's `compute_loss` reads them.

    Raises ValueError for a model whose attention mask is not one of rows, as SFTTrainer counts tokens by it; and for
    slices, if the model's own loss does not take labels that were shifted.
    """
    mask = arguments.get("attention_mask")
    if mask is not None and getattr(mask, "ndim", 0) != 2:
        raise ValueError(
            "SFTTrainer counts the tokens of an attention mask of rows, and this model takes one that keeps packed "
            "samples apart: collate_fn=od.hf.Inputs(config, padded=True), or transformers' Trainer"
        )
    if batch.has_slices and not (isinstance(batch.inputs, Inputs) and batch.inputs.scales_shifted):
        raise ValueError(
            "SFTTrainer takes the model's own loss, and this model's shifts labels that were shifted before sequences "
            "were cut: leave Balance(teams=...) out, or use transformers' Trainer"
        )
    kept = {name: value for name, value in arguments.items() if name != "num_items_in_batch"}
    labels = as_rows(batch.llm.any_labels)
    return kept | {"labels": labels} | ({"shift_labels": labels} if batch.has_slices else {})
