"""Loaders compared through the job's store, ranks as threads over one store; and what of a loader is compared."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from queue import Queue
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from map_dataset import Numbers
from rank_jobs import message
from torch.utils.data import ConcatDataset, Subset

import orchdata as od
from orchdata.ranks import agreement
from orchdata.ranks.agreement import Agreement, JobStore, check_accounts
from orchdata.ranks.parallel import Rank
from orchdata.runtime import _dataset, stable

PATIENCE = 60.0  # A rank that waits longer has failed its test.


class Job:
    """Ranks that make loaders, as with dp=None or a group."""

    def __init__(self, num_ranks: int, store: Any = None, timeout: float = PATIENCE, *, at_once: bool = False) -> None:
        self.size = num_ranks
        self.store = dist.HashStore() if store is None else store
        self.timeout = timeout
        self.at_once = at_once
        self.numbers = [0] * num_ranks

    def agreement(self, rank: int) -> Agreement:
        self.numbers[rank] += 1
        made = Agreement(Rank())
        made._job, made._rank, made._ranks = JobStore(self.store, self.timeout), rank, range(self.size)
        made._folder, made._at_once = f"world/1/{self.numbers[rank]}", self.at_once
        return made

    def made(self, rank: int, **described: Any) -> Agreement:
        made = self.agreement(rank)
        made.make(lambda: None, lambda _: described)
        return made

    def all_made(self, *described: dict[str, Any]) -> list[Agreement]:
        return [self.made(rank, **entries) for rank, entries in enumerate(described)]


def nothing() -> None:
    return None


def errors_of(acts: list[Callable[[], Any]]) -> list[str | None]:
    """Run these in parallel, and return the error of each, or None."""
    with ThreadPoolExecutor(len(acts)) as pool:
        return list(pool.map(message, acts))


def first_steps(made: list[Agreement]) -> list[str | None]:
    begun = [one.begin(0, 0) for one in made]
    return errors_of([lambda one=one: one.agree(nothing) for one in begun])  # type: ignore[misc]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing ranks are named almost immediately."""
    monkeypatch.setattr(agreement, "LATE_SECONDS", 0.05)
    monkeypatch.setattr(agreement, "_LATER_SECONDS", 0.05)


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_equal_loaders_start_share_what_rank_0_draws_and_leave_nothing_in_the_store(kind: str, tmp_path: Path) -> None:
    stores = {
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 4),
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    }
    job = Job(4, stores[kind]())
    before = job.store.num_keys()
    for _ in range(2):
        made = job.all_made(*[{"seed": 1}] * 4)
        for epoch in range(3):
            begun = [one.begin(epoch, 0) for one in made]
            seeds = [{"seed": 10 * epoch + rank} for rank in range(4)]
            with ThreadPoolExecutor(4) as pool:
                shared = list(pool.map(lambda one, seed: one.agree(lambda: seed), begun, seeds))
            assert shared == seeds[:1] * 4
            assert begun[2].agree(lambda: {"seed": 99}) == seeds[0]  # once in an iteration
    if kind != "file":  # which only appends
        assert job.store.num_keys() == before


def test_of_many_ranks_the_first_are_named() -> None:
    seeds = {rank: {"seed": int(rank >= 20), "cost": None} for rank in range(30)}
    with pytest.raises(ValueError, match=r"seed is 0 on ranks 0, .*, 7 and 12 more, 1 on ranks 20, .*, 27 and 2 more"):
        check_accounts(seeds)


@pytest.mark.usefixtures("hasty")
def test_a_late_rank_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(2)
    early = job.made(0, seed=1).begin(0, 0)
    warned: Queue[str] = Queue()
    monkeypatch.setattr(agreement.warnings, "warn", lambda text, stacklevel: warned.put(text))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(early.agree, nothing)
        assert "no word from rank 1" in warned.get(timeout=PATIENCE)
        assert not waiting.done()
        job.made(1, seed=1).begin(0, 0).agree(nothing)
        assert waiting.result(PATIENCE) is None
    assert warned.empty()


