"""A child that measures shards, or chunks of one, for a build: the child's own side."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, Final

from orchdata.loaders.index.jobs.work import Measurer, packed
from orchdata.loaders.limited_process import die_with_parent
from orchdata.loaders.shards.parquet.children import measuring
from orchdata.loaders.slow import shards_under_way

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
            channel.send_bytes(packed(message))

    def show() -> None:
        while True:
            time.sleep(_SHOWN_SECONDS)
            send("at", shards_under_way())

    send("started")
    given = channel.recv_bytes()
    with measuring():
        measurer = Measurer(given)
        threading.Thread(target=show, daemon=True).start()
        for task in _received(channel):
            send("result", measurer.run(*task))


def _received(channel: Connection[Any, Any]) -> Iterator[tuple[Any, ...]]:
    with contextlib.suppress(EOFError, OSError):
        while True:
            yield channel.recv()
