"""Steps measured in tokens: their samples, on any ranks, and how a run continues with another budget."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from delivered_once import tar_keys, wrong_deliveries
from digests import digest, global_batch
from map_dataset import Numbers
from rank_loaders import BUDGET, loaders, rows_of, steps_of
from shard_factory import RECIPE, omni_shards
from torch.utils.data import BatchSampler, RandomSampler

import orchdata as od
from orchdata.planning.sharing.accumulated import better_budget

pytestmark = pytest.mark.usefixtures("same_cache")


OMNI = {"samples": 12}


def keys_of(step: Sequence[Any]) -> list[tuple[str, str]]:
    return sorted(key for share in step for batch in share for key in batch.sample_ids)


def tokens_of(dataset: od.ShardDataset, keys: Sequence[tuple[str, str]], multiple_of: int = 1) -> int:
    index = dataset.index()
    lengths = [int(index.llm_tokens[index.find(*key)]) for key in keys]
    return sum(-(-length // multiple_of) * multiple_of for length in lengths)


@pytest.mark.parametrize("multiple_of", [1, 16])
def test_steps_hold_their_budget_give_or_take_a_sample(dataset: od.ShardDataset, multiple_of: int) -> None:
    (loader,) = loaders(dataset, 1, collate_fn=od.Packed(multiple_of=multiple_of))
    steps = [keys_of(step) for step in steps_of([loader])]
    tokens = [tokens_of(dataset, step, multiple_of) for step in steps]
    index = dataset.index()
    largest = -(-int(index.llm_tokens.max()) // multiple_of) * multiple_of
    assert sorted(itertools.chain(*steps)) == sorted((index.shard_of(row).url, index.key(row)) for row in range(36))
    assert len(steps) == len(loader) == -(-sum(tokens) // BUDGET)
    assert len(steps) > 5
    ends = np.cumsum(tokens)
    cuts = BUDGET * np.arange(1, len(steps) + 1)
    assert (ends <= cuts).all(), "a sample that ends after a cut belongs to the next step"
    assert (ends[:-1] > cuts[:-1] - largest).all()


@pytest.mark.parametrize(
    "options",
    [
        {"balance": od.Balance(max_tokens=300, oversize="own")},
        {"balance": "none"},
        {
            "balance": od.Balance(assignment="per_phase"),
            "cost": od.CostModel(image=od.PhaseCost(2.0), llm=od.PhaseCost(1.0)),
        },
        {"balance": od.Balance(scope="grouped", group_size=2)},
        {"balance": od.Balance(scope="grid", group_size=2, max_tokens=300, oversize="own")},
        pytest.param({"num_workers": 2, "num_threads": 1}, marks=pytest.mark.slow),
        {"collate_fn": od.Padded(multiple_of=64)},
    ],
)
def test_membership_depends_on_nothing_else(dataset: od.ShardDataset, options: dict[str, Any]) -> None:
    alone = [keys_of(step) for step in steps_of(loaders(dataset, 1))]
    assert [keys_of(step) for step in steps_of(loaders(dataset, 3, **options))] == alone


@pytest.mark.parametrize("scope", ["grouped", "grid"])
@pytest.mark.parametrize("streams", [2, 5])
def test_steps_of_tokens_are_drawn_from_streams(dataset: od.ShardDataset, scope: Any, streams: int) -> None:
    """The same on any ranks, each sample once, a resume included; groups get their own streams' samples."""
    options: dict[str, Any] = {"shuffle": od.Shuffle(streams=streams)}
    alone = [keys_of(step) for step in steps_of(loaders(dataset, 1, **options))]
    assert len({key for step in alone for key in step}) == sum(map(len, alone)) == 36
    assert alone != [keys_of(step) for step in steps_of(loaders(dataset, 1))]
    options["balance"] = od.Balance(scope=scope, group_size=2)
    ours = loaders(dataset, 4, **options)
    first = steps_of(ours, 3)
    rest = steps_of(loaders(dataset, 3, ours[0].state_dict(), **options))
    assert [keys_of(step) for step in (*first, *rest)] == alone
    own = [loader.stats()["own_streams"] for loader in ours]
    assert all(share == 1.0 for share in own) if scope == "grouped" else all(share <= 1.0 for share in own)


def test_drop_last_leaves_the_tail_out(dataset: od.ShardDataset) -> None:
    whole, (dropping,) = steps_of(loaders(dataset, 1)), loaders(dataset, 1, drop_last=True)
    kept = steps_of([dropping])
    assert len(dropping) == len(kept) == len(whole) - 1
    assert [keys_of(step) for step in kept] == [keys_of(step) for step in whole[:-1]]
    keys = tar_keys(dataset.urls)
    assert wrong_deliveries([rows_of(kept)], keys, epochs=1, dropped=len(keys_of(whole[-1]))) == []


