"""Workers that cannot start, and loaders that are ended: a clear error, and nothing remains."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lean_job
import pytest
from children import in_a_child
from shard_factory import RECIPE, omni_shards

import orchdata as od
from orchdata.engines.processes import engine


class Plain:
    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> Any:
        return number


class NotUnpicklable(Plain):
    """Pickles, and cannot be unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _fail_to_unpickle, ("it is of another world",)


def _fail_to_unpickle(reason: str) -> None:
    raise LookupError(reason)


class NotReadNow(Plain):
    """Unpickling it meets a file that cannot be read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _fail_to_read, ()


def _fail_to_read() -> None:
    raise od.StorageError("/mnt/arrays/1.int64", "cannot be mapped: Stale file handle", errno.ESTALE)


COSTS: dict[str, Any] = {"cost": [1] * 12}


def _fail(number: int) -> None:
    raise ZeroDivisionError


def test_a_data_set_that_does_not_unpickle_is_an_immediate_error() -> None:
    loader = od.DataLoader(NotUnpicklable(), 4, num_workers=2, multiprocessing_context="forkserver", **COSTS)
    with pytest.raises(RuntimeError, match=r"LookupError: it is of another world\).*multiprocessing_context='fork'"):
        list(loader)


def test_a_file_that_a_starting_worker_cannot_read_is_a_storage_error() -> None:
    loader = od.DataLoader(NotReadNow(), 4, num_workers=1, multiprocessing_context="forkserver", **COSTS)
    with pytest.raises(od.StorageError, match=r"/mnt/arrays/1\.int64: cannot be mapped: Stale file handle"):
        list(loader)


def test_failed_starts_leave_no_descriptor() -> None:
    """Counted in a process of its own: no loader of another test ends there meanwhile."""

    def after() -> list[str]:
        with pytest.raises(ZeroDivisionError):
            list(
                od.DataLoader(Plain(), 2, num_workers=2, worker_init_fn=_fail, multiprocessing_context="fork", **COSTS)
            )
        for process in multiprocessing.active_children():
            process.join()  # on a busy machine a process may end after its loader has stopped waiting for it
        gc.collect()
        return sorted(os.listdir("/proc/self/fd"), key=int)

    def fail_again() -> None:
        first = after()
        assert [after() for _ in range(2)] == [first, first]

    in_a_child(fail_again)


@pytest.mark.timeout(60)
def test_starts_that_fail_with_their_server_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a fork server ended during the start."""
    starts = itertools.count()

    class Lost(engine.Process):
        def __init__(self, *arguments: Any) -> None:
            if next(starts) in (0, 2, 3):
                raise EOFError("unexpected EOF")
            super().__init__(*arguments)

    monkeypatch.setattr(engine, "Process", Lost)
    loader = od.DataLoader(Plain(), 2, num_workers=2, multiprocessing_context="fork", **COSTS)
    assert [batch.tolist() for batch in loader] == [[first, first + 1] for first in range(0, 12, 2)]
    assert next(starts) == 3 + 2


@pytest.mark.slow
def test_with_worker_processes_a_loader_loads_no_compiler(tmp_path: Path) -> None:
    """The compiler takes 40 MiB in each process; only with threads does this process call kernels."""
    od.ShardDataset(omni_shards(tmp_path, shards=1, samples=6), recipe=RECIPE).index()
    command = [sys.executable, lean_job.__file__, tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert json.loads(ended.stdout) == {
        "processes": {"samples": 6, "numba": False},
        "threads": {"samples": 6, "numba": True},
    }


LOSES_ITS_FORK_SERVER = """
import os, signal
from multiprocessing import forkserver
import orchdata as od
from test_starting import Slow
if __name__ == "__main__":
    loader = od.DataLoader(Slow(), 1, num_workers=2, multiprocessing_context="forkserver", cost=[1] * 12)
    batches = iter(loader)
    rows = next(batches).tolist()
    os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
    print(rows + [row for batch in batches for row in batch.tolist()])
"""


class Slow(Plain):
    def __getitem__(self, number: int) -> Any:
        time.sleep(0.2)
        return number


@pytest.mark.slow
def test_the_loss_of_the_fork_server_costs_nothing_and_workers_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LOSES_ITS_FORK_SERVER)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-W", "ignore", str(tmp_path / "script.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{[*range(12)]}\n", "")
