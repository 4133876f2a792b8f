"""TRL's SFTTrainer over a DataLoader: what its constructor wants in place of one, and options that would do nothing.

    class Trainer(od.hf.TrainerMixin, trl.SFTTrainer): ...

The constructor is given a data set of one tokenized row that stands for the loader, and the trainer has the loader
again before anything reads the row.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from itertools import product
from typing import Any, Final

from transformers import TrainingArguments

from orchdata.batch.batch import Batch
from orchdata.hf.inputs import Inputs, as_rows
from orchdata.steps import OptimizerSteps

_OPTIONS: Final = {
    "packing": "collate_fn=od.hf.Inputs(config) packs already",
    "eval_packing": "collate_fn=od.hf.Inputs(config) packs already",
    "padding_free": "collate_fn=od.hf.Inputs(config) packs already",
    "assistant_only_loss": "the recipe says which tokens are trained",
    "completion_only_loss": "the recipe says which tokens are trained",
}
"""Options of SFTConfig about the rows of a data set -> what does the same for a loader."""


def is_sft(trainer: Any) -> bool:
    """Return whether a trainer is TRL's SFTTrainer."""
    return any(kind.__name__ == "SFTTrainer" and kind.__module__.startswith("trl.") for kind in type(trainer).__mro__)


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


def check_options(given: Iterable[Any]) -> None:
    """Raise ValueError if a constructor is given a loader, and options of SFTConfig about rows of a data set."""
    given = list(given)
    if not any(isinstance(each, OptimizerSteps) for each in given):
        return
    for args, (name, instead) in product(given, _OPTIONS.items()):
        if isinstance(args, TrainingArguments) and getattr(args, name, None):
            raise ValueError(
                f"{name} of SFTConfig changes rows of a data set before they are batches, and does nothing to batches "
                f"of a DataLoader: leave it out, {instead}"
            )
