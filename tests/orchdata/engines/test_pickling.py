"""Specs that are sent to another process, and those that cannot be: the error names the member that does not pickle."""

from __future__ import annotations

import pickle
import re
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from map_dataset import Numbers
from shard_factory import RECIPE, omni_samples, omni_shards, write_shard

import orchdata as od
from orchdata.building.step import BuildSpec
from orchdata.engines.engine import explain_pickling


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    return omni_shards(tmp_path, shards=1, samples=10)


def spec_of(data: Any, recipe: od.Recipe = RECIPE, **options: Any) -> BuildSpec:
    dataset = od.ShardDataset(data, recipe=recipe) if options.pop("shards", False) else data
    return od.DataLoader(dataset, **options)._runtime.prepared.spec


class WithTransform(Numbers):
    """A data set with a transform in it."""

    def __init__(self, transform: Any) -> None:
        super().__init__(6)
        self.transforms = {"first": [len, transform]}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            {"collate_fn": partial(len, print, lock=threading.Lock())},
            "collate_fn.keywords['lock'] is an object of type",
        ),
        ({"dataset": WithTransform(lambda sample: sample)}, "dataset.transforms['first'][1] is a lambda"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_error_names_the_member_that_does_not_pickle_and_the_way_out(options: dict[str, Any], named: str) -> None:
    data = options.pop("dataset", None) or Numbers(6)
    spec = spec_of(data, **options)
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)) as refused:
        pickle.dumps(spec)
    with pytest.raises(TypeError, match="^" + re.escape(named)) as raised:
        explain_pickling(spec, refused.value)
    assert "at the top level of a module" in str(raised.value) and "where nothing is pickled" in str(raised.value)


def test_an_index_that_was_rebuilt_raises_an_error(shards: list[str], tmp_path: Path) -> None:
    data = pickle.dumps(spec_of(shards, shards=True))
    pickle.loads(data).open()
    write_shard(tmp_path / "omni-000000.tar", omni_samples(11))
    od.ShardDataset(shards, recipe=RECIPE).index(rebuild=True)
    with pytest.raises(od.StaleIndexError, match="rebuilt after this loader was created: create the loader again"):
        pickle.loads(data).open()
