"""`scripts/public_scripts.py`: only the import is changed, and what differs is seen. No script runs here."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "public_scripts.py"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("public_scripts", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["public_scripts"] = module  # Dataclasses look themselves up there.
    spec.loader.exec_module(module)
    yield module
    del sys.modules["public_scripts"]


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
        (
            "from torch.utils.data import Dataset, DistributedSampler",
            "from torch.utils.data import Dataset, DistributedSampler",
        ),
    ],
)
def test_nothing_is_changed_but_the_import(script: ModuleType, line: str, changed: str) -> None:
    around = "import os\n{}\nfor batch in loader:\n    step(batch)\n"
    assert script.with_our_loader(around.format(line)) == around.format(changed)


def ran(script: ModuleType, **changed: Any) -> Any:
    record = {"losses": [2.0, 1.5], "inputs": [7.0, 8.0, 9.0], "training": 2, "evaluation": 1, "error": ""}
    return script.Ran([record, record | changed], "")


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
def test_differences_are_reported(script: ModuleType, changed: dict[str, Any], said: str) -> None:
    assert script.difference(ran(script), ran(script, **changed)) == said
    if changed:
        assert script.difference(ran(script, error="ValueError: no"), ran(script)) == "does not run with torch's loader"
