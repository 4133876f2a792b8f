"""One contract for engines with workers, processes and Ray actors alike: what is lost with a worker is built again."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from ray_clusters import ACTOR
from ray_data import Deadly, FromFarStorage

import orchdata as od

SKIP = od.ErrorPolicy("skip", max_failures=2)


@pytest.fixture(
    params=[pytest.param("fork", marks=pytest.mark.slow), pytest.param("actors of Ray", marks=pytest.mark.slow)]
)
def workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    if request.param == "fork":
        monkeypatch.setattr("orchdata.engines.supervisor._FRESH_SECONDS", 1.0)
        return {"multiprocessing_context": "fork"}
    request.getfixturevalue("ray_cluster")
    return {"engine": od.RayEngine(**ACTOR)}


def rows_of(data: Any, **options: Any) -> tuple[list[int], list[Any], list[str]]:
    """Iterate twice -> rows in the order of delivery, failures, warnings."""
    loader = od.DataLoader(data, batch_size=4, num_workers=1, cost=[1] * 24, on_error=SKIP, **options)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        rows = [row for _ in range(2) for batch in loader for row in batch.tolist()]
    return rows, loader.gather_failures(), [str(each.message) for each in noted]


@pytest.mark.parametrize(
    ("options", "ending"), [({}, ""), ({"timeout": 2}, "timed out after 2 seconds")], ids=["ends", "hangs"]
)
def test_a_sample_that_ends_or_hangs_two_workers_alone_is_a_failure(
    options: dict[str, Any], ending: str, workers: dict[str, Any], tmp_path: Path
) -> None:
    data = Deadly(tmp_path, row=6, times=1000, hangs=bool(options))
    rows, (failure,), notes = rows_of(data, **options, **workers)
    assert rows == [row for row in range(24) if row != 6] * 2  # the second time it is known
    assert failure.key == "6" and f"{ending}, whenever this sample was loaded alone" in str(failure)
    assert any("built again: step 1 of epoch 0" in each for each in notes)


def test_a_sample_that_ends_its_worker_once_is_no_failure(workers: dict[str, Any], tmp_path: Path) -> None:
    rows, failures, notes = rows_of(Deadly(tmp_path, row=6, times=1), **workers)
    assert rows == [*range(24)] * 2 and not failures
    assert sum("built again: step 1 of epoch 0" in each for each in notes) == 1


@pytest.mark.parametrize("num_threads", [0, 1])
def test_a_sample_that_waits_for_storage_has_more_time(
    num_threads: int, workers: dict[str, Any], tmp_path: Path
) -> None:
    data = FromFarStorage(tmp_path, row=6, seconds=8)
    rows, failures, _ = rows_of(data, num_threads=num_threads, timeout=3, **workers)
    assert rows == [*range(24)] * 2 and not failures
    assert len(list(tmp_path.iterdir())) == 2  # its worker is not replaced
