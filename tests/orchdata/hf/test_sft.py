"""TRL's SFTTrainer over a DataLoader, by a stand-in that refuses and reads what SFTTrainer does; `make test-tools`
has TRL's own.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import orchdata as od

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
pytest.importorskip("datasets", reason="SFTTrainer takes a datasets.Dataset")

from hf_families.families import FAMILIES
from hf_families.samples import made_up, write_samples
from trainer_job import SETTINGS, Ours
from transformers import Trainer, TrainingArguments

from orchdata.hf.trainer import sft_arguments
from orchdata.steps import OptimizerSteps

pytestmark = [pytest.mark.usefixtures("same_cache"), pytest.mark.filterwarnings("ignore::FutureWarning:accelerate.*")]

SIZE, STEPS = 6, 3


class Checking(Trainer):
    """Refuses what is no datasets.Dataset, reads a row, prepares all rows, and computes its own loss."""

    def __init__(self, model: Any, args: Any, train_dataset: Any = None, eval_dataset: Any = None) -> None:
        given = [each for each in (train_dataset, eval_dataset) if each is not None]
        for dataset in given:
            if not isinstance(dataset, import_module("datasets").Dataset):
                raise TypeError(f"`train_dataset` must be a `Dataset`, got `{type(dataset).__name__}`.")
            assert "input_ids" in next(iter(dataset))
            assert self._prepare_dataset(dataset) is dataset
        self.counted: list[Any] = []
        super().__init__(model, args, train_dataset=train_dataset, eval_dataset=eval_dataset)

    def _prepare_dataset(self, dataset: Any) -> Any:
        raise AssertionError("rows of a data set are prepared")

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self.counted.append(num_items_in_batch)
        labels = inputs.pop("labels")
        logits = model(**inputs).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch
        return (loss, None) if return_outputs else loss


SFTTrainer = type("SFTTrainer", (Checking,), {"__module__": "trl.trainer.sft_trainer"})


class Sft(od.hf.TrainerMixin, SFTTrainer):
    pass


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> list[str]:
    family = FAMILIES["llama"]
    return list(write_samples(family, made_up(family, SIZE * STEPS), tmp_path_factory.mktemp("llama")))


def make(kind: type[Any], shards: list[str], folder: Path, **options: Any) -> Any:
    processor, model = FAMILIES["llama"].build()

    def loader(**more: Any) -> od.DataLoader:
        dataset = od.ShardDataset(shards, recipe=od.hf.recipe(processor))
        given = {"global_batch_size": SIZE, "collate_fn": od.hf.Inputs(model.config), "num_threads": 0}
        return od.DataLoader(dataset, **given, balance=od.Balance(max_tokens=260, oversize="own"), **more)

    arguments = TrainingArguments(str(folder), num_train_epochs=1, **SETTINGS)
    for name, value in options.items():
        setattr(arguments, name, value)
    return kind(model, arguments, train_dataset=loader(shuffle=True), eval_dataset=loader())


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_its_own_loss_is_divided_by_the_planned_count(shards: list[str], tmp_path: Path) -> None:
    trainer, expected = make(Sft, shards, tmp_path), make(Ours, shards, tmp_path)
    assert isinstance(trainer.train_dataset, OptimizerSteps) and isinstance(trainer.eval_dataset, OptimizerSteps)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.evaluate()["eval_loss"], abs=1e-5)
    trainer.counted.clear()
    trainer.train()
    expected.train()
    assert losses(trainer) == pytest.approx(losses(expected), abs=1e-5)
    assert len(losses(trainer)) == STEPS and len(set(losses(trainer))) == STEPS
    assert len(trainer.counted) > STEPS and len(set(trainer.counted)) == STEPS  # several microbatches, a count a step


def test_a_class_that_is_not_sfttrainer_is_given_the_loader(shards: list[str], tmp_path: Path) -> None:
    class Other(od.hf.TrainerMixin, Checking):
        pass

    with pytest.raises(TypeError, match="got `OptimizerSteps`"):
        make(Other, shards, tmp_path)


def test_options_of_rows_are_refused(shards: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"packing of SFTConfig .* leave it out, collate_fn=od.hf.Inputs"):
        make(Sft, shards, tmp_path, packing=True)
    with pytest.raises(ValueError, match=r"assistant_only_loss .*the recipe says"):
        make(Sft, shards, tmp_path, assistant_only_loss=True)
    make(Sft, shards, tmp_path, packing=False, completion_only_loss=None)


def test_a_mask_of_packed_samples_is_refused() -> None:
    batch: Any = SimpleNamespace(has_slices=False, llm=SimpleNamespace(any_labels=torch.zeros(4, dtype=torch.int64)))
    with pytest.raises(ValueError, match="padded=True"):
        sft_arguments({"attention_mask": torch.ones(1, 1, 4, 4)}, batch)
    given = sft_arguments({"attention_mask": torch.ones(1, 4), "num_items_in_batch": 3}, batch)
    assert set(given) == {"attention_mask", "labels"} and given["labels"].shape == (1, 4)
