"""The ranks that balance, and their peers, which get the same batches: gloo processes on 2 x 2 meshes (mesh_job.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mesh_job import GLOBAL_BATCH_SIZE, RECIPE, run_suite
from shard_factory import jpeg, omni_samples, write_shard
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import orchdata as od
from orchdata.ranks.parallel import DataParallel, resolve_rank

NUM_SAMPLES = 20
NUM_STEPS = 3  # 20 samples in global batches of 8: 8, 8, 4

PEERS = {"read": [(0, 1), (2, 3)], "broadcast": [(0, 1), (2, 3)], "tp first": [(0, 2), (1, 3)]}
PEERS |= dict.fromkeys(("microbatched", "one length", "skip"), PEERS["broadcast"])
ALL = [*PEERS, "hsdp"]

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    samples = omni_samples(NUM_SAMPLES)
    write_shard(folder / "good.tar", samples)
    cut = jpeg(120, 90)
    broken = {"__key__": "broken", "jpg": cut[: len(cut) // 2] + bytes(len(cut) - len(cut) // 2), "txt": b"a picture"}
    write_shard(folder / "bad.tar", [*samples[:-1], broken])
    write_shard(folder / "unindexed.tar", samples)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORCHDATA_CACHE", str(folder / "cache"))
        for name in ("good", "bad"):
            od.ShardDataset(folder / f"{name}.tar", recipe=RECIPE).index()
    return folder


@pytest.fixture(scope="module")
def ranks(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run_suite("share", 4, shards, tmp_path_factory.mktemp("share"))


def keys(epoch: dict[str, Any], step: int) -> set[str]:
    return {key for _, key in epoch["steps"][step]["keys"]}


def assert_exactly_once(epochs: list[dict[str, Any]], missing: int = 0) -> None:
    for step, size in enumerate([8, 8, 4]):
        delivered_keys = [keys(epoch, step) for epoch in epochs]
        assert sum(map(len, delivered_keys)) == len(set().union(*delivered_keys))  # disjoint
        assert size - missing <= len(set().union(*delivered_keys)) <= size
    delivered = [key for epoch in epochs for step in range(NUM_STEPS) for key in keys(epoch, step)]
    assert len(delivered) == len(set(delivered)) == NUM_SAMPLES - missing


@pytest.mark.slow
@pytest.mark.parametrize("scenario", PEERS)
def test_peers_get_bitwise_equal_batches(ranks: Ranks, scenario: str) -> None:
    for one, other in PEERS[scenario]:
        assert ranks[one][scenario]["steps"] == ranks[other][scenario]["steps"]


@pytest.mark.parametrize("scenario", PEERS)
def test_data_parallel_ranks_share_each_global_batch(ranks: Ranks, scenario: str) -> None:
    readers = [ranks[peers[0]][scenario] for peers in PEERS[scenario]]
    assert_exactly_once(readers, missing=1 if scenario == "skip" else 0)


def test_the_two_dims_of_hsdp_count_as_one(ranks: Ranks) -> None:
    assert_exactly_once([rank["hsdp"] for rank in ranks])


def test_broadcast_batches_equal_those_that_peers_read(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["broadcast"]["steps"] == rank["read"]["steps"]


def test_a_mixture_is_broadcast_as_peers_read_it(ranks: Ranks) -> None:
    """Sources, passes and weighted loss tokens too; per phase on two ranks, and each decodes for the other."""
    for rank in ranks:
        assert rank["mixture, broadcast"]["steps"] == rank["mixture, read"]["steps"]
    for scenario in ("mixture, broadcast", "mixture, per phase"):
        for one, other in PEERS["broadcast"]:
            assert ranks[one][scenario]["steps"] == ranks[other][scenario]["steps"]
        assert all(rank[scenario]["state"] == ranks[0][scenario]["state"] for rank in ranks)
        for shares in zip(*(ranks[reader][scenario]["steps"] for reader in (0, 2)), strict=True):
            assert shares[0]["passes"] == shares[1]["passes"]
            assert len(shares[0]["passes"]) == sum(len(share["keys"]) for share in shares)
    steps = ranks[1]["mixture, broadcast"]["steps"]
    assert {number for step in steps for number in step["sources"]} == {0, 1}
    assert max(number for step in steps for number in step["passes"]) > 0
    assert any(step["weight"] % 1 for step in steps)


def test_a_step_of_several_microbatches_is_broadcast_whole(ranks: Ranks) -> None:
    assert max(len(step["digests"]) for step in ranks[1]["microbatched"]["steps"]) > 1


@pytest.mark.parametrize("scenario", ALL)
def test_length_and_state_are_the_same_on_all_ranks(ranks: Ranks, scenario: str) -> None:
    assert {rank[scenario]["len"] for rank in ranks} == {NUM_STEPS}
    assert all(rank[scenario]["state"] == ranks[0][scenario]["state"] for rank in ranks)


@pytest.mark.parametrize("scenario", PEERS)
def test_stats_are_the_same_on_all_peers(ranks: Ranks, scenario: str) -> None:
    for peers in PEERS[scenario]:
        assert len({ranks[peer][scenario]["samples"] for peer in peers}) == 1
        assert all(ranks[peer][scenario]["phases"] == ranks[0][scenario]["phases"] for peer in peers)


def test_only_the_reader_has_threads_that_decode(ranks: Ranks) -> None:
    assert [rank["broadcast"]["threads"] for rank in ranks] == [2, 0, 2, 0]
    assert [rank["read"]["threads"] for rank in ranks] == [2, 2, 2, 2]


def test_a_failure_is_counted_on_the_reader(ranks: Ranks) -> None:
    counts = [rank["skip"]["failures"] for rank in ranks]
    assert sorted(counts) == [0, 0, 0, 1]
    assert counts[1] == counts[3] == 0
    assert sum(ranks[reader]["skip"]["samples"] for reader in (0, 2)) == NUM_SAMPLES - 1


def test_an_error_of_the_reader_reaches_its_peers(ranks: Ranks) -> None:
    errors = [rank["raise"] for rank in ranks]
    failed = next(reader for reader in (0, 2) if errors[reader].startswith("DataError: "))
    assert "sample 'broken', field 'jpg'" in errors[failed]
    assert errors[failed + 1] == (
        f"RuntimeError: rank {failed} reads for this rank, {failed + 1}, and failed: {errors[failed]}"
    )
    for other in (2 - failed, 3 - failed):  # at this step plans are compared
        assert errors[other].startswith("RuntimeError: other ranks failed where plans are compared, at epoch 0, step ")
        assert f"rank {failed}: {errors[failed]}; rank {failed + 1}: {errors[failed + 1]}" in errors[other]


def test_an_iteration_left_early_resumes_on_all_peers(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["resumed"] == [digest for step in rank["broadcast"]["steps"] for digest in step["digests"]]


@pytest.mark.parametrize("scenario", ["collate", "map broadcast"])
def test_batches_of_a_users_collate_fn_are_not_broadcast(ranks: Ranks, scenario: str) -> None:
    for rank in ranks:
        assert "od.DataParallel(mesh, replicate='read')" in rank[scenario]
        assert rank[scenario].startswith("ValueError: replicate='broadcast' sends an od.Batch")


def test_peers_read_equal_batches_of_a_map_style_data_set(ranks: Ranks) -> None:
    read = [rank["map read"] for rank in ranks]
    assert read[0] == read[1]
    assert read[2] == read[3]
    assert sorted(number for rank in (0, 2) for batch in read[rank] for number in batch) == list(range(8))


def test_a_group_of_two_ranks(ranks: Ranks) -> None:
    assert_exactly_once([ranks[0]["group"], ranks[2]["group"]])
    for rank in (1, 3):
        assert ranks[rank]["group"] == "ValueError: dp is a process group this process does not belong to"


def test_all_ranks_of_a_mesh_name_one_that_differs_or_fails_to_start(ranks: Ranks) -> None:
    (error,) = {rank["seed"] for rank in ranks}
    assert "all ranks of a loader must plan the same steps: order.seed is 1 on ranks 0, 1, 3, 2 on rank 2" in error
    errors = [rank["no index"] for rank in ranks]
    assert errors[2].startswith("MissingIndexError: ")
    for other in (0, 1, 3):
        assert "some could not make it: rank 2: MissingIndexError: " in errors[other]


@pytest.mark.parametrize(("scenario", "step"), [("first step", 0), ("compared step", 2)])
def test_all_ranks_name_a_rank_with_another_plan(ranks: Ranks, scenario: str, step: int) -> None:
    (error,) = {rank[scenario] for rank in ranks}
    assert error.startswith(
        f"RuntimeError: ranks follow different plans at epoch 0, step {step} of this rank: plan is "
    )
    assert error.endswith('" on ranks 0, 1, 3, "of another plan" on rank 2')
    assert {rank["uncompared step"] for rank in ranks} == {None}


def test_a_rank_that_fails_at_a_compared_step_stops_the_others_and_all_continue(ranks: Ranks) -> None:
    for number, rank in enumerate(ranks):
        failure = "OSError: away for a moment"
        if number != 2:
            failure = (
                "RuntimeError: other ranks failed where plans are compared, at epoch 0, step 2: rank 2: " + failure
            )
        assert rank["fails at a compared step"] == failure
        # At a step without comparison other ranks do not learn of it, and the rank that continues alone asks none.
        assert rank["fails at another"] == ("OSError: away for a moment" if number == 2 else None)
        assert rank["left"] == (3 if number == 2 else 4)  # of 6


def test_a_receiver_compares_its_plan_with_the_reader(ranks: Ranks) -> None:
    errors = [rank["receiver"] for rank in ranks]
    assert errors[0] is errors[2] is errors[3] is None
    assert "on rank 0, which reads for rank 1, and 'of another plan' there" in errors[1]


@pytest.fixture
def rank_5_of_8() -> Iterator[None]:
    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


def mesh(*names: str, shape: tuple[int, ...] = (2, 2, 2)) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(8).reshape(shape), mesh_dim_names=names or None)


@pytest.mark.usefixtures("rank_5_of_8")
def test_data_parallel_dims_are_row_major_in_the_order_of_the_mesh() -> None:
    # rank 5 is at (1, 0, 1)
    resolved = resolve_rank(DataParallel(mesh("dp_replicate", "dp_shard", "tp")))
    assert (resolved.rank, resolved.size) == (2, 4)  # (1, 0) of 2 x 2
    assert resolved.shared == ((0, 1), (2, 3), (4, 5), (6, 7))
    resolved = resolve_rank(DataParallel(mesh("dp_replicate", "cp", "dp_shard")))
    assert (resolved.rank, resolved.size) == (3, 4)  # (1, 1)
    assert resolved.shared == ((0, 2), (1, 3), (4, 6), (5, 7))
    resolved = resolve_rank(DataParallel(mesh("pp", "dp", "tp"), dims=("dp",), replicate="read"))
    assert (resolved.rank, resolved.size, resolved.shared) == (0, 2, ())
    assert resolve_rank(mesh("pp", "data", "tp")).size == 2


@pytest.mark.usefixtures("rank_5_of_8")
def test_peers_that_encode_are_row_major_in_encoder_dims() -> None:
    for dims, expected in ((("cp", "tp"), 1), (("tp", "cp"), 2)):  # rank 5 is at (1, 0, 1)
        resolved = resolve_rank(DataParallel(mesh("dp", "cp", "tp"), dims=("dp",), encoder_dims=dims))
        assert (resolved.rank, resolved.peer, resolved.num_peers, resolved.shared) == (1, expected, 4, ())


@pytest.mark.usefixtures("rank_5_of_8")
@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"encoder_dims": ("tp",), "replicate": "broadcast"}, "leave replicate out"),
        ({"encoder_dims": ("pp",)}, "tensor- and context-parallel dims"),
        ({"encoder_dims": ("dp",)}, "not data-parallel"),
        ({"encoder_dims": ("tp",), "averaged": ("cp",)}, "neither in dims nor in encoder_dims"),
        ({"encoder_dims": ("tp",), "gradients": {"tp": "half"}}, "equal or partial"),
        ({"averaged": ("dp",)}, "give encoder_dims too"),
        ({"mesh": (0, 2), "encoder_dims": ("tp",)}, "dims of the mesh"),
        ({"dims": "dp"}, r"dims must be names of mesh dims, as \('dp',\), got 'dp'"),
        ({"replicate": "send"}, "replicate must be 'read' or 'broadcast', got 'send'"),
        ({"ranks_per_node": 0}, "ranks_per_node must be at least 1, got 0"),
    ],
)
def test_what_data_parallel_cannot_be_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        DataParallel(**({"mesh": mesh("pp", "dp", "tp"), "dims": ("dp",)} | given))


@pytest.mark.usefixtures("rank_5_of_8")
@pytest.mark.parametrize(
    ("names", "local", "given", "expected"),
    [
        (("dp_replicate", "dp_shard", "tp"), "4", None, 2),  # nodes of ranks 0-3 and 4-7, peers in pairs
        (("dp", "cp", "tp"), "2", None, 1),  # a data-parallel rank spans two nodes
        (("dp", "cp", "tp"), "", None, None),
        (("dp_replicate", "dp_shard", "tp"), "8", 3, 3),
    ],
)
def test_ranks_of_a_node_are_counted_without_peers(
    names: tuple[str, ...], local: str, given: int | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    dims = ("dp_replicate", "dp_shard", "dp")
    assert resolve_rank(DataParallel(mesh(*names), dims=dims, ranks_per_node=given)).ranks_per_node == expected


@pytest.mark.usefixtures("rank_5_of_8")
def test_a_mesh_without_a_data_parallel_dim_raises_an_error() -> None:
    with pytest.raises(ValueError, match=r"the mesh has the dims \('pp', 'cp', 'tp'\), and none of .*'dp', 'data'\)"):
        resolve_rank(mesh("pp", "cp", "tp"))
    resolved = resolve_rank(mesh(shape=(8,)))  # one dim needs no name
    assert (resolved.rank, resolved.size, resolved.shared) == (5, 8, ())


@pytest.mark.usefixtures("rank_5_of_8")
def test_broadcast_needs_the_mesh_of_all_ranks() -> None:
    part = mesh("pp", "dp", "tp")["dp", "tp"]
    with pytest.raises(ValueError, match=r"takes all 8 ranks of the job, and the mesh has 4: .* replicate='read'"):
        resolve_rank(part)
    resolved = resolve_rank(DataParallel(part, dims=("dp",), replicate="read"))
    assert (resolved.rank, resolved.size) == (0, 2)


def test_a_value_that_is_neither_group_nor_mesh_raises_an_error() -> None:
    with pytest.raises(TypeError, match="a process group, a DeviceMesh, an od.DataParallel or"):
        resolve_rank(DataParallel("dp"))
    assert GLOBAL_BATCH_SIZE * 2 < NUM_SAMPLES < GLOBAL_BATCH_SIZE * NUM_STEPS  # guards NUM_STEPS


def test_a_loader_made_before_its_group_raises_an_error_at_iter(monkeypatch: pytest.MonkeyPatch) -> None:
    early, explicit = od.DataLoader(list(range(4))), od.DataLoader(list(range(4)), dp=(0, 1))
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match=r"there are 2 now.*dp=\(0, 1\)"):
        iter(early)
    assert iter(explicit)
