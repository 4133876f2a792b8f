"""The threads of a build: each measures one shard or several, small ones together, and large ones with idle threads.

shards --chunks--> threads --Builder.costs--> tables
                      |--> measured by another process: checked again, and waited for
                      |--> a read failed: tried again, outside of the thread's turn
                      '--> too little memory: measured again, while no other shard is
"""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from orchdata.loaders.errors import StaleIndexError, StorageError
from orchdata.loaders.index.building.builder import Builder
from orchdata.loaders.index.shard_costs import CostTable
from orchdata.loaders.memory import measured_at
from orchdata.loaders.pace import Turns
from orchdata.loaders.shards.parquet.children import measuring
from orchdata.loaders.slow import here, shards_under_way
from orchdata.loaders.spread import Spread
from orchdata.loaders.storage.retries import Patience

Done = list[tuple[str, CostTable, bool]]
"""For each shard: its path, its costs, and whether they were measured now."""

_TICK_SECONDS = 0.5
_CHUNK_SHARDS = 16
"""Shards that a thread takes together if there are very many; it retries those with errors at the end of the chunk."""
_SHARD_WORK = 5
"""Work of measuring a shard besides its samples, in samples; checking one with cached costs is 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildProgress:
    """A shard is done.

    Attributes:
        url: of the shard.
        measured: whether it was measured now; otherwise its cached costs were still valid.
        samples, bad: numbers of samples in the shard.
        done, total: numbers of shards.
    """

    url: str
    measured: bool
    samples: int
    bad: int
    done: int
    total: int


def warn_of_retries(error: Exception, seconds: float) -> None:
    """Warn that reads are tried again."""
    is_refused = isinstance(error, StorageError) and error.is_refused
    how_long = "some seconds" if is_refused else f"up to {seconds:g} s of waiting in this build"
    warnings.warn(f"{error}; trying again for {how_long}", stacklevel=2)


def in_parallel(
    builder: Builder,
    urls: Sequence[str],
    workers: int,
    progress: Callable[[BuildProgress], None] | None,
    under_way: Callable[[float, int], None] | None,
    patience: Patience,
) -> dict[str, CostTable]:
    """Measure shards in threads, each by one or more, and return their tables by path."""
    # A task per small shard would take a fifth of the time of measuring it.
    length = max(1, min(_CHUNK_SHARDS, len(urls) // (64 * workers)))
    tables: dict[str, CostTable] = {}
    shown = [0.0]
    crew = _Crew(builder, workers, patience)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="orchdata-index")
    try:
        with measuring(), _cancelled(pool, crew):
            chunks = [urls[start : start + length] for start in range(0, len(urls), length)]
            while chunks:  # shards that other processes are measuring are checked again, and waited for
                futures = [pool.submit(crew.measure, chunk) for chunk in chunks]
                tick = None if under_way is None else functools.partial(_show, under_way, tables, len(urls), shown)
                for future in _completed(futures, tick):
                    for url, table, measured in future.result():
                        tables[url] = table
                        if progress is not None:
                            counts = {"samples": table.totals["samples"], "bad": table.totals["bad"]}
                            done = BuildProgress(
                                url=url, measured=measured, done=len(tables), total=len(urls), **counts
                            )
                            progress(done)
                chunks = [[url] for url in crew.take_others()]
    finally:
        pool.shutdown()  # after an error or Ctrl-C, wait for the shards that are being measured
        crew.close()
    return tables


def _show(
    under_way: Callable[[float, int], None], tables: Mapping[str, CostTable], total: int, shown: list[float]
) -> None:
    """Show progress, never less than before: a shard that was just measured does not count as done at once."""
    # A shard that a child has just measured may still count as under way.
    shown[0] = min(total, max(shown[0], len(tables) + shards_under_way()))
    under_way(shown[0], total)


def _completed(futures: Sequence[Future[Done]], tick: Callable[[], None] | None) -> Iterator[Future[Done]]:
    """Yield futures as they are done, and call `tick` in between. Its work does not grow with those that are not."""
    done: SimpleQueue[Future[Done]] = SimpleQueue()
    for future in futures:
        future.add_done_callback(done.put)
    left = len(futures)
    while left:
        try:
            future = done.get(timeout=None if tick is None else _TICK_SECONDS)
        except Empty:
            pass
        else:
            left -= 1
            yield future
        if tick is not None:
            tick()


@contextmanager
def _cancelled(pool: ThreadPoolExecutor, crew: _Crew) -> Iterator[None]:
    """After an error in the block, cancel the shards that have not begun, and all retries."""
    try:
        yield
    except BaseException:
        crew.end()
        pool.shutdown(wait=False, cancel_futures=True)
        raise


class _Crew:
    """The threads of a build: how many may work, and which shards are retried."""

    def __init__(self, builder: Builder, workers: int, patience: Patience) -> None:
        self._builder = builder
        self._patience = patience
        self._turns = Turns(workers, paced=builder.jobs is None)
        self._spread = Spread(self._turns, workers)
        self._others: list[str] = []
        self._waits = False

    def take_others(self) -> list[str]:
        """Return the shards that other processes are measuring; from now on these are waited for."""
        others, self._others, self._waits = self._others, [], True
        return others

    def _go_on(self) -> bool:
        return self._waits and not self._turns.ended

    def measure(self, urls: Sequence[str]) -> Done:
        """Return (url, costs, whether they were measured now) of these shards; fewer after `end`."""
        here().ended = lambda: self._turns.ended
        done: list[tuple[str, CostTable, bool]] = []
        failed: list[tuple[str, StorageError | StaleIndexError]] = []
        short: list[str] = []
        with self._turns.turn() as report_work:
            for url in urls:
                if self._turns.ended:
                    return done
                try:
                    costs = self._builder.costs(url, self._go_on, self._spread)
                except (StorageError, StaleIndexError) as error:
                    failed.append((url, error))
                    continue
                except MemoryError:
                    short.append(url)
                    continue
                if costs is None:
                    self._others.append(url)
                else:
                    table, measured = costs
                    done.append((url, table, measured))
                    report_work(_SHARD_WORK + table.size.rows if measured else 1)

        # Retries, outside of this thread's turn; then the shards that need more memory, one at a time.
        for url, first_error in failed:
            retry = functools.partial(self._retry, url, first_error)
            try:
                done.append(
                    (url, *self._patience.keep_trying(retry, StorageError, StaleIndexError, failed=first_error))
                )
            except MemoryError:
                short.append(url)
        done += [(url, *self._alone(url)) for url in short]
        return done

    def _alone(self, url: str) -> tuple[CostTable, bool]:
        """Measure a shard again after a MemoryError, while no other shard is measured."""
        with self._turns.alone():
            gc.collect()
            try:
                costs = None if self._turns.ended else self._builder.costs(url, lambda: not self._turns.ended)
            except MemoryError as error:
                raise measured_at(error, url) from error
        if costs is None:
            raise MemoryError(f"{url}: was not measured to the end: the build ended")
        return costs

    def _retry(self, url: str, error: Exception) -> tuple[CostTable, bool]:
        with self._turns.turn():
            if self._turns.ended:
                raise error
            self._builder.forget(url)
            costs = self._builder.costs(url, lambda: not self._turns.ended, self._spread)
            if costs is None:
                raise error
            return costs

    def end(self) -> None:
        self._patience.end()
        self._turns.end()

    def close(self) -> None:
        """Wait for the threads that helped."""
        self._spread.close()
