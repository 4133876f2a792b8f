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
import queue
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

from orchdata.loaders.child_process import Channel, Child, leave_out_what_is_loaded
from orchdata.loaders.errors import OrchdataError, ProcessError
from orchdata.loaders.index.costs import Chunk, Progress, Result, measure_chunk
from orchdata.loaders.locks import share_cores
from orchdata.loaders.pace import Spread
from orchdata.loaders.recipe import Recipe, load_for_scanning
from orchdata.loaders.shards.children import measuring
from orchdata.loaders.shards.named_media import Found
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.files import Files
from orchdata.loaders.watch import ThreadProgress, here, shards_under_way


@dataclass(frozen=True)
class Given:
    """What a process gets once."""

    open_builder: Callable[[CacheFolder], Any]  # keeps what it measures in a cache folder; must pickle
    cache: CacheFolder  # of the build
    recipe: Recipe
    count: int  # of processes


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

    def send(kind: str, value: Any) -> None:
        try:
            data = bytes(ForkingPickler.dumps((kind, value)))
            pickle.loads(data)  # noqa: S301 - an exception of the user's may need other arguments than it names
        except Exception:  # noqa: BLE001 - pickling a user's object may raise anything
            data = bytes(ForkingPickler.dumps((kind, ProcessError(f"{type(value).__name__}: {value}"))))
        with sending, contextlib.suppress(OSError):
            channel.send(data)

    def show() -> None:
        while True:
            time.sleep(_SHOWN_SECONDS)
            send("at", shards_under_way())

    with measuring(), contextlib.suppress(OSError):
        given = channel.receive()
        measure = cache(partial(_opened, b"" if given is None else given[0]))
        threading.Thread(target=show, daemon=True).start()
        while (task := channel.receive()) is not None:
            try:
                send("result", measure()(*pickle.loads(task[0])))  # noqa: S301 - of the build
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the build raises it
                send("result", error.with_traceback(None))


def _opened(pickled: bytes) -> Callable[..., Any]:
    """Return what measures in this process: a shard, or a chunk of its samples."""
    try:
        given: Given = pickle.loads(pickled)  # noqa: S301 - of the build
        share_cores(given.count)
        load_for_scanning(given.recipe)
        builder = given.open_builder(given.cache)
    except (OrchdataError, MemoryError):
        raise
    except Exception as error:
        raise ProcessError(
            f"a process that measures shards cannot use the recipe ({type(error).__name__}: {error}): index with "
            "--jobs 1 (jobs=1), which uses threads"
        ) from error
    builder.claims.close()  # the build has claimed the shard
    leave_out_what_is_loaded()  # it stays: the collector need not walk it while samples are measured

    def measure(url: str, chunk: Chunk | None = None) -> Any:
        """Return which files that records name are missing; or the results of a chunk."""
        if chunk is None:
            builder.costs(url, lambda: True)
            return builder.missing_media.take()
        with here().at(url):
            return measure_chunk(chunk, given.recipe, url, Progress(ThreadProgress(), len(chunk)))

    return measure


class ChildProcess:
    """One child process; used by one thread at a time."""

    def __init__(self, given: bytes) -> None:
        self._child = Child(multiprocessing.get_context("spawn"), run_child, (), "orchdata measuring")
        self._given: bytes | None = given

    def run(self, task: tuple[Any, ...], shown: ThreadProgress) -> Any:
        """Return the result of a task, or its exception. Raises Ended if the build ends meanwhile, EOFError if the
        process ends.
        """
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
                    raise EOFError
                kind, value = pickle.loads(received[0])  # noqa: S301 - of this process's child
                if kind == "result":
                    return value
                shown.fraction = value
        except OSError:
            raise EOFError from None

    def death(self) -> tuple[str, bool]:
        """Return how it has ended, and whether another child would end in the same way."""
        self._child.process.join(_END_SECONDS)
        status = self._child.process.exitcode
        if status == _UNGUARDED:
            return (
                "processes that measure shards import the script that starts them: call it below "
                'if __name__ == "__main__", or index with jobs=1'
            ), True
        how = "closed its connection" if status is None else f"ended with status {status}"
        if status is not None and status < 0:
            how = f"was ended by {next((each.name for each in signal.Signals if each == -status), -status)}"
        hint = (
            "is memory short? Fewer --jobs take less" if status == -signal.SIGKILL else "--jobs 1 uses no such process"
        )
        return f"the process that measures it {how}, {ATTEMPTS} times: {hint}", False

    def close(self) -> None:
        """End it now."""
        self._child.end()


