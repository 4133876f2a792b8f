"""Trials under failing system calls: requests as JSON lines on stdin, what came of each on stdout.

Started by `failing_calls.Worker` with the preloaded library. Every trial gets a fresh copy of a cache folder, arms the
library, runs one scenario, disarms it, and runs once more over what the trial left in the cache: trouble must not have
been written down. Most trials leave what an earlier one left, byte for byte: then that one's next run counts, but for
each sixteenth. A process that is to be killed is a fork of this one.

An answer: `outcome` ("ok", "killed", or "error" with `kind` and `text`), `digest` of an ok one, `batches` and `keys`
that were delivered before the end, `after`, what the run without faults gives that follows, and what `Control.disarm`
says. `leaked` lists files of the watched folders that are open still, `left` has the sizes of partial files in the
cache.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fault_data
import numpy as np
import torch
from digests import digest
from failing_calls import Control, Fault
from shard_factory import RECIPE

import orchdata as od
from orchdata.loaders.index.build import build_index
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.table import Columns
from orchdata.loaders.shards.children import measuring
from orchdata.loaders.storage import storage
from orchdata.loaders.storage.cache import SUM_SUFFIX, CacheFolder, kept_files, prune
from orchdata.loaders.storage.sealed import NOTE_SUFFIX, is_noted


def index_digest(index: Index) -> str:
    """Of every sample's key, counts and error, and of the shards; not of where the index lies."""
    held = [(name, np.asarray(getattr(index, name)).tolist()) for name in Columns.__slots__]
    shards = [(os.path.basename(shard.url), shard.size, shard.checksum) for shard in index.shards]
    failures = [index.failure(int(row)).args for row in index.bad_rows()]
    return _digest(json.dumps([held, shards, failures, index.totals, list(index.fields)], sort_keys=True))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class Trial:
    """One scenario over shards and a cache folder. `armed` runs what the faults are for."""

    def __init__(self, control: Control, request: dict[str, Any], data: Path, cache: Path) -> None:
        self.control = control
        self.fault = Fault(**request["fault"])
        self.on_error = request.get("on_error", "skip")
        self.num_threads, self.num_workers = request.get("num_threads", 0), request.get("num_workers", 0)
        self.jobs = request.get("jobs", 1)
        self.retry_seconds = request.get("retry_seconds", 0.0)
        self.container = request.get("container")
        self.media_root: Path | None = None
        if self.container:
            found, self.media_root = fault_data.given(data / self.container)
            self.paths = [str(path) for path in found]
        else:
            names = ("good",) if self.on_error == "raise" else ("bad", "good")
            self.paths = [str(path) for name in names for path in sorted((data / name).iterdir())]
        self.data, self.cache = data, cache
        self.batches: list[str] = []
        self.keys: list[str] = []
        self.failures: list[str] = []
        self.seen: dict[str, Any] = {}

    def armed(self, run: Callable[[], Any]) -> Any:
        self.control.arm(self.fault)
        try:
            return run()
        finally:
            self.seen = self.control.disarm()

    def build(self, *, num_threads: int | None = 1, jobs: int = 1) -> Index:
        return build_index(
            self.paths,
            RECIPE,
            cache=CacheFolder(self.cache),
            num_threads=num_threads,
            jobs=jobs,
            retry_seconds=self.retry_seconds,
        )

    def dataset(self, paths: list[str]) -> od.ShardDataset:
        recipe = fault_data.RECIPE if self.container else RECIPE
        return od.ShardDataset(paths, recipe, media_root=self.media_root)

    def loader(self, paths: list[str]) -> od.DataLoader:
        return od.DataLoader(
            self.dataset(paths),
            batch_size=2 if self.container else 4,
            shuffle=True,
            on_error=od.ErrorPolicy(self.on_error, max_failures=None),
            num_threads=self.num_threads,
            num_workers=self.num_workers,
        )

    def delivered(self, loader: od.DataLoader) -> str:
        for batch in loader:
            self.batches.append(digest(batch, without=("plan", "route")))  # what they say is in the tensors
            self.keys += [key for _, key in batch.sample_ids]
        failures = loader.stats()["failures"]
        self.failures = [json.dumps(failure) for failure in failures["samples"]]
        return _digest(json.dumps([self.batches, failures], sort_keys=True))

    def after(self) -> Any:
        """What the next run gives: of a container all that it delivers, of several the index."""
        if not self.container:
            return index_digest(self.build())
        self.batches, self.keys, self.failures = [], [], []
        self.delivered(self.loader(self.paths))
        return {"keys": self.keys, "batches": self.batches, "failures": self.failures}

    # Scenarios: each returns a digest of all that it gave.

    def build_index(self) -> str:
        options = {"jobs": self.jobs, "num_threads": None} if self.jobs > 1 else {"num_threads": self.num_threads or 1}
        index = self.armed(lambda: self.build(**options))
        self.failures = [str(index.failure(int(row))) for row in index.bad_rows()]
        return index_digest(index)

    def epoch(self) -> str:
        loader = self.loader(self.paths)
        return str(self.armed(lambda: self.delivered(loader)))

    def index(self) -> str:
        """From the paths of a container to its index."""
        index = self.armed(lambda: self.dataset(self.paths).index())
        self.failures = [str(index.failure(int(row))) for row in index.bad_rows()]
        return index_digest(index)

    def recounted(self) -> str:
        """The index of another recipe, from counts of texts and sizes of parts that are kept."""
        recipe = od.Recipe(**fault_data.RECIPE.modalities, limits=od.Limits(sample_tokens=9999))
        index = self.armed(lambda: od.ShardDataset(self.paths, recipe, media_root=self.media_root).index())
        self.failures = [str(index.failure(int(row))) for row in index.bad_rows()]
        return index_digest(index)

    def age(self) -> None:
        """Everything that is kept was last used long ago."""
        for path in self.cache.rglob("*"):
            if path.is_file():
                os.utime(path, (path.stat().st_mtime - 1e7,) * 2)

    def prune(self) -> str:
        """All of a cache folder is removed."""
        self.age()
        self.armed(lambda: prune(CacheFolder(), older_than_seconds=0.0))
        return "pruned"

    def prune_in_use(self) -> str:
        """All, and the index that this process has open can be read."""
        index = self.dataset(self.paths).index()
        self.age()
        self.armed(lambda: prune(CacheFolder(), older_than_seconds=0.0))
        return index_digest(index)

    def listing(self) -> str:
        self.age()
        found = self.armed(lambda: kept_files(CacheFolder()))
        return _digest(json.dumps(sorted(str(path) for file in found for path in file.paths)))

    def take(self) -> str:
        """From the paths of a container to the index of its first samples."""
        index = self.armed(lambda: self.dataset(self.paths).take(2).index())
        self.failures = [str(index.failure(int(row))) for row in index.bad_rows()]
        return index_digest(index)

    def start_and_epoch(self) -> str:
        """From the paths of a container to the end of an epoch, over an index that is there."""
        return str(self.armed(lambda: self.delivered(self.loader(self.paths))))


