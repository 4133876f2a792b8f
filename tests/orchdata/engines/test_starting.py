"""Workers that cannot start, and loaders that are ended: a clear error, and nothing remains."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import hanging_job
import hanging_rank_job
import lean_job
import pytest
import returning_job
from children import in_a_child
from forked_program import ForkedProgram
from map_dataset import Numbers
from shard_factory import RECIPE, omni_samples, omni_shards, write_shard

import orchdata as od
from benchmarks.launch import LaunchError, torchrun
from orchdata.building.step import BuildSpec
from orchdata.engines.engine import explain_pickling
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


@pytest.mark.slow
def test_a_data_set_that_does_not_unpickle_is_an_immediate_error() -> None:
    loader = od.DataLoader(NotUnpicklable(), 4, num_workers=2, multiprocessing_context="forkserver", **COSTS)
    with pytest.raises(RuntimeError, match=r"LookupError: it is of another world\).*multiprocessing_context='fork'"):
        list(loader)


@pytest.mark.slow
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


# Specs that are sent to another process, and those that cannot be: the error names the member that does not pickle.


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    return omni_shards(tmp_path, shards=1, samples=10)


def spec_of(data: Any, recipe: od.Recipe = RECIPE, **options: Any) -> BuildSpec:
    dataset = od.ShardDataset(data, recipe=recipe) if options.pop("shards", False) else data
    return od.DataLoader(dataset, **options)._runtime.prepared.spec


class WithTransform(Numbers):
    """A data set with a transform in it."""

    def __init__(self, transform: Any) -> None:
        super().__init__(6)
        self.transforms = {"first": [len, transform]}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"collate_fn": partial(len, print, lock=threading.Lock())}, "collate_fn.keywords['lock'] is an object"),
        ({"dataset": WithTransform(lambda sample: sample)}, "dataset.transforms['first'][1] is a lambda"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_error_names_the_member_that_does_not_pickle_and_the_way_out(options: dict[str, Any], named: str) -> None:
    data = options.pop("dataset", None) or Numbers(6)
    spec = spec_of(data, **options)
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)) as refused:
        pickle.dumps(spec)
    with pytest.raises(TypeError, match="^" + re.escape(named)) as raised:
        explain_pickling(spec, refused.value)
    assert "at the top level of a module" in str(raised.value) and "where nothing is pickled" in str(raised.value)


def test_an_index_that_was_rebuilt_raises_an_error(shards: list[str], tmp_path: Path) -> None:
    data = pickle.dumps(spec_of(shards, shards=True))
    pickle.loads(data).open()
    write_shard(tmp_path / "omni-000000.tar", omni_samples(11))
    od.ShardDataset(shards, recipe=RECIPE).index(rebuild=True)
    with pytest.raises(od.StaleIndexError, match="rebuilt after this loader was created: create the loader again"):
        pickle.loads(data).open()


# Threads that hang: the loader reports them, and the process ends with its own status and error.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "status", "last_line"),
    [
        ("raise", 1, "RuntimeError: DataLoader timed out after 1 seconds, waiting for step 0 of epoch 0"),
        ("interrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("exit", 3, ""),
        ("catch", 0, ""),
    ],
)
def test_a_process_ends_although_threads_hang(tmp_path: Path, ending: str, status: int, last_line: str) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program = Path(hanging_job.__file__).read_text()
    job = ForkedProgram(program, ending, fifo, folder=tmp_path, to_the_end=True)
    if ending == "interrupt":
        assert job.line() == "hanging\n"
        job.send_signal(signal.SIGINT)
    ended = job.finish()
    assert ended.returncode == status
    assert ended.stdout.endswith("exit handlers ran\n")
    assert ended.stderr.strip().rpartition("\n")[2] == last_line


@pytest.mark.slow
@pytest.mark.parametrize("left_by", ["pool", "store"])
def test_a_call_that_returns_while_the_interpreter_ends_changes_no_status(left_by: str, tmp_path: Path) -> None:
    program = Path(returning_job.__file__).read_text()
    ended = ForkedProgram(program, left_by, folder=tmp_path, to_the_end=True).finish()
    assert (ended.returncode, ended.stderr) == (3, "")


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["plain", "tidy"])
def test_the_rank_that_hangs_is_the_one_that_torchrun_names(tmp_path: Path, ending: str) -> None:
    with (tmp_path / "log").open("w+b") as log, pytest.raises(LaunchError, match="DataLoader timed out"):
        torchrun(
            [hanging_rank_job.__file__, "1", ending],
            num_ranks=2,
            environment={"PYTHONPATH": os.pathsep.join(sys.path)},
            log=log,
            progress=lambda done, total: None,
        )
    text = (tmp_path / "log").read_text()
    assert re.search(r"Root Cause.*?rank +: (\d+).*?exitcode +: (-?\d+)", text, re.DOTALL).groups() == ("1", "1")  # type: ignore[union-attr]
