"""`python -m benchmarks.resume`."""

from __future__ import annotations

from benchmarks.command import run_command
from benchmarks.resume.run import ResumeBench, run

run_command("benchmarks.resume", ResumeBench, run)
