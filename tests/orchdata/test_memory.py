"""Memory does not grow: with epochs, or with the samples of an index."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import memory_job
import numpy as np
import pytest
from shard_factory import omni_shards

from orchdata.bench import synthetic_index

EPOCHS = 40
WARM_EPOCHS = 20  # in which pools, caches and the allocator find their size
MIB = 2**20


def heard(*command: Any) -> Any:
    done = subprocess.run([sys.executable, *map(str, command)], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"num_threads": 2}, {"num_workers": 2, "num_threads": 2}],
    ids=["default", "persistent threads", "persistent workers"],
)
def test_memory_is_flat_over_epochs(tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the process and its children: memory that an epoch leaks shows as a slope."""
    monkeypatch.setenv("ORCHDATA_CACHE", str(tmp_path / "cache"))
    omni_shards(tmp_path, shards=3, samples=40)
    used = heard(memory_job.__file__, tmp_path, EPOCHS, json.dumps(options))
    assert len(used) == EPOCHS
    slope, _ = np.polyfit(np.arange(WARM_EPOCHS, EPOCHS), used[WARM_EPOCHS:], 1)
    assert slope < 0.5 * MIB, [round(bytes_used / MIB, 1) for bytes_used in used]


@pytest.mark.slow
def test_memory_does_not_follow_the_index_and_resuming_late_is_no_slower(tmp_path: Path) -> None:
    """What a process has allocated after a loader planned its first step; the index itself is mapped."""
    figures = []
    for samples in (100_000, 1_000_000):
        path = tmp_path / f"{samples}.index"
        synthetic_index(path, samples, 0)
        figures.append(heard("-m", "benchmarks.start_one", path, 256, 16))
    few, many = figures
    assert many["anonymous_bytes"] - few["anonymous_bytes"] < 20 * MIB  # 22 bytes a sample would be more
    assert many["late_seconds"] < 10 * many["first_seconds"]  # to walk there would take a hundred times as long
