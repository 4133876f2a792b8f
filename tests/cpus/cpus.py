"""The tests that compare floats, under several instruction sets: `make test-cpus`.

    each set --its variables--> decided_by_integers.py --digests--> equal under all sets
                            --> pytest -m "cpus and not slow" --> passed under each

Further arguments are pytest's, in place of these: `make test-cpus ARGS="tests/loaders"`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from decided_by_integers import differing, prepare
from instruction_sets import instruction_sets

SUPPORT = Path(__file__).resolve().parent.parent / "support"
_CAPABILITY = "import torch; print(torch.backends.cpu.get_cpu_capability())"


def main(arguments: Sequence[str]) -> int:
    """The exit status: 0 where digests are equal and all tests have passed."""
    chosen = list(arguments) or ["-m", "cpus and not slow"]
    sets, failed = instruction_sets(), []
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        digests = {name: _digests(Path(folder), name, variables) for name, variables in sets.items()}
    for name, variables in sets.items():
        capability = _run([sys.executable, "-c", _CAPABILITY], variables).strip()
        print(f"== {name} (torch: {capability}): pytest {' '.join(chosen)}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", *chosen]
        if subprocess.run(command, env=os.environ | variables, check=False).returncode:
            failed.append(name)
    changed = differing(digests)
    print(f"Decided by integers, {len(next(iter(digests.values())))} digests under {', '.join(sets)}:", end=" ")
    print(f"different: {', '.join(changed)}" if changed else "all equal")
    print(f"Tests failed under: {', '.join(failed)}" if failed else "Tests passed under every instruction set")
    return 1 if changed or failed else 0


def _digests(folder: Path, name: str, variables: Mapping[str, str]) -> dict[str, str]:
    cache = {"ORCHDATA_CACHE": str(folder / f"cache-{name}")}
    printed = _run([sys.executable, str(SUPPORT / "decided_by_integers.py"), str(folder)], {**variables, **cache})
    found: dict[str, str] = json.loads(printed)
    return found


def _run(command: Sequence[str], variables: Mapping[str, str]) -> str:
    return subprocess.run(command, env=os.environ | variables, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
