"""Trials under failing system calls: requests as JSON lines on stdin, what came of each on stdout.

Started by `failing_calls.Worker` with the preloaded library. Every trial gets a fresh copy of a cache folder, arms the
library, runs one scenario, disarms it, and builds the index once more over what the trial left in the cache: trouble
must not have been written down.

An answer: `outcome` ("ok", or "error" with `kind` and `text`), `digest` of an ok one, `batches` that were delivered
before the end, `after`, the digest of the build without faults that follows, and what `Control.disarm` says. `leaked`
lists files of the watched folders that are open still, `left` the partial files in the cache.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import hashlib
import json
import os
import shutil
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from failing_calls import Control, Fault
from shard_factory import RECIPE

import orchdata as od
from orchdata.loaders.index.build import build_index
from orchdata.loaders.index.index import Index
from orchdata.loaders.shards.parquet.children import measuring
from orchdata.loaders.storage import retries
from orchdata.loaders.storage.cache import CacheFolder


def index_digest(index: Index) -> str:
    """Of every sample's key, counts and error, and of the shards; not of where the index lies."""
    columns = index._columns
    held = [(name, np.asarray(getattr(columns, name)).tolist()) for name in type(columns).__slots__]
    shards = [(os.path.basename(shard.url), shard.size, shard.checksum) for shard in index.shards]
    failures = [index.failure(int(row)).args for row in index.bad_rows()]
    return _digest(json.dumps([held, shards, failures, index.totals, list(index.fields)], sort_keys=True))


def batch_digest(batch: Any) -> str:
    """Of every tensor of a batch, and its keys."""
    digest = hashlib.blake2b(digest_size=8)

    def add(name: str, value: Any) -> None:
        digest.update(name.encode())
        if isinstance(value, torch.Tensor):
            digest.update(str((value.dtype, tuple(value.shape))).encode() + value.contiguous().numpy().tobytes())
        elif isinstance(value, Mapping):
            for key, held in value.items():
                add(str(key), held)
        elif is_dataclass(value) and not isinstance(value, type):
            for field in fields(value):
                if field.name not in ("plan", "route"):  # what they say is in the tensors
                    add(field.name, getattr(value, field.name))
        else:
            digest.update(repr(value).encode())

    add("batch", batch)
    return digest.hexdigest()


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class Trial:
    """One scenario over shards and a cache folder. `armed` runs what the faults are for."""

    def __init__(self, control: Control, request: dict[str, Any], data: Path, cache: Path) -> None:
        self.control = control
        self.fault = Fault(**request["fault"])
        self.on_error = request.get("on_error", "skip")
        self.num_threads = request.get("num_threads", 0)
        self.retry_seconds = request.get("retry_seconds", 0.0)
        names = ("good",) if self.on_error == "raise" else ("bad", "good")
        self.paths = [str(path) for name in names for path in sorted((data / name).iterdir())]
        self.globs = [str(data / name / "*") for name in names]
        self.cache = cache
        self.batches: list[str] = []
        self.failures: list[str] = []
        self.seen: dict[str, Any] = {}

    def armed(self, run: Callable[[], Any]) -> Any:
        self.control.arm(self.fault)
        try:
            return run()
        finally:
            self.seen = self.control.disarm()

    def build(self, *, num_threads: int = 1) -> Index:
        return build_index(
            self.paths, RECIPE, cache=CacheFolder(self.cache), num_threads=num_threads, retry_seconds=self.retry_seconds
        )

    def loader(self, paths: list[str]) -> od.DataLoader:
        return od.DataLoader(
            od.ShardDataset(paths, RECIPE),
            batch_size=4,
            shuffle=True,
            on_error=self.on_error,
            num_threads=self.num_threads,
        )

    def delivered(self, loader: od.DataLoader) -> str:
        for batch in loader:
            self.batches.append(batch_digest(batch))
        failures = loader.stats()["failures"]
        self.failures = [json.dumps(failure) for failure in failures["samples"]]
        return _digest(json.dumps([self.batches, failures], sort_keys=True))

    # Scenarios: each returns a digest of all that it gave.

    def build_index(self) -> str:
        index = self.armed(lambda: self.build(num_threads=max(1, self.num_threads)))
        self.failures = [str(index.failure(int(row))) for row in index.bad_rows()]
        return index_digest(index)

    def load(self) -> str:
        """From the paths to the loader, over an index that is there: what it will plan from."""
        loader = self.armed(lambda: self.loader(self.globs))
        failures = loader.stats()["failures"]
        self.failures = [json.dumps(failure) for failure in failures["samples"]]
        return _digest(json.dumps([index_digest(loader.dataset.index()), len(loader), failures], sort_keys=True))

    def epoch(self) -> str:
        loader = self.loader(self.paths)
        return str(self.armed(lambda: self.delivered(loader)))


