"""post_balance over 2 to 4 gloo processes (post_balance_job.py), its plans, and one rank alone."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from albums import Album
from hypothesis import given
from hypothesis import strategies as st
from post_balance_job import LONG_COUNTS, TIMEOUT_SECONDS, Drawn, make_steps
from post_balance_job import __file__ as JOB
from rank_jobs import run_ranks
from torch.utils.data import DataLoader

import orchdata as od
from orchdata.loaders.errors import StateError, StepError
from orchdata.order.order import Order
from orchdata.order.steps import GlobalBatches, StepTask
from orchdata.planning.parts import Encoders
from orchdata.planning.plan import PlanSpec, make_plan
from orchdata.post_balancing.loader import post_balance
from orchdata.post_balancing.step import PostPlan, make_post_plan, plan_as_drawn


def run_job(scenario: str, num_ranks: int, folder: Path, **options: Any) -> list[Any]:
    """What each rank found, two of them on a node; options as in `run_ranks`."""
    nodes = {"LOCAL_WORLD_SIZE": "2"}
    return run_ranks(JOB, scenario, num_ranks=num_ranks, folder=folder, environment=nodes, **options)


def drawn_keys(num_ranks: int, step: int, steps_of: Any) -> list[str]:
    return sorted(
        sample["key"] for rank in range(num_ranks) if step < len(steps_of(rank)) for sample in steps_of(rank)[step]
    )


def check_epoch(by_rank: list[list[dict[str, Any]]], steps_of: Any, num_steps: int) -> None:
    """Every rank has every step, every sample is there once, in its step, intact, and plans are equal."""
    num_ranks = len(by_rank)
    for seen in by_rank:
        assert [one["step"] for one in seen] == list(range(num_steps))
        assert all(one["intact"] for one in seen)
    for step, ranks in enumerate(zip(*by_rank, strict=True)):
        assert sorted(chain(*(one["keys"] for one in ranks))) == drawn_keys(num_ranks, step, steps_of)
        assert len({one["hash"] for one in ranks}) == 1
        total = sum(sum(one["costs"]) for one in ranks)  # the cost is the number of loss tokens
        assert {one["loss_scale"] for one in ranks} == {num_ranks / max(1, total)}


def makespans(by_rank: list[list[dict[str, Any]]]) -> list[int]:
    return [max(sum(one["costs"]) for one in ranks) for ranks in zip(*by_rank, strict=True)]


def drawn_makespans(num_ranks: int, steps_of: Any, num_steps: int) -> list[int]:
    loads = [[sum(sample["cost"] for sample in samples) for samples in steps_of(rank)] for rank in range(num_ranks)]
    return [max(row[step] for row in loads if step < len(row)) for step in range(num_steps)]


def test_uneven_empty_and_missing_lists_are_shared_out_until_all_ranks_have_no_more(tmp_path: Path) -> None:
    def steps_of(rank: int) -> list[list[dict[str, Any]]]:
        return make_steps(rank, 3 * rank, (6, 0, 9))

    results = run_job("uneven", 3, tmp_path)
    for epoch in range(2):
        by_rank = [result["epochs"][epoch] for result in results]
        check_epoch(by_rank, steps_of, num_steps=6)  # rank 2 has 3 * 2
        for before, after in zip(drawn_makespans(3, steps_of, 6), makespans(by_rank), strict=True):
            assert after < before or before == 0  # step 1 and 4 are empty
    assert any(one["keys"] for one in results[0]["epochs"][0])  # rank 0 draws nothing, and gets its share


def test_lists_longer_than_the_first_message(tmp_path: Path) -> None:
    results = run_job("long_lists", 3, tmp_path)
    by_rank = [result["epochs"][0] for result in results]
    check_epoch(by_rank, lambda rank: make_steps(rank, 4, LONG_COUNTS[rank]), num_steps=4)


def test_every_scope_keeps_its_promise(tmp_path: Path) -> None:
    results = run_job("balances", 4, tmp_path)

    def steps_of(rank: int) -> list[list[dict[str, Any]]]:
        return make_steps(rank, 3)

    unmoved = drawn_makespans(4, steps_of, 3)
    for name in results[0]:
        by_rank = [result[name]["epochs"][0] for result in results]
        check_epoch(by_rank, steps_of, num_steps=3)
        stats = results[0][name]["stats"]
        homes = [{key.split("-")[0] for one in seen for key in one["keys"]} for seen in by_rank]
        if name == "none":
            assert makespans(by_rank) == unmoved
            assert stats["moved_samples"] == stats["moved_bytes"] == 0
            continue
        assert all(after < before for before, after in zip(unmoved, makespans(by_rank), strict=True))
        assert stats["moved_bytes"] > 64 * stats["moved_samples"] > 0
        if name == "grouped":
            assert [home <= ({"0", "1"} if rank < 2 else {"2", "3"}) for rank, home in enumerate(homes)] == [True] * 4


def test_a_step_that_would_gain_too_little_is_left_as_it_is(tmp_path: Path) -> None:
    results = run_job("gain", 2, tmp_path)
    costs = [[one["costs"] for one in result["epochs"][0]] for result in results]
    assert [row[0] for row in costs] == [[30, 30, 30], [30, 30, 30, 10, 10]]  # as drawn: 9.1 % is below 20 %
    assert [sum(row[1]) for row in costs] == [60, 60]
    for result in results:
        assert result["stats"]["below_gain"] == 1
        assert result["stats"]["moved_samples"] == 1
        assert result["stats"]["imbalance_before"] == pytest.approx((110 + 110) / (100 + 60))
        assert result["stats"]["imbalance"] == pytest.approx((110 + 60) / (100 + 60))


def test_a_failing_loader_gives_every_rank_an_error_with_its_rank_and_step(tmp_path: Path) -> None:
    for rank, by_rank in enumerate(run_job("failing_loader", 3, tmp_path)):
        assert by_rank["steps"] == [0, 1, 2, 3, 4]  # steps drawn before are delivered
        assert by_rank["error"] == "rank 1 failed at step 5: OSError: the disk is gone"
        assert by_rank["rank"] == 1
        assert (by_rank["cause"] == "OSError") == (rank == 1)


def test_a_rank_that_dies_is_an_error_on_all_others_with_the_step(tmp_path: Path) -> None:
    results = run_job("dying_rank", 4, tmp_path, lost=[1])
    for by_rank in (results[0], results[2], results[3]):
        last = by_rank["steps"][-1]
        assert by_rank["steps"] == list(range(last + 1))
        assert by_rank["error"].startswith(f"post_balance lost other ranks at step {last + 1}: ")
        assert by_rank["rank"] is None
        assert by_rank["seconds"] < TIMEOUT_SECONDS / 2  # noticed, not waited for


def test_each_of_several_failures_names_its_own_rank(tmp_path: Path) -> None:
    for rank, each in enumerate(run_job("failures_in_turn", 2, tmp_path)):
        *first, last = each["found"]
        said = "failed in step 0: MemoryError: no room for samples"
        for failing, by_rank in enumerate(first):
            assert by_rank["steps"] == []
            assert by_rank["rank"] == failing
            lost = "" if rank == failing else "post_balance lost other ranks at step 0: "
            assert by_rank["error"] == f"{lost}rank {failing} {said}"
        assert last["error"] == f"rank {rank} {said}"


def test_when_the_rank_that_serves_the_store_dies_the_others_know_immediately(tmp_path: Path) -> None:
    for by_rank in run_job("dying_server", 3, tmp_path, lost=[0])[1:]:
        assert by_rank["steps"] == [0, 1, 2, 3]  # it dies while it draws step 4
        assert by_rank["error"].startswith("post_balance lost other ranks at step 4: ")
        assert by_rank["rank"] is None
        assert by_rank["seconds"] < TIMEOUT_SECONDS / 2  # noticed, not waited for


def test_a_rank_that_leaves_its_loop_alone_is_named_by_the_others(tmp_path: Path) -> None:
    results = run_job("one_leaves", 3, tmp_path)
    assert results[1]["threads"] == []
    for by_rank in (results[0], results[2]):
        assert by_rank["rank"] == 1
        assert f"before step {len(by_rank['steps'])}, which needs every rank" in by_rank["error"]


def test_nothing_is_left_when_all_leave_and_they_can_start_again(tmp_path: Path) -> None:
    for by_rank in run_job("all_leave", 2, tmp_path):
        assert by_rank["first"] == [0, 0]
        assert by_rank["threads"] == [[], [], []]


def test_state_is_that_of_the_delivered_step(tmp_path: Path) -> None:
    results = run_job("resume", 2, tmp_path)
    for result in results:
        assert result["resumed"] == result["whole"]
        assert [state["step"] for state in result["states"]] == [0, 1, 2, 3]
        assert result["end"] == {"version": 1, "step": 0, "exhausted": False, "loader": {"position": 0}}
    # Rank 1 had drawn ahead; rank 0 had no third list, and noticed that while building step 2.
    assert [state["loader"] for state in results[1]["states"]] == [{"position": step} for step in range(4)]
    assert [state["exhausted"] for state in results[0]["states"]] == [False, False, False, True]


def test_ranks_with_different_arguments_raise(tmp_path: Path) -> None:
    for by_rank in run_job("unlike", 2, tmp_path):
        assert "gain is 0.02 on rank 0, 0.5 on rank 1" in by_rank["error"]


def test_a_forked_process_takes_no_connection_down_and_does_not_wait(tmp_path: Path) -> None:
    assert run_job("forked", 2, tmp_path) == [{"code": 0, "steps": 2}] * 2


# --- per phase

PER_PHASE = od.Balance(assignment="per_phase")


def test_every_rest_and_part_goes_to_one_rank_and_features_come_back(tmp_path: Path) -> None:
    for ranks in zip(*run_job("per_phase", 3, tmp_path), strict=True):
        assert all(one["intact"] and one["came"] for one in ranks)
        assert len({one["hash"] for one in ranks}) == 1
        keys, parts = ranks[0]["wanted"]
        assert sorted(chain(*(one["keys"] for one in ranks))) == keys
        assert sorted(chain(*(chain(*one["parts"].values()) for one in ranks))) == parts
        assert [list(one["parts"]) for one in ranks] == [["image", "audio"]] * 3
        total, most = ranks[0]["bytes"]
        assert 0 < total <= most  # those of whole samples, and 64 a part


def test_gradients_are_those_of_one_rank(tmp_path: Path) -> None:
    for found in run_job("gradients", 2, tmp_path):
        assert found["arriving"] <= 1e-12
        assert found["sorted"] > 1e-3  # the control


@pytest.mark.parametrize("num_steps", [50, pytest.param(500, marks=pytest.mark.slow)])
def test_loads_are_those_of_a_loader(num_steps: int) -> None:
    for seed in range(num_steps):
        counts = np.random.default_rng(seed).integers(1, 20, 4)
        album, owner = Album(int(counts.sum()), seed), np.repeat(np.arange(4, dtype=np.int32), counts)
        order, batches = Order(len(owner), shuffle=None, seed=0), GlobalBatches(size=len(owner))
        spec = PlanSpec(costs=album, order=order, balance=PER_PHASE, num_ranks=4, batches=batches)
        wanted = make_plan(spec, StepTask(0, 0))
        plan = make_post_plan(drawn_plan(album, owner, 4), Encoders(PER_PHASE, 4, 1, 4), 0)
        for phase in ("image", "llm"):
            assert plan.loads(phase).max() <= 1.01 * wanted.loads(phase).max()


def drawn_plan(album: Album, owner: Any, num_ranks: int) -> PostPlan:
    """The step as drawn."""
    row = np.arange(len(owner))
    parts = album.parts("image", row)
    parts = replace(parts, rank=owner[parts.sample])
    costs, sizes = album.costs("llm", row), np.concatenate([8 * album.text, 99 * parts.costs])
    return plan_as_drawn(0, 0, num_ranks, costs, owner, sizes, 1, {"image": parts})


# --- one rank alone


def cost_of(sample: dict[str, Any]) -> int:
    return int(sample["cost"])


def test_one_rank_gets_what_it_draws() -> None:
    steps = make_steps(0, 3)
    balanced = post_balance(Drawn(steps), cost=cost_of, loss_tokens=lambda sample: 2)
    before = set(threading.enumerate())
    batches = list(balanced)
    assert not set(threading.enumerate()) - before
    assert [batch.samples for batch in batches] == steps
    assert [batch.step for batch in batches] == [0, 1, 2]
    assert {batch.loss_scale for batch in batches} == {1 / 12}  # six samples of two tokens
    assert len(list(balanced)) == 3  # the next epoch
    assert balanced.stats()["steps"] == 6


def test_without_loss_tokens_samples_are_counted() -> None:
    (batch,) = post_balance([["a", "b", "c", "d"]], cost=len)
    assert (batch.loss_scale, batch.global_loss_tokens) == (1 / 4, 4)


def test_costs_may_be_given_by_phase_and_nothing_costs_nothing() -> None:
    (batch,) = post_balance(iter([[{"llm": 3, "image": 2}, {"llm": 0}]]), cost=dict)
    assert batch.plan.costs["llm"].tolist() == [5, 1]


def test_one_rank_encodes_its_own_parts() -> None:
    def cut(sample: str) -> tuple[str, dict[str, list[od.Part]]]:
        return sample[0], {"image": [od.Part(pixels, cost=0, rows=2) for pixels in sample[1:]]}

    drawn = [["a12", "b", "c3"]]
    balanced = post_balance(
        drawn, cost=lambda sample: {"image": len(sample) - 1, "llm": 5}, parts=cut, balance=PER_PHASE
    )
    (batch,) = balanced
    assert (batch.samples, batch.parts) == (["a", "b", "c"], {"image": ["1", "2", "3"]})
    assert batch.arriving["image"].tolist() == [[0, 0, 2], [0, 1, 2], [2, 0, 2]]
    features = torch.arange(6)
    assert od.exchange(features, batch.routes["image"], requires_grad=False).tolist() == list(range(6))
    assert balanced.stats()["imbalance"] == 1.0


def test_resume_of_a_loader_without_state_is_refused_with_the_reason() -> None:
    balanced = post_balance([[1]], cost=int)
    with pytest.raises(TypeError, match="cannot resume: list has no state_dict"):
        balanced.state_dict()
    with pytest.raises(TypeError, match="cannot resume"):
        balanced.load_state_dict({})


def test_a_state_of_something_else_is_refused() -> None:
    balanced = post_balance(Drawn([]), cost=cost_of)
    with pytest.raises(StateError, match="no.* state of post_balance"):
        balanced.load_state_dict({"version": 2})


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"cost": 5}, TypeError, "cost must be callable with a sample, got 5"),
        ({"loss_tokens": 5}, TypeError, "loss_tokens must be callable"),
        ({"gain": 1.0}, ValueError, "gain must be from 0 to below 1, got 1.0"),
        ({"timeout": 0}, ValueError, "timeout must be more than 0 seconds, got 0"),
        ({"loader": 5}, TypeError, "loader must be an iterable"),
        ({"group": (0, 2)}, ValueError, r"group=\(0, 2\) names none"),
        ({"balance": "best"}, ValueError, "balance must be one of"),
        ({"balance": od.Balance(max_tokens=5)}, ValueError, "Balance.max_tokens is for a DataLoader"),
        ({"balance": PER_PHASE}, ValueError, "go together"),
        ({"parts": len}, ValueError, "go together"),
        ({"balance": PER_PHASE, "parts": 5}, TypeError, "parts must be callable"),
        ({"balance": replace(PER_PHASE, max_tokens={"image": 5}), "parts": len}, ValueError, "Balance.max_tokens is"),
        ({"balance": replace(PER_PHASE, encode="step"), "parts": len}, ValueError, "a step .* is one micro-step"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    given_arguments = {"loader": [], "cost": len, **arguments}
    with pytest.raises(error, match=said):
        post_balance(given_arguments.pop("loader"), **given_arguments)


PAIRS = [("ab", 1), ("c", 2)]


@pytest.mark.parametrize(
    ("steps", "cost", "said"),
    [
        ([{"input_ids": [1]}], len, "step 0: TypeError: the loader must yield lists of samples, got a dict"),
        (DataLoader(PAIRS, 2), len, "samples, got columns: .*collate_fn=list"),
        ([["a"], ["b"]], lambda sample: 1.5, "step 0: TypeError: cost must return an integer, got 1.5"),
        ([["a"], ["b"]], lambda sample: -1, "step 0: ValueError: cost must return an integer from 0"),
        ([["a"]], lambda sample: {"llm": "x"}, "cost of phase 'llm' must return an integer, got 'x'"),
    ],
)
def test_what_the_loader_or_the_cost_does_wrong_names_the_step(steps: Any, cost: Any, said: str) -> None:
    with pytest.raises(StepError, match=said):
        list(post_balance(steps, cost=cost))


def test_lists_of_torchs_loader_are_samples() -> None:
    for data, collate in ((["ab", "c"], None), ([b"ab"], None), (PAIRS, list)):
        (moved,) = post_balance(DataLoader(data, 2, collate_fn=collate), cost=len)
        assert moved.samples == [*data]


@pytest.mark.parametrize(
    ("cost", "parts", "said"),
    [
        (5, {}, "cost must return a mapping of phases with 'llm' among them, got 5"),
        ({"image": 0}, {}, "with 'llm' among them"),
        ({"image": 0, "llm": 1}, {"audio": []}, "parts has the phase 'audio', but cost names the encoders .'image'."),
        ({"llm": 1}, {"llm": []}, "parts has the phase 'llm'"),
        ({"image": 3, "llm": 1}, {}, "phase 'image' costs 3, but parts has none of it"),
        ({"image": 3, "llm": 1}, {"image": [od.Part(0, 3, -1)]}, "the rows of a part of phase 'image', must return an"),
    ],
)
def test_parts_that_do_not_fit_the_costs_are_refused(cost: Any, parts: Any, said: str) -> None:
    with pytest.raises(StepError, match=f"rank 0 failed at step 0: .*{said}"):
        list(post_balance([["a"]], cost=lambda _: cost, parts=lambda sample: (sample, parts), balance=PER_PHASE))


# --- plans


@st.composite
def drawn_steps(draw: st.DrawFn) -> PostPlan:
    num_ranks = draw(st.integers(1, 6))
    counts = draw(st.lists(st.integers(0, 8), min_size=num_ranks, max_size=num_ranks))
    owner = np.repeat(np.arange(num_ranks, dtype=np.int32), counts)
    numbers = st.lists(st.integers(1, 1000), min_size=len(owner), max_size=len(owner))
    costs, sizes = np.array(draw(numbers), np.int64), np.array(draw(numbers), np.int64)
    return plan_as_drawn(0, 0, num_ranks, costs, owner, sizes, 1, {})


GROUPED = {"scope": "grouped", "group_size": 2}
SCOPES = [od.Balance(**of) for of in ({"scope": "none"}, {"scope": "global"}, GROUPED, GROUPED | {"scope": "grid"})]


def check_moves(drawn: PostPlan, balance: od.Balance) -> None:
    """Every object goes to one rank, in its scope, and moves pay."""
    num_ranks = drawn.num_ranks
    plan = make_post_plan(drawn, Encoders(balance, num_ranks, 1, 2), 0.05)
    assert plan.hash == make_post_plan(replace(drawn), Encoders(balance, num_ranks, 1, 2), 0.05).hash
    assert sorted(chain(*(plan.places(rank) for rank in range(num_ranks)))) == list(range(len(plan.row)))
    leaving, arriving, _ = zip(*map(plan.moves, range(num_ranks)), strict=True)
    assert sorted(chain(*leaving)) == sorted(chain(*arriving)) == plan.moved.tolist()
    before = sum(int(plan.loads_unbalanced(phase).max()) for phase in plan.phases)
    after = sum(int(plan.loads(phase).max()) for phase in plan.phases)
    assert (plan.before, plan.after) == (before, after)
    assert after <= 0.95 * before if len(plan.moved) else after == before  # the required gain
    owner, rank = plan.object_ranks
    assert balance.scope != "grouped" or (rank // 2 == owner // 2).all()
    assert balance.scope != "none" or not len(plan.moved)


@pytest.mark.parametrize("balance", SCOPES, ids=lambda balance: balance.scope)
@given(drawn=drawn_steps())
def test_a_plan_gives_every_sample_to_one_rank_and_pays(drawn: PostPlan, balance: od.Balance) -> None:
    check_moves(drawn, balance)


@pytest.mark.parametrize("balance", SCOPES, ids=lambda balance: balance.scope)
def test_a_plan_of_parts_keeps_its_scope_and_pays(balance: od.Balance) -> None:
    for seed in range(20):
        owner = np.sort(np.random.default_rng(seed).integers(0, 5, 3 * seed)).astype(np.int32)
        check_moves(drawn_plan(Album(len(owner), seed), owner, 5), replace(balance, assignment="per_phase"))
