"""`python -m benchmarks.throughput`."""

from __future__ import annotations

from benchmarks.command import run_command
from benchmarks.throughput.run import PeersBench, run

run_command("benchmarks.throughput", PeersBench, run)
