"""Measuring shards for an index in actors of a Ray cluster, for `orchdata index --ray`.

    thread of the build --shard, or a chunk of a large one--> an actor on any node --> its result

The build stays in its own process: what is cached, claimed, retried, shown and merged. An actor on a node that does not
see the cache folder sends back the files that it made.
"""

from __future__ import annotations

import pickle
import socket
import time
from contextlib import ExitStack, suppress
from typing import Any, Final, cast

from orchdata.engines.on_ray.cluster import check_address, connect, import_ray, outside_of_groups
from orchdata.engines.on_ray.deaths import described, is_loss, is_own_end
from orchdata.engines.on_ray.room import Waiting
from orchdata.loaders.errors import ProcessError, StorageError
from orchdata.loaders.index.jobs.process import ATTEMPTS, Died
from orchdata.loaders.index.jobs.work import Measurer, packed
from orchdata.loaders.shards.parquet.children import measuring
from orchdata.loaders.slow import ThreadProgress, shards_under_way
from orchdata.notices import warn_user

START_SECONDS: Final = 600.0
_POLL_SECONDS: Final = 0.1
_SHOWN_SECONDS: Final = 0.5
_END_SECONDS: Final = 2.0
_OPTIONS: Final = {"num_cpus": 1, "max_restarts": 0, "max_task_retries": 0, "max_concurrency": 2}


class RayProcesses:
    """Where `build_index(processes=)` measures: in actors of a Ray cluster, each with one CPU.

    Args:
        address: as of `RayEngine`.
        start_timeout: seconds that an actor may wait for a free CPU.

    Raises:
        PackageError: Ray is not installed.
        ValueError: the address is that of a Ray Client (ray://).
        RuntimeError: there is no cluster, or it has another version of Ray or Python.
    """

    def __init__(self, address: str | None = None, *, start_timeout: float = START_SECONDS) -> None:
        check_address(address, "--ray")
        import_ray()
        connect(address, num_ranks=1)
        self._start_timeout = start_timeout

    def open(self, given: bytes) -> MeasuringActor:
        return MeasuringActor(given, self._start_timeout)


class MeasuringActor:
    """One actor; used by one thread at a time."""

    def __init__(self, given: bytes, start_timeout: float) -> None:
        import ray

        self._actor = cast(
            "Any", ray.remote(ShardActor).options(scheduling_strategy=outside_of_groups(), **_OPTIONS).remote(given)
        )
        self._starting: Any = self._actor.fraction.remote()
        self._waiting = Waiting(
            {"num_cpus": 1},
            count=1,
            num_ranks=1,
            num_threads=1,
            start_timeout=start_timeout,
            of="this build",
            ways="add nodes, or lower --jobs",
        )

    def run(self, task: tuple[Any, ...], shown: ThreadProgress) -> Any:
        import ray

        try:
            self._await_start(shown)
            call = self._actor.run.remote(task)
            asked, show_at = None, time.monotonic() + _SHOWN_SECONDS
            while not ray.wait([call], timeout=_POLL_SECONDS)[0]:
                shown.check()
                if asked is None and time.monotonic() >= show_at:
                    asked = self._actor.fraction.remote()
                if asked is not None and ray.wait([asked], timeout=0)[0]:
                    shown.fraction, asked, show_at = ray.get(asked), None, time.monotonic() + _SHOWN_SECONDS
            return pickle.loads(ray.get(call))  # noqa: S301 - of this build's actor
        except ray.exceptions.RayError as error:
            raise _death(error) from None

    def close(self) -> None:
        import ray

        with suppress(ray.exceptions.RayError):
            ray.wait([self._actor.close.remote()], timeout=_END_SECONDS)
        ray.kill(self._actor, no_restart=True)

    def _await_start(self, shown: ThreadProgress) -> None:
        """Wait until the actor runs. Warn if no node has room for it. Raises RuntimeError after start_timeout."""
        import ray

        if self._starting is None:
            return
        from orchdata.engines.on_ray.fleet import waits_for_room

        while not ray.wait([self._starting], timeout=_POLL_SECONDS)[0]:
            shown.check()
            warning = self._waiting.check(1, lambda: int(waits_for_room(self._actor)))
            if warning is not None:
                warn_user(warning)
        ray.get(self._starting)
        self._starting = None


class ShardActor:
    """Measures shards in a process of Ray's: the actor's own side.

    Args:
        given: as of `Measurer`.
    """

    def __init__(self, given: bytes) -> None:
        self._measurer = Measurer(given)
        self._contexts = ExitStack()
        self._contexts.enter_context(measuring())

    def run(self, task: tuple[Any, ...]) -> bytes:
        """Return the pickled result of a task, or its error."""
        result = self._measurer.run(*task)
        if isinstance(result, StorageError):
            result = StorageError(result.url, f"{result.reason} (on node {socket.gethostname()})", result.errno)
        return packed(result)

    def fraction(self) -> float:
        """Return how much of the shard is done."""
        return shards_under_way()

    def close(self) -> None:
        self._contexts.close()
        self._measurer.close()


def _death(error: Exception) -> Exception:
    """Return what the loss of an actor means. Only a process that ended by itself counts against its shard."""
    if not is_loss(error):
        return ProcessError(f"an actor that measures shards failed: {described(error)}")
    return Died(
        f"the Ray actor that measures it was lost, {ATTEMPTS} times: {described(error)}",
        counts=is_own_end(error),
    )