def test_resume_at_every_step_on_other_ranks(dataset: od.ShardDataset) -> None:
    expected = [global_batch(step) for step in steps_of(loaders(dataset, 1))]
    for position in range(len(expected) + 1):
        ours = loaders(dataset, 2)
        first = steps_of(ours, position)
        state = ours[0].state_dict()
        assert state == ours[1].state_dict()
        if position in (0, len(expected)):
            continue
        assert state["tokens"] == tokens_of(dataset, [key for step in first for key in keys_of(step)])
        rest = steps_of(loaders(dataset, 1 + position % 3, state))
        assert [global_batch(step) for step in (*first, *rest)] == expected
        assert wrong_deliveries([rows_of(first), rows_of(rest)], tar_keys(dataset.urls), epochs=1) == []


def test_a_state_of_other_tokens_is_refused(dataset: od.ShardDataset) -> None:
    ours = loaders(dataset, 1)
    steps_of(ours, 2)
    state = ours[0].state_dict()
    with pytest.raises(od.StateError, match=f"after 7 tokens in the state and {state['tokens']} here"):
        loaders(dataset, 1, state | {"tokens": 7})


@pytest.mark.slow_cases("engine1")
@pytest.mark.parametrize("engine", [{"num_threads": 0}, {"num_workers": 2, "num_threads": 1}])
def test_another_budget_goes_on_where_the_state_was(dataset: od.ShardDataset, engine: dict[str, int]) -> None:
    ours = loaders(dataset, 2)
    first = steps_of(ours, 3)
    state = ours[0].state_dict()
    with pytest.raises(od.StateError, match=r"global_batch_tokens=500.*global_batch_tokens=900.*allow="):
        steps_of(loaders(dataset, 1, state, global_batch_tokens=900))
    allow = ("global_batch_tokens",)
    rest = steps_of(loaders(dataset, 3, state, allow, global_batch_tokens=900, **engine))
    keys = [key for step in (*first, *rest) for key in keys_of(step)]
    assert len(keys) == len(set(keys)) == 36
    (again,) = loaders(dataset, 1, global_batch_tokens=900)
    again.load_state_dict(state, allow=allow)
    assert len(again) == 3 + len(rest)
    begun = steps_of([again], 2)
    ends = steps_of(loaders(dataset, 2, again.state_dict(), global_batch_tokens=900))
    assert [keys_of(step) for step in (*begun, *ends)] == [keys_of(step) for step in rest]
    next_epoch = [keys_of(step) for step in steps_of([again])]  # of which there is nothing left over
    fresh = loaders(dataset, 1, global_batch_tokens=900)
    for loader in fresh:
        loader.set_epoch(1)
    assert next_epoch != [] and [keys_of(step) for step in steps_of(fresh)] == next_epoch


def test_samples_go_on_as_tokens_and_back(dataset: od.ShardDataset) -> None:
    sized = {"global_batch_tokens": None, "global_batch_size": 5}
    ours = loaders(dataset, 1, **sized)
    first = steps_of(ours, 2)
    state = ours[0].state_dict()
    rest = steps_of(loaders(dataset, 2, state, ("global_batch_tokens",)))
    assert len({key for step in (*first, *rest) for key in keys_of(step)}) == 36
    tokens = loaders(dataset, 1)
    first = steps_of(tokens, 2)
    rest = steps_of(loaders(dataset, 1, tokens[0].state_dict(), ("global_batch_size",), **sized))
    assert [len(keys_of(step)) for step in rest][:-1] == [5] * (len(rest) - 1)
    assert len({key for step in (*first, *rest) for key in keys_of(step)}) == 36


