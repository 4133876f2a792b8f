"""A mixture of three small data sets on disk, and what a step of it is planned to hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shard_factory import RECIPE, chat, omni_shards, write_shard

import orchdata as od


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> dict[str, od.ShardDataset]:
    """Samples of all kinds, long chats under other names of media and another template, and a few short texts."""
    folder = tmp_path_factory.mktemp("mixed")
    chats = [{"__key__": f"c{n:03d}", "json": chat("tell me", "word " * (5 + 7 * n % 60))} for n in range(20)]
    texts = [{"__key__": f"t{n:03d}", "caption": f"short {n}".encode()} for n in range(9)]
    other = replace(
        RECIPE,
        text=od.TextPreprocessor(
            template=od.ChatTemplate(suffix="<end>"), image_placeholder="[img]", fields=("caption",)
        ),
        image=replace(RECIPE.image, max_tokens=6),
    )
    found = {
        "omni": od.ShardDataset(omni_shards(folder, samples=10), RECIPE),
        "chat": od.ShardDataset(write_shard(folder / "chat.tar", chats), other),
        "text": od.ShardDataset(write_shard(folder / "text.tar", texts), other),
    }
    for dataset in found.values():
        dataset.index()
    return found


def mixture(data: dict[str, od.ShardDataset], weights: Sequence[float] = (5, 3, 1), **options: Any) -> od.Mixture:
    sources = {
        name: od.Source(dataset, weight=None if "stages" in options else weight)
        for (name, dataset), weight in zip(data.items(), weights, strict=True)
    }
    return od.Mixture(sources, **({"stop": "repeat", "epoch_tokens": 9000} | options))


def planned(step: Sequence[Any]) -> list[tuple[int, int, int]]:
    """(source, pass, row) of a step's samples, as every rank planned them."""
    plans = [batch.plan for share in step for batch in share]
    columns = [np.stack([plan.source, plan.passes, plan.row], 1) for plan in plans]
    assert all(np.array_equal(columns[0], column) for column in columns)
    return [tuple(row) for row in columns[0].tolist()]
