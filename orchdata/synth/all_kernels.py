"""Calls every kernel that indexing and loading call, on made-up data: `orchdata warm` has them compiled by that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import orchdata as od
from orchdata.loaders.shards.marks import marks_in
from orchdata.native.scan.mp3 import count_mp3, scan_mp3
from orchdata.order.order import Order, Shuffle
from orchdata.synth import synthesize


def use_all(folder: Path) -> None:
    """Index made-up data, and load steps of them in every way that calls other kernels."""
    synthesize("omni", folder / "omni", samples=96)
    recipe = od.Recipe(image=od.ImagePreprocessor(patch_size=14, merge=2), audio=od.AudioPreprocessor(num_mels=80))
    cost = od.CostModel(**dict.fromkeys(("image", "audio", "llm"), od.PhaseCost(1.0, 1e-4)))
    data = od.ShardDataset(str(folder / "omni" / "*.tar"), recipe=recipe)
    data.index()
    next(iter(od.DataLoader(data.split("train", 0.5), batch_size=4, num_threads=1)))
    Order(64, shuffle=Shuffle(), seed=0).blocks(0)
    marks_in(np.zeros(1024, np.uint8), np.zeros((0, 3), np.int64))
    for scan in (scan_mp3, count_mp3):
        scan(np.frombuffer(bytes(64), np.uint8))
    for balance, options in _ways():
        loader = od.DataLoader(
            data, global_batch_size=32, shuffle=True, dp=(0, 4), cost=cost, balance=balance, num_threads=1, **options
        )
        next(iter(loader))
        loader.close()


def _ways() -> list[tuple[od.Balance, dict[str, Any]]]:
    def ways(**caps: Any) -> list[tuple[od.Balance, dict[str, Any]]]:
        balances = [
            od.Balance(**caps),
            od.Balance(assignment="per_phase", **caps),
            od.Balance(scope="grid", group_size=2, **caps),
            od.Balance(scope="grid", group_size=2, assignment="per_phase", **caps),
            od.Balance(scope="grouped", group_size=2, **caps),
            od.Balance(objective="sum", **caps),
            od.Balance(equal_count=True, **caps),
            od.Balance(scope="none", **caps),
        ]
        return [(each, {}) for each in balances]

    caps: dict[str, Any] = {"max_tokens": 4096, "oversize": "own"}
    return [
        *ways(),
        *ways(**caps),
        (od.Balance(max_samples=20, assignment="per_phase"), {}),
        (od.Balance(order="1f1b", num_stages=4, **caps), {}),
        (od.Balance(), {"accumulate": 2}),
        (od.Balance(**caps), {"collate_fn": od.Padded()}),
        (od.Balance(), {"collate_fn": od.Padded()}),
        (od.Balance(), {"collate_fn": od.Packed(length=16_384)}),
    ]
