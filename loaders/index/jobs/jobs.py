"""Processes that measure shards for a build: its children.

    thread of the build --shard--> a child: scans it, measures its samples, stores its costs --> done, or its error
    a shard that is too large for one child: scanned by the thread --chunks of samples--> children --> their outcomes

The build stays in its own process: what is cached, claimed, retried, shown and merged. So children that end for any
reason lose only what they were measuring, and what is complete is in the cache.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

from orchdata.loaders.errors import ProcessError
from orchdata.loaders.index.jobs.process import ATTEMPTS, ChildProcess, Died, check_may_have_children
from orchdata.loaders.index.jobs.work import Given
from orchdata.loaders.index.measuring.chunk import Progress, Result
from orchdata.loaders.index.measuring.reading import Chunk
from orchdata.loaders.shards.jsonl.media_files import Found
from orchdata.loaders.slow import ThreadProgress, here
from orchdata.loaders.spread import Spread
from orchdata.loaders.storage.files import Files

_POLL_SECONDS: Final = 0.1


class Jobs:
    """The processes of a build; they start when they are needed.

    Args:
        count: the most of them.
        given: what they get. It must pickle.
        urls: all shards of the build.
        files: where they are.

    Raises:
        ValueError: something of the recipe, or of how shards are read, cannot be sent to a process.
    """

    def __init__(self, count: int, given: Given, urls: Sequence[str], files: Files) -> None:
        check_may_have_children()
        self._count = count
        self._given = _pickled(given)
        self._large = _larger_than_a_share(urls, count, files)
        self._changed = threading.Condition()
        self._idle: list[ChildProcess] = []
        self._all: set[ChildProcess] = set()
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="orchdata-chunks")

    def close(self) -> None:
        """End the children."""
        self._pool.shutdown(cancel_futures=True)
        with self._changed:
            children, self._all = self._all, set()
        for child in children:
            child.close()

    def divides(self, url: str) -> bool:
        """Whether a shard is larger than the share of one child: then chunks of its samples are shared."""
        return url in self._large

    def measure(self, url: str) -> Found:
        """Have a process scan and measure a shard, and store its costs. Raises what measuring it raises, and
        ProcessError.
        """
        found: Found = self._run(("shard", url), here())
        return found

    def spread(self, url: str, num_members: int) -> Spread:
        """Return what shares the chunks of a shard with so many members."""
        return _ChunkSpread(partial(self._run_chunk, url), self._pool, self._count, num_members)

    def _run_chunk(self, url: str, chunk: Chunk, ended: Callable[[], bool]) -> list[Result]:
        shown = ThreadProgress()
        shown.ended, shown.shard = ended, url
        results: list[Result] = self._run(("chunk", url, _sent(chunk)), shown)
        return results

    def _run(self, task: tuple[Any, ...], shown: ThreadProgress) -> Any:
        for attempt in range(1, ATTEMPTS + 1):
            child = self._take(shown)
            try:
                result = child.run(task, shown)
            except Died as death:
                self._discard(child)
                if attempt == ATTEMPTS or death.final:
                    raise ProcessError(f"{task[1]}: {death}") from None
            except BaseException:
                self._discard(child)
                raise
            else:
                with self._changed:
                    self._idle.append(child)
                    self._changed.notify()
                if isinstance(result, BaseException):
                    raise result
                return result
        raise AssertionError("the last attempt returns or raises")

    def _take(self, shown: ThreadProgress) -> ChildProcess:
        with self._changed:
            while not self._idle and len(self._all) >= self._count:
                self._changed.wait(_POLL_SECONDS)
                shown.check()
            if self._idle:
                return self._idle.pop()
            child = ChildProcess(self._given)
            self._all.add(child)
            return child

    def _discard(self, child: ChildProcess) -> None:
        child.close()
        with self._changed:
            self._all.discard(child)
            self._changed.notify()


class _ChunkSpread(Spread):
    """Shares the chunks of one shard among children, as `Spread` shares them among threads."""

    def __init__(
        self,
        run: Callable[[Chunk, Callable[[], bool]], list[Result]],
        pool: ThreadPoolExecutor,
        count: int,
        num_members: int,
    ) -> None:
        self._run = run
        self._pool = pool
        self._count = count
        self._num_members = num_members

    def in_order(self, function: object, items: Iterable[Any]) -> Generator[Any]:
        """Yield each chunk without its texts, and its outcomes; the error of a chunk is raised in its place."""
        mine = here()
        progress = Progress(mine, self._num_members)
        given_up = threading.Event()
        ended = mine.ended

        def is_over() -> bool:
            return given_up.is_set() or (ended is not None and ended())

        under_way: deque[tuple[Chunk, Future[list[Result]]]] = deque()
        try:
            for chunk in items:
                future = self._pool.submit(self._run, chunk, is_over)
                under_way.append((replace(chunk, texts={}), future))
                while under_way and (len(under_way) > self._count or under_way[0][1].done()):
                    yield _shown(*under_way.popleft(), progress)
            while under_way:
                yield _shown(*under_way.popleft(), progress)
        finally:
            given_up.set()
            wait([future for _, future in under_way])


def _shown(chunk: Chunk, outcomes: Future[list[Result]], progress: Progress) -> tuple[Chunk, list[Result]]:
    result = chunk, outcomes.result()
    progress.add(sum(len(sample.members) for sample in chunk.samples))
    return result


def _sent(chunk: Chunk) -> Chunk:
    """Return the chunk with texts that pickle."""
    texts = chunk.texts.items()
    return replace(chunk, texts={row: bytes(text) if isinstance(text, memoryview) else text for row, text in texts})


def _pickled(given: Given) -> bytes:
    try:
        return bytes(ForkingPickler.dumps(given))
    except Exception as error:  # pickling a user's object may raise anything
        raise ValueError(
            f"the recipe, or how shards are read, cannot be sent to processes ({type(error).__name__}: {error}): "
            "define functions and classes at the top level of a module, or index with --jobs 1 (jobs=1), in threads"
        ) from error


def _larger_than_a_share(urls: Sequence[str], count: int, files: Files) -> set[str]:
    sizes = {url: files.size_of(url) for url in urls}
    share = sum(sizes.values()) / count
    return {url for url, size in sizes.items() if size > share}
