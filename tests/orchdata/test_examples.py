"""The programs in examples/ run as their docstrings say."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from orchdata.synth import OMNI, synthesize

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("omni")
    synthesize(OMNI, folder, samples=40)
    return folder


def test_train_resumes_and_runs_on_two_ranks(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ORCHDATA_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(REPOSITORY)
    train = import_module("examples.train").main
    options = [f"{shards}/*.tar", "--global-batch-size", "8", "--max-tokens", "3000", "--checkpoint"]

    def run(name: str, steps: int) -> list[str]:
        train([*options, str(tmp_path / name), "--steps", str(steps)])
        return capsys.readouterr().out.splitlines()

    whole = run("whole.pt", 6)
    assert len(whole) == 6  # five steps an epoch: 40 samples by 8
    assert run("part.pt", 3) + run("part.pt", 6) == whole

    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [str(REPOSITORY / part) for part in ("tests/support/run_program.py", "examples/train.py")]
    script = [*program, *options, str(tmp_path / "two.pt"), "--steps", "6"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launcher, *script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    two = done.stdout.splitlines()
    assert [loss_of(line) for line in two] == pytest.approx([loss_of(line) for line in whole], rel=1e-3)
    more = [loss_of(line) for line in run("two.pt", 8)]  # one rank goes on where two stopped
    assert more == pytest.approx([loss_of(line) for line in run("whole.pt", 8)], rel=1e-3)


def loss_of(line: str) -> float:
    """4.25 of `step 1: loss 4.2500, 8 samples`."""
    return float(line.split()[3].rstrip(","))
