"""Functions of the user's: ids from source text, ids that must be given, and errors that name function and line."""

from __future__ import annotations

import importlib.util
import json
import math
import textwrap
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from orchdata.loaders.functions import UserFunction

SCALE = 3


def whole(record: dict[str, Any], most: int = 5) -> Any:
    import re

    words = [re.sub(r"\s", " ", str(word)) for word in record["words"]]
    return {"text": json.dumps(sorted(words)[:most]), "root": math.sqrt(4), "kind": str(np.float32)}


def with_global(record: dict[str, Any]) -> Any:
    return record["x"] * SCALE


def calls_other(record: dict[str, Any]) -> Any:
    return with_global(record)


def with_default(record: dict[str, Any], kinds: Any = np.arange(2)) -> Any:  # noqa: B008
    return kinds


def of_own_module(record: dict[str, Any]) -> Any:
    import shard_factory

    return shard_factory


class Callable:
    def __call__(self, record: dict[str, Any]) -> Any:
        return record

    def method(self, record: dict[str, Any]) -> Any:
        return record


def function_of(text: str, folder: Path, name: str = "made") -> Any:
    """The function `f` of a module with this text."""
    path = folder / f"{name}.py"
    path.write_text(textwrap.dedent(text))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.f


def identity(function: Any, given: str | None = None) -> str:
    return UserFunction.of("Recipe.record", function, given).id


def test_function_that_uses_builtins_and_packages_has_an_id_of_its_source() -> None:
    assert identity(whole) == identity(whole)
    assert identity(whole).startswith("source:")
    assert identity(whole, "v1") == "v1"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (with_global, "it uses SCALE, which is defined outside of it"),
        (calls_other, "it uses with_global, which is defined outside of it"),
        (with_default, "default that is no string or number"),
        (of_own_module, "it imports shard_factory, which is code of your own"),
        (lambda record: record, "a lambda has no source text of its own"),
        (partial(whole, most=2), "it is a partial"),
        (Callable(), "it is a Callable"),
    ],
)
def test_function_that_its_source_does_not_describe_needs_an_id(function: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        identity(function)
    assert 'record_id="..."' in str(caught.value)
    assert identity(function, "mine") == "mine"


def test_id_follows_the_source_and_the_modules_that_it_names(tmp_path: Path) -> None:
    text = "import {} as m\n\ndef f(record):\n    return m.dumps(record)\n"
    first = function_of(text.format("json"), tmp_path, "a")
    assert identity(first) == identity(function_of(text.format("json"), tmp_path, "b"))
    assert identity(first) != identity(function_of(text.format("pickle"), tmp_path, "c"))
    changed = text.format("json").replace("dumps(record)", "dumps([record])")
    assert identity(first) != identity(function_of(changed, tmp_path, "d"))
