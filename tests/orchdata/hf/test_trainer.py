"""transformers' Trainer over a DataLoader takes the plain loop's steps, and goes on where it stopped. TRL's SFTTrainer,
by a stand-in that refuses and reads what SFTTrainer does: `make test-tools` has TRL's own. Losses of slices add up.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from hf_families.families import FAMILIES
from hf_families.reference import distance, gradients_of
from hf_families.samples import made_up, write_samples
from map_dataset import Numbers
from rank_jobs import run_ranks
from torch import Tensor
from trainer_job import SETTINGS, Ours, Watching
from trainer_job import __file__ as JOB
from trainer_job import plain_loop as own_loss_loop
from transformers import Trainer, TrainingArguments
from transformers.modeling_outputs import CausalLMOutput
from transformers.trainer_pt_utils import LabelSmoother

import orchdata as od
from orchdata.hf.trainer import _unshifted, sft_arguments
from orchdata.steps import OptimizerSteps

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning", "ignore::FutureWarning:accelerate.*"
)

TOLERANCE = 1e-8
COUNT, SIZE, STEPS = 18, 6, 3  # samples, of a step, steps of an epoch
SEVERAL = 260  # tokens of a microbatch


class Family:
    """A family's model, and loaders of its samples."""

    def __init__(self, name: str, folder: Path) -> None:
        self.family = FAMILIES[name]
        self.processor, _ = self.family.build()
        self.shards = write_samples(self.family, made_up(self.family, COUNT), folder)

    def model(self) -> Any:
        return self.family.build()[1]

    def loader(self, model: Any, **options: Any) -> od.DataLoader:
        dataset = od.ShardDataset(list(self.shards), recipe=od.hf.recipe(self.processor))
        given = {
            "global_batch_size": SIZE,
            "collate_fn": od.hf.Inputs(model.config, padded=False),
            "balance": od.Balance(max_tokens=SEVERAL, oversize="own"),
            "shuffle": True,
            "num_threads": 0,
        }
        return od.DataLoader(dataset, **(given | options))


