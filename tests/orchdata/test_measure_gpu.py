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
import torch

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


def steps_of(entry: dict[str, Any], lane: str) -> list[dict[str, dict[str, np.ndarray]]]:
    return [
        {kind: {phase: np.array(cell) for phase, cell in cells.items()} for kind, cells in step.items()}
        for step in entry["lanes"][lane]["cells"]
    ]


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


@pytest.mark.slow
def test_all_lanes_run_the_same_samples(report: dict[str, Any]) -> None:
    for entry in report["plans"]:
        for phase in ("image", "llm"):
            for kind in ("positions", "predicted"):
                totals = [[step[kind][phase].sum() for step in steps_of(entry, lane)] for lane in entry["lanes"]]
                assert sum(totals[0]) > 0
                np.testing.assert_allclose(totals, [totals[0]] * 4, rtol=1e-9)


@pytest.mark.slow
def test_step_times_follow_from_the_cells(report: dict[str, Any]) -> None:
    for entry in report["plans"]:
        for name, lane in entry["lanes"].items():
            for number, step in enumerate(steps_of(entry, name)):
                for kind in ("measured", "predicted"):
                    image, llm = step[kind]["image"], step[kind]["llm"]
                    assert image.shape == llm.shape
                    assert image.shape[0] == entry["ranks"]
                    assert ((image > 0) == (step["positions"]["image"] > 0)).all()
                    after_each = image.max(axis=0).sum() + llm.max(axis=0).sum()
                    at_end = (image + llm).sum(axis=1)
                    assert lane[f"{kind}_seconds"][number] == pytest.approx(after_each)
                    assert lane[f"{kind}_seconds_waiting_at_end"][number] == pytest.approx(at_end.max())
                    assert lane[f"{kind}_mean_seconds"][number] == pytest.approx(at_end.mean())
            measured, predicted = sum(lane["measured_seconds"]), sum(lane["predicted_seconds"])
            none = entry["lanes"]["none"]
            assert lane["predicted_over_measured"] == pytest.approx(predicted / measured)
            assert lane["gain_measured"] == pytest.approx(sum(none["measured_seconds"]) / measured)
            assert lane["gain_predicted"] == pytest.approx(sum(none["predicted_seconds"]) / predicted)


def test_one_more_microbatch_where_the_cap_asks_for_it(script: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    script.main(
        ["--tiny", "--ranks", "2", "--steps", "1", "--max-tokens", "1024", "--no-checkpoint", "--out", str(path)]
    )
    (entry,) = json.loads(path.read_text())["plans"]
    for name in entry["lanes"]:
        (step,) = steps_of(entry, name)
        assert step["positions"]["llm"].shape[1] > 1
        assert step["positions"]["llm"].max() <= 1024  # Samples of more tokens are left out.


def test_the_full_models_have_the_stated_sizes(script: ModuleType) -> None:
    with torch.device("meta"):
        models = [
            script.PhaseModel(script.SIZES[phase], vocab, checkpointed=True, varlen=False)
            for phase, vocab in (("image", None), ("llm", script.VOCAB))
        ]
    image, llm = (sum(parameter.numel() for parameter in model.parameters()) for model in models)
    assert 0.6e9 < image < 0.65e9
    assert 1.5e9 < llm < 1.6e9


def test_steps_are_one_number_or_one_for_each_number_of_ranks(script: ModuleType) -> None:
    with pytest.raises(SystemExit):
        script.parse(["--ranks", "2", "4", "8", "--steps", "1", "2"])
