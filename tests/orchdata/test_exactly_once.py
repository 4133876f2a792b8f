"""An epoch is each sample once and the same global batches, bit for bit, whoever builds them and however it is cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from delivered_once import tar_keys, wrong_deliveries
from digests import global_batch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rank_loaders import rows_of
from shard_factory import RECIPE, omni_shards

import orchdata as od

pytestmark = pytest.mark.usefixtures("same_cache")

SAMPLES, GLOBAL_BATCH = 30, 8
STEPS = 4
"""The last of them is smaller."""


@dataclass(frozen=True)
class Stretch:
    """Some steps of an epoch, by loaders of their own; `engine` is their arguments."""

    ranks: int
    engine: tuple[tuple[str, int], ...]
    steps: int


ENGINES = (
    (("num_threads", 0),),
    (("num_threads", 1),),
    (("num_threads", 4),),
    (("num_threads", 4), ("prefetch_factor", 5)),
    (("num_workers", 1), ("num_threads", 4)),
    (("num_workers", 2), ("num_threads", 1)),
    (("num_workers", 3), ("num_threads", 0)),
)
BALANCES = {
    "global": {},
    "none": {"balance": "none"},
    "capped": {"balance": od.Balance(max_tokens=400, oversize="own")},
    "per phase": {
        "balance": od.Balance(assignment="per_phase"),
        "cost": od.CostModel(image=od.PhaseCost(1.0), audio=od.PhaseCost(2.0), llm=od.PhaseCost(3.0)),
    },
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> od.ShardDataset:
    dataset = od.ShardDataset(omni_shards(tmp_path_factory.mktemp("omni"), shards=3, samples=SAMPLES // 3), RECIPE)
    dataset.index()
    return dataset


def loaders(dataset: od.ShardDataset, ranks: int, **options: Any) -> list[od.DataLoader]:
    common = {"global_batch_size": GLOBAL_BATCH, "shuffle": True, "seed": 7} | options
    return [od.DataLoader(dataset, dp=(rank, ranks), **common) for rank in range(ranks)]


def run(dataset: od.ShardDataset, stretches: Sequence[Stretch], epochs: int = 1, **options: Any) -> list[str]:
    """Digests of the global batches of some epochs, the stretches in turn; the last one goes to the end."""
    digests: list[str] = []
    rows: list[list[dict[str, Any]]] = []
    state: dict[str, Any] | None = None
    for number, stretch in enumerate(stretches):
        ours = loaders(dataset, stretch.ranks, **dict(stretch.engine), **options)
        if state is not None:
            for loader in ours:
                loader.load_state_dict(json.loads(json.dumps(state)))
        last = number == len(stretches) - 1
        rows.append([])
        left = epochs * STEPS - len(digests) if last else min(stretch.steps, epochs * STEPS - len(digests))
        while left:
            streams = [iter(loader.steps()) for loader in ours]
            shares = list(itertools.islice(zip(*streams, strict=True), left))
            digests += [global_batch(share) for share in shares]
            rows[-1] += rows_of(shares)
            left -= len(shares)
            for stream in streams:
                stream.close()  # type: ignore[attr-defined]
        states = [loader.state_dict() for loader in ours]
        assert all(each == states[0] for each in states)
        state = states[0]
    assert wrong_deliveries(rows, tar_keys(dataset.urls), epochs=epochs) == []
    return digests


@pytest.fixture(scope="module")
def expected(dataset: od.ShardDataset, module_cache: Path) -> dict[str, list[str]]:
    """By balance: digests of two undisturbed epochs. They do not depend on the balance."""
    alone = [Stretch(1, ENGINES[0], 0)]
    by_balance = {name: run(dataset, alone, 2, **options) for name, options in BALANCES.items()}
    assert all(each == by_balance["global"] for each in by_balance.values())
    assert len(set(by_balance["global"])) == 2 * STEPS
    return by_balance


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_any_number_of_ranks(ranks: int, balance: str, dataset: od.ShardDataset, expected: Any) -> None:
    engine = ENGINES[ranks % len(ENGINES)]
    assert run(dataset, [Stretch(ranks, engine, 0)], 2, **BALANCES[balance]) == expected[balance]


@pytest.mark.parametrize("position", range(2 * STEPS))
def test_a_resume_at_every_position_and_a_second_one(position: int, dataset: od.ShardDataset, expected: Any) -> None:
    ranks, engine = (2, 3, 1)[position % 3], ENGINES[position % len(ENGINES)]
    stretches = [Stretch(2, engine, position), Stretch(ranks, ENGINES[0], 1), Stretch(1, engine, 0)]
    assert run(dataset, stretches, 2) == expected["global"]


@pytest.mark.parametrize("saved", [1, 2, 3])
def test_what_came_after_the_last_state_comes_again_and_counts_once(saved: int, dataset: od.ShardDataset) -> None:
    """Each run saves its state after some steps, and is killed when it has delivered two more."""
    rows: list[list[dict[str, Any]]] = []
    state: dict[str, Any] | None = None
    for ranks in itertools.islice(itertools.cycle((2, 3, 1)), 2 * STEPS // saved + 3):
        ours = loaders(dataset, ranks, num_threads=0)
        for loader in ours if state is not None else ():
            loader.load_state_dict(json.loads(json.dumps(state)))
        streams = [iter(loader.steps()) for loader in ours]
        rows.append(rows_of(list(itertools.islice(zip(*streams, strict=True), saved))))
        state = ours[0].state_dict()
        rows[-1] += rows_of(list(itertools.islice(zip(*streams, strict=True), 2)))
        for stream in streams:
            stream.close()  # type: ignore[attr-defined]
    keys = tar_keys(dataset.urls)
    assert wrong_deliveries(rows, keys, epochs=2) == []
    assert len(rows) > 4 and sum(len(row["keys"]) for run in rows for row in run) > 2 * SAMPLES


def epochs(engines: Sequence[Any], ranks: Sequence[int]) -> dict[str, Any]:
    stretches = st.builds(Stretch, st.sampled_from(ranks), st.sampled_from(engines), st.integers(0, STEPS))
    return {"stretched": st.lists(stretches, min_size=1, max_size=5), "balance": st.sampled_from(list(BALANCES))}


UNHURRIED = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(UNHURRIED, max_examples=30)
@given(**epochs(ENGINES, [1, 2, 3, 4]))
def test_very_many_runs_are_the_undisturbed_one(
    stretched: list[Stretch], balance: str, dataset: od.ShardDataset, expected: Any
) -> None:
    assert run(dataset, stretched, 2, **BALANCES[balance]) == expected[balance]


def test_a_lost_a_doubled_and_an_altered_sample_are_reported(dataset: od.ShardDataset) -> None:
    (loader,) = loaders(dataset, 1, num_threads=0)
    steps = list(loader.steps())
    digests = [global_batch([step]) for step in steps]
    assert len(set(digests)) == STEPS
    with pytest.raises(AssertionError):
        global_batch([steps[0], steps[0]])
    assert global_batch([[]]) not in digests
    steps[0][0].llm.labels[3] ^= 1
    assert global_batch([steps[0]]) != digests[0]
    steps[1][0].image.patches[0, 0] += 1
    assert global_batch([steps[1]]) != digests[1]
