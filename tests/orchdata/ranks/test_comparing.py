"""Loaders compared through the job's store: ranks are threads over one store."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from queue import Queue
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import Any

import pytest
import torch.distributed as dist

from orchdata.ranks import comparing
from orchdata.ranks.agreement import account, failure_account
from orchdata.ranks.comparing import Agreement, Beginning, Comparison, Numbers
from orchdata.ranks.parallel import Rank
from orchdata.ranks.posting import JobStore, Round

PATIENCE = 60.0  # A rank that waits longer has failed its test.


class Job:
    """Ranks that make loaders as with dp=None."""

    def __init__(self, num_ranks: int, store: Any = None, timeout: float = PATIENCE) -> None:
        self.size = num_ranks
        self.store = dist.HashStore() if store is None else store
        self.timeout = timeout
        self.numbers = [Numbers() for _ in range(num_ranks)]

    def comparison(self, rank: int) -> Comparison:
        return Comparison(JobStore(self.store, self.timeout), rank, range(self.size), "world", self.numbers[rank])

    def made(self, rank: int, **described: Any) -> Comparison:
        made = self.comparison(rank)
        made.describe(account(described))
        return made

    def all_made(self, *described: dict[str, Any]) -> list[Comparison]:
        return [self.made(rank, **entries) for rank, entries in enumerate(described)]


def begin(made: Comparison, epoch: int = 0, step: int = 0) -> Beginning:
    return Beginning(made, {"epoch": epoch, "step": step})


def errors_of(acts: list[Callable[[], Any]]) -> list[str | None]:
    """Run these in parallel, and return the error of each, or None."""

    def run(act: Callable[[], Any]) -> str | None:
        try:
            act()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    with ThreadPoolExecutor(len(acts)) as pool:
        return list(pool.map(run, acts))


def first_steps(made: list[Comparison], epochs: list[int] | None = None) -> list[str | None]:
    begun = [begin(one, epoch) for one, epoch in zip(made, epochs or [0] * len(made), strict=True)]
    return errors_of([one.compare for one in begun])


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing ranks are named, and checked again, almost immediately."""
    monkeypatch.setattr(comparing, "LATE_SECONDS", 0.05)
    monkeypatch.setattr(comparing, "_LATER_SECONDS", 0.05)
    monkeypatch.setattr(comparing, "_LOOK_SECONDS", 0.0)


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_equal_loaders_start_and_only_their_numbers_remain_in_the_store(kind: str, tmp_path: Any) -> None:
    stores = {
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 4),
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    }
    job = Job(4, stores[kind]())
    before = job.store.num_keys()
    for _ in range(3):
        made = job.all_made(*[{"seed": 1}] * 4)
        for epoch in range(3):
            assert first_steps(made, [epoch] * 4) == [None] * 4
    if kind != "file":  # which only appends
        assert job.store.num_keys() - before == 4


def test_all_ranks_name_one_that_differs_with_both_values() -> None:
    made = Job(4).all_made(
        {"order": {"seed": 1}}, {"order": {"seed": 1}}, {"order": {"seed": 2}}, {"order": {"seed": 1}}
    )
    (error,) = set(first_steps(made))
    assert error == (
        "ValueError: all ranks of a loader must plan the same steps; rank 2 differs from the others: order.seed is 1 "
        "on ranks 0, 1, 3, 2 on rank 2 (compared is loader number 1 with dp=None of each rank: all make the same ones "
        "in the same order, and a loader of one rank alone with dp=(0, 1))"
    )


def test_a_rank_that_could_not_make_the_loader_is_named_without_waiting() -> None:
    job = Job(3)
    made = [job.made(rank, seed=1) for rank in (0, 2)]
    job.comparison(1).describe(failure_account(OSError("no disk")))
    for error in first_steps(made):
        assert error is not None
        assert error.startswith(
            "RuntimeError: this loader needs all its ranks, and 1 could not make it: rank 1: OSError: no disk (compared"
        )


def test_loaders_made_in_another_order_are_distinguished() -> None:
    job = Job(2)
    train = [job.made(0, data="train")]
    evaluate = [job.made(0, data="eval"), job.made(1, data="eval")]
    train += [job.made(1, data="train")]
    assert 'data is "train" on rank 0, "eval" on rank 1 (compared is loader number 1' in str(
        first_steps([train[0], evaluate[1]])[0]
    )
    assert "loader number 2 with dp=None" in str(first_steps([evaluate[0], train[1]])[0])


