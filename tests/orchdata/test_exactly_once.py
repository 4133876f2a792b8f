"""An epoch is each sample once and the same global batches, bit for bit, whoever builds them and however it is cut."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import memory_job
import numpy as np
import pytest
import webdataset
from delivered_once import tar_keys, wrong_deliveries
from digests import global_batch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rank_loaders import rows_of
from shard_factory import SKIP_ANY, omni_shards

import orchdata as od
from orchdata.bench import synthetic_index

pytestmark = pytest.mark.usefixtures("same_cache")

SAMPLES, GLOBAL_BATCH = 30, 8
STEPS = 4
"""The last of them is smaller."""


@dataclass(frozen=True)
class Stretch:
    """Some steps of an epoch, by loaders of their own; `engine` is their arguments."""

    ranks: int
    engine: tuple[tuple[str, int], ...]
    steps: int


ENGINES = (
    (("num_threads", 0),),
    (("num_threads", 1),),
    (("num_threads", 4),),
    (("num_threads", 4), ("prefetch_factor", 5)),
    (("num_workers", 1), ("num_threads", 4)),
    (("num_workers", 2), ("num_threads", 1)),
    (("num_workers", 3), ("num_threads", 0)),
)
BALANCES = {
    "global": {},
    "none": {"balance": "none"},
    "capped": {"balance": od.Balance(max_tokens=400, oversize="own")},
    "per phase": {
        "balance": od.Balance(assignment="per_phase"),
        "cost": od.CostModel(image=od.PhaseCost(1.0), audio=od.PhaseCost(2.0), llm=od.PhaseCost(3.0)),
    },
}


OMNI = {"shards": 3, "samples": SAMPLES // 3}


def loaders(dataset: od.ShardDataset, ranks: int, **options: Any) -> list[od.DataLoader]:
    common = {"global_batch_size": GLOBAL_BATCH, "shuffle": True, "seed": 7} | options
    return [od.DataLoader(dataset, dp=(rank, ranks), **common) for rank in range(ranks)]


def run(dataset: od.ShardDataset, stretches: Sequence[Stretch], epochs: int = 1, **options: Any) -> list[str]:
    """Digests of the global batches of some epochs, the stretches in turn; the last one goes to the end."""
    digests: list[str] = []
    rows: list[list[dict[str, Any]]] = []
    state: dict[str, Any] | None = None
    for number, stretch in enumerate(stretches):
        ours = loaders(dataset, stretch.ranks, **dict(stretch.engine), **options)
        if state is not None:
            for loader in ours:
                loader.load_state_dict(json.loads(json.dumps(state)))
        last = number == len(stretches) - 1
        rows.append([])
        left = epochs * STEPS - len(digests) if last else min(stretch.steps, epochs * STEPS - len(digests))
        while left:
            streams = [iter(loader.steps()) for loader in ours]
            shares = list(itertools.islice(zip(*streams, strict=True), left))
            digests += [global_batch(share) for share in shares]
            rows[-1] += rows_of(shares)
            left -= len(shares)
            for stream in streams:
                stream.close()  # type: ignore[attr-defined]
        states = [loader.state_dict() for loader in ours]
        assert all(each == states[0] for each in states)
        state = states[0]
    assert wrong_deliveries(rows, tar_keys(dataset.urls), epochs=epochs) == []
    return digests


@pytest.fixture(scope="module")
def expected(dataset: od.ShardDataset, module_cache: Path) -> dict[str, list[str]]:
    """By balance: digests of two undisturbed epochs. They do not depend on the balance."""
    alone = [Stretch(1, ENGINES[0], 0)]
    by_balance = {name: run(dataset, alone, 2, **options) for name, options in BALANCES.items()}
    assert all(each == by_balance["global"] for each in by_balance.values())
    assert len(set(by_balance["global"])) == 2 * STEPS
    return by_balance


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_any_number_of_ranks(ranks: int, balance: str, dataset: od.ShardDataset, expected: Any) -> None:
    engine = ENGINES[ranks % len(ENGINES)]
    assert run(dataset, [Stretch(ranks, engine, 0)], 2, **BALANCES[balance]) == expected[balance]


@pytest.mark.parametrize(
    "position", [*range(STEPS + 1), *(pytest.param(at, marks=pytest.mark.slow) for at in range(STEPS + 1, 2 * STEPS))]
)
def test_a_resume_at_every_position_and_a_second_one(position: int, dataset: od.ShardDataset, expected: Any) -> None:
    ranks, engine = (2, 3, 1)[position % 3], ENGINES[position % len(ENGINES)]
    stretches = [Stretch(2, engine, position), Stretch(ranks, ENGINES[0], 1), Stretch(1, engine, 0)]
    assert run(dataset, stretches, 2) == expected["global"]


@pytest.mark.parametrize("saved", [1, 2, 3])
def test_what_came_after_the_last_state_comes_again_and_counts_once(saved: int, dataset: od.ShardDataset) -> None:
    """Each run saves its state after some steps, and is killed when it has delivered two more."""
    rows: list[list[dict[str, Any]]] = []
    state: dict[str, Any] | None = None
    for ranks in itertools.islice(itertools.cycle((2, 3, 1)), 2 * STEPS // saved + 3):
        ours = loaders(dataset, ranks, num_threads=0)
        for loader in ours if state is not None else ():
            loader.load_state_dict(json.loads(json.dumps(state)))
        streams = [iter(loader.steps()) for loader in ours]
        rows.append(rows_of(list(itertools.islice(zip(*streams, strict=True), saved))))
        state = ours[0].state_dict()
        rows[-1] += rows_of(list(itertools.islice(zip(*streams, strict=True), 2)))
        for stream in streams:
            stream.close()  # type: ignore[attr-defined]
    keys = tar_keys(dataset.urls)
    assert wrong_deliveries(rows, keys, epochs=2) == []
    assert len(rows) > 4 and sum(len(row["keys"]) for run in rows for row in run) > 2 * SAMPLES


def epochs(engines: Sequence[Any], ranks: Sequence[int]) -> dict[str, Any]:
    stretches = st.builds(Stretch, st.sampled_from(ranks), st.sampled_from(engines), st.integers(0, STEPS))
    return {"stretched": st.lists(stretches, min_size=1, max_size=5), "balance": st.sampled_from(list(BALANCES))}


UNHURRIED = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(UNHURRIED, max_examples=30)
@given(**epochs(ENGINES, [1, 2, 3, 4]))
def test_very_many_runs_are_the_undisturbed_one(
    stretched: list[Stretch], balance: str, dataset: od.ShardDataset, expected: Any
) -> None:
    assert run(dataset, stretched, 2, **BALANCES[balance]) == expected[balance]


def test_a_lost_a_doubled_and_an_altered_sample_are_reported(dataset: od.ShardDataset) -> None:
    (loader,) = loaders(dataset, 1, num_threads=0)
    steps = list(loader.steps())
    digests = [global_batch([step]) for step in steps]
    assert len(set(digests)) == STEPS
    with pytest.raises(AssertionError):
        global_batch([steps[0], steps[0]])
    assert global_batch([[]]) not in digests
    steps[0][0].llm.labels[3] ^= 1
    assert global_batch([steps[0]]) != digests[0]
    steps[1][0].image.patches[0, 0] += 1
    assert global_batch([steps[1]]) != digests[1]


# The main job on real media: a data set written by webdataset's own writer from real photos, speech and text.


LARGER = od.Recipe(image=od.ImagePreprocessor(max_tokens=256))


@pytest.fixture(scope="module")
def shards(fixtures_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    photos = sorted((fixtures_dir / "images/raccoon").rglob("*.jpg"))[:60]
    photos += sorted((fixtures_dir / "images/exif-orientation-examples").rglob("*.jpg"))[:8]
    speech = (
        sorted((fixtures_dir / "speech").rglob("*.wav"))[:20] + sorted((fixtures_dir / "speech").rglob("*.flac"))[:6]
    )
    questions = [json.loads(line) for line in (fixtures_dir / "text/gsm8k/test.jsonl").read_text().splitlines()[:120]]
    photo, clip = cycle(photos), cycle(speech)
    folder = tmp_path_factory.mktemp("real")
    urls = []
    for shard, start in enumerate(range(0, len(questions), 40)):
        urls.append(str(folder / f"real-{shard:03d}.tar"))
        with webdataset.TarWriter(urls[-1], encoder=False) as writer:
            for number, question in enumerate(questions[start : start + 40], start):
                sample: dict[str, object] = {"__key__": f"{shard}/{number:05d}"}
                media = number % 4
                marks = ""
                if media in (1, 3):
                    sample["0.jpg"], sample["1.jpg"] = (path.read_bytes() for path in islice(photo, 2))
                    marks += "<image><image>"
                if media in (2, 3):
                    path = next(clip)
                    sample[path.suffix[1:]] = path.read_bytes()
                    marks += "<audio>"
                turns = [
                    {"role": "user", "content": marks + question["question"]},
                    {"role": "assistant", "content": question["answer"]},
                ]
                sample["json"] = json.dumps(turns).encode()
                writer.write(sample)
    return urls


def epoch(urls: list[str], num_ranks: int) -> list[list[str]]:
    """Sorted keys of each global batch."""
    dataset = od.ShardDataset(urls, recipe=LARGER)
    dataset.index()
    loaders = [
        od.DataLoader(dataset, global_batch_size=24, shuffle=True, dp=(rank, num_ranks), num_threads=2)
        for rank in range(num_ranks)
    ]
    steps = zip(*(loader.steps() for loader in loaders), strict=True)
    return [sorted(key for share in step for batch in share for _, key in batch.sample_ids) for step in steps]


def test_each_sample_once_and_the_same_batches_on_any_ranks(shards: list[str]) -> None:
    alone = epoch(shards, 1)
    keys = [key for step in alone for key in step]
    assert len(keys) == len(set(keys)) == 120  # 5 steps of 24: nothing to drop
    for num_ranks in (2, 3, 8):
        assert epoch(shards, num_ranks) == alone


def matching(fixtures_dir: Path, *patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in fixtures_dir.glob(pattern))


def test_every_fixture_shard_loads_or_says_why(fixtures_dir: Path) -> None:
    paths = matching(fixtures_dir, "wds/**/*.tar", "wds/**/*.tgz", "multimodal/**/*.parquet")
    assert len(paths) >= 9
    delivered: dict[str, int] = {}
    for path in paths:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the loader has no steps")  # of two shards nothing can be read
            warnings.filterwarnings("ignore", "no sample has a token to learn")  # some have images alone
            loader = od.DataLoader(od.ShardDataset(path), batch_size=4, on_error=SKIP_ANY, num_threads=2)
        count = sum(len(batch.sample_ids) for batch in loader)
        failures = loader.stats()["failures"]["samples"]
        for failure in failures:
            assert failure["shard"] == str(path) and failure["key"] and failure["reason"], failure
        assert count + len(failures) == loader.dataset.index().num_samples > 0
        delivered[path.name] = count
    assert delivered["image1.tar"] == 4
    assert delivered["compressed.tar"] == 3  # 0001.txt.gz to 0003.txt.gz
    assert delivered["demo-dataset-images-bytes.parquet"] == 0  # the texts have placeholders of another tool
    assert delivered["demo-dataset.parquet"] == 6
    assert delivered["mpdata.tar"] == delivered["tendata.tar"] == 0  # msgpack and tensors: nothing a recipe reads


def test_placeholders_of_another_tool_are_read_where_the_recipe_names_them(fixtures_dir: Path) -> None:
    (path,) = matching(fixtures_dir, "multimodal/**/demo-dataset-images-bytes.parquet")
    with pytest.raises(IndexError, match=r"TextPreprocessor\(image_placeholder='<__dj__image>'\) reads it"):
        od.ShardDataset(path)[0]
    recipe = od.Recipe(text=od.TextPreprocessor(image_placeholder="<__dj__image>"))
    kinds = [type(part).__name__ for part in od.ShardDataset(path, recipe=recipe)[0].parts]
    assert len(od.ShardDataset(path, recipe=recipe)) == 3 and kinds == ["MediaPart", "TextPart"]


# Memory does not grow: with epochs, or with the samples of an index.


EPOCHS = 40
WARM_EPOCHS = 20  # in which pools, caches and the allocator find their size
MIB = 2**20


def heard(*command: Any) -> Any:
    done = subprocess.run([sys.executable, *map(str, command)], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"num_threads": 2}, {"num_workers": 2, "num_threads": 2}],
    ids=["default", "persistent threads", "persistent workers"],
)
def test_memory_is_flat_over_epochs(tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the process and its children: memory that an epoch leaks shows as a slope."""
    monkeypatch.setenv("ORCHDATA_CACHE", str(tmp_path / "cache"))
    omni_shards(tmp_path, shards=3, samples=40)
    used = heard(memory_job.__file__, tmp_path, EPOCHS, json.dumps(options))
    assert len(used) == EPOCHS
    slope, _ = np.polyfit(np.arange(WARM_EPOCHS, EPOCHS), used[WARM_EPOCHS:], 1)
    assert slope < 0.5 * MIB, [round(bytes_used / MIB, 1) for bytes_used in used]


@pytest.mark.slow
def test_memory_does_not_follow_the_index_and_resuming_late_is_no_slower(tmp_path: Path) -> None:
    """What a process has allocated after a loader planned its first step; the index itself is mapped."""
    figures = []
    for samples in (100_000, 1_000_000):
        path = tmp_path / f"{samples}.index"
        synthetic_index(path, samples, 0)
        figures.append(heard("-m", "benchmarks.start_one", path, 256, 16))
    few, many = figures
    assert many["anonymous_bytes"] - few["anonymous_bytes"] < 20 * MIB  # 22 bytes a sample would be more
    assert many["late_seconds"] < 10 * many["first_seconds"]  # to walk there would take a hundred times as long
