"""Training parity of mixtures with loss weights, of steps measured in tokens, and of microbatches of one length."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from mixture_parity_job import BUDGET, LENGTH, SUITES, Case, Suite
from mixture_parity_job import __file__ as JOB
from rank_jobs import run_ranks
from shard_factory import RECIPE, chat, omni_samples, write_shard

import orchdata as od

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE = 1e-12  # relative, by norm of each parameter
Outcomes = dict[Case, dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed")
    write_shard(folder / "omni.tar", omni_samples(20, prefix="o"))
    chats = [{"__key__": f"c{n}", "json": chat("tell me", "word " * (3 + 7 * n % 30))} for n in range(14)]
    write_shard(folder / "chat.tar", chats)
    write_shard(folder / "text.tar", [{"__key__": f"t{n}", "txt": b"short" * (n % 4 + 1)} for n in range(11)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORCHDATA_CACHE", str(folder / "cache"))
        for name in ("omni", "chat", "text"):
            od.ShardDataset(folder / f"{name}.tar", recipe=RECIPE).index()
    return folder


@pytest.fixture(scope="module", params=list(SUITES))
def suite(request: pytest.FixtureRequest) -> Suite:
    return SUITES[request.param]


@pytest.fixture(scope="module")
def outcomes(suite: Suite, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    name = next(name for name, each in SUITES.items() if each is suite)
    results, *_ = run_ranks(
        JOB,
        folder,
        name,
        num_ranks=suite.num_ranks,
        folder=tmp_path_factory.mktemp("job"),
        environment={"ORCHDATA_CACHE": str(folder / "cache")},
    )
    return {case: results[str(case)] for case in suite.cases}


def of_steps(seen: list[dict[str, Any]]) -> dict[int, list[str]]:
    """The keys of each step."""
    digests: dict[int, list[str]] = defaultdict(list)
    for batch in seen:
        digests[batch["step"]] += batch["samples"]
    return {step: sorted(keys) for step, keys in digests.items()}


def test_training_ends_where_one_process_does(outcomes: Outcomes) -> None:
    apart = {str(case): of["from_reference"] for case, of in outcomes.items() if case.loss == "global"}
    assert {case: difference for case, difference in apart.items() if not difference < TOLERANCE} == {}
    assert all(of["moved"] > 1e-2 for of in outcomes.values())  # or the comparison would say nothing


def test_sums_and_denominators_that_are_wrong_do_not_pass(outcomes: Outcomes, suite: Suite) -> None:
    """Without the weights of tokens, with denominators without them, and with means of each rank."""
    wrong = {str(case): of["from_reference"] for case, of in outcomes.items() if case.loss != "global"}
    assert len(wrong) == 4
    assert {case: difference for case, difference in wrong.items() if not difference > 1e-3} == {}


def test_steps_are_those_of_one_process(outcomes: Outcomes) -> None:
    for of in outcomes.values():
        assert of_steps([batch for rank in of["seen"] for batch in rank]) == of_steps(of["alone"])


def test_the_cases_were_what_they_say(outcomes: Outcomes, suite: Suite) -> None:
    """Guards the data: several microbatches, sources of unlike weight in a step, parts encoded away from home."""
    for case, of in outcomes.items():
        batches = [batch for rank in of["seen"] for batch in rank]
        is_short = case.layout == "packed to lengths" and suite.num_ranks * LENGTH < BUDGET
        if case.capped or (is_short and case.measure == "tokens"):
            assert any(batch["microbatches"] > 1 for batch in batches)
        mixed = [len({key[0] for key in keys}) for keys in of_steps(of["alone"]).values()]
        assert max(mixed) == (3 if case.data == "mixture" else 1)
        if suite.num_ranks > 1:
            assert any(batch["rows_away"] for batch in batches) == (case.assignment == "per_phase")
