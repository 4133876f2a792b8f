"""A build and an epoch of one good sample under limits of memory in steps; prints what came of each, as JSON.

Each trial is a fork of this process, which has imported and compiled all with a small sample: memory that it had freed
would be at hand in each fork, within any limit. After each trial, the next build without a limit has to give the
sample.
"""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import sys
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path
from select import select
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from shard_factory import write_shard
from video_clips import animation, clip

import orchdata as od
from orchdata.loaders.index.build import build_index
from orchdata.loaders.shards.reading import Reading
from orchdata.loaders.storage.cache import CacheFolder

STEP_BYTES, STEPS = 12 << 20, 30
RECIPE = od.Recipe(video=od.VideoPreprocessor())
NOT_DATA = (MemoryError, od.StorageError, od.PackageError)


def picture(scale: int) -> bytes:
    stream = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (30, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((40 * scale, 30 * scale)).save(stream, "WEBP", quality=20)
    return stream.getvalue()


def made(kind: str, folder: Path, scale: int) -> tuple[str, str | None]:
    """A shard with one good sample, whose pictures have this many times 40 x 30 pixels, and media_root."""
    folder.mkdir(parents=True)
    size = (40 * scale, 30 * scale)
    if kind in ("gif", "mp4"):
        data = animation(12, size) if kind == "gif" else clip(frames=12, size=size)
        return write_shard(folder / "a.tar", [{"__key__": "good", kind: data, "txt": b"<video>"}]), None
    if kind == "webp":
        return write_shard(folder / "a.tar", [{"__key__": "good", "webp": picture(scale), "txt": b"<image>"}]), None
    if kind == "parquet":
        pq.write_table(pa.table({"image": [picture(scale)], "text": ["<image>"]}), folder / "a.parquet")
        return str(folder / "a.parquet"), None
    (folder / "media").mkdir()
    (folder / "media" / "good.webp").write_bytes(picture(scale))
    (folder / "a.jsonl").write_text(json.dumps({"image": "good.webp", "text": "<image>"}))
    return str(folder / "a.jsonl"), str(folder / "media")


def outcome(url: str, root: str | None, cache: str) -> str:
    """ "whole", or the error of an index and an epoch; else what was wrong."""
    os.environ["ORCHDATA_CACHE"] = cache
    try:
        index = build_index([url], RECIPE, cache=CacheFolder(cache), reading=Reading(media_root=root), retry_seconds=0)
        bad = [index.failure(int(row)).reason for row in index.bad_rows()]
        if bad:
            return f"recorded as bad: {bad[0]}"
        loader = od.DataLoader(
            od.ShardDataset([url], RECIPE, media_root=root),
            batch_size=1,
            num_threads=0,
            on_error=od.ErrorPolicy("skip", max_failures=None),
        )
        loaded = sum(len(batch.sample_ids) for batch in loader)
        reasons = [failure["reason"] for failure in loader.stats()["failures"]["samples"]]
        if loaded == 1:
            return "whole"
        return "doubt" if all("or for lack of memory: " in reason for reason in reasons) else f"left out: {reasons}"
    except NOT_DATA as error:
        return next(kind.__name__ for kind in NOT_DATA if isinstance(error, kind))


def forked(trial: Any) -> str:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            try:
                result = trial()
            except BaseException as error:
                result = f"{type(error).__name__}: {error}"
            os.write(writing, result.encode()[:4000])
        os._exit(0)
    os.close(writing)
    answer = b"no answer" if not select([reading], [], [], 60)[0] else os.read(reading, 1 << 16)
    os.close(reading)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return answer.decode()


def main(kind: str, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # a fork has no pool of threads
    assert outcome(*made(kind, folder / "small", 4), str(folder / "warm")) == "whole"
    url, root = made(kind, folder / "large", 100)
    found: Counter[str] = Counter()
    for step in range(1, STEPS):
        cache = str(folder / "cache")
        shutil.rmtree(cache, ignore_errors=True)

        def limited(step: int = step, cache: str = cache) -> str:
            taken = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + step * STEP_BYTES, resource.RLIM_INFINITY))
            return outcome(url, root, cache)

        found[forked(limited)] += 1
        after = forked(lambda cache=cache: outcome(url, root, cache))
        if after != "whole":
            found[f"afterwards {after}"] += 1
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
