"""A child that measures shards, or chunks of one, for a build: the parent's side."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from typing import Any, Final

from orchdata.loaders.index.jobs.child import run_child
from orchdata.loaders.slow import ThreadProgress

ATTEMPTS: Final = 3
"""How many children try the same task if they end."""
_UNGUARDED: Final = 78
_POLL_SECONDS: Final = 0.1
_END_SECONDS: Final = 5.0


def check_may_have_children() -> None:
    """Raise ValueError in a daemonic process. End a child that is still importing the script of its parent, which says
    what is wrong.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(_UNGUARDED)
    if multiprocessing.current_process().daemon:
        raise ValueError("this process is daemonic and can have no children: index with jobs=1")


class Died(Exception):
    """A child has ended.

    Attributes:
        final: whether another child would end in the same way.
    """

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class ChildProcess:
    """One child process; used by one thread at a time."""

    def __init__(self, given: bytes) -> None:
        context = multiprocessing.get_context("spawn")
        self._channel, theirs = context.Pipe()
        life, self._life = context.Pipe(duplex=False)
        self._process = context.Process(target=run_child, args=(theirs, life), daemon=True)
        self._given: bytes | None = given
        # Ctrl-C is for this process alone, also while the child starts: it inherits the signals that are blocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
            life.close()

    def run(self, task: tuple[Any, ...], shown: ThreadProgress) -> Any:
        """Return the result of a task, or its exception. Raises Ended if the build ends meanwhile, and Died."""
        try:
            if self._given is not None:
                self._received(shown)  # it has started, and reads
                self._channel.send_bytes(self._given)
                self._given = None
            self._channel.send(task)
            while True:
                kind, *values = self._received(shown)
                if kind == "result":
                    return values[0]
                shown.fraction = values[0]
        except (EOFError, OSError):
            raise self._death() from None

    def _received(self, shown: ThreadProgress) -> Any:
        while not self._channel.poll(_POLL_SECONDS):
            shown.check()
        return pickle.loads(self._channel.recv_bytes())  # noqa: S301 - of this process's child

    def _death(self) -> Died:
        self._process.join(_END_SECONDS)
        status = self._process.exitcode
        if status == _UNGUARDED:
            return Died(
                "processes that measure shards import the script that starts them: call it below "
                'if __name__ == "__main__", or index with jobs=1',
                final=True,
            )
        if status is None:
            how = "closed its connection"
        elif status < 0:
            how = f"was ended by {next((each.name for each in signal.Signals if each == -status), -status)}"
        else:
            how = f"ended with status {status}"
        hint = (
            "is memory short? Fewer --jobs take less" if status == -signal.SIGKILL else "--jobs 1 uses no such process"
        )
        return Died(f"the process that measures it {how}, {ATTEMPTS} times: {hint}")

    def close(self) -> None:
        """End it now."""
        self._process.kill()
        self._process.join(_END_SECONDS)
        self._channel.close()
        self._life.close()
