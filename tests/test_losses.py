"""The code of docs/losses.md on two ranks has the gradients of one batch with all samples (losses_job.py)."""

from __future__ import annotations

from typing import Any

import pytest
from losses_job import RECIPE, run
from shard_factory import write_shard

import orchdata as od

LOSSES = ("class", "mean", "contrastive", "router", "tasks")


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("losses")
    shards = []
    for name, count in (("first", 13), ("second", 9)):  # the last step has one sample: a rank has none
        samples: list[dict[str, Any]] = [
            {"__key__": f"{name}{n}", "txt": bytes(range(65, 70 + 5 * (n % 4))), "cls": b"%d" % (n % 5)}
            for n in range(count)
        ]
        del samples[4]["cls"]
        shards.append(write_shard(folder / f"{name}.tar", samples))
        od.ShardDataset(shards[-1], recipe=RECIPE).index()
    return run(*shards, folder=folder)


@pytest.mark.parametrize("name", [name + cut for name in LOSSES for cut in ("", "loader", "trainer")])
def test_the_code_of_the_page_has_the_gradients_of_one_batch(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        assert rank[name]["worst"] < 1e-10
    assert len(ranks[0][name]["counts"]) >= 3


def test_ranks_have_several_microbatches_and_one_has_no_sample(ranks: list[dict[str, Any]]) -> None:
    counts = [rank["class"]["counts"] for rank in ranks]
    assert max(map(len, counts[0])) > 1
    assert sorted(sum(one[-1]) for one in counts) == [0, 1]
    assert all(rank[name]["smallest"] > 0 for rank in ranks for name in ("class", "mean", "tasks"))
