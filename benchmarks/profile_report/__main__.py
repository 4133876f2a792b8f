"""`python -m benchmarks.profile_report`."""

from __future__ import annotations

from benchmarks.command import run_command
from benchmarks.profile_report.run import ProfileReportBench, run

run_command("benchmarks.profile_report", ProfileReportBench, run)
