"""`scripts/path_of_a_step.py`: lines are counted as it says, and a step enters what it must."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "path_of_a_step.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = spec_from_file_location("path_of_a_step", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["path_of_a_step"] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def test_a_docstring_is_not_counted_and_a_function_inside_is(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, body = '@cache\n@other\ndef outer():\n    """Two\n    lines."""\n', "    def inner():\n        return 1\n"
    (tmp_path / "a.py").write_text(f"{head}{body}\n    return inner\n")
    monkeypatch.setattr(script, "REPOSITORY", tmp_path)
    outer, inner = script.functions(tmp_path / "a.py")
    assert (outer.name, outer.first, outer.lines) == ("outer", 1, 5)  # 7 lines from `def`, 2 of them its docstring
    assert (inner.name, inner.first, inner.lines) == ("inner", 6, 2)


def test_a_step_enters_the_loop_the_plan_and_the_builder(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHDATA_CACHE", "")  # the script sets it, for its process alone
    before = sys.getprofile()
    _, entered = script.entered_by_a_step(constructor=False)
    assert sys.getprofile() is before
    written = {(each.file, each.first): each.name for path in script.python_files() for each in script.functions(path)}
    names = {(file, written[file, first]) for file, first in entered if (file, first) in written}
    assert {
        ("orchdata/dataloader.py", "__iter__"),
        ("orchdata/planning/plan.py", "make_plan"),
        ("orchdata/engines/engine.py", "submit"),
        ("orchdata/building/step.py", "build"),
    } <= names
    assert ("orchdata/dataloader.py", "__init__") not in names
