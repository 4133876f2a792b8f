"""Training parity: balancing changes who computes what, and nothing else.

One torchrun job of two gloo ranks trains every combination (parity_job.py); the tests look at what it found. Steps are
laid out so that each modality is missing on one rank, on both, and on none.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from parity_job import MAX_TOKENS, RECIPE
from webdataset import TarWriter

import orchdata as od
from orchdata.demo.launch import torchrun
from orchdata.synth import make_sample, read_description

JOB = Path(__file__).parents[1] / "support" / "parity_job.py"
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
        },
    }
)
STEPS = [
    ["text", "image", "audio", "both", "text", "album"],
    ["text"] * 6,  # nobody has image or audio
    ["text", "text", "text", "image", "text", "text"],  # one rank has an image
    ["text", "audio", "text", "text", "text", "text"],  # one rank has audio
    ["image", "album", "image", "image", "text", "album"],
    ["audio"] * 6,
    ["both", "text", "both", "text", "text", "text"],
    ["image", "audio", "image", "audio", "image", "audio"],  # dealt out in turn: one rank all images, one all audio
    ["text", "album", "text", "album", "text", "both"],
    ["both"],  # the global remainder: one rank has no sample at all
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("parity")
    shards = folder / "shard-000000.tar"
    with shards.open("wb") as stream, TarWriter(stream, encoder=False) as writer:
        for index, kind in enumerate(kind for step in STEPS for kind in step):
            writer.write({"__key__": f"{index:04d}-{kind}", **make_sample(DESCRIPTION, index, kind)[1]})

    with pytest.MonkeyPatch.context() as patch, (folder / "log").open("w+b") as log:
        patch.setenv("ORCHDATA_CACHE", str(folder / "cache"))
        od.ShardDataset(shards, recipe=RECIPE).index()
        torchrun(
            [str(JOB), str(shards), str(folder / "result.json")],
            num_ranks=2,
            environment={"ORCHDATA_CACHE": str(folder / "cache")},
            log=log,
            progress=lambda done, total: None,
        )
    found: list[dict[str, Any]] = json.loads((folder / "result.json").read_text())
    return found


def choose(results: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    (chosen,) = [result for result in results if all(result[name] == value for name, value in wanted.items())]
    return chosen


@pytest.mark.parametrize(
    ("wrapper", "frozen", "checkpoint", "microbatched"), list(product(("ddp", "fsdp2"), *[(False, True)] * 3))
)
def test_balanced_training_ends_where_unbalanced_does(
    results: list[dict[str, Any]], wrapper: str, frozen: bool, checkpoint: bool, microbatched: bool
) -> None:
    max_tokens = MAX_TOKENS if microbatched else None
    result = choose(
        results, wrapper=wrapper, frozen=frozen, checkpoint=checkpoint, max_tokens=max_tokens, loss="global"
    )
    assert result["difference"] < TOLERANCE
    assert result["from_reference"] < TOLERANCE  # one process with all samples
    assert result["moved"] > 1e-2  # or the comparison would say nothing


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_a_per_rank_mean_loss_does_not_pass(results: list[dict[str, Any]], wrapper: str) -> None:
    result = choose(results, wrapper=wrapper, loss="rank mean")
    assert result["difference"] > 1e4 * TOLERANCE
    assert result["from_reference"] > 1e4 * TOLERANCE


@pytest.mark.parametrize("lane", ["balanced", "unbalanced"])
@pytest.mark.parametrize("modality", ["image", "audio"])
def test_the_steps_had_empty_phases(results: list[dict[str, Any]], lane: str, modality: str) -> None:
    """Guards the data above: a modality is missing on no rank, on one, and on all."""
    result = choose(results, wrapper="ddp", frozen=False, checkpoint=False, max_tokens=None, loss="global")
    have = [[rank[lane][step][modality] > 0 for rank in result["seen"]] for step in range(len(STEPS))]
    assert {sum(step) for step in have} == {0, 1, 2}


def test_a_rank_without_any_sample_took_part(results: list[dict[str, Any]]) -> None:
    for result in results:
        last = [sum(one["samples"] for one in rank["balanced"] if one["step"] == 9) for rank in result["seen"]]
        assert sorted(last) == [0, 1]


def test_the_plans_differed(results: list[dict[str, Any]]) -> None:
    for result in results:
        lanes = [{one["plan"] for one in result["seen"][0][lane]} for lane in ("balanced", "unbalanced")]
        assert len(lanes[0] - lanes[1]) >= 7  # of ten steps


def test_microbatched_steps_had_several_microbatches(results: list[dict[str, Any]]) -> None:
    for result in results:
        counts = [[one["microbatches"] for one in rank["balanced"]] for rank in result["seen"]]
        assert counts[0] == counts[1]
        assert (max(counts[0]) > 1) == (result["max_tokens"] is not None)