def hurry() -> None:
    """Waits between tries cut short: how often is tried stays, how long it takes is not what is tested."""
    storage.PAUSES_SECONDS = tuple(pause / 1000 for pause in storage.PAUSES_SECONDS)  # type: ignore[misc]
    # Where a loader builds: one shard after the other, so that the n-th call is the same in each trial.
    assert build_index.__kwdefaults__ is not None
    build_index.__kwdefaults__ |= {"retry_seconds": 0.0, "num_threads": 1}


@contextlib.contextmanager
def swallowing_trouble() -> Iterator[None]:
    """The fault that trials are to find: what the system refuses becomes a shard's failure, as if it were damaged."""
    from orchdata.loaders.index import build as builder
    from orchdata.loaders.shards.shard import Facts, FactsMeta, shard_failure

    sound = builder.load_facts  # type: ignore[attr-defined]

    def swallowing(url: str, opened: Any, *, limits: Any, **options: Any) -> Any:
        try:
            return sound(url, opened, limits=limits, **options)
        except (od.OrchdataError, OSError) as error:
            meta = FactsMeta(url=url, size=1, version="", checksum="")
            return Facts(shard_failure(str(error)), meta)

    builder.load_facts = swallowing  # type: ignore[attr-defined]
    try:
        yield
    finally:
        builder.load_facts = sound  # type: ignore[attr-defined]


KILLED: dict[str, Any] = {"outcome": "killed", "batches": [], "leaked": [], "threads": []}


