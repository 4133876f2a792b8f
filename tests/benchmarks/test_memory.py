"""`python -m benchmarks.memory` at tiny sizes: which process is the trainer, which a worker, and what they use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from children import in_a_child

from benchmarks.memory.job import MemoryJob, measure
from benchmarks.memory.run import MemoryBench, run

MIB = 2**20
WORKER = "import sys; used = bytearray(b'x') * (int(sys.argv[1]) << 20); print(flush=True); sys.stdin.read()"


def job(tmp_path: Path, batches: int = 2) -> MemoryJob:
    return MemoryJob(sources=(), folder=tmp_path, batch_size=4, batches=batches, workers=1, seed=0)


def with_a_worker_of(mib: int) -> Generator[int]:
    """A loader with one worker process, which has allocated so much when the first batch comes."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", WORKER, str(mib)], **pipes) as worker:  # type: ignore[call-overload]
        worker.stdout.readline()
        yield 4
        yield 4
        worker.communicate()


def test_memory_of_a_worker_is_its_own(tmp_path: Path) -> None:
    def check() -> None:
        large, small = (measure(lambda _, size=size: with_a_worker_of(size), job(tmp_path)) for size in (64, 1))
        (large_worker,), (small_worker,) = large.workers, small.workers
        assert 62 * MIB < large_worker.own - small_worker.own < 66 * MIB
        assert abs(large.trainer.own - small.trainer.own) < 16 * MIB
        assert large.together.pss >= large.trainer.pss + large_worker.pss

    in_a_child(check)  # which has no other children, as a process of many tests may have


def test_a_loader_with_too_few_samples_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="8 samples came in place of 12"):
        measure(lambda _: with_a_worker_of(1), job(tmp_path, batches=3))


@pytest.mark.slow
def test_the_command_reads_mixtures() -> None:
    memory, settings = run(MemoryBench(sources="1,3", peers="none", batch_size=4, batches=3))
    lanes = ["orchdata, threads", "orchdata, processes", "orchdata, forked"]
    assert [row[:2] for row in memory.rows] == [(name, number) for number in ("1", "3") for name in lanes]
    assert [row[0] for row in settings.rows] == lanes
    for name, _, *figures in memory.rows:
        assert [cell is None for cell in figures] == [False, False, *[name == "orchdata, threads"] * 2, False]
        assert all(float(cell) > 1 for cell in figures if cell is not None)
