"""Processes that measure shards for a build: both sides.

    thread of the build --shard--> a child: scans it, measures its samples, stores its costs --> done, or its error
    a shard that is too large for one child: scanned by the thread --chunks of samples--> children --> their outcomes

The build stays in its own process: what is cached, claimed, retried, shown and merged. So children that end for any
reason lose only what they were measuring, and what is complete is in the cache.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final, Protocol

from orchdata.loaders.child_process import Channel, Child, leave_out_what_is_loaded
from orchdata.loaders.errors import OrchdataError, ProcessError
from orchdata.loaders.index.measuring import Chunk, Progress, Result, measure_chunk
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.required import load_for_scanning
from orchdata.loaders.shards.jsonl.media_files import Found, MissingMedia
from orchdata.loaders.shards.parquet.children import measuring
from orchdata.loaders.spread import Spread
from orchdata.loaders.storage.cache import CacheFolder, Claims
from orchdata.loaders.storage.files import Files
from orchdata.loaders.tokenizer_threads import share_cores
from orchdata.loaders.watch import ThreadProgress, here, shards_under_way


class Builds(Protocol):
    """The part of a builder that is used here."""

    claims: Claims
    missing_media: MissingMedia

    def costs(self, url: str, go_on: Callable[[], bool]) -> object: ...


@dataclass(frozen=True)
class Given:
    """What a process gets once.

    Attributes:
        open_builder: makes its builder, which keeps what it measures in a cache folder; it must pickle.
        cache: the cache folder of the build.
        count: number of processes.
    """

    open_builder: Callable[[CacheFolder], Builds]
    cache: CacheFolder
    recipe: Recipe
    count: int


class Measurer:
    """Measures in this process; used by one thread.

    Args:
        given: a pickled `Given`.
    """

    def __init__(self, given: bytes) -> None:
        self._pickled = given
        self._given: Given | None = None
        self._builder: Builds | None = None

    def run(self, kind: str, url: str, *chunk: Chunk) -> Any:
        """Return the result of a task: which files that records name are missing, or the results of a chunk. An error
        is returned, not raised.
        """
        try:
            given, builder = self._opened()
            if kind == "shard":
                builder.costs(url, lambda: True)
                return builder.missing_media.take()
            with here().at(url):
                return measure_chunk(chunk[0], given.recipe, url, Progress(ThreadProgress(), len(chunk[0])))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the build raises it
            return error.with_traceback(None)

    def _opened(self) -> tuple[Given, Builds]:
        if self._given is not None and self._builder is not None:
            return self._given, self._builder
        try:
            given: Given = pickle.loads(self._pickled)  # noqa: S301 - of the build
            share_cores(given.count)
            load_for_scanning(given.recipe)
            self._builder = given.open_builder(given.cache)
        except (OrchdataError, MemoryError):
            raise
        except Exception as error:
            raise ProcessError(
                f"a process that measures shards cannot use the recipe ({type(error).__name__}: {error}): index with "
                "--jobs 1 (jobs=1), which uses threads"
            ) from error
        self._builder.claims.close()  # the build has claimed the shard
        leave_out_what_is_loaded()  # it stays: the collector need not walk it while samples are measured
        self._given = given
        return given, self._builder


def packed(message: Any) -> bytes:
    """Return a pickled message, or an error, or a tuple that ends in one. What does not unpickle is a ProcessError."""
    try:
        data = bytes(ForkingPickler.dumps(message))
        pickle.loads(data)  # noqa: S301 - an exception of the user's may need other arguments than it names
        return data
    except Exception:  # noqa: BLE001 - pickling a user's object may raise anything
        error = message[-1] if isinstance(message, tuple) else message
        replaced = ProcessError(f"{type(error).__name__}: {error}")
        return bytes(ForkingPickler.dumps((message[0], replaced) if isinstance(message, tuple) else replaced))


_SHOWN_SECONDS: Final = 0.5
ATTEMPTS: Final = 3
"""How many children try the same task if they end."""
_UNGUARDED: Final = 78
_POLL_SECONDS: Final = 0.1
_END_SECONDS: Final = 5.0


def run_child(channel: Channel, _fds: list[int]) -> None:
    """Serve tasks until the parent ends this process."""
    os.dup2(2, 1)  # printed text is not part of a report
    sending = threading.Lock()

    def send(*message: Any) -> None:
        with sending, contextlib.suppress(OSError):
            channel.send(packed(message))

    def show() -> None:
        while True:
            time.sleep(_SHOWN_SECONDS)
            send("at", shards_under_way())

    with measuring(), contextlib.suppress(OSError):
        given = channel.receive()
        measurer = Measurer(b"" if given is None else given[0])
        threading.Thread(target=show, daemon=True).start()
        while (task := channel.receive()) is not None:
            send("result", measurer.run(*pickle.loads(task[0])))  # noqa: S301 - of the build


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
        self._child = Child(multiprocessing.get_context("spawn"), run_child, (), "orchdata measuring")
        self._given: bytes | None = given

    def run(self, task: tuple[Any, ...], shown: ThreadProgress) -> Any:
        """Return the result of a task, or its exception. Raises Ended if the build ends meanwhile, and Died."""
        channel = self._child.channel
        try:
            if self._given is not None:
                channel.send(self._given)
                self._given = None
            channel.send(bytes(ForkingPickler.dumps(task)))
            answers = select.poll()
            answers.register(channel.socket, select.POLLIN)
            while True:
                while not answers.poll(_POLL_SECONDS * 1000):
                    shown.check()
                received = channel.receive()
                if received is None:
                    raise self._death()
                kind, value = pickle.loads(received[0])  # noqa: S301 - of this process's child
                if kind == "result":
                    return value
                shown.fraction = value
        except OSError:
            raise self._death() from None

    def _death(self) -> Died:
        self._child.process.join(_END_SECONDS)
        status = self._child.process.exitcode
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
        self._child.end()


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
        # A child that is still importing the script of its parent ends here: the parent says what is wrong.
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            os._exit(_UNGUARDED)
        if multiprocessing.current_process().daemon:
            raise ValueError("this process is daemonic and can have no children: index with jobs=1")
        self._count = count
        try:
            self._given = bytes(ForkingPickler.dumps(given))
        except Exception as error:  # pickling a user's object may raise anything
            raise ValueError(
                f"the recipe, or how shards are read, cannot be sent to processes ({type(error).__name__}: {error}): "
                "define functions and classes at the top level of a module, or index with --jobs 1 (jobs=1), in threads"
            ) from error
        sizes = {url: files.size_of(url) for url in urls}
        share = sum(sizes.values()) / count
        self._large = {url for url, size in sizes.items() if size > share}
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
        texts: dict[int, Any] = {
            row: bytes(text) if isinstance(text, memoryview) else text for row, text in chunk.texts.items()
        }
        results: list[Result] = self._run(("chunk", url, replace(chunk, texts=texts)), shown)
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