@pytest.mark.usefixtures("hasty")
def test_a_loader_of_one_rank_alone_warns_and_ends_at_the_timeout_of_the_group() -> None:
    job = Job(20, timeout=0.3)
    alone = begin(job.made(3, seed=1))  # which waits for no rank
    expected = (
        r"ranks 0, 1, 2, 4, 5, 6, 7, 8 and 11 more have made no such loader: this is loader number 1 with dp=None of "
        r"rank 3, its samples are shared by all 20 ranks, .*made with dp=\(0, 1\)\. "
    )
    with (
        pytest.warns(UserWarning, match=expected + "They may only be late. This rank waits 0.3 seconds"),
        pytest.raises(RuntimeError, match=expected + "Waited 0.3 seconds, the timeout of the process group"),
    ):
        alone.compare()


@pytest.mark.usefixtures("hasty")
def test_a_late_rank_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(2)
    early = begin(job.made(0, seed=1))
    warned: Queue[str] = Queue()
    monkeypatch.setattr(comparing.warnings, "warn", lambda text, stacklevel: warned.put(text))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(early.compare)
        assert "rank 1 has made no such loader" in warned.get(timeout=PATIENCE)
        assert not waiting.done()
        begin(job.made(1, seed=1)).compare()
        assert waiting.result(PATIENCE) is None
    assert warned.empty()


@pytest.mark.parametrize("moved", [{"epoch": 1}, {"step": 3}])
def test_all_ranks_raise_an_error_if_one_begins_elsewhere(moved: dict[str, int]) -> None:
    made = Job(3).all_made(*[{"seed": 1}] * 3)
    assert first_steps(made) == [None] * 3
    starts = [{}, {}, moved]
    (error,) = set(errors_of([begin(one, **start).compare for one, start in zip(made, starts, strict=True)]))
    (name,) = moved
    assert error is not None
    assert error.startswith(
        "ValueError: all ranks of a loader must begin an iteration at the same step; rank 2 differs from the others: "
        f"{name} is 0 on ranks 0, 1, {moved[name]} on rank 2 (pass load_state_dict and set_epoch the same"
    )


@pytest.mark.usefixtures("hasty")
def test_a_rank_that_iterates_alone_continues_with_a_warning_until_others_begin_elsewhere() -> None:
    made = Job(2).all_made({}, {})
    alone = begin(made[0])
    with pytest.warns(
        UserWarning,
        match=r"rank 1 has not begun to iterate a loader .* made with dp=\(0, 1\). They may only be late. This rank co",
    ):
        alone.compare()
    alone.compare()
    late = begin(made[1], epoch=1)
    for one in (alone, late):
        with pytest.raises(ValueError, match="epoch is 0 on rank 0, 1 on rank 1"):
            one.compare()


@pytest.mark.usefixtures("hasty")
@pytest.mark.filterwarnings("ignore:rank . has not begun")
def test_a_rank_late_for_a_peek_and_the_iteration_after_it_is_waited_for_and_waits_for_none() -> None:
    made = Job(2).all_made({}, {})
    begin(made[0]).compare()
    early = begin(made[0], 1)
    early.compare()  # its first step waits in a collective for rank 1
    begin(made[1]).compare()
    begin(made[1], 1).compare()  # raises at the timeout unless rank 0 has posted that it began
    early.compare()


@pytest.mark.usefixtures("hasty")
@pytest.mark.filterwarnings("ignore:rank . has not begun")
def test_a_late_rank_iterates_the_epochs_that_others_have_ended() -> None:
    made = Job(2).all_made({}, {})
    for one in made:
        for epoch in range(3):
            begin(one, epoch).compare()
    assert first_steps(made, [3, 3]) == [None, None]


@pytest.mark.usefixtures("hasty")
@pytest.mark.filterwarnings("ignore:rank . has not begun")
@pytest.mark.parametrize("peeks_first", [True, False])
def test_a_rank_that_took_a_batch_for_itself_is_an_iteration_ahead_and_raises_an_error(peeks_first: bool) -> None:
    made = Job(2, timeout=0.5).all_made({}, {})
    if not peeks_first:
        assert first_steps(made) == [None, None]

    def peek() -> None:  # next(iter(loader)) on rank 0, which continues alone if rank 1 never began
        begin(made[0], 0).compare()

    if peeks_first:
        peek()
    late = begin(
        made[1], 0
    )  # before rank 0 checks: if no rank has begun it continues alone, and checks at its next step
    error = errors_of([late.compare, lambda: (None if peeks_first else peek(), begin(made[0], 1).compare())])
    assert error[0] is None
    assert str(error[1]).startswith("RuntimeError: rank 1 has not begun iteration ")
    assert "rank that takes batches for itself, as by next(iter(loader))" in str(error[1])


