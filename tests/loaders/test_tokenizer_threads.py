"""Worker processes share the cores, and a fork of a process with threads of `tokenizers` neither waits nor warns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")

JOB = Path(__file__).parents[1] / "support" / "tokenizer_threads_job.py"
CORES = len(os.sched_getaffinity(0))
SHARE = max(1, CORES // 2)


UNSET = ({}, "None", SHARE, SHARE)
TRUE = ({"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "3"}, "true", 3, 3)
FALSE = ({"TOKENIZERS_PARALLELISM": "false"}, "false", SHARE, 0)


CASES = {
    "fork": ("fork", *UNSET),
    "fork-true": ("fork", *TRUE),
    "forkserver": ("forkserver", *UNSET),
    "forkserver-true": ("forkserver", *TRUE),
    "spawn": ("spawn", *UNSET),
    "spawn-false": ("spawn", *FALSE),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """Exit code, stdout and stderr of each case."""
    environment = {
        name: value for name, value in os.environ.items() if "TOKENIZERS" not in name and "RAYON" not in name
    }
    environment["PYTHONPATH"] = str(JOB.parent)
    cases = json.dumps([case[:2] for case in CASES.values()])
    done = subprocess.run(
        [sys.executable, str(JOB), cases, str(tmp_path_factory.mktemp("cases"))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_workers_share_the_cores_and_forks_go_on(case: str, outcomes: dict[str, tuple[int, str, str]]) -> None:
    start_method, _, used, count, started = CASES[case]
    code, out, err = outcomes[case]
    assert code == 0, err
    assert "forked" not in err
    lines = out.split("\n")
    in_workers = f"false {count} 0" if start_method == "fork" else f"{used} {count} {started}"  # none survive a fork
    assert lines.count(f"worker {in_workers}") == 2, out
    assert "batches 10" in lines and "fork false" in lines and f"program {used}" in lines
