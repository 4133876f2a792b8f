"""Samples with media that ranks share: each member has the features of its slice, and encoders get all gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from digests import digest
from hf_families.families import FAMILIES
from hf_families.samples import made_up, write_samples
from rank_jobs import run_ranks
from shard_factory import RECIPE, audio, jpeg, write_shard
from shared_media_job import __file__ as JOB
from shared_media_job import loader

import orchdata as od

pytestmark = pytest.mark.usefixtures("same_cache")


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> str:
    """20 chats: in each five one of images and clips between texts, that is longer than all others."""
    rng, samples = np.random.default_rng(0), []
    for number in range(20):
        words = "word " * int(rng.integers(1, 9))
        sample: dict[str, Any] = {"__key__": f"s{number:02d}", "txt": words.encode()}
        if number % 5 == 0:
            sample = {"__key__": f"s{number:02d}"} | {f"{at}.jpg": jpeg(40 + 20 * at, 90, at) for at in range(6)}
            sample |= {"6.wav": audio(1.0)}
            text = words.join(["<image>"] * 3) + "<audio>" + words.join(["<image>"] * 3)
            turns = [{"role": "user", "content": text}, {"role": "assistant", "content": 9 * words}]
            sample["json"] = json.dumps({"messages": turns}).encode()
        elif number % 5 == 1:
            sample["jpg"] = jpeg(90, 60, number)[: -200 if number == 6 else None]  # one is cut
        samples.append(sample)
    shard = write_shard(tmp_path_factory.mktemp("media") / "shard.tar", samples)
    od.ShardDataset(shard, RECIPE).index()
    return shard


@pytest.fixture(scope="module", params=[pytest.param(size, marks=pytest.mark.slow) for size in (2, 4)])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, shard: str) -> Any:
    family = FAMILIES["qwen2_5_vl"]
    shards = write_samples(family, made_up(family, 9, 1), tmp_path_factory.mktemp("family"))
    processor, model = family.build()
    od.ShardDataset(shards, od.hf.recipe(processor)).index()
    assert od.hf.Inputs(model.config, padded=False).sharing.shares
    return run_ranks(JOB, shard, *shards, num_ranks=request.param, folder=tmp_path_factory.mktemp("ranks"))


def test_gradients_are_those_of_one_rank(found: list[dict[str, Any]]) -> None:
    for name in ("loader", "rounds", "trainer", "hugging face"):
        assert max(rank[name]["distance"] for rank in found) < 1e-12, name
    assert max(rank["spoilt"]["distance"] for rank in found) > 1e-6
    for name in ("loader", "rounds"):
        assert min(sum(rank[name][what] for rank in found) for what in ("shared", "torn")) > 1
    assert all(rank["rounds"]["rounds"] and rank["hugging face"]["shared"] for rank in found)


def test_a_text_that_fails_on_one_member_is_blank_on_all(found: list[dict[str, Any]]) -> None:
    failed = [rank["failing"] for rank in found]
    assert sum(len(each["labels"]) for each in failed) and not any(sum(each["labels"]) for each in failed)
    assert all(each["placed"] for each in failed)
    # Each on one member, and the image that is cut.
    assert sum(each["count"] for each in failed) == failed[0]["texts"] + 1


def test_processes_build_the_same_slices_and_routes(shard: str) -> None:
    way = {"num_workers": 1, "num_threads": 2, "multiprocessing_context": "fork"}
    for rank in range(2):
        given = {"dp": (rank, 2), "on_error": "raise", "global_batch_size": 3}
        one, other = (next(iter(loader(shard, **given, **each))) for each in ({}, way))
        assert one.teams[0].size == 2 and digest(one) == digest(other) and one.routes == other.routes
