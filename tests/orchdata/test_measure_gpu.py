"""`scripts/measure_gpu.py --tiny`: what it writes agrees with itself; nothing about time is asserted."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from orchdata.balancers import PhaseCost

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_gpu.py"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, str(SCRIPT.parent))  # as where it is run by its path
    spec = importlib.util.spec_from_file_location("measure_gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["measure_gpu"] = module  # Dataclasses look themselves up there.
    spec.loader.exec_module(module)
    yield module
    del sys.modules["measure_gpu"]
    sys.path.remove(str(SCRIPT.parent))


@pytest.fixture(scope="module")
def report(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("gpu") / "gpu.json"
    script.main(["--tiny", "--out", str(path)])
    parsed: dict[str, Any] = json.loads(path.read_text())
    return parsed


@pytest.mark.slow
def test_the_report_says_what_was_run(report: dict[str, Any]) -> None:
    assert report["command"].startswith("python scripts/measure_gpu.py --tiny")
    assert [(entry["ranks"], entry["steps"]) for entry in report["plans"]] == [(2, 2), (4, 1)]
    assert all(list(entry["lanes"]) == ["none", "llm_only", "joint", "per_phase"] for entry in report["plans"])
    assert "one device" in report["not_measured"]
    assert {"device", "attention", "cores", "packages"} <= set(report["machine"])
    assert set(report["data"]["positions_per_sequence"]) == {"image", "llm"}


@pytest.mark.slow
def test_the_residual_is_that_of_the_reported_measurements(report: dict[str, Any]) -> None:
    for fit in report["fits"].values():
        cost = PhaseCost(**fit["seconds_per_sequence"])
        errors = []
        for measured in fit["measurements"]:
            assert measured["fit"] == pytest.approx(measured["sequences"] * cost.at(measured["length"]))
            errors.append(measured["fit"] / np.median(measured["seconds"]) - 1)
        assert fit["residual"] == pytest.approx(np.sqrt(np.mean(np.square(errors))))
