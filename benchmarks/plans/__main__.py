"""`python -m benchmarks.plans`."""

from __future__ import annotations

from benchmarks.command import run_command
from benchmarks.plans.run import PlansBench, run

run_command("benchmarks.plans", PlansBench, run)