def hurry() -> None:
    """Waits between tries cut short: how often is tried stays, how long it takes is not what is tested."""
    retries.PAUSES_SECONDS = tuple(pause / 1000 for pause in retries.PAUSES_SECONDS)  # type: ignore[misc]
    assert build_index.__kwdefaults__ is not None
    build_index.__kwdefaults__["retry_seconds"] = 0.0  # where a loader builds


@contextlib.contextmanager
def swallowing_trouble() -> Iterator[None]:
    """The fault that trials are to find: what the system refuses becomes a shard's failure, as if it were damaged."""
    from orchdata.loaders.index import build
    from orchdata.loaders.limits import limits_fingerprint
    from orchdata.loaders.shards.facts_table import Facts, FactsMeta, shard_failure

    sound = build.load_facts  # type: ignore[attr-defined]

    def swallowing(url: str, opened: Any, *, limits: Any, **options: Any) -> Any:
        try:
            return sound(url, opened, limits=limits, **options)
        except (od.OrchdataError, OSError) as error:
            meta = FactsMeta(url=url, size=1, version="", checksum="", limits=limits_fingerprint(limits))
            return Facts(shard_failure(str(error)), meta)

    build.load_facts = swallowing  # type: ignore[attr-defined]
    try:
        yield
    finally:
        build.load_facts = sound  # type: ignore[attr-defined]


def run(control: Control, request: dict[str, Any], folder: Path, data: Path) -> dict[str, Any]:
    cache = folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    if request["scenario"] == "build_index":
        cache.mkdir()
    else:
        shutil.copytree(_built(control, request, folder, data), cache)
        if request.get("evicted"):  # decompressed shards are made again
            shutil.rmtree(cache / "shards", ignore_errors=True)
    os.environ["ORCHDATA_CACHE"] = str(cache)
    control.watch(data, cache)
    trial = Trial(control, request, data, cache)
    answer: dict[str, Any] = {}
    try:
        with swallowing_trouble() if request.get("swallow") else contextlib.nullcontext():
            answer |= {"outcome": "ok", "digest": getattr(trial, request["scenario"])()}
    except BaseException as error:
        named = any(str(place) in str(error) for place in (data, cache))
        kind = next((known.__name__ for known in type(error).__mro__ if known is od.StorageError), type(error).__name__)
        answer |= {"outcome": "error", "kind": kind, "text": str(error), "named": named, "stack": _stack(error)}
        del error
    answer |= trial.seen
    answer |= {"batches": trial.batches, "failures": trial.failures, "shards": trial.paths}
    gc.collect()
    answer["leaked"] = _open_below(str(data), str(cache / "shards"))
    answer["left"] = [str(path) for path in cache.rglob("*") if path.suffix in (".part", ".tmp")]
    answer["threads"] = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    try:
        answer["after"] = index_digest(trial.build())
    except BaseException as error:
        answer["after"] = f"{type(error).__name__}: {error}"
    return answer


def _built(control: Control, request: dict[str, Any], folder: Path, data: Path) -> Path:
    """A cache folder with the index and all decompressed shards, made once a worker."""
    template = folder / f"built-{request.get('on_error', 'skip')}"
    if not template.exists():
        Trial(control, request, data, template).build()
    return template


def _open_below(*folders: str) -> list[str]:
    paths = []
    for name in os.listdir("/proc/self/fd"):
        try:
            paths.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return [path for path in paths if path.startswith(folders)]


def _stack(error: BaseException) -> list[str]:
    return traceback.format_exception(error)[-12:]


def main() -> None:
    folder, data = Path(sys.argv[1]), Path(sys.argv[2])
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints must not come between
    hurry()
    control = Control(os.environ["FAULT_CONTROL"])
    with measuring():  # the children that measure Parquet files serve all trials
        for number, line in enumerate(sys.stdin):
            print(json.dumps(run(control, json.loads(line), folder, data)), file=answers, flush=True)
            if number < 10:
                gc.freeze()  # what is imported and compiled: to look through it takes longer than a trial


if __name__ == "__main__":
    main()
