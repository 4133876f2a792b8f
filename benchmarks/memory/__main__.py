"""`python -m benchmarks.memory`."""

from __future__ import annotations

from benchmarks.command import run_command
from benchmarks.memory.run import MemoryBench, run

run_command("benchmarks.memory", MemoryBench, run)