@pytest.fixture(scope="module")
def vl(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> Family:
    return Family("qwen2_5_vl", tmp_path_factory.mktemp("vl"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> Family:
    """Whose forward the Trainer gives its own count; Qwen-VL's it does not."""
    return Family("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def _kept(same_cache: None) -> None:
    """Indexes are made once."""


def make(model: Any, loader: Any, folder: Path, *, kind: type[Any] = Ours, more: Any = None, **options: Any) -> Any:
    """A trainer whose steps are those of SGD, watched."""
    settings = SETTINGS | {"output_dir": str(folder), "num_train_epochs": 2}
    trainer = kind(model, TrainingArguments(**(settings | options)), train_dataset=loader, **(more or {}))
    trainer.watching = Watching()
    trainer.add_callback(trainer.watching)
    return trainer


def plain_loop(model: Any, loader: od.DataLoader, num_epochs: int) -> Iterator[tuple[float, dict[str, Tensor]]]:
    """Loss and gradients of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss = 0.0
    for _ in range(num_epochs):
        for batch in loader:
            part = od.hf.loss(model(**batch.model_inputs()), batch)
            part.backward()
            loss += part.item()
            if batch.is_last_microbatch:
                yield loss, gradients_of(model)
                optimizer.step()
                optimizer.zero_grad()
                loss = 0.0


def test_every_gradient_is_that_of_the_plain_loop(vl: Family, tmp_path: Path) -> None:
    model = vl.model()
    loader = vl.loader(model)
    assert max(len(step) for step in loader.steps()) > 1
    loader.set_epoch(0)
    expected = list(plain_loop(model, loader, 2))
    assert len(expected) == 2 * STEPS

    model = vl.model()
    trainer = make(model, vl.loader(model), tmp_path)
    trainer.train()
    found = trainer.watching
    assert [each[0] for each in expected] == pytest.approx(found.losses, rel=1e-6)  # logits of float32 in its own loss
    for (_, theirs), ours in zip(expected, found.gradients, strict=True):
        assert distance(ours, theirs) < 1e-5  # rounding of float32, on any processor
    assert trainer.accelerator._dataloaders == []  # nothing has sharded it


@pytest.mark.slow
def test_a_compute_loss_of_one_s_own_is_given_counts_as_the_trainer_has_them(llama: Family, tmp_path: Path) -> None:
    class Own(Ours):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = 0
        ) -> Any:
            own = {name: value for name, value in inputs.items() if name != "orchdata_batch"}
            return Trainer.compute_loss(self, model, own, return_outputs, num_items_in_batch)

    small = {"balance": od.Balance(max_tokens=60, oversize="own")}
    for averages in (True, False):
        model = llama.model()
        expected = own_loss_loop(model, llama.loader(model, **small))
        model = llama.model()
        trainer = make(
            model,
            llama.loader(model, **small),
            tmp_path,
            kind=Own,
            num_train_epochs=1,
            average_tokens_across_devices=averages,
        )
        trainer.train()
        assert trainer.model_accepts_loss_kwargs
        for ours, theirs in zip(trainer.watching.gradients, expected, strict=True):
            assert distance(ours, theirs) < TOLERANCE


@pytest.mark.slow
def test_a_model_whose_own_loss_does_not_follow_is_scaled_too(tmp_path: Path) -> None:
    audio = Family("qwen2_audio", tmp_path)
    model = audio.model()
    expected = list(plain_loop(model, audio.loader(model), 1))
    model = audio.model()
    trainer = make(model, audio.loader(model), tmp_path / "out", num_train_epochs=1)
    trainer.train()
    assert trainer.watching.losses == pytest.approx([loss for loss, _ in expected], rel=1e-6)  # of float32
    for (_, theirs), ours in zip(expected, trainer.watching.gradients, strict=True):
        assert distance(ours, theirs) < TOLERANCE


def smoothed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    smoothing = {"label_smoothing": 0.1, "ignore_index": -100, "reduction": "sum"}
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), **smoothing) / num_items_in_batch


@pytest.mark.parametrize("way", ["function", "smoothing"])
def test_another_loss_is_divided_by_the_tokens_of_the_whole_step(vl: Family, way: str, tmp_path: Path) -> None:
    model = vl.model()
    expected: list[dict[str, Tensor]] = []
    for batch in vl.loader(model):
        inputs = batch.model_inputs()
        labels, items = inputs.pop("labels"), inputs.pop("num_items_in_batch")
        smoothed(model(**inputs), labels, items).backward()
        if batch.is_last_microbatch:
            expected.append(gradients_of(model))
            break
    model = vl.model()
    ways: dict[str, Any] = {
        "function": {"more": {"compute_loss_func": smoothed}},
        "smoothing": {"label_smoothing_factor": 0.1},
    }
    trainer = make(model, vl.loader(model), tmp_path, max_steps=1, **ways[way])
    trainer.train()
    assert distance(trainer.watching.gradients[0], expected[0]) < (TOLERANCE if way == "function" else 1e-5)


@pytest.mark.parametrize("stop", [2, pytest.param(STEPS, marks=pytest.mark.slow)])
def test_a_training_that_goes_on_has_the_losses_of_one_that_never_stopped(
    vl: Family, stop: int, tmp_path: Path
) -> None:
    model = vl.model()
    whole = make(model, vl.loader(model), tmp_path / "whole")
    whole.train()
    assert whole.state.global_step == 2 * STEPS and whole.watching.epochs[-1] == 2

    model = vl.model()
    saving = {"save_strategy": "steps", "save_steps": stop}
    make(model, vl.loader(model), tmp_path / "part", max_steps=stop, **saving).train()
    model = vl.model()
    rest = make(model, vl.loader(model, num_threads=2), tmp_path / "part", max_steps=2 * STEPS, **saving)
    rest.train(resume_from_checkpoint=True)
    assert rest.watching.losses == whole.watching.losses[stop:]
    assert rest.watching.epochs == pytest.approx(whole.watching.epochs[stop:])
    assert not rest.args.ignore_data_skip
    for ours, theirs in zip(rest.watching.gradients, whole.watching.gradients[stop:], strict=True):
        assert distance(ours, theirs) < TOLERANCE


def checkpoint_of(trainer: Any, folder: Path) -> Path:
    trainer.train()
    return folder / f"checkpoint-{trainer.state.global_step}"


@pytest.mark.slow
def test_a_checkpoint_without_the_loader_s_state_is_refused_unless_it_is_left_out(vl: Family, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    model = vl.model()
    written = checkpoint_of(make(model, vl.loader(model), tmp_path, max_steps=2, **saving), tmp_path)
    path = written / "trainer_state.json"
    state = json.loads(path.read_text())
    held = state["stateful_callbacks"].pop("orchdata.DataLoader")
    assert (held["loader"]["epoch"], held["loader"]["step"]) == (0, 2)
    path.write_text(json.dumps(state))

    model = vl.model()
    trainer = make(model, vl.loader(model), tmp_path)
    with pytest.raises(od.StateError, match="checkpoint-2 holds no state of a DataLoader.*ignore_data_skip=True"):
        trainer.train(resume_from_checkpoint=str(written))
    leaving_out = make(model, vl.loader(model), tmp_path, max_steps=3, ignore_data_skip=True)
    leaving_out.train(resume_from_checkpoint=str(written))
    assert leaving_out.args.ignore_data_skip and leaving_out.state.global_step == 3

    held["loader"]["step"] = 1
    held["loader"]["position"] = SIZE
    path.write_text(json.dumps(state | {"stateful_callbacks": {"orchdata.DataLoader": held}}))
    with pytest.raises(od.StateError, match="step 2 of epoch 0.*its loader of step 1 of epoch 0"):
        make(model, vl.loader(model), tmp_path).train(resume_from_checkpoint=str(written))


@pytest.mark.slow
def test_eval_loss_is_the_mean_over_all_tokens_however_batches_are_cut(vl: Family, tmp_path: Path) -> None:
    model = vl.model().eval()
    options = {"shuffle": False, "global_batch_size": 5}  # the last step is smaller
    total = tokens = 0.0
    with torch.no_grad():
        for batch in vl.loader(model, **options):
            total += od.hf.loss(model(**batch.model_inputs()), batch).item() / batch.loss_scale
            tokens += batch.loss_tokens
    more = {"eval_dataset": vl.loader(model, **options)}
    trainer = make(model, vl.loader(model), tmp_path, more=more)
    for _ in range(2):
        assert trainer.evaluate()["eval_loss"] == pytest.approx(total / tokens, rel=1e-6)
    several = {"eval_dataset": {"a": vl.loader(model, **options), "b": vl.loader(model, **options)}}
    found = make(model, vl.loader(model), tmp_path, more=several).evaluate()
    assert found["eval_a_loss"] == found["eval_b_loss"] == pytest.approx(total / tokens, rel=1e-6)


@pytest.mark.slow
def test_gradients_of_two_ranks_are_those_of_the_plain_loop_joint_and_per_phase(vl: Family, tmp_path: Path) -> None:
    model = vl.model()
    total = tokens = 0.0
    with torch.no_grad():
        for batch in vl.loader(model):
            total += od.hf.loss(model(**batch.model_inputs()), batch).item() / batch.loss_scale
            tokens += batch.loss_tokens
    (tmp_path / "logs").mkdir()
    for rank in run_ranks(JOB, tmp_path, *vl.shards, num_ranks=2, folder=tmp_path / "logs"):
        for way in ("joint", "per_phase"):
            found = rank[way]
            assert found["off"] < TOLERANCE < found["off by one step"], way
            assert found["steps"] == STEPS and found["prepared"] == 0
            assert found["eval"] == pytest.approx(total / tokens, rel=1e-6)


class WithSum(torch.nn.Module):
    """A model of one's own: outputs have a loss_sum."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(260, 4)

    def forward(self, input_ids: Tensor, labels: Tensor, **others: Any) -> Any:
        from examples.model import ModelOutput

        return ModelOutput(self.embed(input_ids)[labels != -100].square().sum(), 0)


def test_a_model_of_one_s_own_gives_a_sum(vl: Family, tmp_path: Path) -> None:
    recipe = od.Recipe(image=od.ImagePreprocessor(patch_size=14, max_tokens=64), audio=None)
    options: dict[str, Any] = {"global_batch_size": SIZE, "balance": od.Balance(max_tokens=300, oversize="own")}
    dataset = od.ShardDataset(list(vl.shards), recipe=recipe)
    torch.manual_seed(0)
    model = WithSum()
    loss = 0.0
    for batch in next(iter(od.DataLoader(dataset, **options).steps())):
        loss += (model(**batch.model_inputs()).loss_sum * batch.loss_scale).item()
    trainer = make(model, od.DataLoader(dataset, **options), tmp_path, max_steps=1)
    trainer.train()
    assert trainer.watching.losses == pytest.approx([loss])


class OfRows(torch.nn.Module):
    """Takes what a collate_fn of one's own makes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, number: Tensor, length: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.weight * number).mean()}


def test_map_style_batches_go_to_the_model_as_they_are(tmp_path: Path) -> None:
    loader = od.DataLoader(Numbers(12), batch_size=4)
    trainer = make(OfRows(), loader, tmp_path, num_train_epochs=1, learning_rate=0.0)
    trainer.train()
    assert trainer.watching.losses == pytest.approx([1.5, 5.5, 9.5]) and trainer.state.global_step == 3
    assert trainer.num_examples(trainer.train_dataset) == 12


def test_other_data_sets_are_the_trainer_s(tmp_path: Path) -> None:
    class Plain(Ours):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            assert isinstance(inputs, dict) and len(inputs["number"]) == 4
            return super().training_step(model, inputs, num_items_in_batch)

    given = {"kind": Plain, "remove_unused_columns": False, "per_device_train_batch_size": 4, "num_train_epochs": 1}
    evaluated = od.DataLoader(Numbers(12), batch_size=4)
    given |= {"eval_strategy": "epoch", "more": {"eval_dataset": evaluated}}
    trainer = make(OfRows(), Numbers(12), tmp_path, **given)
    trainer.train()
    assert trainer.state.global_step == 3 and "eval_loss" in trainer.state.log_history[-2]


REFUSED: Sequence[tuple[dict[str, Any], str]] = (
    ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2 would join steps"),
    ({"auto_find_batch_size": True}, "auto_find_batch_size cannot change"),
)


@pytest.mark.parametrize(("options", "why"), REFUSED)
def test_what_would_change_a_step_is_refused(vl: Family, options: dict[str, Any], why: str, tmp_path: Path) -> None:
    model = vl.model()
    with pytest.raises(ValueError, match=why):
        make(model, vl.loader(model), tmp_path, **options).train()


def test_loaders_that_the_trainer_would_miscount_are_refused(vl: Family, tmp_path: Path) -> None:
    model = vl.model()
    balance = od.Balance(teams=od.Teams(largest=2, cut="trainer"))
    shared = vl.loader(model, collate_fn=od.Packed(), balance=balance)
    for method in ("train", "evaluate"):
        with pytest.raises(ValueError, match="the Trainer trains whole sequences"):
            getattr(make(model, shared, tmp_path, more={"eval_dataset": shared}), method)()
    rounds = vl.loader(model, balance=od.Balance(assignment="per_phase", encode="step"))
    with pytest.raises(ValueError, match="leave encode out"):
        make(model, rounds, tmp_path).train()
    with pytest.raises(ValueError, match="of 2 data-parallel ranks and the Trainer of 1"):
        make(model, vl.loader(model, dp=(0, 2)), tmp_path).train()
    tokens = int(od.ShardDataset(list(vl.shards), recipe=od.hf.recipe(vl.processor)).index().llm_tokens.sum())
    ramp = [(0, tokens // 6), (tokens // 2, tokens // 4)]
    growing: dict[str, Any] = {"global_batch_size": None, "global_batch_tokens": ramp}
    with pytest.raises(ValueError, match=r"epochs 0 and 1 of this DataLoader have \d+ and \d+ steps"):
        make(model, vl.loader(model, **growing), tmp_path).train()
    within = make(model, vl.loader(model, **growing), tmp_path, max_steps=2)
    within.train()
    assert within.state.global_step == 2
    with pytest.raises(ValueError, match="compute_metrics takes predictions of one row a sample"):
        more = {"eval_dataset": vl.loader(model), "compute_metrics": lambda _: {}}
        make(model, vl.loader(model), tmp_path, more=more).evaluate()
    with pytest.raises(ValueError, match="transformers takes len"):
        make(model, vl.loader(model), tmp_path, kind=Trainer)


def test_one_gpu_a_process(vl: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = vl.model()
    trainer = make(model, vl.loader(model), tmp_path)
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda _: 2))
    with pytest.raises(ValueError, match="this process has 2 GPUs"):
        trainer.train()


class MeanOfSquares(OfRows):
    def forward(self, number: Tensor, length: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.weight * number).square().mean(), "logits": number}


def test_eval_loss_of_map_style_data_weighs_by_samples_and_predictions_are_not_lost(tmp_path: Path) -> None:
    loader = od.DataLoader(Numbers(9), batch_size=4)
    trainer = make(MeanOfSquares(), None, tmp_path, more={"eval_dataset": loader})
    assert trainer.evaluate()["eval_loss"] == pytest.approx(sum(n * n for n in range(9)) / 9)
    with pytest.raises(ValueError, match="prediction_loss_only=True"):
        trainer.predict(loader)
    trainer.args.prediction_loss_only = True
    assert trainer.predict(loader).metrics["test_loss"] == pytest.approx(204 / 9)


def test_a_rank_that_only_repeats_a_sample_says_so() -> None:
    repeating = [od.DataLoader(Numbers(9), 2, seed=0, dp=(rank, 2)).steps() for rank in range(2)]
    assert [[steps.repeats for _ in steps] for steps in repeating] == [[False] * 3, [False, False, True]]


def test_data_that_a_trainer_would_lose_its_place_in_are_refused(vl: Family, tmp_path: Path) -> None:
    loader = od.DataLoader(Numbers(12), batch_size=4)
    for given in (loader, {"a": loader.steps()}):
        trainer = make(OfRows(), loader, tmp_path, eval_strategy="steps", more={"eval_dataset": given})
        with pytest.raises(ValueError, match="make a second DataLoader"):
            trainer.train()
    alone = make(OfRows(), loader, tmp_path, more={"eval_dataset": loader}, num_train_epochs=1)
    alone.train()
    assert alone.evaluate()["eval_loss"] > 0
    shards = od.ShardDataset(list(vl.shards))
    for dataset in (shards, od.Mixture({"a": od.Source(shards)})):
        with pytest.raises(TypeError, match=rf"got a {type(dataset).__name__}: give od.DataLoader"):
            make(OfRows(), dataset, tmp_path)


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


def make_sft(kind: type[Any], llama: Family, folder: Path, **options: Any) -> Any:
    pytest.importorskip("datasets", reason="SFTTrainer takes a datasets.Dataset")
    model = llama.model()
    arguments = TrainingArguments(str(folder), num_train_epochs=1, **SETTINGS)
    for name, value in options.items():
        setattr(arguments, name, value)
    given = {"collate_fn": od.hf.Inputs(model.config)}
    evaluated = llama.loader(model, shuffle=False, **given)
    return kind(model, arguments, train_dataset=llama.loader(model, **given), eval_dataset=evaluated)


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_its_own_loss_is_divided_by_the_planned_count(llama: Family, tmp_path: Path) -> None:
    trainer, expected = make_sft(Sft, llama, tmp_path), make_sft(Ours, llama, tmp_path)
    assert isinstance(trainer.train_dataset, OptimizerSteps) and isinstance(trainer.eval_dataset, OptimizerSteps)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.evaluate()["eval_loss"], abs=1e-5)
    trainer.counted.clear()
    trainer.train()
    expected.train()
    assert losses(trainer) == pytest.approx(losses(expected), abs=1e-5)
    assert len(losses(trainer)) == STEPS and len(set(losses(trainer))) == STEPS
    assert len(trainer.counted) > STEPS and len(set(trainer.counted)) == STEPS  # several microbatches, a count a step


def test_a_class_that_is_not_sfttrainer_is_given_the_loader(llama: Family, tmp_path: Path) -> None:
    class Other(od.hf.TrainerMixin, Checking):
        pass

    with pytest.raises(TypeError, match="got `OptimizerSteps`"):
        make_sft(Other, llama, tmp_path)


def test_options_of_rows_are_refused(llama: Family, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"packing of SFTConfig .* leave it out, collate_fn=od.hf.Inputs"):
        make_sft(Sft, llama, tmp_path, packing=True)
    with pytest.raises(ValueError, match=r"assistant_only_loss .*the recipe says"):
        make_sft(Sft, llama, tmp_path, assistant_only_loss=True)
    make_sft(Sft, llama, tmp_path, packing=False, completion_only_loss=None)


def test_a_mask_of_packed_samples_is_refused() -> None:
    batch: Any = SimpleNamespace(has_slices=False, llm=SimpleNamespace(any_labels=torch.zeros(4, dtype=torch.int64)))
    with pytest.raises(ValueError, match="padded=True"):
        sft_arguments({"attention_mask": torch.ones(1, 1, 4, 4)}, batch)
    given = sft_arguments({"attention_mask": torch.ones(1, 4), "num_items_in_batch": 3}, batch)
    assert set(given) == {"attention_mask", "labels"} and given["labels"].shape == (1, 4)


# Losses of slices, in each way that transformers and others compute them, add up to that of whole sequences.

RANKS, VOCAB = 4, 260
CONFIG = transformers.LlamaConfig(vocab_size=VOCAB, hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
INPUTS = od.hf.Inputs(CONFIG, padded=False, probe=False)
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def shifting(outputs: Any, labels: Tensor, num_items_in_batch: float) -> Tensor:
    """A `compute_loss_func` that shifts labels, as the Trainer documents them."""
    logits, wanted = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, wanted, reduction="sum") / num_items_in_batch


def of_model(outputs: Any, **given: Any) -> Tensor:
    loss: Tensor = transformers.LlamaForCausalLM._from_config(CONFIG).loss_function(
        logits=outputs.logits, vocab_size=VOCAB, **given
    )
    return loss


WAYS: dict[str, Any] = {
    "od.hf.loss": lambda batch, outputs: od.hf.loss(outputs, batch),
    "the model's own": lambda batch, outputs: of_model(
        outputs, **{name: each for name, each in batch.model_inputs().items() if "labels" in name or "num" in name}
    ),
    "compute_loss_func": lambda batch, outputs: shifting(*_unshifted(outputs, batch), 1 / batch.loss_scale),
    "label smoothing": lambda batch, outputs: partial(LabelSmoother(0.1), shift_labels=True)(
        *_unshifted(outputs, batch), num_items_in_batch=1 / batch.loss_scale
    ),
    "SFT": lambda batch, outputs: of_model(
        outputs,
        num_items_in_batch=1 / batch.loss_scale,
        **{name: each for name, each in sft_arguments({}, batch).items() if "labels" in name},
    ),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> list[str]:
    rng, paths = np.random.default_rng(1), []
    for name in ("a", "b"):
        path = tmp_path_factory.mktemp("texts") / f"{name}.jsonl"
        lengths = [1500, *rng.integers(20, 120, 7).tolist()]
        said = ["".join(map(chr, rng.integers(97, 123, length))) for length in lengths]
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in said))
        paths.append(str(path))
        od.ShardDataset(str(path), od.Recipe(image=None, audio=None)).index()
    return paths


def batches_of(texts: list[str], weight: float, *, shared: bool) -> list[od.Batch]:
    """The first step on all ranks, or on one that has everything whole."""
    recipe = od.Recipe(image=None, audio=None)
    a, b = (od.ShardDataset(path, recipe) for path in texts)
    data = od.Mixture({"a": od.Source(a), "b": od.Source(b, loss_weight=weight)}, stop="all")
    cost = od.CostModel(llm=od.PhaseCost(1.0, 0.01))
    balance = od.Balance(teams=od.Teams(largest=4)) if shared else od.Balance()
    common = {"global_batch_size": 16, "cost": cost, "balance": balance, "num_threads": 0, "collate_fn": INPUTS}
    ranks = RANKS if shared else 1
    loaders = [od.DataLoader(data, dp=(rank, ranks), **common) for rank in range(ranks)]
    for each in loaders:
        each._runtime.context.delivery.team_use.is_by_name = True  # as od.hf.share_attention does, on each rank
    return [next(iter(each)) for each in loaders]


@pytest.mark.filterwarnings("ignore:len")
@pytest.mark.parametrize(("way", "weight"), [*((way, 1.0) for way in WAYS), ("od.hf.loss", 3.0)])
def test_losses_of_members_add_up(texts: list[str], way: str, weight: float) -> None:
    ours, (whole,) = batches_of(texts, weight, shared=True), batches_of(texts, weight, shared=False)
    assert max(team.size for batch in ours for team in batch.teams) > 1

    def loss(batch: od.Batch) -> float:
        return float(WAYS[way](batch, CausalLMOutput(logits=TABLE[batch.llm.input_ids][None])))

    assert sum(map(loss, ours)) / RANKS == pytest.approx(loss(whole), rel=1e-6)
    names = {"attention_mask", "cu_seq_lens_q"}
    assert all("teams" in batch.model_inputs() and not names & batch.model_inputs().keys() for batch in ours)


@pytest.mark.filterwarnings("ignore:len")
def test_a_model_that_shifts_labels_itself_gets_none(texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (batch, *_) = batches_of(texts, 1.0, shared=True)
    monkeypatch.setattr("orchdata.hf.inputs._loss_follows", lambda _, *, shifted=False: not shifted)
    batch = SimpleNamespace(**vars(batch), has_slices=True, loss_weights=None, loss_scale=1.0)
    batch.inputs = od.hf.Inputs(CONFIG, padded=False, probe=False)
    assert not {"labels", "shift_labels"} & batch.inputs.arguments(batch).keys()
    with pytest.raises(ValueError, match="shifts labels that were shifted before"):
        sft_arguments({}, batch)
