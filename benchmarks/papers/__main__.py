"""`python -m benchmarks.papers`."""

from __future__ import annotations

from benchmarks.command import run_command
from benchmarks.papers.run import PapersBench, run

run_command("benchmarks.papers", PapersBench, run)
