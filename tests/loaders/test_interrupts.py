"""Ctrl-C that is lost in a finalizer ends a long wait all the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

import pytest

from orchdata.loaders.interrupts import interrupts_repeated


class Interrupted:
    """Gets a Ctrl-C while it is finalized, where Python only writes the exception to stderr."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # the handler runs here
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_lost_ctrl_c_is_raised_at_the_next_check() -> None:
    def lose(check: Callable[[], None]) -> None:
        check()
        lost = Interrupted()
        del lost  # nothing is raised
        with pytest.raises(KeyboardInterrupt):
            check()

    before = signal.getsignal(signal.SIGINT)
    with interrupts_repeated() as check:
        lose(check)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_of_the_users_own_may_go_on() -> None:
    seen: list[int] = []

    def go_on(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGINT, go_on)
    try:
        with interrupts_repeated() as check:
            os.kill(os.getpid(), signal.SIGINT)
            check()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]