def test_a_ramp_grows_over_epochs(dataset: od.ShardDataset) -> None:
    total = int(dataset.index().llm_tokens.sum())
    ramp = [(0, BUDGET), (total // 2, 2 * BUDGET), (total + 1000, 4 * BUDGET)]
    (loader,) = loaders(dataset, 1, global_batch_tokens=ramp)
    assert loader.global_batch_tokens == [list(bound) for bound in ramp]
    sizes = []
    for _ in range(3):
        num_steps = len(loader)
        steps = steps_of([loader])
        assert len(steps) == num_steps
        sizes.append([tokens_of(dataset, keys_of(step)) for step in steps])
    means = [sum(epoch[:-1]) / (len(epoch) - 1) for epoch in sizes]
    assert means[0] < 1.6 * BUDGET < means[1] < 3.5 * BUDGET < means[2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"global_batch_size": 8}, "global_batch_size and global_batch_tokens are given: pass exactly one"),
        ({"batch_size": 2}, "batch_size and global_batch_tokens are given: pass exactly one"),
        ({"global_batch_tokens": 0}, "global_batch_tokens must be at least 1"),
        ({"global_batch_tokens": [(5, 100)]}, "ascending from 0"),
        ({"global_batch_tokens": [(0, 100), (0, 200)]}, "ascending from 0"),
        ({"global_batch_tokens": [100]}, "is a number or a list"),
        ({"global_batch_tokens": 100}, r"omni-.*: sample '.*' has \d+ tokens, .*oversize='drop'"),
        ({"balance": od.Balance(max_samples=40)}, "cap tokens by Balance.max_tokens"),
    ],
)
def test_what_cannot_be_is_refused(dataset: od.ShardDataset, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        loaders(dataset, 1, **options)


def test_what_is_above_the_budget_can_be_left_out(dataset: od.ShardDataset) -> None:
    lengths = dataset.index().llm_tokens
    budget = int(np.median(lengths))
    steps = steps_of(loaders(dataset, 2, global_batch_tokens=budget, balance=od.Balance(oversize="drop")))
    keys = [key for step in steps for key in keys_of(step)]
    assert len(keys) == len(set(keys)) == int((lengths <= budget).sum())
    assert all(keys_of(step) for step in steps)


@pytest.mark.parametrize(
    ("budget", "ranks", "better"),
    [
        (16_000, 4, 15_760),
        (15_760, 4, None),
        (16_400, 4, 15_760),
        (31_000, 4, None),
        (24_000, 4, 31_520),
        (300, 4, 15_760),
    ],
)
def test_a_budget_that_fills_its_microbatches_is_known(budget: int, ranks: int, better: int | None) -> None:
    assert better_budget(budget, 4_000, ranks) == better


# `accumulate=`: steps of so many microbatches on every rank, by any engine, and clear errors.


@pytest.fixture(scope="module")
def fifty(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> od.ShardDataset:
    fifty = od.ShardDataset(omni_shards(tmp_path_factory.mktemp("omni"), shards=2, samples=25), RECIPE)
    fifty.index()
    return fifty


def make(fifty: Any, **options: Any) -> od.DataLoader:
    """50 samples in steps of 2 * 4 * 2 ranks: three, and one of two samples."""
    fixed = {"batch_size": 2, "accumulate": 4, "dp": (0, 2), "shuffle": True, "num_threads": 0}
    return od.DataLoader(fifty, **fixed | options)


def ids(step: list[od.Batch]) -> list[list[tuple[str, str]]]:
    return [list(batch.sample_ids) for batch in step]


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
def test_every_step_has_its_microbatches_on_every_rank(fifty: od.ShardDataset, options: dict[str, Any]) -> None:
    ranks = [list(make(fifty, dp=(rank, 2), **options).steps()) for rank in range(2)]
    loader = make(fifty, **options)
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


def test_other_engines_and_any_step_again_give_the_same(fifty: od.ShardDataset) -> None:
    expected = [ids(step) for step in make(fifty).steps()]
    forked = make(fifty, num_workers=1, num_threads=1, multiprocessing_context="fork")
    assert [ids(step) for step in forked.steps()] == expected
    assert ids(make(fifty).step_at(0, 2)) == expected[2]
    assert make(fifty).plan_at(0, 3).num_microbatches == 4


def test_a_run_continues_with_another_accumulation_and_other_ranks(fifty: od.ShardDataset) -> None:
    first = make(fifty)
    list(islice(first.steps(), 1))
    state = first.state_dict()
    whole = [
        sorted(each for batch in ids(step) for each in batch) for step in make(fifty, dp=(0, 1), batch_size=4).steps()
    ]
    for options in ({"accumulate": 2}, {"accumulate": 1}, {"accumulate": 8}):
        other = make(fifty, dp=(0, 1), batch_size=None, global_batch_size=16, **options)
        other.load_state_dict(state)
        following = [sorted(each for batch in ids(step) for each in batch) for step in other.steps()]
        assert following == whole[1:]
        assert state["fingerprint"] == other.state_dict()["fingerprint"]


def test_what_cannot_be_cut_is_an_error(fifty: od.ShardDataset) -> None:
    with pytest.raises(ValueError, match="accumulate=4 cuts steps of as many samples.*global_batch_tokens"):
        make(fifty, batch_size=None, global_batch_tokens=3000)
    named = r"accumulate=3 micro-steps do not hold the 18 samples.*max_tokens=\{'llm': 245\}"
    with pytest.raises(ValueError, match=named):
        make(fifty, batch_size=3, accumulate=3, balance=od.Balance(max_tokens=245))
    with pytest.raises(ValueError, match=r"accumulate=3 micro-steps .* within Packed\(length=245\), at most 3 of them"):
        make(fifty, batch_size=3, accumulate=3, collate_fn=od.Packed(length=245))
    with pytest.raises(ValueError, match="accumulate must be at least 1"):
        make(fifty, accumulate=0)
    with pytest.raises(ValueError, match="for other data, step the optimizer"):
        od.DataLoader(Numbers(8), batch_size=2, accumulate=2)
    assert len(od.DataLoader(Numbers(8), batch_size=2, accumulate=1)) == 4


# Any step of a run, once more: what `step_at` builds is what the iteration gave, and the loader stays where it was.


NUMBERS = list(range(30))


def digests(step: list[Any]) -> list[str]:
    return [digest(batch) for batch in step]


@pytest.mark.slow_cases("options2", "options4")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"global_batch_tokens": [(0, 400), (2000, 900)]},
        {"global_batch_tokens": None, "global_batch_size": 7, "balance": od.Balance(max_tokens=300, oversize="own")},
        {"balance": od.Balance(assignment="per_phase")},
        {"collate_fn": od.Padded()},
        {"shuffle": od.Shuffle(window=1, streams=2), "num_threads": 2},
    ],
)
def test_every_step_of_every_rank_is_built_again(dataset: od.ShardDataset, options: dict[str, Any]) -> None:
    ours = loaders(dataset, 3, **options)
    given = [[[digests(step) for step in loader.steps()] for _ in range(2)] for loader in ours]
    asked = loaders(dataset, 3, **options)[0]
    asked.set_epoch(1)
    before = asked.state_dict()
    for epoch in range(2):
        for step in range(len(given[0][epoch])):
            plan = asked.plan_at(epoch, step)
            for rank in range(3):
                again = asked.step_at(epoch, step, rank=rank)
                assert digests(again) == given[rank][epoch][step]
                assert all(batch.plan.hash == plan.hash for batch in again)
        with pytest.raises(IndexError, match=f"step {step + 1} is outside"):
            asked.step_at(epoch, step + 1)
    assert digests(asked.step_at(1, 0)) != digests(asked.step_at(0, 0))
    assert asked.state_dict() == before
    assert asked.stats()["steps"] == 0


