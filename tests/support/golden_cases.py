"""Golden cases: values that the library gave when they were stored, next to their test in `tests/orchdata/golden`.

    PYTHONPATH=tests/support .venv/bin/python tests/support/golden_cases.py NAME...

makes the cases of these names again and leaves all others unchanged. A name may be a pattern, as 'plan, *'. A case
that no longer exists is removed by its name. Recipes, which many states have, are stored once.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from copy import deepcopy
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from golden_batches import BATCHES, PLANS, counts, fingerprints, floats
from golden_data import GoldenData
from golden_states import STATES

PATH = Path(__file__).resolve().parents[1] / "orchdata" / "golden" / "golden.json"
CASES: dict[str, Callable[[GoldenData], Any]] = {
    **{f"state, {name}": case.stored for name, case in STATES.items()},
    **{f"plan, {name}": case.stored for name, case in PLANS.items()},
    **{f"batch, {name}": case.stored for name, case in BATCHES.items()},
    "floats": floats,
    "counts": counts,
    "fingerprints": fingerprints,
}
_WIDTH = 120
_DEEP = 4
_RECIPE, _RECIPES = "recipe", "recipes"


def read() -> dict[str, Any]:
    """The stored cases by name."""
    return _unpacked(PATH.read_text()) if PATH.exists() else {}


def as_text(cases: dict[str, Any]) -> str:
    """The content of the file: in the order of `CASES`, so that a change of one case changes its lines alone."""
    recipes: dict[str, Any] = {}
    packed = {name: _packed(cases[name], recipes) for name in CASES if name in cases}
    return _laid_out({_RECIPES: dict(sorted(recipes.items())), **packed}, "") + "\n"


def _packed(value: Any, recipes: dict[str, Any]) -> Any:
    """A value whose recipes are names in `recipes`."""
    if isinstance(value, list):
        return [_packed(each, recipes) for each in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for key, each in value.items():
        if key == _RECIPE and isinstance(each, dict):
            name = hashlib.blake2b(json.dumps(each).encode(), digest_size=4).hexdigest()
            recipes[name] = each
            found[key] = f"{_RECIPES}/{name}"
        else:
            found[key] = _packed(each, recipes)
    return found


def _unpacked(text: str) -> dict[str, Any]:
    cases: dict[str, Any] = json.loads(text)
    recipes = {f"{_RECIPES}/{name}": each for name, each in cases.pop(_RECIPES, {}).items()}

    def unpacked(value: Any) -> Any:
        if isinstance(value, list):
            return [unpacked(each) for each in value]
        if not isinstance(value, dict):
            return value
        return {
            key: deepcopy(recipes[each]) if isinstance(each, str) and each in recipes else unpacked(each)
            for key, each in value.items()
        }

    return {name: unpacked(each) for name, each in cases.items()}


def _laid_out(value: Any, indent: str) -> str:
    """JSON with what fits into a line on one line, and deep inside what has no other values in it."""
    line = json.dumps(value)
    fits = len(indent) + len(line) < _WIDTH and indent
    is_plain = isinstance(value, dict) and not any(isinstance(each, dict) for each in value.values())
    if not isinstance(value, dict | list) or fits or (len(indent) >= _DEEP and is_plain):
        return line
    inner = indent + " "
    if isinstance(value, list):
        return "[\n" + ",\n".join(f"{inner}{_laid_out(each, inner)}" for each in value) + f"\n{indent}]"
    entries = (f"{inner}{json.dumps(name)}: {_laid_out(each, inner)}" for name, each in value.items())
    return "{\n" + ",\n".join(entries) + f"\n{indent}}}"


def main(patterns: Sequence[str]) -> int:
    """The exit status: 1 where a name is no case."""
    cases = read()
    known = {*CASES, *cases}
    unknown = [each for each in patterns if not any(fnmatchcase(name, each) for name in known)]
    if unknown or not patterns:
        print(f"no such cases: {unknown}. There are:", *CASES, sep="\n  ")
        return 1
    asked = {name for name in known for each in patterns if fnmatchcase(name, each)}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ORCHDATA_CACHE"] = f"{folder}/cache"
        data = GoldenData(Path(folder) / "shards")
        for name in sorted(asked):
            old = cases.pop(name, None)
            if name in CASES:
                cases[name] = CASES[name](data)
            print("removed" if name not in CASES else "the same" if cases[name] == old else "written", name)
    PATH.write_text(as_text(cases))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
