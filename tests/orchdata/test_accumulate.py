"""`accumulate=`: steps of so many microbatches on every rank, by any engine, and clear errors."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from map_dataset import Numbers
from shard_factory import RECIPE, omni_shards

import orchdata as od

pytestmark = pytest.mark.usefixtures("same_cache")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> od.ShardDataset:
    dataset = od.ShardDataset(omni_shards(tmp_path_factory.mktemp("omni"), shards=2, samples=25), RECIPE)
    dataset.index()
    return dataset


def make(dataset: Any, **options: Any) -> od.DataLoader:
    """50 samples in steps of 2 * 4 * 2 ranks: three, and one of two samples."""
    fixed = {"batch_size": 2, "accumulate": 4, "dp": (0, 2), "shuffle": True, "num_threads": 0}
    return od.DataLoader(dataset, **fixed | options)


def ids(step: list[od.Batch]) -> list[list[tuple[str, str]]]:
    return [list(batch.sample_ids) for batch in step]


def of_ranks(dataset: Any, **options: Any) -> list[list[list[od.Batch]]]:
    """The steps of an epoch, by rank."""
    return [list(make(dataset, dp=(rank, 2), **options).steps()) for rank in range(2)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"collate_fn": od.Padded(), "balance": od.Balance(equal_count=True)},
        {"balance": od.Balance(assignment="per_phase"), "num_threads": 2},
        {"balance": od.Balance(scope="grouped", group_size=1), "drop_last": True},
        {"collate_fn": od.Packed(length=4096)},
    ],
    ids=["packed", "padded", "per phase", "grouped", "one length"],
)
def test_every_step_has_its_microbatches_on_every_rank(dataset: od.ShardDataset, options: dict[str, Any]) -> None:
    ranks = of_ranks(dataset, **options)
    loader = make(dataset, **options)
    dropped = options.get("drop_last", False)
    assert len(loader.steps()) == len(ranks[0]) == (3 if dropped else 4)
    assert (loader.batch_size, loader.global_batch_size) == (2, 16)
    seen: Counter[tuple[str, str]] = Counter()
    for number, steps in enumerate(zip(*ranks, strict=True)):
        of_step = [len(each) for step in steps for each in ids(step)]
        assert [len(step) for step in steps] == [4, 4]
        assert of_step == [2] * 8 if number < 3 else sum(of_step) == 2 and max(of_step) == 1
        total = sum(batch.loss_tokens for step in steps for batch in step)
        for step in steps:
            assert [batch.is_last_microbatch for batch in step] == [False, False, False, True]
            assert all(batch.num_microbatches == 4 and batch.global_loss_tokens == total for batch in step)
            seen.update(each for batch in ids(step) for each in batch)
    assert set(seen.values()) == {1} and len(seen) == (48 if dropped else 50)


def test_other_engines_and_any_step_again_give_the_same(dataset: od.ShardDataset) -> None:
    expected = [ids(step) for step in make(dataset).steps()]
    forked = make(dataset, num_workers=1, num_threads=1, multiprocessing_context="fork")
    assert [ids(step) for step in forked.steps()] == expected
    assert ids(make(dataset).step_at(0, 2)) == expected[2]
    assert make(dataset).plan_at(0, 3).num_microbatches == 4


def test_a_run_continues_with_another_accumulation_and_other_ranks(dataset: od.ShardDataset) -> None:
    first = make(dataset)
    list(islice(first.steps(), 1))
    state = first.state_dict()
    whole = [
        sorted(each for batch in ids(step) for each in batch) for step in make(dataset, dp=(0, 1), batch_size=4).steps()
    ]
    for options in ({"accumulate": 2}, {"accumulate": 1}, {"accumulate": 8}):
        other = make(dataset, dp=(0, 1), batch_size=None, global_batch_size=16, **options)
        other.load_state_dict(state)
        following = [sorted(each for batch in ids(step) for each in batch) for step in other.steps()]
        assert following == whole[1:]
        assert state["fingerprint"] == other.state_dict()["fingerprint"]


def test_what_cannot_be_cut_is_an_error(dataset: od.ShardDataset) -> None:
    with pytest.raises(ValueError, match="accumulate=4 cuts steps of as many samples.*global_batch_tokens"):
        make(dataset, batch_size=None, global_batch_tokens=3000)
    named = r"accumulate=3 micro-steps do not hold the 18 samples.*max_tokens=\{'llm': 245\}"
    with pytest.raises(ValueError, match=named):
        make(dataset, batch_size=3, accumulate=3, balance=od.Balance(max_tokens=245))
    with pytest.raises(ValueError, match=r"accumulate=3 micro-steps .* within Packed\(length=245\), at most 3 of them"):
        make(dataset, batch_size=3, accumulate=3, collate_fn=od.Packed(length=245))
    with pytest.raises(ValueError, match="accumulate must be at least 1"):
        make(dataset, accumulate=0)
    with pytest.raises(ValueError, match="for other data, step the optimizer"):
        od.DataLoader(Numbers(8), batch_size=2, accumulate=2)
    assert len(od.DataLoader(Numbers(8), batch_size=2, accumulate=1)) == 4
