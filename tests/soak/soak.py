"""Epochs that are killed, stopped and resumed by others: `make soak ARGS="--minutes 60 --seed 0"`.

Launch after launch trains on one data set: some ranks, each a forked process with some engine, under some balance, from
the state that the launch before left. Each ends in one of several ways, at a random moment. Every step that all ranks
of a launch have delivered is compared to the global batch that one undisturbed rank builds inline; the steps that were
under way are delivered again by the next. The keys of all launches are compared to those of the shards. What is left
after each launch is counted: processes, shared memory, locks, temporary files.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.context import ForkProcess as Process
from pathlib import Path
from typing import Any

import numpy as np
from delivered_once import tar_keys, wrong_deliveries
from digests import Content, content, joined
from shard_factory import RECIPE, omni_shards

import orchdata as od

GLOBAL_BATCH, SHARDS, SAMPLES = 16, 3, 40
STEPS = -(-SHARDS * SAMPLES // GLOBAL_BATCH)
ENDINGS = ("finish", "finish", "kill all", "kill a rank", "interrupt", "terminate")
END_SECONDS = 5.0
CLEAR_SECONDS = 30.0
"""Until nothing of a launch is there: a process that was starting when its trainer was killed ends once it has."""
WARM_STEPS, LONG_STEPS = 30 * STEPS, 120 * STEPS
"""Of the memory slope: what a launch delivers before it counts, and how long those are for which it does."""
MARK = "ORCHDATA_SOAK"
BALANCES: dict[str, dict[str, Any]] = {
    "global": {},
    "none": {"balance": "none"},
    "capped": {"balance": od.Balance(max_tokens=400, oversize="own")},
    "per phase": {
        "balance": od.Balance(assignment="per_phase"),
        "cost": od.CostModel(image=od.PhaseCost(1.0), audio=od.PhaseCost(2.0), llm=od.PhaseCost(3.0)),
    },
}


def loader_of(shards: list[str], rank: int, ranks: int, **options: Any) -> od.DataLoader:
    dataset = od.ShardDataset(shards, RECIPE)
    return od.DataLoader(dataset, global_batch_size=GLOBAL_BATCH, shuffle=True, seed=3, dp=(rank, ranks), **options)


# One rank of a launch: a process


def train(job: dict[str, Any]) -> None:
    """Deliver steps from where `job` says, one line of JSON each, until asked to stop or for `steps` steps."""
    errors = os.open(f"{job['log']}.errors", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    loader = loader_of(job["shards"], job["rank"], job["ranks"], **job["engine"], **BALANCES[job["balance"]])
    if job["state"] is not None:
        loader.load_state_dict(job["state"])
    delivered = 0
    with open(job["log"], "a", buffering=1) as log:
        while delivered < job["steps"]:
            stream = iter(loader.steps())
            for share in stream:
                plan = share[0].plan
                row = {"epoch": plan.epoch, "step": plan.step, "content": content(share), "resident": resident_kib()}
                log.write(json.dumps(row | {"state": loader.state_dict()}) + "\n")
                delivered += 1
                time.sleep(job["pause"])
                if delivered == job["steps"]:
                    break
            stream.close()  # type: ignore[attr-defined]


def resident_kib() -> int:
    """Memory of this process. What a fork shares counts in full: its share would grow as pages are parted."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


# All launches


@dataclass
class Found:
    """What all launches gave."""

    launches: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    again: int = 0
    wrong: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    killed_workers: int = 0
    lost_interrupts: int = 0
    slowest_end: float = 0.0
    slowest_clearing: float = 0.0
    socket_folders: int = 0
    slopes: list[float] = field(default_factory=list)


