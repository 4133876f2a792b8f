"""Runs over mixtures of all kinds of sources, cut anywhere and continued on other ranks: the undisturbed sequence."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from digests import content
from shard_factory import RECIPE, omni_shards, write_shard

import orchdata as od
from orchdata.planning.plan import Plan

pytestmark = pytest.mark.usefixtures("same_cache")

EPOCHS = 2
Taken = list[tuple[int, int, int]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> dict[str, od.ShardDataset]:
    folder = tmp_path_factory.mktemp("kinds")
    texts = [{"text": "word " * (1 + 3 * number % 17)} for number in range(40)]
    (folder / "lines.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in texts))
    pq.write_table(pa.table({"text": ["x" * (1 + 7 * number % 90) for number in range(25)]}), folder / "rows.parquet")
    tar = [{"__key__": f"t{number}", "txt": b"y" * (1 + 5 * number % 60)} for number in range(30)]
    lines = od.ShardDataset(folder / "lines.jsonl", RECIPE)
    datasets = {
        "tar": od.ShardDataset(write_shard(folder / "texts.tar", tar), RECIPE).split("train", 0.8),
        "rows": od.ShardDataset(folder / "rows.parquet", RECIPE),
        "lines": lines.filter("tokens < 80"),
        "held": lines.filter("tokens >= 80"),
        "omni": od.ShardDataset(omni_shards(folder, shards=2, samples=10), RECIPE),
    }
    for dataset in datasets.values():
        dataset.index()
    return datasets


def mixture(
    data: dict[str, od.ShardDataset], *, stop: str, by: str, staged: bool, weights: tuple[int, ...]
) -> od.Mixture:
    inner = {name: od.Source(data[name], weight=weight) for name, weight in zip(data, weights, strict=False)}
    words = od.Mixture({name: inner.pop(name) for name in ("lines", "held", "rows")})
    outer = {"omni": inner["omni"], "tar": inner["tar"], "words": od.Source(words, weight=weights[1])}
    options: dict[str, Any] = {"epoch_tokens": 2500} if stop == "repeat" else {}
    if staged:
        outer = {name: od.Source(source.dataset) for name, source in outer.items()}
        stages = [
            (0, {"omni": 1, "tar": 3}),
            (30, {"omni": 2, "tar": 1, "words": 4}),
            (900, {"tar": 1, "words": 2, "omni": 1}),
        ]
        options["stages"] = stages
    return od.Mixture(outer, stop=stop, by=by, **options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Stretch:
    ranks: int
    rank: int
    steps: int


def taken(plan: Plan) -> Taken:
    assert plan.passes is not None
    return list(zip(plan.source.tolist(), plan.passes.tolist(), plan.row.tolist(), strict=True))


def run(dataset: od.Mixture, stretches: list[Stretch], **options: Any) -> list[tuple[int, int, Taken]]:
    """(epoch, step, samples) of two epochs, the stretches in turn; the last one goes to the end."""
    all_steps: list[tuple[int, int, Taken]] = []
    state: Any = None
    for number, stretch in enumerate(stretches):
        rank = stretch.rank % stretch.ranks
        loader = od.DataLoader(dataset, dp=(rank, stretch.ranks), seed=5, num_threads=0, **options)
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        left = 10**9 if number == len(stretches) - 1 else stretch.steps
        while left and loader.state_dict()["epoch"] < EPOCHS:
            epoch, steps = loader.state_dict()["epoch"], iter(loader.steps())
            for step in itertools.islice(steps, left):
                all_steps.append((epoch, step[0].step, taken(step[0].plan)))
                left -= 1
            steps.close()  # type: ignore[attr-defined]
        state = loader.state_dict()
    return all_steps


@pytest.mark.parametrize("stop", ["all", "repeat"])
def test_a_resume_at_every_step_and_a_second_one(data: dict[str, od.ShardDataset], stop: str) -> None:
    mixed = mixture(data, stop=stop, by="tokens", staged=True, weights=(3, 1, 4, 1, 5))
    options = {"shuffle": od.Shuffle(streams=2), "global_batch_tokens": 1000}
    undisturbed = run(mixed, [Stretch(1, 0, 0)], **options)
    for position in range(len(undisturbed)):
        cut = [Stretch(2, 1, position), Stretch((8, 1, 3)[position % 3], position, 2), Stretch(3, 0, 0)]
        assert run(mixed, cut, **options) == undisturbed


@pytest.mark.parametrize("stop", ["all", "repeat"])
def test_global_batches_hold_the_same_bits_on_any_ranks(data: dict[str, od.ShardDataset], stop: str) -> None:
    mixed = mixture(data, stop=stop, by="tokens", staged=stop == "repeat", weights=(3, 1, 4, 1, 5))
    contents = []
    for ranks in (1, 2, 3, 8):
        balance = od.Balance(scope="grid" if ranks == 8 else "global", group_size=2 if ranks == 8 else None)
        ours = [
            od.DataLoader(
                mixed, dp=(rank, ranks), global_batch_tokens=600, shuffle=True, balance=balance, num_threads=0
            )
            for rank in range(ranks)
        ]
        steps = zip(*(loader.steps() for loader in ours), strict=True)
        shares = [[content(share) for share in step] for step in steps]
        contents.append([[sorted(x for share in step for x in share[kind]) for kind in (0, 1)] for step in shares])
    assert len(contents[0]) > 4
    assert contents[1:] == contents[:1] * 3
