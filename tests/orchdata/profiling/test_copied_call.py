"""What a report's sentences say holds for the call that it gives: planned with other seeds, over whole epochs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from shard_factory import RECIPE

import orchdata as od
from benchmarks.indexed_shards import IndexedShards
from orchdata.bench import synthetic_index
from orchdata.planning.plan import Plan
from orchdata.profiling.summary import Finding, findings, recommended

COST = od.CostModel(image=od.PhaseCost(3.0), audio=od.PhaseCost(1.0), llm=od.PhaseCost(1.0, 0.0001))
RANKS, BATCH_SIZE, STEPS = 16, 4, 256
SEEDS = (11, 12, 13)
DataSet = od.ShardDataset | od.Mixture
TEXT, PICTURES = "image_parts == 0 and audio_parts == 0", "image_parts > 0 and audio_parts == 0"


def made_up(folder: Path, samples: int = RANKS * BATCH_SIZE * (STEPS + 20)) -> IndexedShards:
    """Samples of text, images and sound."""
    path = folder / "made_up.index"
    synthetic_index(path, samples, 0)
    return IndexedShards(path)


def texts(folder: Path, lengths: Sequence[int]) -> od.ShardDataset:
    path = folder / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"id": str(n), "text": "x" * length}) for n, length in enumerate(lengths)))
    return od.ShardDataset(str(path), recipe=RECIPE)


def short_lengths() -> list[int]:
    count = RANKS * BATCH_SIZE * (STEPS + 20)
    return np.random.default_rng(0).integers(50, 150, count).tolist()


def text_alone(folder: Path) -> DataSet:
    return made_up(folder, 48_000).filter(TEXT)


def images(folder: Path) -> DataSet:
    return made_up(folder, 44_000).filter(PICTURES)


def mixture(folder: Path) -> DataSet:
    parts = {"text": TEXT, "pictures": PICTURES}
    data = made_up(folder, 60_000)
    return od.Mixture({name: od.Source(data.filter(chosen), weight=1) for name, chosen in parts.items()})


def with_a_giant(folder: Path) -> DataSet:
    """One sample in one of more than 256 steps, which takes it as long as some 60 others."""
    lengths = short_lengths()
    lengths[len(lengths) // 3] = 12_000
    return texts(folder, lengths)


def many_giants(folder: Path) -> DataSet:
    """Some three giants in each step: no plan of whole samples shortens it much."""
    lengths = short_lengths()
    lengths[::20] = [20_000] * len(lengths[::20])
    return texts(folder, lengths)


def even(folder: Path) -> DataSet:
    return texts(folder, [80] * len(short_lengths()))


def waits(plans: Sequence[Plan]) -> float:
    """The share of the steps' time that ranks wait for each other, where they meet after each phase."""
    costs = totals = 0
    for plan in plans:
        cells = [plan.cells(phase) for phase in plan.costs]
        costs += sum(int(of.max(axis=0).sum()) for of in cells)
        totals += sum(int(of.sum()) for of in cells)
    return 1 - totals / RANKS / costs


def planned(call: str, data: DataSet, seed: int) -> list[Plan]:
    """All steps of an epoch of the call, with another seed."""
    source = call.replace("seed=0", f"seed={seed}, dp=(0, {RANKS})")
    assert source != call
    loader = eval(source.removeprefix("loader = "), {"od": od, "dataset": data, "cost": COST})
    assert len(loader) >= STEPS
    return [loader.plan_at(0, step) for step in range(len(loader))]


@pytest.mark.slow
@pytest.mark.parametrize("made", [text_alone, images, made_up, mixture, with_a_giant, many_giants, even])
def test_the_copied_call_waits_as_long_as_the_sentence_says(made: Callable[[Path], DataSet], tmp_path: Path) -> None:
    data = made(tmp_path)
    profile = data.profile(cost=COST, ranks=(RANKS,), batch_size=BATCH_SIZE, group_size=4)
    best = recommended(profile.main_scale)
    said: dict[str, Finding] = {each.setting: each for each in findings(profile) if each.setting}
    unbalanced = re.sub(r"od\.Balance\(.*?\)", "od.Balance(scope='none')", profile.call)
    assert (best == "none") == (unbalanced == profile.call) == (made is even)
    for name, call in {best: profile.call, "none": unbalanced}.items():
        finding = said[name]
        assert re.search(r"\d+ %", finding.text)
        for seed in SEEDS:
            waiting = waits(planned(call, data, seed))
            assert finding.low <= waiting <= finding.high, f"{waiting:.3f} is not as said: {finding.text}"
        assert made is with_a_giant or finding.high - finding.low < 0.35
    if made in (with_a_giant, many_giants):
        is_unplanned = any("No planned step had" in sentence for sentence in profile.summary)
        assert is_unplanned == (made is with_a_giant)
