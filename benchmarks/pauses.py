"""How long a Python thread waits next to a loader whose texts are long.

    made-up documents --DataLoader, in threads--> batches
    a thread that reads the clock all the time --> the longest time between two looks

Other programs make a thread wait as well: a process that reads the clock at the same time shows how long. The lanes
take turns: texts tokenized one by one by `encode`, which holds the interpreter's lock, and as the loader does now.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import orchdata as od
from benchmarks.command import run_command
from benchmarks.pieces import PiecesBench, made_up, write_texts
from orchdata.bench import Result, WideTable
from orchdata.loaders.text.preprocessor import Encoded, FastTokenizer

_LONG_PAUSE = 0.001


EncodeBatch = Callable[..., list[Encoded | Exception]]


@dataclass(frozen=True, kw_only=True, slots=True)
class PausesBench:
    """What to measure.

    Attributes:
        documents: of the data set.
        tokens: of a document, about.
        repeats: epochs of each lane.
        seed: of the documents.
    """

    documents: int = 40
    tokens: int = 72_000
    repeats: int = 3
    seed: int = 0


def run(config: PausesBench) -> list[Result | WideTable]:
    """Measure a configuration."""
    words = PiecesBench(documents=config.documents, tokens=config.tokens, seed=config.seed)
    texts, tokenizer = made_up(words)
    recipe = od.Recipe(image=None, audio=None, text=od.TextPreprocessor(tokenizer))
    lanes: dict[str, EncodeBatch] = {"encode": _one_by_one, "now": _encode_batch}
    longest: dict[str, list[float]] = {name: [] for name in (*lanes, "idle")}
    elsewhere: dict[str, list[float]] = {name: [] for name in (*lanes, "idle")}
    with tempfile.TemporaryDirectory() as folder:
        path = write_texts(texts, Path(folder, "texts.jsonl"))
        loader = od.DataLoader(od.ShardDataset(path, recipe), batch_size=1, shuffle=False)
        for _ in loader:
            pass
        for _ in range(config.repeats):
            for name, encode in lanes.items():
                with _encoding(encode), _longest_pauses(longest[name], elsewhere[name]):
                    for _ in loader:
                        pass
            with _longest_pauses(longest["idle"], elsewhere["idle"]):
                time.sleep(2)
    return [
        Result(
            name=f"longest pause of a thread, {_NAMES[name]}",
            unit="ms",
            values=tuple(longest[name]),
            note=f"in another process {np.median(elsewhere[name]):.0f} ms",
        )
        for name in longest
    ]


_NAMES = {"encode": "texts tokenized one by one", "now": "as the loader does", "idle": "no loader"}
_encode_batch = FastTokenizer.encode_batch


def _one_by_one(
    tokenizer: FastTokenizer, texts: Sequence[str], *, add_special_tokens: Sequence[bool]
) -> list[Encoded | Exception]:
    encodings = [
        tokenizer._running.encode(text, add_special_tokens=added)
        for text, added in zip(texts, add_special_tokens, strict=True)
    ]
    return [*map(_arrays, encodings)]


def _arrays(encoding: Any) -> Encoded:
    ids = np.array(encoding.ids, np.int32)
    offsets = np.fromiter(chain.from_iterable(encoding.offsets), np.int64, 2 * len(ids)).reshape(-1, 2)
    return Encoded(ids, offsets[:, 0], offsets[:, 1])


@contextmanager
def _encoding(encode_batch: EncodeBatch) -> Iterator[None]:
    """Have every tokenizer use this function during the block."""
    FastTokenizer.encode_batch = encode_batch  # type: ignore[method-assign]
    try:
        yield
    finally:
        FastTokenizer.encode_batch = _encode_batch  # type: ignore[method-assign]


@contextmanager
def _longest_pauses(here: list[float], elsewhere: list[float]) -> Iterator[None]:
    """Add the longest pause during the block of a thread, and of another process, in milliseconds."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_watch_elsewhere, args=(theirs,), daemon=True)
    process.start()
    ours.recv()
    ended, found = threading.Event(), [0.0]

    def watch() -> None:
        found[0] = _longest(ended.is_set)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        ours.send(None)
        elsewhere.append(1000 * ours.recv())
        process.join()
        here.append(1000 * found[0])


def _watch_elsewhere(channel: Connection[Any, Any]) -> None:
    channel.send(None)
    channel.send(_longest(channel.poll))


def _longest(has_ended: Callable[[], bool]) -> float:
    """Read the clock until the end. Returns the longest time between two looks, in seconds."""
    longest, last = 0.0, time.perf_counter()
    while not has_ended():
        time.sleep(_LONG_PAUSE)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest


if __name__ == "__main__":
    run_command("benchmarks.pauses", PausesBench, run)
