"""Worker processes share the cores, and a fork of a process with threads of `tokenizers` neither waits nor warns."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("start_method", "given", "used", "count", "started"),
    [
        ("fork", *UNSET),
        ("fork", *TRUE),
        ("forkserver", *UNSET),
        ("forkserver", *TRUE),
        ("spawn", *UNSET),
        ("spawn", *FALSE),
    ],
    ids=["fork", "fork-true", "forkserver", "forkserver-true", "spawn", "spawn-false"],
)
def test_workers_share_the_cores_and_forks_go_on(start_method, given, used, count, started, tmp_path):
    environment = {
        name: value for name, value in os.environ.items() if "TOKENIZERS" not in name and "RAYON" not in name
    }
    environment |= {"ORCHDATA_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(JOB.parent)} | given
    done = subprocess.run(
        [sys.executable, str(JOB), start_method, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "forked" not in done.stderr
    lines = done.stdout.split("\n")
    in_workers = f"false {count} 0" if start_method == "fork" else f"{used} {count} {started}"  # none survive a fork
    assert lines.count(f"worker {in_workers}") == 2, done.stdout
    assert "batches 10" in lines and "fork false" in lines and f"program {used}" in lines
