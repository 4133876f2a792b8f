"""Digests of everything that integers decide: `python decided_by_integers.py FOLDER`, one JSON object."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from shard_factory import RECIPE, omni_shards

import orchdata as od
from orchdata.balancers import balance, balance_padded
from orchdata.bench import synthetic_index
from orchdata.loaders.index.index import Index
from orchdata.order.order import Order, Shuffle

COST = od.CostModel(
    image=od.TransformerCost(hidden=1280, layers=32, ffn=5120),
    audio=od.TransformerCost(hidden=1024, layers=24, ffn=4096),
    llm=od.TransformerCost(hidden=3584, layers=28, ffn=18944),
)
BALANCES = {
    "none": od.Balance(scope="none"),
    "global": od.Balance(),
    "sum": od.Balance(objective="sum"),
    "capped": od.Balance(max_tokens=100, oversize="own"),
    "equal counts": od.Balance(equal_count=True),
    "grid": od.Balance(scope="grid", group_size=4),
    "grouped": od.Balance(scope="grouped", group_size=4),
    "per phase": od.Balance(assignment="per_phase"),
}
COLUMNS = ("llm_tokens", "loss_tokens", "part_tokens", "part_positions", "part_rows", "part_extent", "part_modality")


def prepare(folder: Path) -> None:
    """Write the shards."""
    omni_shards(folder, shards=2, samples=40)


def digests(folder: Path) -> dict[str, str]:
    """Digest by what it is of."""
    dataset = od.ShardDataset(f"{folder}/omni-*.tar", recipe=RECIPE)
    index = dataset.index()
    made_up = synthetic_index(folder / f"made-up-{os.getpid()}.index", 20_000, seed=3, num_shards=7)
    found = {"fingerprints": hash_of(RECIPE.fingerprint(), index.fingerprint)}
    found |= {f"counts of {name}": _counts(each) for name, each in (("files", index), ("made-up", made_up))}
    found["sizes of images and clips"] = hash_of(_sizes())
    found["orders"] = hash_of(list(_orders()))
    found["assignments"] = hash_of(list(_assignments(made_up)))
    for name, option in BALANCES.items():
        found[f"plans, {name}"] = hash_of(list(_plans(dataset, option)))
    found["batches"] = hash_of(
        [_batch(each) for each in od.DataLoader(dataset, batch_size=8, num_threads=0, cost=COST)]
    )
    return found


def _counts(index: Index) -> str:
    return hash_of([getattr(index, name).tolist() for name in COLUMNS if hasattr(index, name)])


def _sizes() -> Iterable[Any]:
    image, audio = od.ImagePreprocessor(), od.AudioPreprocessor()
    random, limits = np.random.default_rng(0), od.Limits()
    sizes = [image.count_header((int(w), int(h)), limits) for w, h in random.integers(30, 3000, (500, 2))]
    clips = [audio.count_header((int(n), 44_100), limits) for n in random.integers(1, 2_000_000, 500)]
    return [list(map(repr, sizes)), list(map(repr, clips))]


def _orders() -> Iterable[Any]:
    for shuffle, seed in itertools.product((None, Shuffle(), Shuffle(window=4, streams=3)), (0, 7)):
        order = Order(3000, shuffle=shuffle, seed=seed)
        yield [np.asarray(each).tolist() for each in order.rows(1, 0, order.length(1))]


def _assignments(index: Index) -> Iterable[Any]:
    """Of the balancers alone, with costs of all sizes."""
    tokens = index.llm_tokens.astype(np.int64)
    for count, ranks in ((512, 8), (4096, 64), (16384, 512)):
        yield balance(tokens[:count], ranks).rank.tolist()
        yield balance(tokens[:count] ** 2, ranks, equal_count=True).rank.tolist()
        yield balance_padded(tokens[:count], ranks, od.PhaseCost(linear=1.5, quadratic=1 / 3)).rank.tolist()


def _plans(dataset: od.ShardDataset, option: od.Balance) -> Iterable[str]:
    for collate in (od.Packed(), od.Padded(multiple_of=8)):
        if isinstance(collate, od.Padded) and option.assignment == "per_phase":
            continue
        loader = od.DataLoader(
            dataset, batch_size=2, shuffle=True, cost=COST, balance=option, dp=(0, 8), collate_fn=collate, num_threads=0
        )
        for epoch, step in itertools.product((0, 3), range(5)):
            yield loader.plan_at(epoch, step).hash


def _batch(batch: od.Batch) -> Any:
    return [
        batch.sample_ids,
        *[each.tolist() for each in (batch.llm.input_ids, batch.llm.labels, batch.llm.position_ids)],
    ]


def differing(by_set: Mapping[str, Mapping[str, str]]) -> list[str]:
    """What is not the same under all instruction sets, by name."""
    names = {name for found in by_set.values() for name in found}
    return sorted(name for name in names if len({found.get(name) for found in by_set.values()}) > 1)


def hash_of(*values: Any) -> str:
    return hashlib.blake2b(json.dumps(values, default=str).encode(), digest_size=12).hexdigest()


if __name__ == "__main__":
    print(json.dumps(digests(Path(sys.argv[1]))))
