"""A child that measures shards, or chunks of one, for a build: the child's own side."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

from orchdata.loaders.errors import ProcessError
from orchdata.loaders.index.jobs.work import Measurer
from orchdata.loaders.limited_process import die_with_parent
from orchdata.loaders.shards.parquet.children import measuring
from orchdata.loaders.slow import shards_under_way, watching

_SHOWN_SECONDS: Final = 0.5


def run_child(channel: Connection[Any, Any], life: Connection[Any, Any]) -> None:
    """Serve tasks until the parent ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    die_with_parent(life.fileno())
    os.dup2(2, 1)  # printed text is not part of a report
    sending = threading.Lock()

    def send(*message: Any) -> None:
        with sending, contextlib.suppress(OSError):
            channel.send_bytes(_described(message))

    def show() -> None:
        while True:
            time.sleep(_SHOWN_SECONDS)
            send("at", shards_under_way())

    send("started")
    given = channel.recv_bytes()
    with watching(partial(send, "slow")), measuring():
        measurer = Measurer(given)
        threading.Thread(target=show, daemon=True).start()
        for task in _received(channel):
            send("result", measurer.run(*task))


def _received(channel: Connection[Any, Any]) -> Iterator[tuple[Any, ...]]:
    with contextlib.suppress(EOFError, OSError):
        while True:
            yield channel.recv()


def _described(message: tuple[Any, ...]) -> bytes:
    try:
        described = bytes(ForkingPickler.dumps(message))
        pickle.loads(described)  # noqa: S301 - an exception of the user's may need other arguments than it names
        return described
    except Exception:  # noqa: BLE001 - pickling a user's object may raise anything
        error = message[-1]
        return bytes(ForkingPickler.dumps((message[0], ProcessError(f"{type(error).__name__}: {error}"))))
