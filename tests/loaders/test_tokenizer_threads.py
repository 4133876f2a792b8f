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
    "spawn-false": ("spawn", *FALSE),
}


def outcomes(folder: Path) -> dict[str, tuple[int, str, str]]:
    """Exit code, stdout and stderr of each case."""
    environment = {
        name: value for name, value in os.environ.items() if "TOKENIZERS" not in name and "RAYON" not in name
    }
    environment["PYTHONPATH"] = str(JOB.parent)
    cases = json.dumps([case[:2] for case in CASES.values()])
    done = subprocess.run(
        [sys.executable, str(JOB), cases, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.slow
def test_workers_share_the_cores_and_forks_go_on(tmp_path: Path) -> None:
    for case, (code, out, err) in outcomes(tmp_path).items():
        start_method, _, used, count, started = CASES[case]
        assert code == 0, err
        assert "forked" not in err
        lines = out.split("\n")
        in_workers = (
            f"false {count} 0" if start_method == "fork" else f"{used} {count} {started}"
        )  # none survive a fork
        assert {line for line in lines if line.startswith("worker")} == {f"worker {in_workers}"}, (case, out)
        assert "batches 10" in lines and "fork false" in lines and f"program {used}" in lines, (case, out)
