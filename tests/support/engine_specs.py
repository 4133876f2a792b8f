"""Every kind of spec that engines build, with some tasks of each."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from map_dataset import Numbers
from shard_factory import RECIPE, omni_shards
from spec_job import decoded, words

import orchdata as od
from orchdata.building.step import BuildSpec
from orchdata.order.steps import StepTask

Specs = dict[str, tuple[BuildSpec, list[StepTask]]]


def make_specs(folder: Path) -> Specs:
    """Return the specs by name; shards are written to the folder, and indexed."""
    shards = omni_shards(folder, shards=2, samples=15)
    words_recipe = replace(RECIPE, text=od.TextPreprocessor(words, id="words"))
    per_phase = od.Balance(assignment="per_phase", max_tokens=500, oversize="own")
    cost = od.CostModel(image=od.PhaseCost(1.0), audio=od.PhaseCost(2.0, 0.5), llm=od.PhaseCost(3.0))
    numbers, lengths = Numbers(40, bad=(7,)), np.arange(40) % 9
    halves = [od.Source(od.ShardDataset(shard, RECIPE), loss_weight=1 + at) for at, shard in enumerate(shards)]
    mixture = od.Mixture(dict(zip("ab", halves, strict=True)), stop="repeat", epoch_samples=50)
    ours = {"shuffle": None, "on_error": "skip"}
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "shards, packed, joint": (RECIPE, {}),
        "shards, another seed": (RECIPE, {"seed": 1}),
        "shards, own tokenizer, mrope": (words_recipe, {"collate_fn": od.Packed(positions="mrope", multiple_of=8)}),
        "shards, per phase": (RECIPE, {"balance": per_phase, "cost": cost}),
        "shards, one length": (RECIPE, {"collate_fn": od.Packed(length=512, encoder_lengths={"image": (64, 2048)})}),
        "shards, padded": (RECIPE, {"collate_fn": od.Padded(encoders="padded"), "drop_last": True}),
        "shards, collate_fn": (RECIPE, {"collate_fn": decoded}),
        "shards, some left out": (RECIPE, {"quarantine": [(shards[0], "s0-0003"), (shards[1], "s1-0010")]}),
        "shards, mixture": (mixture, {}),
        "map-style": (numbers, {"cost": lengths, "on_error": od.ErrorPolicy("skip", max_failures=None)}),
        "map-style, one by one": ([np.arange(row) for row in range(9)], {"batch_size": None, "shuffle": False}),
        "map-style, sampler": (Numbers(20), {"sampler": torch.utils.data.RandomSampler(Numbers(20))} | ours),
        "map-style, batch_sampler": (Numbers(9), {"batch_sampler": [[1, 2], [7, 8], [3, 4, 5]]} | ours),
    }
    made: Specs = {}
    for name, (data, options) in kinds.items():
        sampled = "sampler" in name
        common = {"shuffle": True} | ({} if "batch_size" in options or sampled else {"batch_size": 4})
        rank = (0, 1) if sampled else (1, 2)
        dataset = od.ShardDataset(shards, recipe=data) if isinstance(data, od.Recipe) else data
        if dataset is not data:
            dataset.index()
        for leaf in getattr(data, "leaves", ()):
            leaf.dataset.index()
        prepared = od.DataLoader(dataset, dp=rank, **common | options)._runtime.prepared
        made[name] = (
            prepared.spec,
            [task for epoch in (0, 1) for task in islice(prepared.steps.tasks(epoch, 0, None, again=False), 2)],
        )
    return made