class Soak:
    """Launches in turn."""

    def __init__(self, folder: Path, seed: int, workers: list[int]) -> None:
        self._random = random.Random(seed)
        self._folder = folder
        self._workers = workers
        self._shards = omni_shards(folder, shards=SHARDS, samples=SAMPLES)
        self._undisturbed = loader_of(self._shards, 0, 1, num_threads=0)
        self._expected: dict[tuple[int, int], Content] = {}
        self._state: dict[str, Any] | None = None
        self._place = (0, 0)
        self._hit_at: dict[str, int] = {}
        self._runs: list[list[dict[str, Any]]] = []
        self.found = Found()

    def launch(self) -> None:
        """One launch, from the state that the last one left."""
        draw, number = self._random, sum(self.found.launches.values())
        ranks, ending = draw.choice((1, 2, 3, 4)), draw.choice(ENDINGS)
        steps = draw.choice((draw.randint(1, 3 * STEPS), LONG_STEPS)) if ending == "finish" else 1 << 30
        pause, after = draw.choice((0.0, 0.0, 0.01)), draw.uniform(0.0, 4.0)
        balance = draw.choice(list(BALANCES))
        common = {"shards": self._shards, "state": self._state, "ranks": ranks, "pause": pause, "balance": balance}
        jobs = [
            common
            | {"rank": rank, "engine": self._engine(), "steps": steps, "log": f"{self._folder}/log-{number}-{rank}"}
            for rank in range(ranks)
        ]
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=train, args=(job,)) for job in jobs]
        for process in processes:
            process.start()
        try:
            self._end(processes, jobs, ending, after)
        finally:
            for process in processes:
                process.kill()
                process.join()
        self.found.launches[ending] += 1
        self._check(jobs, number)
        self._look_for_leftovers(number)

    def _engine(self) -> dict[str, Any]:
        draw = self._random
        workers, threads = draw.choice(self._workers), draw.choice((0, 1, 4))
        engine: dict[str, Any] = {"num_workers": workers, "num_threads": threads if not workers else max(1, threads)}
        if workers or threads:
            engine |= {"prefetch_factor": draw.choice((1, 2, 5)), "persistent_workers": draw.random() < 0.5}
        return engine

    def _end(self, processes: list[Process], jobs: list[dict[str, Any]], ending: str, after: float) -> None:
        if ending == "finish":
            for process, job in zip(processes, jobs, strict=True):
                while process.is_alive():
                    time.sleep(0.05)
                    self._kill_a_worker(process.pid, job)
                if process.exitcode:
                    self._complain(f"exit status {process.exitcode}", job)
            return
        while not all(Path(job["log"]).exists() for job in jobs):  # it is random moments of training that count
            if not all(process.is_alive() for process in processes):
                break
            time.sleep(0.02)
        ends = time.monotonic() + after
        while time.monotonic() < ends:
            time.sleep(0.05)
            for process, job in zip(processes, jobs, strict=True):
                self._kill_a_worker(process.pid, job)
        for process, job in zip(processes, jobs, strict=True):
            if not process.is_alive():
                self._complain(f"ended by itself with {process.exitcode}", job)
        sent = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM}.get(ending, signal.SIGKILL)
        started = time.monotonic()
        for process in processes[: 1 if ending == "kill a rank" else None]:
            with contextlib.suppress(ProcessLookupError):  # one that ended by itself is complained of
                os.kill(process.pid, sent)
        if ending == "kill a rank":  # what a launcher does with the others
            for process in processes[1:]:
                process.terminate()
        for process, job in zip(processes, jobs, strict=True):
            process.join(END_SECONDS)
            if process.is_alive() and ending == "interrupt":  # a library's callback has swallowed it: pressed again
                self.found.lost_interrupts += 1
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(process.pid, sent)
            process.join(60)
            if process.is_alive():
                self._complain(f"has not ended 60 s after {ending}", job)
        self.found.slowest_end = max(self.found.slowest_end, time.monotonic() - started)

    def _kill_a_worker(self, process: int, job: dict[str, Any]) -> None:
        """Now and then, one of the processes that a rank has started; not again before that rank has delivered a step:
        on a busy machine none would ever have started.
        """
        if not max(self._workers) or self._random.random() >= 0.05:
            return
        delivered = Path(job["log"]).stat().st_size if Path(job["log"]).exists() else 0
        if self._hit_at.get(job["log"]) == delivered:
            return
        children = [each for each in descendants(process) if "resource_tracker" not in command_of(each)]
        if children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._random.choice(children), signal.SIGKILL)
                self.found.killed_workers += 1
                self._hit_at[job["log"]] = delivered

    def _complain(self, what: str, job: dict[str, Any]) -> None:
        errors = Path(f"{job['log']}.errors").read_text().strip()[-1500:]
        self.found.wrong.append(f"{what}: rank {job['rank']} of {job['ranks']}, {job['engine']}: {errors}")

    def _check(self, jobs: list[dict[str, Any]], number: int) -> None:
        """Compare what all ranks delivered to the undisturbed run, and continue after it."""
        by_rank = [list(rows_of(Path(job["log"]))) for job in jobs]
        self._runs.append([row_of(rank, row) for rank, rows in enumerate(by_rank) for row in rows])
        for rows in by_rank:
            self._note_slope([row["resident"] for row in rows])
        for rows in zip(*by_rank, strict=False):
            places = {(row["epoch"], row["step"]) for row in rows}
            if places != {self._place}:
                self.found.wrong.append(f"launch {number}: ranks deliver {sorted(places)}, due is {self._place}")
                return
            self._compare([row["content"] for row in rows], number)
            if any(row["state"] != rows[0]["state"] for row in rows):
                self.found.wrong.append(f"launch {number}, {self._place}: the ranks' states differ")
            epoch, step = self._place
            self._place = (epoch, step + 1) if step + 1 < STEPS else (epoch + 1, 0)
            self._state = rows[0]["state"]
            self.found.steps += 1
        self.found.again += sum(max(0, len(rows) - min(map(len, by_rank))) for rows in by_rank)

    def _compare(self, contents: list[Content], number: int) -> None:
        epoch = self._place[0]
        if self._place not in self._expected:
            self._undisturbed.set_epoch(epoch)
            for step, share in enumerate(self._undisturbed.steps()):
                self._expected[epoch, step] = content(share)
        try:
            if joined(contents) != joined([self._expected[self._place]]):
                found, due = described(contents), described([self._expected[self._place]])
                differing = f"has {sorted(found - due)} in place of {sorted(due - found)}"
                self.found.wrong.append(f"launch {number}, {self._place}, another global batch: {differing}")
        except AssertionError as error:
            self.found.wrong.append(f"launch {number}, {self._place}: {error}")

    def check_keys(self) -> None:
        """Over all launches each sample was delivered once an epoch."""
        self.found.wrong += wrong_deliveries(self._runs, tar_keys(self._shards), epochs=self._place[0])

    def _note_slope(self, resident: list[int]) -> None:
        """MB a thousand steps, over what a long launch delivered once it had warmed up."""
        warm = np.array(resident[WARM_STEPS:], float)
        if len(warm) >= LONG_STEPS - WARM_STEPS:
            self.found.slopes.append(float(np.polyfit(np.arange(len(warm)), warm, 1)[0] * 1000 / 1024))

    def _look_for_leftovers(self, number: int) -> None:
        started = time.monotonic()
        while (alive := marked_processes(str(self._folder))) and time.monotonic() < started + CLEAR_SECONDS:
            time.sleep(0.02)
        self.found.slowest_clearing = max(self.found.slowest_clearing, time.monotonic() - started)
        left = [f"process {process}: {command_of(process)}" for process in alive]
        left += [f"shared memory {name}" for name in os.listdir("/dev/shm") if "orchdata" in name]
        left += [f"lock of process {process}" for process in lock_holders() if process in alive]
        for folder in (self._folder / "temporary").glob("pymp-*"):  # sockets of fork servers
            shutil.rmtree(folder)
            self.found.socket_folders += 1
        for path in (self._folder / "temporary").rglob("*"):
            left.append(f"temporary file {path}")
            path.unlink()  # it is left once
        left += [f"file {path}" for path in (self._folder / "cache").rglob("*") if path.suffix in (".tmp", ".part")]
        self.found.left += [f"launch {number}: {each}" for each in left]
        for process in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def described(contents: list[Content]) -> set[str]:
    """Each sequence and medium that several ranks have, in words."""
    sequences = {" ".join(each) for found, _ in contents for each in found}
    return sequences | {medium for _, media in contents for medium in media}


