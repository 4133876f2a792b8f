"""What a Batch says of itself: its names, where its samples lie, and errors for names of other libraries."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from shard_factory import write_shard

import orchdata as od


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("batch") / "a.tar"
    shard = write_shard(path, [{"__key__": f"k{number}", "txt": b"x" * (3 + number)} for number in range(3)])
    return next(iter(od.DataLoader(od.ShardDataset(shard), batch_size=3, shuffle=False)))


def model(**arguments: Any) -> Any:
    return arguments


def test_a_batch_is_not_a_mapping_and_says_where_to_look(batch: Any) -> None:
    assert [key for _, key in batch.sample_ids] == ["k0", "k1", "k2"]
    with pytest.raises(AttributeError, match=r"batch\.sample_ids"):
        batch.keys  # noqa: B018
    with pytest.raises(AttributeError, match=r"no 'input_ids'.*model_inputs\(\)"):
        batch.input_ids  # noqa: B018
    with pytest.raises(TypeError, match=r"'input_ids'.*model_inputs\(\)"):
        batch["input_ids"]
    with pytest.raises(TypeError, match=r"not a mapping.*model_inputs\(\)"):
        dict(batch)
    with pytest.raises(TypeError, match="must be a mapping, not Batch"):
        model(**batch)
    assert "input_ids" in model(**batch.model_inputs())


def test_a_batch_is_copied_and_pickled(batch: Any) -> None:
    for made in (copy.copy(batch), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert made.sample_ids == batch.sample_ids and made.llm.input_ids.equal(batch.llm.input_ids)
