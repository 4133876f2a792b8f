"""Lightning's Trainer over a loader: its state is loaded, its steps are not joined, and its epochs are not cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from map_dataset import Numbers
from shard_factory import RECIPE, omni_shards

import orchdata as od

# Lightning and Ray Train are imported by the tests themselves: each process of tests collects this file, one runs it.
pytestmark = [
    pytest.mark.usefixtures("same_cache"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning"),  # Lightning's, of torch
]


OMNI = {"shards": 2, "samples": 20}


def callbacks() -> Any:
    return pytest.importorskip("lightning.pytorch.callbacks")


def fit(
    make: Callable[[], Any], path: Any = None, *, asks: bool = False, more: Any = (), val: Any = None, **options: Any
) -> list[Any]:
    """What each step was given."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.seen = torch.nn.Parameter(torch.zeros(())), []

        def train_dataloader(self) -> Any:
            return make()

        def validation_step(self, item: Any, number: int) -> None: ...

        def training_step(self, item: Any, number: int) -> torch.Tensor:
            for each in item if isinstance(item, list) else [item]:
                self.seen.append(each.sample_ids if isinstance(each, od.Batch) else each["number"].tolist())
            return self.weight.sum()

        def configure_optimizers(self) -> Any:
            if asks:
                assert self.trainer.estimated_stepping_batches
            return torch.optim.SGD(self.parameters(), lr=0.0)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    module = Module()
    checkpoints = any(type(each) is callbacks().ModelCheckpoint for each in more)
    settings = {"max_epochs": 2, "devices": 1, "enable_checkpointing": checkpoints}
    trainer = lightning.Trainer(callbacks=list(more), **(quiet | settings | options))
    trainer.fit(module, val_dataloaders=val, ckpt_path=path)
    return module.seen