def test_a_run_that_was_cut_again_is_rebuilt_from_its_state(dataset: od.ShardDataset) -> None:
    run = loaders(dataset, 1, global_batch_tokens=300)[0]
    steps = run.steps()
    for _ in range(3):
        next(steps)
    resumed = loaders(dataset, 1, run.state_dict(), ["global_batch_tokens"], global_batch_tokens=800)[0]
    given = [digests(step) for step in resumed.steps()]
    laptop = loaders(dataset, 1, global_batch_tokens=800)[0]
    assert digests(laptop.step_at(0, 3)) != given[0]  # before it loads the state
    middle = loaders(dataset, 1, run.state_dict(), ["global_batch_tokens"], global_batch_tokens=800)[0]
    laptop.load_state_dict(middle.state_dict())
    assert [digests(laptop.step_at(0, 3 + number)) for number in range(len(given))] == given
    with pytest.raises(IndexError, match="cut in another way"):
        laptop.step_at(0, 2)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4, "shuffle": True, "seed": 5},
        {"batch_size": 4},
        {"batch_size": 4, "sampler": range(0, 30, 2)},
        {"batch_sampler": BatchSampler(range(30), 4, drop_last=False)},
    ],
)
def test_map_style_steps(options: dict[str, Any]) -> None:
    loader = od.DataLoader(NUMBERS, collate_fn=list, **options)
    state = torch.get_rng_state()
    asked = [loader.step_at(0, step) for step in range(len(loader))]
    assert torch.equal(torch.get_rng_state(), state)
    assert asked == [[batch] for batch in loader]


@pytest.mark.parametrize("kind", [{"shuffle": True}, {"sampler": RandomSampler(NUMBERS, num_samples=30)}])
def test_a_state_tells_what_torch_drew(kind: dict[str, Any]) -> None:
    loader = od.DataLoader(NUMBERS, batch_size=4, collate_fn=list, **kind)
    steps = iter(loader)
    given = [next(steps) for _ in range(3)]
    state = json.loads(json.dumps(loader.state_dict()))
    laptop = od.DataLoader(NUMBERS, batch_size=4, collate_fn=list, **kind)
    with pytest.raises(ValueError, match="load a state of that epoch"):
        laptop.step_at(0, 1)
    laptop.load_state_dict(state)
    given += steps
    assert [laptop.step_at(0, step) for step in range(len(given))] == [[batch] for batch in given]
