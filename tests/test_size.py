"""The budget of the project: lines and files of each root folder. Raising a number says what it buys."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
BUDGET = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["orchdata"]["size"]


@pytest.mark.parametrize("folder", ["orchdata", "loaders", "balancers", "native", "tests"])
def test_a_folder_is_within_its_budget(folder: str) -> None:
    files = sorted((REPOSITORY / folder).rglob("*.py"))
    lines = sum(len(file.read_bytes().splitlines()) for file in files)
    assert 0 < lines <= BUDGET[folder]["lines"], f"{folder} has {lines} lines"
    assert len(files) <= BUDGET[folder]["files"], f"{folder} has {len(files)} files"
