"""Work in a forked process, so that a crash or a hang of it is a failure of one test."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable

import pytest

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's place, which only root can")


def in_a_child(work: Callable[[], None], seconds: int = 120) -> None:
    """Run in a forked process: a crash or a hang of it is a failure here, with what it said last."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(seconds)
            os.dup2(writer, 2)
            sys.stderr = os.fdopen(2, "w", buffering=1)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            # A handler of signals, such as torch's, may raise in the lines above too: the child ends in any case, and
            # never goes on as a second run of the tests.
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as said:
        last = said.read()[-4000:]
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, last
