"""Scripts of the repository, as modules."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from orchdata.balancers import PhaseCost

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def script(name: str) -> ModuleType:
    """A script of that file, imported as where it is run by its path."""
    spec = importlib.util.spec_from_file_location(f"script_{name}", SCRIPTS / f"{name}.py")
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        spec.loader.exec_module(module)
    return module


# `scripts/path_of_a_step.py`: lines are counted as it says, and a step enters what it must.


@pytest.fixture(scope="module")
def path_of_a_step() -> ModuleType:
    return script("path_of_a_step")


def test_a_docstring_is_not_counted_and_a_function_inside_is(
    path_of_a_step: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, body = '@cache\n@other\ndef outer():\n    """Two\n    lines."""\n', "    def inner():\n        return 1\n"
    (tmp_path / "a.py").write_text(f"{head}{body}\n    return inner\n")
    monkeypatch.setattr(path_of_a_step, "REPOSITORY", tmp_path)
    outer, inner = path_of_a_step.functions(tmp_path / "a.py")
    assert (outer.name, outer.first, outer.lines) == ("outer", 1, 5)  # 7 lines from `def`, 2 of them its docstring
    assert (inner.name, inner.first, inner.lines) == ("inner", 6, 2)


@pytest.mark.slow
def test_a_step_enters_the_loop_the_plan_and_the_builder(path_of_a_step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHDATA_CACHE", "")  # the script sets it, for its process alone
    before = sys.getprofile()
    _, entered = path_of_a_step.entered_by_a_step(constructor=False)
    assert sys.getprofile() is before
    files = [path for path in path_of_a_step.python_files() if path.stem in ("dataloader", "plan", "engine", "step")]
    written = {(each.file, each.first): each.name for path in files for each in path_of_a_step.functions(path)}
    names = {(file, written[file, first]) for file, first in entered if (file, first) in written}
    assert {
        ("orchdata/dataloader.py", "__iter__"),
        ("orchdata/planning/plan.py", "make_plan"),
        ("orchdata/engines/engine.py", "submit"),
        ("orchdata/building/step.py", "build"),
    } <= names
    assert ("orchdata/dataloader.py", "__init__") not in names


# `scripts/plain_torchaudio.py`: torchaudio is imported without its compiled libraries, where torch has no CUDA.


USE = "import torchaudio; print(torchaudio.decorated(3), torchaudio.available)"


@pytest.mark.slow
def test_what_is_written_in_python_is_there_without_the_libraries(tmp_path: Path) -> None:
    package = tmp_path / "torchaudio"
    (package / "_extension").mkdir(parents=True)
    (package / "_extension" / "__init__.py").write_text("raise OSError('libcudart.so.13')\n")
    (package / "__init__.py").write_text(
        "from torchaudio._extension import _IS_ALIGN_AVAILABLE as available, fail_if_no_align\n"
        "@fail_if_no_align\n"
        "def decorated(value): return value\n"
    )
    status, said = used(tmp_path, "-S")
    assert status and "libcudart.so.13" in said  # as it is without the script
    (tmp_path / "sitecustomize.py").write_text(script("plain_torchaudio").MODULE)
    status, said = used(tmp_path)
    assert (status, said) == (0, "3 False") if torch.version.cuda is None else status


def used(folder: Path, *options: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *options, "-c", USE],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    return done.returncode, (done.stdout + done.stderr).strip().splitlines()[-1]


# `scripts/public_scripts.py`: only the import is changed, and what differs is seen. No script runs here.


@pytest.fixture(scope="module")
def public_scripts() -> ModuleType:
    return script("public_scripts")


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("from torch.utils.data import DataLoader", "from orchdata import DataLoader"),
        ("from torch.utils.data.dataloader import DataLoader", "from orchdata import DataLoader"),
        (
            "from torch.utils.data import Dataset, DataLoader",
            "from torch.utils.data import Dataset\nfrom orchdata import DataLoader",
        ),
        (
            "from torchdata.stateful_dataloader import StatefulDataLoader",
            "from orchdata import DataLoader as StatefulDataLoader",
        ),
        (
            "import torch\nloader = torch.utils.data.DataLoader(data)",
            "import torch\nimport orchdata\nloader = orchdata.DataLoader(data)",
        ),
        ("from torch.utils.data import DistributedSampler", "from torch.utils.data import DistributedSampler"),
    ],
)
def test_nothing_is_changed_but_the_import(public_scripts: ModuleType, line: str, changed: str) -> None:
    around = "import os\n{}\nfor batch in loader:\n    step(batch)\n"
    assert public_scripts.with_our_loader(around.format(line)) == around.format(changed)


def ran(public_scripts: ModuleType, **changed: Any) -> Any:
    record = {"losses": [2.0, 1.5], "inputs": [7.0, 8.0, 9.0], "training": 2, "evaluation": 1, "error": ""}
    return public_scripts.Ran([record, record | changed], "")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "nothing: every input and loss is the same to the bit"),
        ({"inputs": [7.0, 8.5, 9.5]}, "inputs of rank 1: 2 of 3, the first is number 1"),
        ({"losses": [2.0, 1.25]}, "losses of rank 1: 1 of 2, the first is number 1"),
        ({"evaluation": 0}, "batches of rank 1"),
        ({"error": "ValueError: no"}, "refused or failed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_differences_are_reported(public_scripts: ModuleType, changed: dict[str, Any], said: str) -> None:
    assert public_scripts.difference(ran(public_scripts), ran(public_scripts, **changed)) == said
    if changed:
        assert (
            public_scripts.difference(ran(public_scripts, error="ValueError: no"), ran(public_scripts))
            == "does not run with torch's loader"
        )


# `scripts/measure_gpu.py`: with `--tiny`, what it writes agrees with itself; nothing about time is asserted.


@pytest.fixture(scope="module")
def measure_gpu() -> ModuleType:
    return script("measure_gpu")


@pytest.fixture(scope="module")
def report(measure_gpu: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("gpu") / "gpu.json"
    measure_gpu.main(["--tiny", "--out", str(path)])
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