class Around:
    """A user's object around a loader."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.state_dict = loader, loader.state_dict

    def __iter__(self) -> Any:
        yield from self.loader

    def __len__(self) -> int:
        return len(self.loader)

    def load_state_dict(self, state: Any) -> None:
        self.loader.load_state_dict(state)


class Endless(torch.utils.data.IterableDataset[dict[str, int]]):
    def __iter__(self) -> Any:
        return ({"number": number} for number in range(20))


class Sized(Endless):
    def __len__(self) -> int:
        return 20


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("stop", [2, 5, 7])
@pytest.mark.parametrize("kind", ["steps", "microbatches", "around", "drawn", "in order", "iterable"])
def test_a_state_is_loaded_although_the_number_of_steps_was_asked_before(
    dataset: od.ShardDataset, kind: str, stop: int, tmp_path: Path
) -> None:
    def make() -> Any:
        options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "drop_last": True, "seed": 1}
        if kind in ("steps", "microbatches"):
            loader = od.DataLoader(dataset, **options | {"batch_size": 8})
            return loader.steps() if kind == "steps" else loader
        if kind == "iterable":
            return od.DataLoader(Sized(), batch_size=4)
        loader = od.DataLoader(Numbers(20), **options | {"seed": None if kind == "drawn" else 1})
        return Around(loader.steps()) if kind == "around" else loader

    if kind == "drawn" and stop != 2:
        pytest.skip("later epochs draw from torch's generator, which Lightning does not restore")
    torch.manual_seed(0)
    kept = callbacks().ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=1, filename="{step}")
    whole = fit(make, more=[kept])
    assert len(whole) == 10
    for asks in (False, True):
        found = fit(make, tmp_path / f"step={stop}.ckpt", asks=asks)
        end = 5 if kind == "drawn" else 10
        assert len(found) == 10 - stop and found[: end - stop] == whole[stop:end]


def test_a_state_that_comes_too_late_to_be_loaded_is_an_error(tmp_path: Path) -> None:
    def make() -> od.DataLoader:
        return od.DataLoader(Endless(), batch_size=4)

    kept = callbacks().ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=1, filename="{step}")
    fit(make, more=[kept], max_steps=8)
    path = tmp_path / "step=2.ckpt"
    with pytest.raises(od.StateError, match="in configure_optimizers, trainer.estimated_stepping_batches"):
        fit(make, path, asks=True, max_steps=8)
    with pytest.raises(od.StateError, match="a batch ahead of data without a length"):
        fit(make, path, max_steps=8)


@pytest.mark.parametrize("whole", [True, False])
def test_lightning_does_not_join_steps_whose_loss_is_scaled(dataset: od.ShardDataset, whole: bool) -> None:
    scheduler = callbacks().GradientAccumulationScheduler

    class Later(callbacks().Callback):
        """Changes it by itself, inside an epoch."""

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.accumulate_grad_batches = 2

    def make(**options: Any) -> Any:
        loader = od.DataLoader(dataset, **({"batch_size": 4} | options))
        return loader.steps() if whole else loader

    ways: Any = ({"accumulate_grad_batches": 3}, {"more": [scheduler({1: 3})]}, {"more": [Later()]})
    for way, joined in zip(ways, (3, 3, 2), strict=True):
        with pytest.raises(ValueError, match=f"accumulate_grad_batches={joined} would join .*accumulate={joined}[)]"):
            fit(make, **way)
    assert len(fit(make, more=[scheduler({1: 1})])) == 20  # the control
    assert len(fit(lambda: od.DataLoader(Numbers(12), batch_size=4), accumulate_grad_batches=3)) == 6
    if whole:
        assert len(fit(lambda: make(accumulate=3), max_epochs=1)) == 12
        with pytest.raises(ValueError, match="accumulate_grad_batches=3 would join .*accumulate=9[)]"):
            fit(lambda: make(accumulate=3), accumulate_grad_batches=3)


def test_lightning_does_not_cut_epochs_of_other_lengths(dataset: od.ShardDataset) -> None:
    tokens = int(dataset.index().llm_tokens.sum())

    def ramp() -> Any:
        ramp = [(0, tokens // 10), (tokens, tokens // 5)]
        return od.DataLoader(dataset, global_batch_tokens=ramp, shuffle=True).steps()

    first, second = (ramp().num_steps(epoch) for epoch in range(2))
    assert first > second
    named = f"epochs 0 and 1 of this DataLoader have {first} and {second} steps, and Lightning.*max_steps={first} or"
    for options in ({}, {"max_epochs": -1}, {"max_steps": first + 1, "max_epochs": -1}):
        with pytest.raises(ValueError, match=named):
            fit(ramp, **options)
    for options in ({"max_steps": first, "max_epochs": -1}, {"max_epochs": 1}, {"limit_train_batches": second}):
        assert len(fit(ramp, **options)) == (2 * second if "limit_train_batches" in options else first)
    for options in ({}, {"num_sanity_val_steps": 0}):
        with pytest.raises(ValueError, match=named.replace("max_steps", "limit_val_batches")):
            fit(lambda: od.DataLoader(Numbers(12)), val=ramp(), **options)
    assert len(fit(lambda: od.DataLoader(Numbers(12)), val=ramp(), limit_val_batches=second)) == 24


def test_lightning_does_not_evaluate_by_the_loader_that_trains() -> None:
    loader = od.DataLoader(Numbers(12), batch_size=4)
    for val in (loader, [loader.steps()]):
        with pytest.raises(ValueError, match="make a second DataLoader"):
            fit(lambda: loader, val=val)
    assert len(fit(lambda: loader, val=od.DataLoader(Numbers(12)))) == 6


# Loaders inside of Ray Train: what its `prepare_data_loader` would do to them is an error.


@pytest.fixture(params=[1, 2], ids=["one worker", "two workers"])
def prepare(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What Ray Train knows in a worker of its."""
    import ray.train.torch
    from ray.train.v2.torch import train_loop_utils

    context = SimpleNamespace(get_world_size=lambda: request.param, get_world_rank=lambda: 0)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    monkeypatch.setattr(ray.train.torch, "get_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(train_loop_utils, "record_extra_usage_tag", lambda *_: None)
    assert ray.train.torch.prepare_data_loader is train_loop_utils.prepare_data_loader
    return ray.train.torch.prepare_data_loader


@pytest.mark.parametrize("kind", ["shards", "map-style"])
def test_a_prepared_loader_is_an_error_that_says_what_to_do(kind: str, tmp_path: Path, prepare: Any) -> None:
    data: Any = list(range(8))
    if kind == "shards":
        data = od.ShardDataset(omni_shards(tmp_path, shards=1, samples=4), RECIPE)
    loader = od.DataLoader(data, batch_size=2, dp=(0, 1))
    message = r"iterate over the loader itself.*batch\.to\(ray\.train\.torch\.get_device"
    with pytest.raises(TypeError, match=message):
        iter(prepare(loader))
    assert len(list(loader)) == (2 if kind == "shards" else 4)


def test_torchs_own_loaders_are_prepared_as_ever(prepare: Any) -> None:
    sampler = torch.utils.data.DistributedSampler(range(8), 1, 0)
    loader = torch.utils.data.DataLoader(list(range(8)), batch_size=2, sampler=sampler)
    assert len(list(prepare(loader))) == 4
