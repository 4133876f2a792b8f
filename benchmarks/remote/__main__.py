"""`python -m benchmarks.remote`."""

from __future__ import annotations

from benchmarks.command import run_command
from benchmarks.remote.run import RemotePeersBench, run

run_command("benchmarks.remote", RemotePeersBench, run)
