"""The store of the job, through which ranks of torch.distributed meet."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from threading import Thread
from typing import Any, TypeVar

from torch.distributed import distributed_c10d

T = TypeVar("T")


class JobStore:
    """The store of the job, with a prefix for our keys. Raises RuntimeError if it has ended or does not answer."""

    def __init__(self, store: Any, timeout: float) -> None:
        self._store = distributed_c10d.PrefixStore("orchdata", store)
        self.timeout = timeout

    def ask(self, call: Callable[[Any], T], seconds: float | None = None) -> T:
        """Return `call(store)`, with a timeout: a store with a server that hangs takes no timeout, and no Ctrl-C."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(call(self._store))
            except BaseException as error:  # noqa: BLE001 - it is passed on
                answer.set_exception(error)

        limit = self.timeout if seconds is None else seconds
        Thread(target=run, daemon=True, name="orchdata-store").start()
        try:
            return answer.result(limit)
        except FutureTimeout:
            reason = f"does not answer within {limit:g} seconds"
        except RuntimeError as error:
            reason = f"cannot be reached: {error}"
        raise RuntimeError(
            f"ranks are compared through the store of the job, which {reason}; rank 0 or the launcher serves it: check "
            "there whether it ended or stopped"
        )


def job_store() -> Any:
    """Return the store that init_process_group was given or created; None if the backend has none (MPI, fake)."""
    return None if distributed_c10d.get_backend() in ("fake", "mpi") else distributed_c10d._get_default_store()