class Jobs:
    """The processes of a build of these shards, `count` at most; they start when they are needed. Raises ValueError if
    something of the recipe, or of how shards are read, cannot be sent to a process.
    """

    def __init__(self, count: int, given: Given, urls: Sequence[str], files: Files) -> None:
        # A child that is still importing the script of its parent ends here: the parent says what is wrong.
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            os._exit(_UNGUARDED)
        if multiprocessing.current_process().daemon:
            raise ValueError("this process is daemonic and can have no children: index with jobs=1")
        self.count = count
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
        self._all: set[ChildProcess] = set()
        self._free: queue.LifoQueue[ChildProcess | None] = queue.LifoQueue()  # None: one may be started
        for _ in range(count):
            self._free.put(None)
        self.pool = ThreadPoolExecutor(count, thread_name_prefix="orchdata-chunks")

    def close(self) -> None:
        """End the children."""
        self.pool.shutdown(cancel_futures=True)
        while self._all:
            self._all.pop().close()

    def divides(self, url: str) -> bool:
        """Whether a shard is larger than the share of one child: then chunks of its samples are shared."""
        return url in self._large

    def measure(self, url: str) -> Found:
        """Have a process scan and measure a shard, and store its costs. Raises what measuring it raises, and
        ProcessError.
        """
        found: Found = self._run((url,), here())
        return found

    def spread(self, url: str, num_members: int) -> Spread:
        """Return what shares the chunks of a shard with so many members."""
        return _ChunkSpread(self, url, num_members)

    def run_chunk(self, url: str, chunk: Chunk, ended: Callable[[], bool]) -> list[Result]:
        shown = ThreadProgress()
        shown.ended, shown.shard = ended, url
        texts: dict[int, Any] = {
            row: bytes(text) if isinstance(text, memoryview) else text for row, text in chunk.texts.items()
        }
        results: list[Result] = self._run((url, replace(chunk, texts=texts)), shown)
        return results

    def _run(self, task: tuple[Any, ...], shown: ThreadProgress) -> Any:
        for attempt in range(1, ATTEMPTS + 1):
            # A child that waits for a task, or a new one.
            child = None
            while child is None:
                try:
                    child = self._free.get(timeout=_POLL_SECONDS) or ChildProcess(self._given)
                except queue.Empty:
                    shown.check()
            self._all.add(child)
            try:
                result = child.run(task, shown)
            except BaseException as error:
                how, is_final = child.death() if isinstance(error, EOFError) else ("", True)
                child.close()
                self._all.discard(child)
                self._free.put(None)
                if not isinstance(error, EOFError):
                    raise
                if attempt == ATTEMPTS or is_final:
                    raise ProcessError(f"{task[0]}: {how}") from None
            else:
                self._free.put(child)
                if isinstance(result, BaseException):
                    raise result
                return result
        raise AssertionError("the last attempt returns or raises")


class _ChunkSpread(Spread):
    """Shares the chunks of one shard, with so many members, among children, as `Spread` shares them among threads."""

    def __init__(self, jobs: Jobs, url: str, num_members: int) -> None:
        self._jobs, self._url, self._num_members = jobs, url, num_members

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
            for chunk in chain(items, [None]):
                if chunk is not None:
                    future = self._jobs.pool.submit(self._jobs.run_chunk, self._url, chunk, is_over)
                    under_way.append((replace(chunk, texts={}), future))
                while under_way and (chunk is None or len(under_way) > self._jobs.count or under_way[0][1].done()):
                    first, outcomes = under_way.popleft()
                    result = first, outcomes.result()
                    progress.add(sum(len(sample.members) for sample in first.samples))
                    yield result
        finally:
            given_up.set()
            wait([future for _, future in under_way])
