"""Golden cases: values that the library gave when they were stored, next to their test in `tests/orchdata/golden`.

    PYTHONPATH=tests/support .venv/bin/python tests/support/golden_cases.py NAME...

makes the cases of these names again and leaves all others unchanged. A name may be a pattern, as 'plan, *'. A case
that no longer exists is removed by its name.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from golden_batches import BATCHES, PLANS, assigned, counts, fingerprints, floats, sizes
from golden_data import GoldenData
from golden_states import STATES

PATH = Path(__file__).resolve().parents[1] / "orchdata" / "golden" / "golden.json"
CASES: dict[str, Callable[[GoldenData], Any]] = {
    **{f"state, {name}": case.stored for name, case in STATES.items()},
    **{f"plan, {name}": case.stored for name, case in PLANS.items()},
    **{f"batch, {name}": case.stored for name, case in BATCHES.items()},
    "floats": floats,
    "counts": counts,
    "sizes": sizes,
    "assigned": assigned,
    "fingerprints": fingerprints,
}


def read() -> dict[str, Any]:
    """The stored cases by name."""
    return json.loads(PATH.read_text()) if PATH.exists() else {}


def as_text(cases: dict[str, Any]) -> str:
    """The content of the file: in the order of `CASES`, a line each, so that a change of one case changes one line."""
    lines = [f"{json.dumps(name)}: {json.dumps(cases[name])}" for name in CASES if name in cases]
    return "{\n" + ",\n".join(lines) + "\n}\n"


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
