"""The public face: `orchdata.__all__` is what docs/api.md lists, and every name is there when asked for."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path

import pytest

import orchdata

REPOSITORY = Path(__file__).resolve().parents[2]
ROOMS = ("balancers", "hf", "planners", "torchtitan")
NAMES = [name for name in orchdata.__all__ if name not in ROOMS]


def _documented() -> list[str]:
    """Names that begin an item of a list in docs/api.md, written as `od.Name`."""
    return re.findall(r"^- `od\.([\w.]+)", (REPOSITORY / "docs" / "api.md").read_text(), re.MULTILINE)


def test_all_is_what_the_docs_list() -> None:
    in_rooms = [f"{room}.{name}" for room in ROOMS[1:] for name in getattr(orchdata, room).__all__]
    assert sorted([*NAMES, "balancers", *in_rooms]) == sorted(_documented())
    # The program that mypy checks against a wheel uses them all.
    program = (REPOSITORY / "tests" / "support" / "typed_program.py").read_text()
    used = {ast.unparse(node) for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Attribute)}
    assert {f"od.{name}" for name in [*NAMES, *in_rooms]} <= used
    assert len(set(orchdata.__all__)) == len(orchdata.__all__)
    assert set(ROOMS) < set(orchdata.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_public_name_exists_and_says_what_it_is(name: str) -> None:
    value = getattr(orchdata, name)
    assert value.__name__ == name
    assert value.__module__.startswith("orchdata.")
    assert value.__doc__


def test_errors_are_one_tree_and_survive_a_process_border() -> None:
    public = [value for name in NAMES if isinstance(value := getattr(orchdata, name), type)]
    errors = [value for value in public if issubclass(value, BaseException)]
    assert {error.__name__ for error in errors} >= {"OrchdataError", "DataError", "StepError"}
    for error in errors:
        assert issubclass(error, orchdata.OrchdataError)
    given = orchdata.StepError("rank 1 failed at step 2: no room", 2, 1)
    copied = pickle.loads(pickle.dumps(given))
    assert (str(copied), copied.step, copied.rank) == (str(given), 2, 1)
    assert isinstance(copied, RuntimeError)


@pytest.mark.parametrize("stub", ["orchdata/__init__.pyi", *(f"orchdata/{room}/__init__.pyi" for room in ROOMS[1:])])
def test_type_checkers_see_each_name_of_a_stub(stub: str) -> None:
    # In a stub `from .file import name` is private to it; with `as name` it is public.
    imports = [node for node in ast.parse((REPOSITORY / stub).read_text()).body if isinstance(node, ast.ImportFrom)]
    assert imports
    for node in imports:
        assert [alias.asname for alias in node.names] == [alias.name for alias in node.names]


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Dataloader'"):
        orchdata.Dataloader  # noqa: B018


def test_unknown_name_of_a_room_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="input"):
        orchdata.hf.input  # noqa: B018


def test_dir_lists_the_public_names_alone() -> None:
    assert dir(orchdata) == sorted(orchdata.__all__)
    assert dir(orchdata.hf) == sorted(orchdata.hf.__all__)
