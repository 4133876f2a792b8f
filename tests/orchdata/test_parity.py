"""Training parity: balancing changes who computes what, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from parity_job import LAYOUTS, NUM_EPOCHS, RECIPE, SUITES, Case
from parity_job import __file__ as JOB
from rank_jobs import run_ranks
from webdataset import TarWriter

import orchdata as od
from orchdata.synth import make_sample, read_description

TOLERANCE = 1e-9  # relative, by norm of each parameter

DESCRIPTION = read_description(
    {
        "kinds": {
            "text": {"words": {"lognormal": [8, 0.8], "min": 1, "max": 30}},
            "image": {"words": 4, "image": {"width": {"uniform": [16, 80]}}},
            "audio": {"words": 4, "audio": {"seconds": {"uniform": [0.1, 1.5]}, "rates": 16000, "formats": "wav"}},
            "album": {"style": "chat", "words": 6, "image": {"count": 3, "width": {"uniform": [16, 80]}}},
            "both": {
                "style": "chat",
                "words": 9,
                "image": {"width": 40},
                "audio": {"seconds": {"uniform": [0.1, 0.8]}},
            },
        }
    }
)
STEPS = [
    ["text", "image", "audio", "both", "text", "album"],
    ["text"] * 6,  # no sample has image or audio
    ["text", "text", "text", "image", "text", "text"],  # one rank has an image
    ["text", "audio", "text", "text", "text", "text"],  # one rank has audio
    ["image", "album", "image", "image", "text", "album"],
    ["audio"] * 6,
    ["both", "text", "both", "text", "text", "text"],
    ["image", "audio", "image", "audio", "image", "audio"],  # dealt out in turn: one rank all images, one all audio
    ["text", "album", "text", "album", "text", "both"],
    ["both"],  # the global remainder: one rank has no sample at all
]


NUM_STEPS = NUM_EPOCHS * len(STEPS)


@dataclass(frozen=True)
class Trained:
    """The results of the job that trains one suite."""

    num_ranks: int
    cases: dict[Case, dict[str, Any]]
    between_references: list[tuple[str, str, float]]

    @property
    def compared(self) -> dict[Case, dict[str, Any]]:
        """The cases that must train as one process does."""
        return {case: result for case, result in self.cases.items() if case.loss == "global"}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parity") / "shard-000000.tar"
    with path.open("wb") as stream, TarWriter(stream, encoder=False) as writer:
        for index, kind in enumerate(kind for step in STEPS for kind in step):
            described = {**DESCRIPTION, "kinds": {kind: DESCRIPTION["kinds"][kind]}}
            writer.write({"__key__": f"{index:04d}-{kind}", **make_sample(described, index)[1]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORCHDATA_CACHE", str(path.parent / "cache"))
        od.ShardDataset(path, recipe=RECIPE).index()
    return path


SLOW = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=[pytest.param(name, marks=SLOW * each.slow) for name, each in SUITES.items()])
def trained(request: pytest.FixtureRequest, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    suite, folder = SUITES[request.param], tmp_path_factory.mktemp("job")
    results, *_ = run_ranks(
        JOB,
        shards,
        request.param,
        num_ranks=suite.num_ranks,
        folder=folder,
        environment={"ORCHDATA_CACHE": str(shards.parent / "cache")},
    )
    by_case = {case: results["cases"][str(case)] for case in suite.cases}
    return Trained(suite.num_ranks, by_case, results["between_references"])


def test_training_ends_where_one_process_does(trained: Trained) -> None:
    apart = {str(case): result["from_reference"] for case, result in trained.compared.items()}
    assert {case: difference for case, difference in apart.items() if not difference < TOLERANCE} == {}
    for result in trained.compared.values():
        assert {batch["step"] for batch in result["seen"][0]} == set(range(NUM_STEPS))
        assert result["moved"] > 1e-2  # or the comparison would say nothing


def test_every_layout_trains_the_same(trained: Trained) -> None:
    assert trained.between_references
    for first, second, difference in trained.between_references:
        if LAYOUTS[first].positions == LAYOUTS[second].positions:
            assert difference < TOLERANCE
        else:
            assert difference > 1e4 * TOLERANCE


@pytest.mark.parametrize("trained", [next(iter(SUITES))], indirect=True)
@pytest.mark.parametrize("loss", ["rank mean", "padding too"])
def test_a_mean_by_rank_and_padding_with_a_loss_do_not_pass(trained: Trained, loss: str) -> None:
    (wrong,) = [result for case, result in trained.cases.items() if case.loss == loss]
    assert wrong["from_reference"] > 1e4 * TOLERANCE


def of_step(result: dict[str, Any], step: int) -> list[list[dict[str, Any]]]:
    """The microbatches of one step, by rank."""
    return [[batch for batch in rank if batch["step"] == step] for rank in result["seen"]]


@pytest.mark.parametrize("modality", ["image", "audio"])
def test_the_steps_had_empty_phases(trained: Trained, modality: str) -> None:
    """Guards the data above: a modality is missing on no rank, on all, and on all but one."""
    for result in trained.cases.values():
        steps = [of_step(result, step) for step in range(NUM_STEPS)]
        ranks = {sum(any(batch[modality] for batch in rank) for rank in step) for step in steps}
        assert ranks >= {0, 1, trained.num_ranks}


def samples_by_rank(result: dict[str, Any], step: int) -> list[list[str]]:
    return [sorted(key for batch in rank for key in batch["samples"]) for rank in of_step(result, step)]


def test_ranks_without_any_sample_took_part(trained: Trained) -> None:
    for result in trained.cases.values():
        for last in range(len(STEPS) - 1, NUM_STEPS, len(STEPS)):
            counts = sorted(map(len, samples_by_rank(result, last)))
            assert counts == [0] * (trained.num_ranks - 1) + [1]


def test_balancing_moved_samples(trained: Trained) -> None:
    """Guards the comparison: most steps share the samples out in another way than in turn."""
    for case, result in trained.cases.items():
        in_turn = 0
        for step in range(NUM_STEPS):
            by_rank = samples_by_rank(result, step)
            samples = sorted(key for keys in by_rank for key in keys)
            in_turn += by_rank == [samples[rank :: trained.num_ranks] for rank in range(trained.num_ranks)]
        assert in_turn == NUM_STEPS if case.scope == "none" else in_turn <= 0.3 * NUM_STEPS


def test_parts_were_encoded_away_from_home_under_per_phase_alone(trained: Trained) -> None:
    for case, result in trained.cases.items():
        rows = [batch["rows_away"] for rank in result["seen"] for batch in rank]
        assert any(rows) == (case.assignment == "per_phase")


def test_microbatched_steps_had_several_microbatches(trained: Trained) -> None:
    for case, result in trained.cases.items():
        counts = [[batch["microbatches"] for batch in rank] for rank in result["seen"]]
        assert all(rank == counts[0] for rank in counts)
        if case.layout != "packed to lengths":  # its length is a cap anyway
            assert (max(counts[0]) > 1) == case.microbatched
