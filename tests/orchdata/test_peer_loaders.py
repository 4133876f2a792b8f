"""Peers share the parts of their rank: what a loader of each reads and delivers, and how they train, on gloo ranks."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from doc_pages import recipe_of
from peer_loaders_job import CASES
from peer_loaders_job import __file__ as JOB
from rank_jobs import run_ranks
from shard_factory import RECIPE, jpeg, omni_samples, write_shard
from torch import Tensor

import orchdata as od
from orchdata.ranks.parallel import Rank

pytestmark = pytest.mark.usefixtures("same_cache")

TOLERANCE = 1e-12  # of the largest gradient
PER_PHASE = od.Balance(assignment="per_phase")
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> str:
    """Two parts fail, one of a sample of two images; so does a text."""
    samples = omni_samples(30)
    samples[3]["0.jpg"] = jpeg(90, 90)[:-200]
    samples[16]["jpg"] = jpeg(90, 90)[:-200]
    path = write_shard(tmp_path_factory.mktemp("peers") / "shard.tar", samples)
    index = od.ShardDataset(path, RECIPE).index()
    with open(path, "r+b") as file:  # once it is indexed
        (offset, size), *_ = [each[:2] for each in index.read_spec(index.find(path, "s0011")) if each[3] == "txt"]
        file.seek(offset)
        file.write(b"\xff" * size)
    return path


@pytest.fixture(scope="module")
def job(shards: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    def run(scenario: str, *arguments: Any, num_ranks: int = 4, **options: Any) -> Ranks:
        folder = tmp_path_factory.mktemp("job")
        return run_ranks(JOB, shards, scenario, *arguments, num_ranks=num_ranks, folder=folder, **options)

    return run


@pytest.mark.slow
def test_gradients_of_encoders_and_llm_are_those_of_one_rank(job: Callable[..., Ranks]) -> None:
    recipe = recipe_of("encoders_apart.md", "encoder_dims")
    found = job("trained", recipe)
    for name, case in CASES.items():
        off = max(rank[name] for rank in found)
        assert off > 1e-3 if case.swaps else off < TOLERANCE, name


@pytest.fixture(scope="module")
def delivered(job: Callable[..., Ranks]) -> Ranks:
    return job("delivered")


@pytest.mark.parametrize("engine", ["shared", "workers"])
def test_peers_have_the_same_samples_and_each_part_is_decoded_once(delivered: Ranks, engine: str) -> None:
    places = [[2, rank, peer] for rank in (0, 1) for peer in (0, 1)]
    assert [rank[engine]["place"] for rank in delivered] == places
    for one, other in (delivered[:2], delivered[2:]):
        for name in ("keys", "ids", "labels"):
            assert one[engine][name] == other[engine][name]
    keys = [key for rank in delivered[::2] for key in rank[engine]["keys"]]
    assert sorted(keys) == sorted(delivered[0]["whole"]["keys"])
    if engine == "shared":
        decoded = [sum(rank[name]["decoded"] for rank in delivered) for name in ("shared", "read")]
        assert decoded[1] == 2 * decoded[0]
        assert decoded[0] == delivered[0]["whole"]["decoded"]
        assert all(rank["shared"]["decoded"] for rank in delivered)


def test_ranks_of_a_dim_that_is_not_named_get_the_same_batches(delivered: Ranks) -> None:
    one, other = ([rank["other dim"] for rank in delivered[first : first + 2]] for first in (0, 2))
    assert one == other
    assert [rank["place"] for rank in one] == [[1, 0, 0], [1, 0, 1]]
    assert sum(rank["decoded"] for rank in one) == delivered[0]["whole"]["decoded"]
    assert sum(one[0]["labels"]) == sum(delivered[0]["whole"]["labels"])


def test_what_fails_on_one_peer_is_masked_on_all_and_counted_once_by_each_of_its_rank(delivered: Ranks) -> None:
    whole = delivered[0]["whole"]
    assert whole["failed"] == ["s0003", "s0011", "s0016"]
    assert sum(sum(rank["shared"]["labels"]) for rank in delivered[::2]) == sum(whole["labels"])
    by_rank = [rank["shared"]["failed"] for rank in delivered]
    assert by_rank[0] == by_rank[1]
    assert by_rank[2] == by_rank[3]
    assert sorted(by_rank[0] + by_rank[2]) == whole["failed"]
    for rank in delivered:
        assert rank["by hand"] == rank["shared"]["labels"]
        assert "TooManyFailures" in rank["budget"]


def test_ranks_agree_on_their_peers(delivered: Ranks) -> None:
    for rank in delivered:
        assert "gradients" in rank["differ"]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 4), (4, 1), (2, 1)])
def test_a_killed_run_goes_on_with_other_peers(
    job: Callable[..., Ranks], shards: str, shape: tuple[int, int], tmp_path: Path
) -> None:
    job("killed", tmp_path, lost=range(4))
    first = [json.loads((tmp_path / f"{step}-{rank}.json").read_text()) for step in (0, 1) for rank in (0, 2)]
    rest = job("resumed", tmp_path, json.dumps(shape), num_ranks=shape[0] * shape[1])
    keys = [*itertools.chain(*first), *(key for rank in rest if not rank["place"][1] for key in rank["keys"])]
    assert sorted(keys) == [f"s{number:04d}" for number in range(30)]


# In one process: a loader for each rank and peer.


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> od.ShardDataset:
    dataset = od.ShardDataset(write_shard(tmp_path_factory.mktemp("good") / "shard.tar", omni_samples(20)), RECIPE)
    dataset.index()
    return dataset


def loaders(dataset: Any, num_ranks: int = 2, num_peers: int = 2, **options: Any) -> list[od.DataLoader]:
    """Of each rank and peer."""
    given = {"global_batch_size": 8, "num_threads": 0, "balance": PER_PHASE} | options
    places = itertools.product(range(num_ranks), range(num_peers))
    return [
        od.DataLoader(dataset, dp=Rank(rank, num_ranks, peer=peer, num_peers=num_peers), **given)
        for rank, peer in places
    ]


def carried(batches: Sequence[od.Batch], name: str, num_peers: int) -> list[Tensor]:
    """What `exchange` gives each rank of a microbatch, by hand: (num_tokens, values a token)."""
    sent = []
    for batch in batches:
        media = batch.media[name]
        rows = media.arrays["patches" if name == "image" else "features"]
        if media.mask is not None:
            rows = rows[media.mask]
        rows = rows.reshape(-1, rows.shape[-1] * 4)[: media.num_tokens]  # 2 x 2 patches, or 4 frames
        sent.append(rows.split(batch.route(name).send_rows.tolist()))
    ranks = range(len(batches) // num_peers)
    return [
        torch.cat([sent[sender * num_peers + peer][rank] for peer in range(num_peers) for sender in ranks])
        for rank in ranks
    ]


def samples_of(loaders: Sequence[od.DataLoader], num_peers: int) -> Counter[tuple[Any, ...]]:
    """Each sample that is delivered: its key, ids, and what stands where its features go."""
    found: Counter[tuple[Any, ...]] = Counter()
    for batches in zip(*loaders, strict=True):
        features = {name: carried(batches, name, num_peers) for name in batches[0].media}
        for rank, batch in enumerate(batches[::num_peers]):
            columns = [batch.llm.input_ids[..., None]]
            for name, rows in features.items():
                placed = torch.zeros(batch.llm.input_ids.numel(), rows[rank].shape[-1])
                placed[batch.llm.media_positions[name]] = rows[rank].float()
                columns.append(placed.view(*batch.llm.input_ids.shape, -1))
            for (_, key), where in zip(batch.sample_ids, batch.samples, strict=True):
                found[key, *(column[where].numpy().tobytes() for column in columns)] += 1
    return found


def balanced(**options: Any) -> dict[str, Any]:
    return {"balance": od.Balance(assignment="per_phase", **options)}


WORKS = {
    "scopes": [balanced(scope="none"), *(balanced(scope=scope, group_size=1) for scope in ("grouped", "grid"))],
    "token steps": [{"global_batch_size": None, "global_batch_tokens": 400}],
    "accumulate": [{"accumulate": 2}],
    "caps": [balanced(max_tokens={"llm": 150, "image": 60}, oversize="own", encode="step")],
    "od.Packed(length=)": [{"collate_fn": od.Packed(length=400)}],
    "od.Padded": [{"collate_fn": od.Padded()}, {"collate_fn": od.Padded(encoders="padded")}],
    "pipelines": [balanced(max_tokens=150, oversize="own", order="1f1b", num_stages=2)],
    "mixtures": [{}],
    "engines": [{"num_threads": 2}, {"num_workers": 1, "num_threads": 1}],
}


@pytest.mark.slow_cases("engines")
@pytest.mark.parametrize("row", WORKS)
def test_works_with_peers(good: od.ShardDataset, row: str) -> None:
    data = good if row != "mixtures" else od.Mixture({"one": od.Source(good)})
    for options in WORKS[row]:
        shared = loaders(data, **options)
        found = samples_of(shared, 2)
        assert found == samples_of(loaders(data, 1, 1), 1), options
        for one, other in (shared[:2], shared[2:]):
            assert one.state_dict() == other.state_dict()


@pytest.mark.slow
def test_works_on_ray(good: od.ShardDataset, ray_cluster: Any) -> None:
    shared = loaders(good, num_workers=1, engine=od.RayEngine(num_cpus=0.25))
    assert samples_of(shared, 2) == samples_of(loaders(good, 1, 1), 1)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "joint": ({"balance": "global"}, "assignment='per_phase'"),
    "collate_fn": ({"collate_fn": list}, "od.Packed"),
    "windows": ({"collate_fn": od.Packed(length=64, concatenate=True)}, "concatenate"),
    "map-style": ({"dataset": [1, 2, 3]}, "od.ShardDataset"),
}


@pytest.mark.parametrize("row", REFUSED)
def test_is_refused_with_peers(good: od.ShardDataset, row: str) -> None:
    options, way_out = REFUSED[row]
    with pytest.raises(ValueError, match=re.escape(way_out)):
        loaders(**{"dataset": good, **options})


def test_a_trainer_refuses_peers(good: od.ShardDataset) -> None:
    with pytest.raises(ValueError, match="encoder_dims"):
        loaders(good)[0].steps().check_whole("the Trainer")


@pytest.mark.parametrize("shape", [(1, 4), (4, 1), (2, 1)])
def test_a_state_does_not_know_peers(good: od.ShardDataset, shape: tuple[int, int]) -> None:
    seen: list[str] = []

    def take(of: list[od.DataLoader], num_peers: int, steps: int | None) -> None:
        for loader in of[::num_peers]:
            for step in itertools.islice(loader.steps(), steps):
                seen.extend(key for batch in step for _, key in batch.sample_ids)

    before, after = loaders(good), loaders(good, *shape)
    assert {len(loader) for loader in (*before, *after)} == {3}
    take(before, 2, 1)
    for loader in after:
        loader.load_state_dict(before[0].state_dict())
    take(after, shape[1], None)
    assert Counter(seen) == Counter(f"s{number:04d}" for number in range(20))
