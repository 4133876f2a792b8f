"""Encoders balanced apart, between processes: a job (per_phase_job.py) for each number of gloo ranks."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from per_phase_job import CASES, IMAGE_CAP, RECIPE, SUITES, Case, reference_name
from per_phase_job import __file__ as JOB
from rank_jobs import run_ranks
from shard_factory import audio, chat, jpeg, write_shard

import orchdata as od

Result = dict[str, Any]
Ranks = list[Result]

TOLERANCE = 1e-9  # relative
GIANT_IMAGES = 12
GOOD_STEPS = [
    ["text", "image", "audio", "both", "text", "album"],
    ["text"] * 6,  # no sample has image or audio
    ["image", "album", "text", "bare", "image", "text"],  # no sample has audio
    ["text", "text", "giant", "text", "text", "text"],
    ["both", "audio", "clips", "audio", "image", "both"],
    ["album"],  # fewer samples than ranks
]
GIANT_STEP = 3
BROKEN_STEPS = [
    ["album", "text", "clips", "image", "text", "both"],
    ["text", "album", "clips", "text", "text", "both"],
    ["album", "text", "text", "both", "image", "audio"],
    ["image"],  # fails as a whole
]
# Each of an album's three images once, so that some of them are encoded away from home on any number of ranks.
BROKEN = {
    ("000-album", "0.jpg"),
    ("002-clips", "0.wav"),
    ("003-image", "txt"),
    ("007-album", "1.jpg"),
    ("008-clips", "1.wav"),
    ("012-album", "2.jpg"),
    ("015-both", "jpg"),
    ("015-both", "wav"),
    ("018-image", "jpg"),
}
BROKEN_KEYS = {key for key, _ in BROKEN}
NUM_PARTS = {"image": (1, 0), "audio": (0, 1), "both": (1, 1), "album": (3, 0), "clips": (0, 2), "text": (0, 0)}
NUM_PARTS["bare"] = (1, 0)  # no text: nothing to read where its image is encoded elsewhere
NUM_PARTS["giant"] = (GIANT_IMAGES, 0)


def sample(kind: str, number: int) -> dict[str, Any]:
    """One of a size that depends on its number."""
    words = " ".join(["word"] * (1 + number % 5))
    images = {f"{each}.jpg": jpeg(24 + 8 * (number % 4), 32 + 16 * each, number) for each in range(3)}
    clips = {f"{each}.wav": audio(0.2 + 0.1 * (number % 5) + 0.3 * each) for each in range(2)}
    fields: dict[str, Any] = {
        "text": {"txt": f"plain {words}".encode()},
        "image": {"jpg": images["1.jpg"], "txt": words.encode()},
        "bare": {"jpg": images["0.jpg"]},
        "audio": {"wav": clips["1.wav"], "txt": words.encode()},
        "both": {"jpg": images["2.jpg"], "wav": clips["0.wav"], "json": chat("<image> and <audio>", words)},
        "album": {**images, "json": chat("<image> <image> <image>", words)},
        "clips": {**clips, "json": chat("<audio> <audio>", words)},
        "giant": {
            **{f"{each:02d}.jpg": jpeg(48, 48, each) for each in range(GIANT_IMAGES)},
            "json": chat("<image>" * GIANT_IMAGES, words),
        },
    }[kind]
    return {"__key__": f"{number:03d}-{kind}", **fields}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORCHDATA_CACHE", str(folder / "cache"))
        for name, steps in (("good", GOOD_STEPS), ("intact", BROKEN_STEPS), ("broken", BROKEN_STEPS)):
            kinds = itertools.chain.from_iterable(steps)
            path = write_shard(folder / f"{name}.tar", [sample(kind, number) for number, kind in enumerate(kinds)])
            index = od.ShardDataset(path, recipe=RECIPE).index()
            assert not len(index.bad_rows())
        overwrite(path, index)
    return folder


def overwrite(path: str, index: Any) -> None:
    """The members in `BROKEN`, in place: neither pictures, nor sound, nor UTF-8."""
    with open(path, "r+b") as file:
        for key, field in BROKEN:
            row = index.find(path, key)
            (offset, size), *_ = [(start, size) for start, size, _, name in index.read_spec(row) if name == field]
            file.seek(offset)
            file.write(b"\xff" * size)


@pytest.fixture(scope="module")
def jobs(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ranks]:
    """Each suite is run once."""

    @functools.cache
    def run(suite: str) -> Ranks:
        environment = {"ORCHDATA_CACHE": str(shards / "cache")}
        folder, num_ranks = tmp_path_factory.mktemp("job"), SUITES[suite].num_ranks
        return run_ranks(JOB, suite, shards, num_ranks=num_ranks, folder=folder, environment=environment)

    return run


@pytest.fixture
def ranks(request: pytest.FixtureRequest, jobs: Callable[[str], Ranks]) -> Ranks:
    """The results of each rank."""
    return jobs(request.param)


def every(*, case: Callable[[str], bool] | None = None, scenario: str | None = None) -> pytest.MarkDecorator:
    """All suites in which the cases or the scenario run."""

    def marks(suite: str) -> list[pytest.MarkDecorator]:
        return [pytest.mark.slow] if SUITES[suite].slow else []

    if scenario is not None:
        suites = [suite for suite in SUITES if scenario in SUITES[suite].scenarios]
        return pytest.mark.parametrize("ranks", [pytest.param(s, marks=marks(s), id=s) for s in suites], indirect=True)
    chosen = [(suite, name) for suite in SUITES for name in SUITES[suite].cases if case is None or case(name)]
    params = [pytest.param(suite, name, marks=marks(suite), id=f"{suite}: {name}") for suite, name in chosen]
    return pytest.mark.parametrize(("ranks", "name"), params, indirect=["ranks"])


def results(ranks: Ranks, name: str) -> Ranks:
    """Of a case or scenario, on every rank that took part."""
    by_rank = [rank[name] for rank in ranks if rank[name]]
    failures = [each["failed"] for each in by_rank if "failed" in each]
    assert not failures, "\n".join(failures)
    return by_rank


def is_broken(name: str) -> bool:
    return CASES[name].data == "broken"


def can_spread_the_large_sample(name: str) -> bool:
    """Its images may go anywhere and are the only ones of their step; no cap is too small for half of them."""
    case = CASES[name]
    anywhere = case.balance.get("scope", "global") == "global"
    return anywhere and case.data == "good" and not case.options.get("shuffle") and name != "own, both caps"


def batches(by_rank: Ranks) -> Iterator[tuple[int, Result]]:
    """(rank, batch), of all ranks."""
    return ((rank, batch) for rank, each in enumerate(by_rank) for batch in each["batches"])


def step_losses(by_rank: Ranks) -> list[float]:
    losses = [0.0] * by_rank[0]["num_steps"]
    for _, batch in batches(by_rank):
        losses[batch["step"]] += batch["loss"]
    return losses


def assert_losses_of_one_process(ranks: Ranks, by_rank: Ranks, case: Case) -> None:
    references = ranks[0]["references"][reference_name(case)]
    assert max(references) > 10  # or the comparison would say nothing
    assert step_losses(by_rank) == pytest.approx(references, rel=TOLERANCE)


@every(case=lambda name: CASES[name].layout != "zero")
def test_each_step_has_the_loss_of_one_process(ranks: Ranks, name: str) -> None:
    assert_losses_of_one_process(ranks, results(ranks, name), CASES[name])


@every()
def test_every_rank_has_the_same_steps_and_microbatches(ranks: Ranks, name: str) -> None:
    steps = [
        [(batch["step"], batch["microbatch"], batch["num_microbatches"]) for batch in each["batches"]]
        for each in results(ranks, name)
    ]
    assert all(rank == steps[0] for rank in steps)
    expected = GOOD_STEPS if CASES[name].data == "good" else BROKEN_STEPS
    assert sorted({step for step, _, _ in steps[0]}) == list(range(len(expected)))
    assert all(list(range(of)) == [m for s, m, _ in steps[0] if s == step] for step, _, of in steps[0])
    if len(ranks) == 2 and "llm" in CASES[name].caps and CASES[name].layout != "padded":
        assert max(of for *_, of in steps[0]) > 1


@every()
def test_each_sample_is_on_one_rank_and_each_part_arrives_there_once(ranks: Ranks, name: str) -> None:
    by_rank = results(ranks, name)
    keys = sorted(key for _, batch in batches(by_rank) for key in batch["keys"])
    steps = GOOD_STEPS if CASES[name].data == "good" else BROKEN_STEPS
    assert keys == [f"{number:03d}-{kind}" for number, kind in enumerate(itertools.chain.from_iterable(steps))]
    numbers: list[int] = []
    for _, batch in batches(by_rank):
        for column, modality in enumerate(("image", "audio")):
            arrived = batch[modality]["arrived"]
            numbers += [number for _, number in arrived if number]
            counts = Counter(key for key, _ in arrived)
            assert counts == {key: count for key in batch["keys"] if (count := NUM_PARTS[key[4:]][column])}
    assert -1 not in numbers and len(numbers) == len(set(numbers))


@every()
def test_parts_travel_as_far_as_the_scope_allows(ranks: Ranks, name: str) -> None:
    balance, by_rank = CASES[name].balance, results(ranks, name)
    away = sum(batch[modality]["rows_away"] for _, batch in batches(by_rank) for modality in ("image", "audio"))
    assert (away > 0) == (balance.get("scope") != "none")
    if balance.get("scope") == "grouped":
        for rank, batch in batches(by_rank):
            assert {peer // 2 for modality in ("image", "audio") for peer in batch[modality]["peers"]} <= {rank // 2}


@every(case=can_spread_the_large_sample)
def test_the_images_of_a_large_sample_are_spread(ranks: Ranks, name: str) -> None:
    by_rank = results(ranks, name)
    counts = [len(batch["image"]["valid"]) for _, batch in batches(by_rank) if batch["step"] == GIANT_STEP]
    assert sum(counts) == GIANT_IMAGES
    assert max(counts) <= -(-GIANT_IMAGES // len(by_rank)) + 1


@every(case=lambda name: bool(CASES[name].caps))
def test_caps_hold_on_every_rank_and_in_every_micro_step(ranks: Ranks, name: str) -> None:
    case = CASES[name]
    own = case.balance.get("oversize") == "own"
    for _, batch in batches(results(ranks, name)):
        for phase, cap in case.caps.items():
            if phase == "llm":
                assert batch["llm_positions"] <= cap or (own and len(batch["keys"]) == 1)
            else:
                assert batch[phase]["positions"] <= cap or (own and batch[phase]["samples"] == 1)


@every(case=lambda name: name == "image cap")
def test_a_sample_above_an_encoder_cap_is_encoded_within_it_by_several_ranks(ranks: Ranks, name: str) -> None:
    """12 images of 36 patches: 432 in all."""
    positions = [
        batch["image"]["positions"] for _, batch in batches(results(ranks, name)) if batch["step"] == GIANT_STEP
    ]
    assert sum(positions) == 12 * 36 > IMAGE_CAP >= max(positions)


@every(case=is_broken)
def test_failures_leave_steps_and_all_other_samples_alone(ranks: Ranks, name: str) -> None:
    intact = [other for other in CASES if CASES[other] == Case("intact", balance=CASES[name].balance)]
    by_rank = results(ranks, name)
    for _, batch in batches(by_rank):
        assert {key for key, count in batch["labels"].items() if not count} == BROKEN_KEYS & set(batch["keys"])
        assert batch["loss_tokens"] == sum(batch["labels"].values())
    if CASES[name].layout == "packed" and intact and intact[0] in ranks[0]:
        for one, other in zip(by_rank, results(ranks, intact[0]), strict=True):
            assert len(one["batches"]) == len(other["batches"])
            for batch, before in zip(one["batches"], other["batches"], strict=True):
                for same in ("step", "microbatch", "num_microbatches", "keys", "llm_positions", "global_loss_tokens"):
                    assert batch[same] == before[same]
                assert batch["labels"] == {k: 0 if k in BROKEN_KEYS else n for k, n in before["labels"].items()}


@every(case=is_broken)
def test_rows_of_failed_parts_arrive_as_zeros(ranks: Ranks, name: str) -> None:
    for modality, suffix in (("image", "jpg"), ("audio", "wav")):
        arrived = [part for _, batch in batches(results(ranks, name)) for part in batch[modality]["arrived"]]
        failed = Counter(key for key, number in arrived if not number)
        assert failed == Counter(key for key, field in BROKEN if field.endswith(suffix))


@every(case=is_broken)
def test_each_failure_is_counted_once_where_it_was_met(ranks: Ranks, name: str) -> None:
    by_rank = results(ranks, name)
    assert sorted(map(tuple, itertools.chain.from_iterable(each["failures"] for each in by_rank))) == sorted(BROKEN)
    for each in by_rank:
        assert each["count"] == len(each["failures"])
        assert sorted(map(tuple, each["gathered"])) == sorted(BROKEN)
        invalid = sum(
            batch[modality]["valid"].count(False) for batch in each["batches"] for modality in ("image", "audio")
        )
        assert invalid == sum(field != "txt" for _, field in each["failures"])
        texts = {key for key, field in each["failures"] if field == "txt"}
        assert texts <= {key for batch in each["batches"] for key in batch["keys"]}


@every(case=lambda name: CASES[name].by_hand)
def test_no_labels_are_masked_for_others_where_the_loader_knows_no_group(ranks: Ranks, name: str) -> None:
    before = {key: count for _, batch in batches(results(ranks, name)) for key, count in batch["labels_before"].items()}
    assert {key for key, count in before.items() if not count} == {key for key, field in BROKEN if field == "txt"}


@every(scenario="trained")
def test_training_on_broken_samples_is_that_of_one_process(ranks: Ranks) -> None:
    by_rank = results(ranks, "trained")
    for each in by_rank:
        assert each["losses"] == pytest.approx(each["losses_alone"], rel=TOLERANCE)
        assert each["distance"] < TOLERANCE
    assert len({each["weights"] for each in by_rank}) == 1
    losses = by_rank[0]["losses"]
    assert len(losses) == len(BROKEN_STEPS)
    assert all(0 <= loss < float("inf") for loss in losses)


@every(scenario="refused")
def test_the_encoding_rank_raises_naming_the_part(ranks: Ranks) -> None:
    first = [[[*pair] for pair in each["failures"][:1]] for each in results(ranks, "broken")]
    for each, expected in zip(results(ranks, "refused"), first, strict=True):
        if not expected:
            assert each == {"delivered": len(BROKEN_STEPS), "error": None, "message": ""}
            continue
        _, *named = each["error"]
        assert named == expected[0]
        assert all(part in each["message"] for part in ("broken.tar", *map(repr, named)))
    assert any(first)


@every(scenario="resumed")
def test_a_loader_resumes_in_the_middle(ranks: Ranks) -> None:
    by_rank = results(ranks, "resumed")
    for each in by_rank:
        assert each["resumed"] == each["whole"]
        assert len(each["whole"]) == len(BROKEN_STEPS)
        assert each["state"] == by_rank[0]["state"]


@every(scenario="budget")
def test_a_rank_that_gives_up_ends_the_others_at_once(ranks: Any) -> None:
    *others, last = results(ranks, "budget")
    assert last["error"] == "TooManyFailures"
    for by_rank in others:
        assert by_rank["error"] == "RuntimeError"
        assert f"rank {len(others)}: TooManyFailures: 1 of " in by_rank["message"]
        assert "samples failed, the policy allows 0" in by_rank["message"]
    assert all(by_rank["left"] <= 2 for by_rank in (*others, last))  # loaders close their connections


@every(scenario="subgroup")
def test_a_group_of_some_ranks_masks_its_own_labels(ranks: Ranks) -> None:
    by_rank = results(ranks, "subgroup")
    assert len(by_rank) == 2
    assert_losses_of_one_process(ranks, by_rank, Case("broken"))
    assert all(sorted(map(tuple, each["gathered"])) == sorted(BROKEN) for each in by_rank)


@every(scenario="mesh")
@pytest.mark.parametrize("replicate", ["broadcast", "read"])
def test_peers_have_the_same_batches_and_exchange_in_their_own_dp_group(ranks: Ranks, replicate: str) -> None:
    mesh = results(ranks, "mesh")
    for column in range(2):
        by_rank = [each[replicate] for each in mesh if each["place"][1] == column]
        assert_losses_of_one_process(ranks, by_rank, Case("broken"))
        met = [] if replicate == "broadcast" and column else sorted(BROKEN)  # receivers met none
        assert all(sorted(map(tuple, each["gathered"])) == met for each in by_rank)
    for row in range(2):
        first, second = [each[replicate] for each in mesh if each["place"][0] == row]
        assert first["batches"] == second["batches"]
        assert first["digests"] == second["digests"]


@every(scenario="mesh")
def test_two_data_parallel_dims_count_as_one(ranks: Ranks) -> None:
    by_rank = [each["hsdp"] for each in results(ranks, "mesh")]
    assert_losses_of_one_process(ranks, by_rank, Case("broken"))
    assert all(sorted(map(tuple, each["gathered"])) == sorted(BROKEN) for each in by_rank)
