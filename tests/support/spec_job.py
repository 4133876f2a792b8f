"""Builds steps of pickled specs in a fresh process: `python spec_job.py FOLDER` prints name -> digests of steps."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

from digests import digest

import orchdata as od
from orchdata.building.step import BuiltStep


def delivered(built: BuiltStep) -> str:
    """A digest of all that a step delivers."""
    return digest([built.plan, built.batches, [failure.args for failure in built.failures]])


def words(text: str) -> list[int]:
    """A tokenizer that is found by its name."""
    return [len(word) for word in text.split()]


def decoded(samples: list[od.Sample], *, step: od.StepInfo) -> list[Any]:
    """A collate_fn that keeps all it gets."""
    return [step, samples]


def main(folder: Path) -> dict[str, list[str]]:
    found = {}
    for path in sorted(folder.iterdir()):
        spec, tasks = pickle.loads(path.read_bytes())
        builder = pickle.loads(spec).open()
        found[path.name] = [delivered(builder.build(task)) for task in tasks]
    return found


if __name__ == "__main__":
    # What the parent knows by the module's name is not to be a second thing here.
    from spec_job import main as named_main

    print(json.dumps(named_main(Path(sys.argv[1]))))
