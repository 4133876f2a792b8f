"""`len(loader.steps())` equals the number of items, and trainers that take len() of a plain loader raise an error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from map_dataset import Numbers

import orchdata as od
from orchdata.building import step as building
from orchdata.order.steps import StepTask
from orchdata.planning.plan import PlanSpec, make_plan

pytestmark = [
    pytest.mark.usefixtures("same_cache"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.checkpoint.*"),  # one process, it says
]

STEPS = 6  # of 10 samples
SEVERAL = {"balance": od.Balance(max_tokens=500, oversize="own")}


OMNI = {"shards": 3, "samples": 20}


def make(dataset: Any, **options: Any) -> od.DataLoader:
    return od.DataLoader(dataset, **({"global_batch_size": 10, "shuffle": True, "num_threads": 2, "seed": 5} | options))


def position(microbatches: list[od.Batch]) -> tuple[int, int]:
    return microbatches[0].plan.epoch, microbatches[0].step


def test_length_is_the_number_of_items_in_every_epoch(dataset: od.ShardDataset) -> None:
    steps = make(dataset, **SEVERAL).steps()
    for epoch in range(3):
        assert len(steps) == STEPS
        items = list(steps)
        assert [position(item) for item in items] == [(epoch, step) for step in range(STEPS)]
        assert any(len(item) > 1 for item in items)  # microbatches, which the loader itself would give one by one


def test_the_length_is_that_of_the_epoch_under_way(dataset: od.ShardDataset) -> None:
    tokens = int(dataset.index().llm_tokens.sum())
    ramp = [(0, tokens // 6), (tokens // 2, tokens // 4)]  # the second epoch has larger steps
    loader = make(dataset, global_batch_size=None, global_batch_tokens=ramp)
    steps = loader.steps()
    first, second = steps.num_steps(0), steps.num_steps(1)
    assert first > second
    for expected in (first, second):
        assert len(steps) == expected
        assert {len(steps) for _ in steps} == {expected}
    loader.set_epoch(0)
    assert len(steps) == first
    next(iter(steps))
    next(iter(steps))  # left immediately, as with limit_train_batches=1: this is the second epoch
    assert len(steps) == second


def test_steps_and_loader_share_one_position_and_one_state(dataset: od.ShardDataset) -> None:
    loader = make(dataset, **SEVERAL)
    steps = loader.steps()
    expected = [position(item) for item in islice(steps, 4)]
    assert expected[-1] == (0, 3)
    state = json.loads(json.dumps(steps.state_dict()))
    assert state == loader.state_dict() and (state["epoch"], state["step"]) == (0, 4)
    resumed = make(dataset, **SEVERAL).steps()
    resumed.load_state_dict(state)
    assert len(resumed) == STEPS  # of the epoch: trainers that resume continue to count at 4
    resumed.set_epoch(0)
    assert [position(item) for item in resumed] == [(0, 4), (0, 5)]
    assert resumed.loader.state_dict()["epoch"] == 1
    with pytest.raises(od.StateError, match="global_batch_size"):
        make(dataset, global_batch_size=12).steps().load_state_dict(state)


@pytest.fixture
def ended(dataset: od.ShardDataset) -> Any:
    """The state after the last step of epoch 0, before the iteration has ended."""
    steps = make(dataset).steps()
    iterator = iter(steps)
    for _ in range(STEPS):
        next(iterator)
    state = steps.state_dict()
    assert (state["epoch"], state["step"]) == (0, STEPS)
    return state


def test_a_state_at_the_end_of_an_epoch_begins_the_next_one(dataset: od.ShardDataset, ended: Any) -> None:
    plain = make(dataset)
    plain.load_state_dict(ended)
    assert not list(plain)  # as when a loop continues with the rest of the epoch
    steps = make(dataset).steps()
    steps.load_state_dict(ended)
    assert steps.state_dict()["epoch"] == 1
    assert [position(item) for item in steps] == [(1, step) for step in range(STEPS)]


@pytest.mark.parametrize(("epoch", "first"), [(0, None), (1, (1, 0)), (2, (2, 0))])
def test_no_step_of_an_ended_epoch_is_delivered_again(
    dataset: od.ShardDataset, ended: Any, epoch: int, first: tuple[int, int] | None
) -> None:
    steps = make(dataset).steps()
    steps.load_state_dict(ended)
    steps.set_epoch(epoch)
    assert next((position(item) for item in steps), None) == first
    steps.set_epoch(0)  # from then on it works as usual
    assert position(next(iter(steps))) == (0, 0)


TRAINERS = ("lightning.fabric.utilities.data", "pytorch_lightning.x", "transformers.trainer_utils", "accelerate.x")


def len_from(module: str) -> Callable[[Any], int]:
    """Return a function of that module which calls len()."""
    namespace: dict[str, Any] = {"__name__": module}
    exec("def sized_len(loader):\n    return len(loader)", namespace)
    return namespace["sized_len"]


@pytest.mark.parametrize("module", TRAINERS)
@pytest.mark.parametrize("options", [SEVERAL, {"collate_fn": od.Packed(length=1000)}])
def test_a_trainer_that_would_count_microbatches_raises_an_error(
    dataset: od.ShardDataset, module: str, options: dict[str, Any]
) -> None:
    loader, sized_len = make(dataset, **options), len_from(module)
    with pytest.raises(ValueError, match=rf"^{module.split('.')[0]} takes len.*Give it loader\.steps\(\)"):
        sized_len(loader)
    assert sized_len(loader.steps()) == STEPS
    assert sized_len(make(dataset)) == STEPS  # a step is one microbatch


def test_len_from_other_modules_warns(dataset: od.ShardDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchdata.notices._warned", set())
    with pytest.warns(UserWarning, match=r"loader\.steps\(\)"):
        assert len_from("my.lightning")(make(dataset, **SEVERAL)) == STEPS


def test_torch_s_distributed_checkpoint_takes_loader_and_steps(dataset: od.ShardDataset, tmp_path: Path) -> None:
    loader = make(dataset)
    expected = [position(item) for item in islice(loader.steps(), 3)]
    dcp.save({"loader": loader, "steps": loader.steps()}, checkpoint_id=tmp_path)
    for name in ("loader", "steps"):
        fresh = make(dataset)
        dcp.load({name: fresh if name == "loader" else fresh.steps()}, checkpoint_id=tmp_path)
        assert [position(item) for item in fresh.steps()] == [(0, 3), (0, 4), (0, 5)]
    assert expected[-1] == (0, 2)


def test_distributed_checkpoint_does_not_load_into_the_loaders_own_fingerprint(
    dataset: od.ShardDataset, tmp_path: Path
) -> None:
    begun = make(dataset)
    next(iter(begun.steps()))
    dcp.save({"loader": begun}, checkpoint_id=tmp_path)
    other = make(dataset, seed=6)
    with pytest.raises(od.StateError, match=r"order\.seed is 5 in the state and 6 here"):
        dcp.load({"loader": other}, checkpoint_id=tmp_path)  # in place, into other.state_dict()
    assert other.state_dict() == make(dataset, seed=6).state_dict()


def test_an_entry_of_a_state_that_distributed_checkpoint_drops_is_an_error(
    dataset: od.ShardDataset, tmp_path: Path
) -> None:
    begun = make(dataset)
    next(iter(begun.steps()))
    larger = make(dataset, global_batch_size=12)
    larger.load_state_dict(begun.state_dict(), allow=("global_batch_size",))  # cut again after 10 samples
    next(iter(larger.steps()))
    assert "drawn" in larger.state_dict()
    dcp.save({"loader": larger}, checkpoint_id=tmp_path)
    with pytest.raises(od.StateError, match="step 2 of epoch 0 begins after 22 samples in the state and 24 here"):
        dcp.load({"loader": make(dataset, global_batch_size=12)}, checkpoint_id=tmp_path)
    whole = make(dataset, global_batch_size=12)
    whole.load_state_dict(json.loads(json.dumps(larger.state_dict())))
    assert position(next(iter(whole.steps()))) == (0, 2)


@pytest.mark.parametrize("whole", [True, False], ids=["steps", "loader"])
def test_an_epoch_that_a_trainer_sets_begins_although_the_loader_would_begin_another(
    dataset: od.ShardDataset, ended: Any, whole: bool
) -> None:
    def items(**options: Any) -> Any:
        loader = make(dataset, balance="global", **options)
        return loader.steps() if whole else loader

    def positions(iterable: Any) -> list[tuple[int, int]]:
        return [position(item if whole else [item]) for item in iterable]

    fresh = items()
    iterator = iter(fresh)  # as Lightning, which resumes at the end of an epoch without the loader's state
    fresh.sampler.set_epoch(1)
    assert positions(iterator) == [(1, step) for step in range(STEPS)]
    fresh.sampler.set_epoch(2)
    assert positions(islice(fresh, 2)) == [(2, 0), (2, 1)]
    state = fresh.state_dict()
    resumed = items()
    resumed.load_state_dict(state)
    resumed.sampler.set_epoch(2)
    assert positions(resumed) == [(2, step) for step in range(2, STEPS)]
    limited = items()
    limited.load_state_dict(state)
    iterator = iter(limited)
    limited.sampler.set_epoch(3)  # limit_train_batches has ended epoch 2
    assert positions(islice(iterator, 1)) == [(3, 0)]
    over = items()
    over.load_state_dict(ended)
    over.sampler.set_epoch(0 if whole else 1)
    assert positions(over) == [(1, step) for step in range(STEPS)]


def test_a_loader_that_is_ahead_of_its_trainer_stays_ahead(dataset: od.ShardDataset) -> None:
    steps = make(dataset).steps()
    steps.set_epoch(5)
    next(iter(steps))
    state = steps.state_dict()
    begun = make(dataset).steps()
    begun.load_state_dict(
        state
    )  # as when a training begins; or by Lightning, of a loader that began again inside an epoch
    for epoch in range(3):
        begun.sampler.set_epoch(epoch)
        assert position(next(iter(begun))) == (5 + epoch, 0 if epoch else 1)
    resumed = make(dataset).steps()
    resumed.load_state_dict(state)
    with pytest.raises(od.StateError, match="a state of epoch 5 was loaded, and the trainer continues at epoch 2"):
        resumed.sampler.set_epoch(2)
    namespace: dict[str, Any] = {"__name__": "lightning.pytorch"}
    exec("def load(steps, state): steps.load_state_dict(state)", namespace)
    namespace["load"](resumed, state)
    resumed.sampler.set_epoch(2)
    assert position(next(iter(resumed))) == (5, 1)
    resumed.sampler.set_epoch(3)
    assert position(next(iter(resumed))) == (6, 0)


# `stats()` says what steps would cost without balancing, since when it counts, and every key is in the docs.


COST = od.CostModel(image=od.PhaseCost(2.0), audio=od.PhaseCost(1.0, 0.5), llm=od.PhaseCost(1.0, 0.01))


def costed(dataset: Any, **options: Any) -> od.DataLoader:
    fixed = {"batch_size": 4, "dp": (0, 3), "shuffle": True, "num_threads": 0, "cost": COST}
    return od.DataLoader(dataset, **fixed | options)


def shown(spec: PlanSpec) -> dict[str, Any]:
    """The figures of an epoch that a loader of this spec would show."""
    totals = building.START
    for step in range(spec.num_steps):
        totals = building.added(totals, building.step_figures(spec, make_plan(spec, StepTask(0, step)), 0, 0))
    return building.shown(totals, spec.num_steps)


@pytest.mark.parametrize("layout", [od.Packed(), od.Padded()])
@pytest.mark.parametrize("objective", ["barrier", "sum"])
def test_without_balancing_is_what_dealing_in_turn_costs(dataset: od.ShardDataset, objective: Any, layout: Any) -> None:
    made = costed(dataset, balance=od.Balance(objective=objective), collate_fn=layout)
    spec = made._runtime.prepared.spec.plan
    found = shown(spec)
    dealt = shown(replace(spec, balance=replace(spec.balance, scope="none")))
    assert found["step_imbalance_unbalanced"] == dealt["step_imbalance"] == dealt["step_imbalance_unbalanced"]
    assert dealt["saved"] == 0
    assert found["saved"] == pytest.approx(1 - found["step_imbalance"] / found["step_imbalance_unbalanced"])
    assert 0.05 < found["saved"] < 1
    for phase, ratios in found["phases"].items():
        assert ratios["imbalance_unbalanced"] == dealt["phases"][phase]["imbalance"]
        assert ratios["imbalance_unbalanced_in_micro_steps"] == dealt["phases"][phase]["imbalance_in_micro_steps"]


def test_an_interval_has_its_own_steps(dataset: od.ShardDataset) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    loader = costed(dataset)
    steps = iter(loader.steps())
    for _ in range(3):
        next(steps)
    first = loader.stats(reset=True)
    assert before <= datetime.fromisoformat(first["since"]) <= datetime.now(UTC)
    assert first["steps"] == 3 and first["reads"]["used_bytes"] > 0
    empty = loader.stats()
    assert (empty["steps"], empty["samples"], empty["phases"], empty["milliseconds"]["waiting"]) == (0, 0, {}, 0)
    assert empty["reads"] == dict.fromkeys(empty["reads"], 0) and empty["read_amplification"] is None
    assert datetime.fromisoformat(empty["since"]) >= datetime.fromisoformat(first["since"])
    list(steps)
    second, whole = loader.stats(), costed(dataset)
    list(whole.steps())
    assert first["steps"] + second["steps"] == len(whole.steps())
    assert first["samples"] + second["samples"] == whole.stats()["samples"]
    assert first["loss_tokens"] + second["loss_tokens"] == whole.stats()["loss_tokens"]


def test_failures_are_counted_since_the_loader_was_made(dataset: od.ShardDataset, tmp_path: Path) -> None:
    class Broken(Numbers):
        def __getitem__(self, row: int) -> Any:
            if row == 3:
                raise ValueError("broken")
            return super().__getitem__(row)

    loader = od.DataLoader(Broken(8), batch_size=2, on_error="skip", num_threads=1)
    list(loader)
    assert loader.stats(reset=True)["failures"]["count"] == 1
    assert loader.stats()["failures"]["count"] == 1 and len(loader.gather_failures()) == 1


def keys_of(stats: dict[str, Any]) -> Iterator[str]:
    """All keys but names of phases, sources and reasons."""
    for key, value in stats.items():
        yield key
        inner = list(value.values()) if key in ("phases", "features", "sources") else [value]
        for each in inner:
            if isinstance(each, dict) and key != "by_reason":
                yield from keys_of(each)


def test_every_key_is_in_the_docs(dataset: od.ShardDataset) -> None:
    mixture = od.Mixture({"one": od.Source(dataset), "two": od.Source(dataset)})
    found = set()
    for data, options in ((dataset, {"balance": od.Balance(assignment="per_phase")}), (mixture, {})):
        loader = costed(data, **options)
        next(iter(loader.steps()))
        found |= set(keys_of(loader.stats()))
    assert {"rows", "passes", "imbalance", "waiting", "by_reason", "cut_tokens", "used_bytes"} <= found
    page = Path(__file__).resolve().parents[3].joinpath("docs", "stats.md").read_text()
    assert sorted(key for key in found if f"`{key}`" not in page) == []
