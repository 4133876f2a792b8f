"""`python -m benchmarks.train`."""

from __future__ import annotations

from benchmarks.command import run_command
from benchmarks.train.run import TrainBench, run

run_command("benchmarks.train", TrainBench, run)