def row_of(rank: int, row: dict[str, Any]) -> dict[str, Any]:
    """What a rank wrote of a step, as `delivered_once` reads it."""
    sequences, _ = row["content"]
    keys = [(shard, key) for shard, key, _ in sequences]
    return {"rank": rank, "epoch": row["epoch"], "step": row["step"], "keys": keys}


def rows_of(log: Path) -> Iterator[dict[str, Any]]:
    """Lines that were written to their end."""
    if log.exists():
        for line in log.read_text().split("\n")[:-1]:
            yield json.loads(line)


def descendants(process: int) -> list[int]:
    """Processes that one has started, and theirs."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            for child in Path(f"/proc/{process}/task/{thread}/children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def command_of(process: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    return ""


def marked_processes(mark: str) -> list[int]:
    """Processes that a launch started, however deep."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if (
                name.isdecimal()
                and int(name) != os.getpid()
                and f"{MARK}={mark}".encode() in Path(f"/proc/{name}/environ").read_bytes()
            ):
                found.append(int(name))
    return found


def lock_holders() -> set[int]:
    return {int(line.split()[4 + ("->" in line)]) for line in Path("/proc/locks").read_text().splitlines()}


def report(found: Found, seconds: float) -> str:
    """JSON of all that was found, and the median memory slope in MB a 1,000 steps of launches that were long enough."""
    slopes = sorted(found.slopes)
    figures = {"minutes": round(seconds / 60, 1), "epochs": found.steps / STEPS, "long launches": len(slopes)}
    figures |= {"memory slope": slopes[len(slopes) // 2] if slopes else None}
    shown = vars(found) | {"slopes": None, "left": found.left[:20], "wrong": found.wrong[:20]}
    return json.dumps(figures | shown, indent=1)


def in_folder_of_its_own() -> int:
    """This program again, by whose environment all that it starts is known."""
    with tempfile.TemporaryDirectory(prefix="orchdata-soak-") as folder:
        (Path(folder) / "temporary").mkdir()
        own = {MARK: folder, "ORCHDATA_CACHE": f"{folder}/cache", "TMPDIR": f"{folder}/temporary"}
        own |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        return subprocess.call([sys.executable, *sys.argv], env=os.environ | own)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--launches", type=int, default=1 << 30, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, nargs="+", help="numbers of worker processes to choose from")
    given = parser.parse_args()
    if MARK not in os.environ:
        return in_folder_of_its_own()
    warnings.simplefilter("ignore")
    has_processes = importlib.util.find_spec("orchdata.engines.processes") is not None
    started = time.monotonic()
    soak = Soak(Path(os.environ[MARK]), given.seed, given.workers or ([0, 0, 1, 2] if has_processes else [0]))
    with contextlib.suppress(KeyboardInterrupt):
        while time.monotonic() - started < 60 * given.minutes and sum(soak.found.launches.values()) < given.launches:
            soak.launch()
    soak.check_keys()
    print(report(soak.found, time.monotonic() - started))
    return int(bool(soak.found.wrong or soak.found.left))


if __name__ == "__main__":
    sys.exit(main())
