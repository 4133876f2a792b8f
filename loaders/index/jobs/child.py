"""A child that measures shards, or chunks of one, for a build: the child's own side."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final, Protocol

from orchdata.loaders.claims import Claims
from orchdata.loaders.errors import OrchdataError, ProcessError
from orchdata.loaders.index.measuring.chunk import Progress, measure_chunk
from orchdata.loaders.index.measuring.reading import Chunk
from orchdata.loaders.limited_process import die_with_parent
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.required import load_for_scanning
from orchdata.loaders.shards.jsonl.media_files import MissingMedia
from orchdata.loaders.shards.parquet.children import measuring
from orchdata.loaders.slow import ThreadProgress, here, shards_under_way, watching
from orchdata.loaders.tokenizer_threads import share_cores

_SHOWN_SECONDS: Final = 0.5


class Builds(Protocol):
    """The part of a builder that a child uses."""

    claims: Claims
    missing_media: MissingMedia

    def costs(self, url: str, go_on: Callable[[], bool]) -> object: ...


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


def _done(builder: Builds, recipe: Recipe, kind: str, url: str, *chunk: Chunk) -> Any:
    if kind == "shard":
        builder.costs(url, lambda: True)
        return builder.missing_media.take()
    with here().at(url):
        return measure_chunk(chunk[0], recipe, url, Progress(ThreadProgress(), len(chunk[0])))


def _described(message: tuple[Any, ...]) -> bytes:
    try:
        described = bytes(ForkingPickler.dumps(message))
        pickle.loads(described)  # noqa: S301 - an exception of the user's may need other arguments than it names
        return described
    except Exception:  # noqa: BLE001 - pickling a user's object may raise anything
        error = message[-1]
        return bytes(ForkingPickler.dumps((message[0], ProcessError(f"{type(error).__name__}: {error}"))))
