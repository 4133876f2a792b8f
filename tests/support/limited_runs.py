"""Hostile files in limited children: shards -> index -> one epoch under on_error="skip", and what became of each.

    Runner.run(shards) --JSON--> a forked child with limits on memory, CPU and time --JSON--> verdict

The program (this file) imports and compiles everything once, stays with one thread, and forks a child for each request:
a crash, a hang or memory past the limits ends that child only.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MEMORY_BYTES = 3 << 30
"""Address space that a child may take beyond what the program had."""


class Runner:
    """One that forks: the program, or a fork of it. See `start_runners`."""

    def __init__(self, process: subprocess.Popen[bytes], requests: int, answers: int) -> None:
        self._process = process
        self._requests = os.fdopen(requests, "w")
        self._answers = os.fdopen(answers)

    def run(
        self,
        shards: Sequence[str],
        *,
        cpu_seconds: int,
        wall_seconds: float = 120,
        misbehave: str = "",
        compare: bool = False,
        video: bool = False,
    ) -> dict[str, Any]:
        """What became of these shards: `end` ("done", "raised", or how the child ended), `text`, `delivered` as
        (shard, key), `failures` as (shard, key, field, reason), `samples` in the index, `peak_bytes`, `seconds`.
        With `compare` also `different`: media whose sizes are not what others find; see `recounted`. With `video` the
        recipe reads clips, and GIFs as such.
        """
        request = {"shards": list(shards), "cpu_seconds": cpu_seconds, "wall_seconds": wall_seconds}
        request |= {"misbehave": misbehave, "compare": compare, "video": video}
        self._requests.write(json.dumps(request) + "\n")
        self._requests.flush()
        answer: dict[str, Any] = json.loads(self._answers.readline())
        return answer

    def close(self) -> None:
        """End it, and all that were started with it."""
        self._requests.close()
        self._answers.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def start_runners(*folders: Path) -> list[Runner]:
    """Start a runner for each folder, which takes its cache folders and output: the program, and forks of it."""
    requests, answers = ([os.pipe() for _ in folders] for _ in range(2))
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    theirs = [(read, write) for (read, _), (_, write) in zip(requests, answers, strict=True)]
    given = [(str(folder), *ends) for folder, ends in zip(folders, theirs, strict=True)]
    process = subprocess.Popen(
        [sys.executable, __file__, json.dumps(given)],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)},
        pass_fds=[end for ends in theirs for end in ends],
        process_group=0,
    )
    for end in (end for ends in theirs for end in ends):
        os.close(end)
    return [Runner(process, write, read) for (_, write), (read, _) in zip(requests, answers, strict=True)]


def fork_and_wait(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run a request in a child, and say how it ended."""
    receive, send = os.pipe()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        log = Path(cache) / "log"
        child = os.fork()
        if child == 0:
            os.close(receive)
            os.setpgid(0, 0)  # with all that it starts
            _child(request, send, cache, log)
        os.close(send)
        with contextlib.suppress(OSError):
            os.setpgid(child, child)
        text, in_time = _read_all(receive, started + request["wall_seconds"])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
        try:
            answer: dict[str, Any] = json.loads(text)
        except ValueError:  # it ended before it could say
            code = os.waitstatus_to_exitcode(status)
            end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            end = end if in_time else f"no end after {request['wall_seconds']} s"
            answer = {"end": end, "text": log.read_text(errors="replace")[-1500:] if log.exists() else ""}
            answer |= {"delivered": [], "failures": [], "samples": 0}
    answer["peak_bytes"] = usage.ru_maxrss << 10
    answer["seconds"] = round(time.monotonic() - started, 3)
    return answer


def _read_all(descriptor: int, deadline: float) -> tuple[bytes, bool]:
    text = b""
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        while select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0]:
            piece = file.read(1 << 20)
            if not piece:
                return text, True
            text += piece
    return text, False


def _child(request: dict[str, Any], send: int, cache: str, log: Path) -> None:
    """Never returns."""
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (request["cpu_seconds"],) * 2)
        os.environ["ORCHDATA_CACHE"] = cache
        try:
            misbehave(request["misbehave"])
            answer = examine(request["shards"], compare=request["compare"], video=request["video"])
        except BaseException as error:
            kind = f"{type(error).__name__}: {error}"
            stack = "".join(traceback.format_tb(error.__traceback__)[-6:])
            answer = {"end": "raised", "text": f"{kind[:600]}\n{stack}", "delivered": [], "failures": [], "samples": 0}
        with os.fdopen(send, "w") as file:
            json.dump(answer, file)
    finally:
        os._exit(0)


def misbehave(way: str) -> None:
    """What a child is there for: to try the limits themselves."""
    if way == "abort":
        os.abort()
    while way == "spin":
        pass
    while way == "hang":
        time.sleep(1)
    held = []
    while way == "allocate":
        held.append(bytearray(64 << 20))


def examine(shards: list[str], *, compare: bool = False, video: bool = False) -> dict[str, Any]:
    """Index the shards, and take one epoch of what can be used."""
    from recounted import recounted

    import orchdata as od
    from orchdata.loaders.index.build import build_index

    limits = od.Limits(sample_decoded_bytes=1 << 30)  # what this child has room for
    clips = od.VideoPreprocessor(max_tokens=16, max_frames=6) if video else None
    recipe = od.Recipe(image=od.ImagePreprocessor(max_tokens=64), video=clips, limits=limits)
    dataset = od.ShardDataset([Path(shard) for shard in shards], recipe)
    index = build_index(dataset.urls, recipe, num_threads=1)
    failures: list[od.DataError] = []
    delivered: list[tuple[str, str]] = []
    policy = od.ErrorPolicy("skip", max_failures=None, handler=failures.append)
    for batch in od.DataLoader(dataset, batch_size=4, on_error=policy, num_threads=0):
        delivered.extend(batch.sample_ids)
    listed = [(failure.shard, failure.key, failure.field, failure.reason) for failure in failures]
    answer = {"end": "done", "text": "", "delivered": delivered, "failures": listed, "samples": index.num_samples}
    return answer | {"different": recounted(index, recipe, set(delivered)) if compare else []}


def main() -> None:
    (folder, requests, answers), *others = json.loads(sys.argv[1])
    warnings.simplefilter("ignore")
    import torch
    from shard_factory import omni_samples, write_shard

    torch.set_num_threads(1)
    os.dup2(2, 1)
    os.environ["ORCHDATA_CACHE"] = f"{folder}/warm"
    examine(
        [write_shard(Path(folder) / "warm.tar", omni_samples(5))], compare=True
    )  # imports and compiles what all children share
    for other in others:
        if os.fork() == 0:
            folder, requests, answers = other
            break
    with os.fdopen(requests) as lines, os.fdopen(answers, "w") as out:
        for line in lines:
            print(json.dumps(fork_and_wait(json.loads(line), Path(folder))), file=out, flush=True)


if __name__ == "__main__":
    main()
