"""As many threads are at work as get most done."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from orchdata.loaders import pace
from orchdata.loaders.pace import Pace, Turns


def worked(pace: Pace, rate_of: Callable[[int, float], float], seconds: float) -> dict[int, float]:
    """Seconds at each number of threads, where so many of them do `rate_of(threads, now)` jobs a second."""
    now, spent = 0.0, dict.fromkeys(range(1, 65), 0.0)
    while now < seconds:
        step = 1 / rate_of(pace.at_work, now)
        spent[pace.at_work] += step
        now += step
        pace.done(1.0, now)
    return spent


@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_where_threads_hinder_one_another_one_is_left(most: int) -> None:
    spent = worked(Pace(most, 0.0), lambda threads, _: 1400 / threads**0.5, 60)
    assert spent[1] > 55


@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_where_threads_wait_all_are_at_work(most: int) -> None:
    spent = worked(Pace(most, 0.0), lambda threads, _: 100 * threads, 60)
    assert spent[most] > 50


def test_threads_that_hang_take_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not at work: the others go on one at a time, and wait for nothing."""
    monkeypatch.setattr(pace, "_SHORT_SECONDS", 0.0)
    turns, hangs, inside = Turns(3), threading.Event(), threading.Semaphore(0)
    turns._pace.at_work = 1

    def hang() -> None:
        with turns.turn():
            inside.release()
            hangs.wait()

    threads = [threading.Thread(target=hang) for _ in range(2)]
    for thread in threads:
        thread.start()
        assert inside.acquire(timeout=60)
    monkeypatch.setattr(pace, "_SHORT_SECONDS", 3600.0)
    turns._begun.update(dict.fromkeys(turns._begun, -3600.0))  # an hour ago
    for _ in range(100):
        with turns.turn() as tell:
            tell(1.0)
    hangs.set()
    for thread in threads:
        thread.join()
    assert not turns._begun


def test_no_more_are_inside_than_may_be_and_the_end_lets_all_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_SHORT_SECONDS", 3600.0)
    turns, inside, most_inside = Turns(1), 0, 0
    entered = threading.Semaphore(0)
    leave = threading.Event()

    def work() -> None:
        nonlocal inside, most_inside
        with turns.turn() as done:
            inside += 1
            most_inside = max(most_inside, inside)
            entered.release()
            leave.wait()
            inside -= 1
            done(1.0)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert entered.acquire(timeout=60)
    assert not entered.acquire(timeout=0.05) and most_inside == 1
    turns.end()
    assert entered.acquire(timeout=60) and entered.acquire(timeout=60)
    leave.set()
    for thread in threads:
        thread.join()