@pytest.mark.usefixtures("hasty")
@pytest.mark.filterwarnings("ignore:no word from")
def test_a_rank_that_took_a_batch_for_itself_is_an_iteration_ahead_and_raises_an_error() -> None:
    made = Job(2, timeout=0.5).all_made({}, {})
    peeks = [made[0].begin(0, 0), made[0].begin(1, 0)]  # next(iter(loader)) on rank 0, then its epoch
    late = made[1].begin(0, 0)
    errors = errors_of([lambda: late.agree(nothing), lambda: [one.agree(nothing) for one in peeks]])
    assert errors[0] is None
    assert "no word from rank 1, where rank 0 has begun iteration 2 of loader 1, at epoch 1, step 0" in str(errors[1])


def test_rank_0_which_may_serve_the_store_waits_until_the_others_have_seen_the_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agreement, "_LEAVE_SECONDS", PATIENCE)
    posts = [one.post({}) for one in Job(2).all_made({}, {})]
    with ThreadPoolExecutor(1) as pool:
        server = pool.submit(posts[0].wait, PATIENCE)
        time.sleep(0.1)
        assert not server.done()
        posts[1].wait(PATIENCE)
        assert server.result(PATIENCE) is None


def test_a_store_that_ends_after_all_are_known_to_be_equal_fails_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = JobStore.ask

    def gone(job: JobStore, call: Any, seconds: float | None = None) -> Any:
        if seconds is not None:  # in `_leave`
            raise RuntimeError("cannot be reached")
        return ask(job, call)

    monkeypatch.setattr(JobStore, "ask", gone)
    assert first_steps(Job(2).all_made({}, {})) == [None, None]


SERVER = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """A process that serves a store, and a store connected to it."""
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=PATIENCE))
        yield process, store
        process.send_signal(SIGCONT)
        process.kill()


@pytest.mark.slow
def test_a_store_that_hangs_or_dies_ends_the_wait(server: tuple[subprocess.Popen[str], Any]) -> None:
    process, store = server
    asked = JobStore(store, PATIENCE)
    assert asked.ask(lambda store: store.add("a", 1)) == 1
    process.send_signal(SIGSTOP)
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0] != "T":
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="the store of the job, which does not answer within 0.2 seconds"):
        asked.ask(lambda store: store.add("a", 1), 0.2)
    process.send_signal(SIGKILL)
    process.wait()
    with pytest.raises(RuntimeError, match="the store of the job, which cannot be reached: .*rank 0 or the launcher"):
        asked.ask(lambda store: store.add("a", 1))


class Chosen(torch.utils.data.Dataset[Any]):
    def __init__(self, indices: Any) -> None:
        self.indices = indices


def hugging_face(text: str) -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict({"text": [text, "b"]})


DATA: list[tuple[str, Callable[[int], Any]]] = [
    ("Subset", lambda rank: Subset(Numbers(20), list(range(rank, 20, 2)))),
    ("nested Subset", lambda rank: Subset(Subset(Numbers(20), range(rank, 20, 2)), [1, 2, 3])),
    ("ConcatDataset", lambda rank: ConcatDataset([Numbers(3), Subset(Numbers(20), [rank, 5])])),
    ("indices", lambda rank: Chosen(np.array([rank, 5]))),
    ("list", lambda rank: list(range(rank, 20, 2))),
    ("list of samples", lambda rank: [{"text": f"of rank {rank}"}] * 200),
    ("Hugging Face", lambda rank: hugging_face("ab"[rank])),
]


@pytest.mark.parametrize(("name", "make"), DATA, ids=[name for name, _ in DATA])
def test_data_split_by_rank_is_described_differently(name: str, make: Callable[[int], Any]) -> None:
    first, again, second = (json.dumps(_dataset(make(rank))) for rank in (0, 0, 1))
    assert first == again
    assert first != second


@dataclass
class Settings:
    limit: int
    inner: Any


def test_nothing_in_a_description_depends_on_the_process() -> None:
    def local(samples: list[Any]) -> int:
        return len(samples)

    class Collator:
        def __call__(self, samples: list[Any]) -> int:
            return len(samples)

    value = {
        "functions": [local, lambda samples: 0, len, functools.partial(local, device="cuda:1"), Collator().__call__],
        "objects": [object(), Collator(), Settings(1, object()), od.Packed(), od.Balance(max_tokens={"llm": 8})],
        "values": [np.int64(1), np.float32(0.5), torch.bfloat16, {3, 1, 2}, b"abc", (1, "a"), None],
    }
    text = json.dumps(stable(value))
    assert "0x" not in text
    assert "local" in text
    assert "Collator" in text
    assert '"limit": 1' in text
    assert text == json.dumps(stable(value))
