"""Child processes that measure shards for a build.

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
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final, Protocol

from orchdata.loaders.claims import Claims
from orchdata.loaders.errors import OrchdataError, ProcessError
from orchdata.loaders.index.shard_costs import _Chunk, _measure_chunk, _Outcome, _Progress
from orchdata.loaders.limited_process import die_with_parent
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.required import load_for_scanning
from orchdata.loaders.shards.jsonl.media_files import Found, MissingMedia
from orchdata.loaders.shards.parquet.children import measuring
from orchdata.loaders.slow import ThreadProgress, here, log, shards_under_way, watching
from orchdata.loaders.spread import Spread
from orchdata.loaders.text.tokenizer_threads import share_cores

UNGUARDED: Final = 78
"""Exit status of a child that would start children of its own."""
_POLL_SECONDS: Final = 0.1
_SHOWN_SECONDS: Final = 0.5
_END_SECONDS: Final = 5.0
_ATTEMPTS: Final = 2


class Builds(Protocol):
    """The part of a builder that a child uses."""

    claims: Claims
    missing_media: MissingMedia

    def costs(self, url: str, go_on: Callable[[], bool]) -> object: ...


class Jobs:
    """The children of a build; they start when they are needed.

    Args:
        count: the most of them.
        open_builder: makes the builder of a child, which measures there what `urls` names; it must pickle.
        recipe: of the builder.
        urls: all shards of the build.

    Raises:
        ValueError: something of the recipe, or of how shards are read, cannot be sent to a process.
    """

    def __init__(self, count: int, open_builder: Callable[[], Builds], recipe: Recipe, urls: Sequence[str]) -> None:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            os._exit(UNGUARDED)  # the parent says what is wrong
        if multiprocessing.current_process().daemon:
            raise ValueError("this process is daemonic and can have no children: index with jobs=1")
        self._count = count
        self._given = _pickled(open_builder, recipe, count)
        self._large = _larger_than_a_share(urls, count)
        self._changed = threading.Condition()
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()
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
        """Have a child scan and measure a shard, and store its costs. Returns what it saw of the files that records
        name. Raises what measuring it raises, and ProcessError.
        """
        found: Found = self._run(("shard", url), here())
        return found

    def spread(self, url: str, num_members: int) -> Spread:
        """Return what shares the chunks of a shard with so many members."""
        return _ChunkSpread(partial(self._run_chunk, url), self._pool, self._count, num_members)

    def _run_chunk(self, url: str, chunk: _Chunk, ended: Callable[[], bool]) -> list[_Outcome]:
        shown = ThreadProgress()
        shown.ended, shown.shard = ended, url
        outcomes: list[_Outcome] = self._run(("chunk", url, _sent(chunk)), shown)
        return outcomes

    def _run(self, task: tuple[Any, ...], shown: ThreadProgress) -> Any:
        for attempt in range(1, _ATTEMPTS + 1):
            child = self._take(shown)
            try:
                result = child.run(task, shown)
            except _Died as death:
                self._discard(child)
                if attempt == _ATTEMPTS or death.final:
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

    def _take(self, shown: ThreadProgress) -> _Child:
        with self._changed:
            while not self._idle and len(self._all) >= self._count:
                self._changed.wait(_POLL_SECONDS)
                shown.check()
            if self._idle:
                return self._idle.pop()
            child = _Child(self._given)
            self._all.add(child)
            return child

    def _discard(self, child: _Child) -> None:
        child.close()
        with self._changed:
            self._all.discard(child)
            self._changed.notify()


class _ChunkSpread(Spread):
    """Shares the chunks of one shard among children, as `Spread` shares them among threads."""

    def __init__(
        self,
        run: Callable[[_Chunk, Callable[[], bool]], list[_Outcome]],
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
        progress = _Progress(mine, self._num_members)
        given_up = threading.Event()
        ended = mine.ended

        def is_over() -> bool:
            return given_up.is_set() or (ended is not None and ended())

        under_way: deque[tuple[_Chunk, Future[list[_Outcome]]]] = deque()
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


def _shown(chunk: _Chunk, outcomes: Future[list[_Outcome]], progress: _Progress) -> tuple[_Chunk, list[_Outcome]]:
    result = chunk, outcomes.result()
    progress.add(sum(len(sample.members) for sample in chunk.samples))
    return result


def _sent(chunk: _Chunk) -> _Chunk:
    """Return the chunk with texts that pickle."""
    texts = chunk.texts.items()
    return replace(chunk, texts={row: bytes(text) if isinstance(text, memoryview) else text for row, text in texts})


class _Died(Exception):
    """A child has ended.

    Attributes:
        final: whether another child would end in the same way.
    """

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class _Child:
    """One child process; used by one thread at a time."""

    def __init__(self, given: bytes) -> None:
        context = multiprocessing.get_context("spawn")
        self._channel, theirs = context.Pipe()
        life, self._life = context.Pipe(duplex=False)
        self._process = context.Process(target=_run_child, args=(theirs, life, given), daemon=True)
        # Ctrl-C is for this process alone, also while the child starts: it inherits the signals that are blocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
            life.close()

    def run(self, task: tuple[Any, ...], shown: ThreadProgress) -> Any:
        """Return the result of a task, or its exception. Raises Ended if the build ends meanwhile, and _Died."""
        try:
            self._channel.send(task)
            while True:
                while not self._channel.poll(_POLL_SECONDS):
                    shown.check()
                kind, *values = pickle.loads(self._channel.recv_bytes())  # noqa: S301 - of this process's child
                if kind == "result":
                    return values[0]
                if kind == "at":
                    shown.fraction = values[0]
                else:
                    log(*values)
        except (EOFError, OSError):
            raise self._death() from None

    def _death(self) -> _Died:
        self._process.join(_END_SECONDS)
        status = self._process.exitcode
        if status == UNGUARDED:
            return _Died(
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
        return _Died(f"the process that measures it {how}, {_ATTEMPTS} times: {hint}")

    def close(self) -> None:
        """End it now."""
        self._process.kill()
        self._process.join(_END_SECONDS)
        self._channel.close()
        self._life.close()


def _pickled(open_builder: Callable[[], Builds], recipe: Recipe, count: int) -> bytes:
    try:
        return bytes(ForkingPickler.dumps((open_builder, recipe, count)))
    except Exception as error:  # pickling a user's object may raise anything
        raise ValueError(
            f"the recipe, or how shards are read, cannot be sent to processes ({type(error).__name__}: {error}): "
            "define functions and classes at the top level of a module, or index with --jobs 1 (jobs=1), in threads"
        ) from error


def _larger_than_a_share(urls: Sequence[str], count: int) -> set[str]:
    sizes: dict[str, int] = {}
    for url in urls:
        with contextlib.suppress(OSError):
            sizes[url] = os.stat(url).st_size
    share = sum(sizes.values()) / count
    return {url for url, size in sizes.items() if size > share}


def _run_child(channel: Connection[Any, Any], life: Connection[Any, Any], given: bytes) -> None:
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
        while not threading.Event().wait(_SHOWN_SECONDS):
            send("at", shards_under_way())

    with watching(partial(send, "slow")), measuring():
        builder: Builds | None = None
        threading.Thread(target=show, daemon=True).start()
        for task in _received(channel):
            try:
                if builder is None:
                    builder, recipe = _opened(given)
                result = _done(builder, recipe, *task)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the parent raises it
                result = error.with_traceback(None)
            send("result", result)


def _opened(given: bytes) -> tuple[Builds, Recipe]:
    try:
        open_builder, recipe, count = pickle.loads(given)  # noqa: S301 - of this process's parent
        share_cores(count)
        load_for_scanning(recipe)
        builder = open_builder()
    except (OrchdataError, MemoryError):
        raise
    except Exception as error:
        raise ProcessError(
            f"a process that measures shards cannot use the recipe ({type(error).__name__}: {error}): index with "
            "--jobs 1 (jobs=1), which uses threads"
        ) from error
    builder.claims.close()  # the parent has claimed the shard
    return builder, recipe


def _received(channel: Connection[Any, Any]) -> Iterator[tuple[Any, ...]]:
    with contextlib.suppress(EOFError, OSError):
        while True:
            yield channel.recv()


def _done(builder: Builds, recipe: Recipe, kind: str, url: str, *chunk: _Chunk) -> Any:
    if kind == "shard":
        builder.costs(url, lambda: True)
        return builder.missing_media.take()
    with here().at(url):
        return _measure_chunk(chunk[0], recipe, url, _Progress(ThreadProgress(), len(chunk[0])))


def _described(message: tuple[Any, ...]) -> bytes:
    try:
        described = bytes(ForkingPickler.dumps(message))
        pickle.loads(described)  # noqa: S301 - an exception of the user's may need other arguments than it names
        return described
    except Exception:  # noqa: BLE001 - pickling a user's object may raise anything
        error = message[-1]
        return bytes(ForkingPickler.dumps((message[0], ProcessError(f"{type(error).__name__}: {error}"))))