def run(control: Control, request: dict[str, Any], folder: Path, data: Path) -> dict[str, Any]:
    cache = folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    if request["scenario"] in ("build_index", "index", "take"):
        cache.mkdir()
    else:
        shutil.copytree(_built(control, request, folder, data), cache)
        if request.get("evicted"):  # decompressed shards are made again
            shutil.rmtree(cache / "shards", ignore_errors=True)
    os.environ["ORCHDATA_CACHE"] = str(cache)
    control.watch(data, cache)
    trial = Trial(control, request, data, cache)
    if trial.fault.name == "kill":
        answer = in_fork(lambda: tried(trial, request)) or {**KILLED, **control.disarm()}
    else:
        answer = tried(trial, request)
    left = [path for path in cache.rglob("*") if path.suffix in (".part", ".tmp")]
    answer["left"] = {str(path): path.stat().st_size for path in left}
    answer["after"] = _after(trial, request)
    return answer


class _NextRun:
    """What a run over a cache folder gave, and how often it stood for another."""

    def __init__(self, given: Any) -> None:
        self.given = given
        self.used = 0


_next_runs: dict[str, _NextRun] = {}
_RUN_AGAIN = 16


def _after(trial: Trial, request: dict[str, Any]) -> Any:
    """What the next run gives, or the error that it raises: of equal folders the same."""
    options = {name: value for name, value in request.items() if name not in ("fault", "scenario", "swallow")}
    state = f"{sorted(options.items())} {_content(trial.cache)}"
    known = _next_runs.get(state)
    if known is not None and (known.used + 1) % _RUN_AGAIN:
        known.used += 1
        return known.given
    try:
        given = trial.after()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    _next_runs[state] = _NextRun(given)
    return given


def _content(folder: Path) -> str:
    """All that is in a folder: paths, modes, and digests of bytes; of what notes a file's time, whether it holds."""
    entries = []
    for path in sorted(folder.rglob("*")):
        data = path.read_bytes() if path.is_file() else b""
        if path.suffix == NOTE_SUFFIX:
            noted = path.with_name(path.name.removeprefix(".").rsplit(".", 2)[0])
            data = str(noted.exists() and is_noted(noted, noted.stat())).encode()
        elif path.suffix == SUM_SUFFIX and data.count(b" ") == 3:
            size, crc, changed_ns, shard_ns = data.split()
            tar = path.with_suffix(".tar")
            holds = tar.exists() and tar.stat().st_mtime_ns == int(changed_ns)
            data = b"%b %b %d %b" % (size, crc, holds, shard_ns)
        entries.append([str(path.relative_to(folder)), path.lstat().st_mode, hashlib.blake2b(data).hexdigest()])
    return _digest(json.dumps(entries))


def tried(trial: Trial, request: dict[str, Any]) -> dict[str, Any]:
    """What came of the scenario itself."""
    answer: dict[str, Any] = {}
    try:
        with swallowing_trouble() if request.get("swallow") else contextlib.nullcontext():
            answer |= {"outcome": "ok", "digest": getattr(trial, request["scenario"])()}
    except BaseException as error:
        named = any(str(place) in str(error) for place in (trial.data, trial.cache))
        kind = next((known.__name__ for known in type(error).__mro__ if known is od.StorageError), type(error).__name__)
        answer |= {"outcome": "error", "kind": kind, "text": str(error), "named": named, "stack": _stack(error)}
        del error
    answer |= trial.seen
    answer |= {"batches": trial.batches, "keys": trial.keys, "failures": trial.failures, "shards": trial.paths}
    gc.collect()
    answer["leaked"] = _open_below(str(trial.data), str(trial.cache / "shards"))
    answer["threads"] = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    return answer


def in_fork(call: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """What `call` returns, made in a fork of this process; None where that was killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            with open(writing, "wb") as out:
                out.write(json.dumps(call()).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading, "rb") as given:
        answer = given.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return json.loads(answer) if status == 0 else None


def _built(control: Control, request: dict[str, Any], folder: Path, data: Path) -> Path:
    """A cache folder with the index and all decompressed shards, made once a worker."""
    template = folder / f"built-{request.get('container', request.get('on_error', 'skip'))}"
    if not template.exists():
        os.environ["ORCHDATA_CACHE"] = str(template)
        Trial(control, request, data, template).after()
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
    os.dup2(2, 1)  # other output must not get between the answers
    hurry()
    control = Control(os.environ["FAULT_CONTROL"])
    with measuring():  # the children that measure Parquet files serve all trials
        for number, line in enumerate(sys.stdin):
            print(json.dumps(run(control, json.loads(line), folder, data)), file=answers, flush=True)
            if number < 10:
                gc.freeze()  # what is imported and compiled: to look through it takes longer than a trial


if __name__ == "__main__":
    main()
