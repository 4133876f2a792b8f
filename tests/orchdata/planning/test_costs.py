"""Costs of an index's rows: what each part and each sequence costs by itself, windows too."""

from __future__ import annotations

import numpy as np
import pytest
from shard_factory import omni_shards

import orchdata as od
from orchdata.dataset.index_costs import IndexCosts

RECIPE = od.Recipe(image=od.ImagePreprocessor(max_tokens=64))
WINDOWS = od.CostModel(
    image=od.PhaseCost(1, 2, windows=((16, 3), (40, 5))), llm=od.PhaseCost(7, 0, 11, windows=((20, 13),))
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> od.ShardDataset:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORCHDATA_CACHE", str(tmp_path_factory.mktemp("cache")))
        made = od.ShardDataset(omni_shards(tmp_path_factory.mktemp("omni"), shards=1, samples=12), recipe=RECIPE)
        made.index()
        return made


def test_every_part_and_sequence_costs_what_its_phase_says(dataset: od.ShardDataset) -> None:
    costs = IndexCosts(dataset.index(), WINDOWS)
    rows = np.arange(12)
    parts = costs.parts("image", rows)
    patches = parts.positions
    assert patches.min() == 16 < 40 < patches.max()
    by_hand = patches + 2 * patches**2 + 3 * patches * np.minimum(patches, 16) + 5 * patches * np.minimum(patches, 40)
    assert parts.costs.tolist() == by_hand.tolist()
    assert costs.costs("image", rows).tolist() == np.bincount(parts.sample, by_hand, minlength=12).tolist()
    tokens = costs.positions("llm", rows)
    by_hand = 7 * tokens + 11 + 13 * tokens * np.minimum(tokens, 20)
    assert costs.costs("llm", rows).tolist() == by_hand.tolist()
