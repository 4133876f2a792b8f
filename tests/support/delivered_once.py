"""What runs delivered, held against what the shards hold: each sample exactly once. Shares no code with the library.

A run is a start, from the beginning or from a saved state, and what follows until it ends or is killed. Each of its
ranks writes a line of JSON a step:

    {"rank": 0, "epoch": 0, "step": 3, "keys": [["a.tar", "s0001"], ["b.tar", "s0042"]]}

The first step of a run says from which state it continued. All that earlier runs wrote of that step and of later ones
came after that state: it does not count, and must come again.
"""

from __future__ import annotations

import json
import tarfile
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Key = tuple[str, str]
Row = Mapping[str, Any]
Place = tuple[int, int]
"""Epoch and step."""

_SHOWN = 3


def tar_keys(paths: Iterable[str | Path]) -> list[Key]:
    """(path, key) of each sample of tars, in order, as WebDataset names samples."""
    keys: dict[Key, None] = {}
    for path in map(str, paths):
        with tarfile.open(path) as archive:
            for name in archive.getnames():
                folder, separator, base = name.rpartition("/")
                keys[path, folder + separator + base.partition(".")[0]] = None
    return list(keys)


def row_of(rank: int, share: Sequence[Any]) -> dict[str, Any]:
    """The line of a step that a rank was given as batches."""
    plan = share[0].plan
    keys = [list(key) for batch in share for key in batch.sample_ids]
    return {"rank": rank, "epoch": plan.epoch, "step": plan.step, "keys": keys}


def read_rows(paths: Iterable[str | Path]) -> list[dict[str, Any]]:
    """The rows of a run, of a file for each rank. A killed rank may have left half a line, which is no row."""
    return [json.loads(line) for path in paths for line in Path(path).read_text().split("\n")[:-1]]


def wrong_deliveries(
    runs: Iterable[Iterable[Row]],
    *sources: Collection[Key],
    epochs: int,
    dropped: int = 0,
    repeats: bool = False,
) -> list[str]:
    """All that is wrong with what runs delivered, in words; empty where nothing is.

    Args:
        runs: in the order in which they ran; of each its rows, those of a rank as it wrote them.
        sources: the keys of the data set, or of each source of a mixture.
        epochs: that were delivered to their end. Later ones may stop anywhere.
        dropped: samples that each epoch leaves out, as `drop_last` does.
        repeats: whether a source comes round again, as one of more weight does: its samples then come equally often,
            or once more.
    """
    steps, wrong = _counted(runs)
    delivered: dict[int, Counter[Key]] = defaultdict(Counter)
    numbers: dict[int, list[int]] = defaultdict(list)
    for (epoch, step), keys in steps.items():
        delivered[epoch].update(keys)
        numbers[epoch].append(step)
    known = {key for source in sources for key in source}
    for epoch in sorted({*delivered, *range(epochs)}):
        counts = delivered[epoch]
        found = [f"{_shown(set(counts) - known)} of no shard"] if set(counts) - known else []
        if numbers[epoch] != list(range(len(numbers[epoch]))):
            found.append(f"a step is missing among {numbers[epoch]}")
        for source in sources:
            times = [counts[key] for key in source]
            usual = min(times, default=0) if repeats else 0
            if often := {key for key in source if counts[key] > usual + 1}:
                found.append(f"{_shown(often)} more than {'once more than others' if repeats else 'once'}")
        missing = known - set(counts)
        if epoch < epochs and not repeats and len(missing) != dropped:
            found.append(f"{_shown(missing)} missing, where {dropped} are to be left out")
        wrong += [f"epoch {epoch}: {each}" for each in found]
    return wrong


def _counted(runs: Iterable[Iterable[Row]]) -> tuple[dict[Place, list[Key]], list[str]]:
    """The keys of each step that counts, over all ranks, and what is wrong with the order of steps."""
    steps: dict[Place, list[Key]] = {}
    undone: dict[Place, set[Key]] = defaultdict(set)
    wrong: list[str] = []
    for number, rows in enumerate(runs):
        last: dict[int, Place] = {}
        own: dict[Place, list[Key]] = defaultdict(list)
        for row in rows:
            rank, place = row["rank"], (row["epoch"], row["step"])
            before = last.get(rank)
            if before is not None and place not in ((before[0], before[1] + 1), (before[0] + 1, 0)):
                wrong.append(f"run {number}, rank {rank}: {_named(place)} comes after {_named(before)}")
            last[rank] = place
            own[place] += [(str(shard), str(key)) for shard, key in row["keys"]]
        for place in [place for place in steps if own and place >= min(own)]:
            undone[place].update(steps.pop(place))
        steps |= own
    for place, keys in undone.items():
        if place in steps and (others := keys - set(steps[place])):
            wrong.append(f"{_named(place)} came again with other samples: without {_shown(others)}")
    return dict(sorted(steps.items())), wrong


def _named(place: Place) -> str:
    return f"step {place[1]} of epoch {place[0]}"


def _shown(keys: Collection[Key]) -> str:
    shown = ", ".join(f"{Path(shard).name}: {key}" for shard, key in sorted(keys)[:_SHOWN])
    return f"{len(keys)} samples ({shown}{', ...' if len(keys) > _SHOWN else ''})"