def test_rank_0_which_may_serve_the_store_waits_until_the_others_have_seen_the_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comparing, "_LEAVE_SECONDS", PATIENCE)
    made = Job(2).all_made({}, {})
    begun = [begin(one) for one in made]
    looks: Queue[bool] = Queue()
    look = Round.seen_by_all

    def noting(posted: Round, store: Any) -> bool:
        seen = look(posted, store)
        looks.put(seen)
        return seen

    monkeypatch.setattr(Round, "seen_by_all", noting)
    with ThreadPoolExecutor(1) as pool:
        server = pool.submit(begun[0].compare)
        assert [looks.get(timeout=PATIENCE) for _ in range(3)] == [False] * 3
        assert not server.done()
        begun[1].compare()
        assert server.result(PATIENCE) is None


def test_rank_0_waits_only_once_for_ranks_that_do_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "_LEAVE_SECONDS", 0.05)
    made = Job(2).all_made({}, {})
    begun = [begin(one) for one in made]
    begun[0].compare()
    assert not made[0]._lingers


def test_all_ranks_get_what_rank_0_draws_in_each_iteration() -> None:
    job = Job(3)
    made = job.all_made({}, {}, {})
    for epoch in range(4):
        begun = [begin(one, epoch) for one in made]
        assert errors_of([one.compare for one in begun]) == [None] * 3
        seeds = [{"seed": 10 * epoch + rank} for rank in range(3)]
        with ThreadPoolExecutor(3) as pool:
            shared = list(pool.map(Beginning.share, begun, seeds))
        assert shared == [{"seed": 10 * epoch}] * 3
        assert begun[2].share({"seed": 99}) == {"seed": 10 * epoch}  # once in an iteration
    left = [key for key in range(1, 5) if job.store.check([f"orchdata/world/{job.numbers[0].job}/1/shared/{key}"])]
    assert left == [3, 4]
    assert begin(job.made(0)).share(None) is None  # nothing is drawn


@pytest.mark.usefixtures("hasty")
def test_a_rank_waits_for_what_rank_0_draws_until_the_timeout_of_the_group() -> None:
    made = Job(2, timeout=0.4).all_made({}, {})
    with (
        pytest.warns(UserWarning, match="rank 0 has not begun to iterate.*Waiting for 0.4 seconds"),
        pytest.raises(RuntimeError, match="rank 0 has not begun to iterate.*With seed= no rank waits.*0.4 seconds"),
    ):
        begin(made[1]).share({"seed": 1})


def test_a_store_that_ends_after_all_are_known_to_be_equal_fails_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(posted: Round, store: Any) -> None:
        raise dist.DistNetworkError("Connection reset by peer")

    monkeypatch.setattr(Round, "clear", gone)
    assert first_steps(Job(2).all_made({}, {})) == [None, None]


def test_after_a_difference_ranks_begin_again_and_after_another_error_they_continue() -> None:
    made = Job(2).all_made({}, {})
    agreements = [Agreement(Rank()) for _ in made]
    for agreement, one in zip(agreements, made, strict=True):
        agreement._compared = one
    begun = [agreement.begin(rank, 0) for rank, agreement in enumerate(agreements)]
    assert None not in errors_of([one.compare for one in begun])
    again = [agreement.begin(1, 0, one) for agreement, one in zip(agreements, begun, strict=True)]
    assert errors_of([one.compare for one in again]) == [None, None]
    assert agreements[0].begin(1, 3, again[0]) is again[0]


def test_entries_of_an_earlier_job_in_the_store_are_not_used() -> None:
    first = Job(2)
    first.all_made({"seed": 1}, {"seed": 1})  # and never iterated
    first.made(0, seed=2)
    second = Job(2, first.store)
    assert first_steps(second.all_made({"seed": 3}, {"seed": 3})) == [None, None]


def test_iterations_of_two_loaders_may_be_interleaved() -> None:
    job = Job(2)
    both = [job.all_made({"data": name}, {"data": name}) for name in ("one", "two")]

    def iterate(rank: int) -> None:
        begun = [begin(both[0][rank]), begin(both[1][rank])]
        for _ in range(3):
            for one in begun:
                one.compare()
        begin(both[0][rank], 1).compare()

    assert errors_of([lambda: iterate(0), lambda: iterate(1)]) == [None, None]


@pytest.mark.parametrize("missing", [[0], [31], [4, 5, 6], list(range(1, 32))])
def test_silent_ranks_are_found_by_halves(missing: list[int]) -> None:
    store = dist.HashStore()
    for rank in set(range(32)) - set(missing):
        Round("a", rank, range(32), {}).post(store)
    assert Round("a", 0, range(32), {}).silent(store, 8) == missing[:8]


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
