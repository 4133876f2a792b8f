"""`python -m benchmarks.balance`."""

from __future__ import annotations

from benchmarks.balance.run import BalanceBench, run
from benchmarks.command import run_command

run_command("benchmarks.balance", BalanceBench, run)
