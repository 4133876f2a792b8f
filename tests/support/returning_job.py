"""Run by test_hanging: a thread that comes back from a call of torch's while the interpreter goes."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from orchdata.engines.engine import ThreadPool
from orchdata.ranks.agreement import JobStore


class Hurry:
    """Answers the call as modules are cleared, and gives it the time to come back."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.sleep = time.sleep

    def __del__(self) -> None:
        self.store.set("answer", "1")
        self.sleep(0.5)


def main(kind: str) -> Hurry:
    store = JobStore(dist.HashStore(), timeout=0.01)
    asked = threading.Event()

    def ask(store: Any) -> None:
        asked.set()
        store.wait(["answer"], timedelta(hours=1))

    if kind == "store":
        with contextlib.suppress(RuntimeError):  # it does not answer
            store.ask(ask)
    else:
        ThreadPool(1, prepare=lambda: None).submit(lambda: ask(store._store))
    asked.wait()
    return Hurry(store._store)


if __name__ == "__main__":
    hurry = main(sys.argv[1])
    sys.exit(3)
