"""The public face: `orchdata.__all__` is what docs/api.md lists, and every name is there when asked for."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path

import pytest

import orchdata

REPOSITORY = Path(__file__).resolve().parents[2]


def _documented() -> list[str]:
    """Names of the first column of the tables in docs/api.md, written as `od.Name`."""
    return re.findall(r"^\| `od\.([\w.]+)", (REPOSITORY / "docs" / "api.md").read_text(), re.MULTILINE)


def test_all_is_what_the_docs_list() -> None:
    rooms = [f"{room}.{name}" for room in ("hf", "torchtitan") for name in getattr(orchdata, room).__all__]
    own = [*orchdata.__all__, *rooms]
    assert sorted(own) == sorted(_documented())
    assert len(set(orchdata.__all__)) == len(orchdata.__all__)


@pytest.mark.parametrize("name", orchdata.__all__)
def test_public_name_exists_and_says_what_it_is(name: str) -> None:
    value = getattr(orchdata, name)
    assert value.__name__ == name
    assert value.__module__.startswith("orchdata.")
    assert value.__doc__


def test_errors_are_one_tree_and_survive_a_process_border() -> None:
    public = [value for name in orchdata.__all__ if isinstance(value := getattr(orchdata, name), type)]
    errors = [value for value in public if issubclass(value, BaseException)]
    assert {error.__name__ for error in errors} >= {"OrchdataError", "DataError", "StepError"}
    for error in errors:
        assert issubclass(error, orchdata.OrchdataError)
    given = orchdata.StepError("rank 1 failed at step 2: no room", 2, 1)
    copied = pickle.loads(pickle.dumps(given))
    assert (str(copied), copied.step, copied.rank) == (str(given), 2, 1)
    assert isinstance(copied, RuntimeError)


def test_type_checkers_see_the_names_that_are_loaded_late() -> None:
    tree = ast.parse(Path(orchdata.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: str(node.module) for node in block.body for alias in node.names}
    assert seen == orchdata._HOMES
    assert set(seen) == set(orchdata.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Dataloader'"):
        orchdata.Dataloader  # noqa: B018


def test_dir_lists_the_public_names() -> None:
    assert set(orchdata.__all__) <= set(dir(orchdata))
