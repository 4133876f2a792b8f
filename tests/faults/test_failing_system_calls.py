"""Every system call of a build, a start and an epoch fails in turn: complete data or one clear error, nothing between.

With any fault in the calls, a trial may end in two ways. It gives what a run without faults gives, to the bit; or it
raises a StorageError that names a file, after batches that were right. In both ways, and where the process was killed
amid a call, the cache folder that it leaves must give the right samples to the next run: what could not be read for a
moment is never written down as bad data.

Walks over every container are tried at a sample of their calls, or at every one, under any error that there is; a
mixture of shards, with bad samples among them, where processes are started and where reads and writes are short.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from failing_calls import (
    CUT,
    LASTING,
    NO_TROUBLE,
    Fault,
    Worker,
    compile_shim,
    every_point,
    kind_of_file,
)
from fault_data import CONTAINERS, write_containers, write_mixture

NEVER = Fault(nth=0)
LEAST_POINTS = 1_500


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_mixture(folder)
    return folder


@pytest.fixture(scope="module")
def keys(data: Path) -> dict[str, list[str]]:
    """The keys of each container; the containers are next to the mixture."""
    return write_containers(data)


@pytest.fixture(scope="module")
def workers(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    library = compile_shim(tmp_path_factory.mktemp("library"))
    if library is None:
        pytest.skip("no C compiler: the library that makes calls fail cannot be built")
    workers = [Worker(library, tmp_path_factory.mktemp("worker"), data) for _ in range(2)]
    yield workers
    for worker in workers:
        worker.close()


@pytest.fixture
def worker(workers: list[Worker]) -> Worker:
    return workers[0]


class Truth:
    """What a run without faults gives, and how many calls it makes that a fault may take."""

    def __init__(self, worker: Worker, scenario: str, options: dict[str, Any]) -> None:
        self.worker, self.scenario, self.options = worker, scenario, options
        self.answer = worker.run(scenario, NEVER, **options)
        assert self.answer["outcome"] == "ok" and not problems(self.answer, self.answer, NEVER), self.answer

    def calls(self) -> list[tuple[str, str]]:
        """All calls in order: the kind of each, and what it does to what kind of file."""
        return [(kind, f"{call} {kind_of_file(path)}") for kind, call, path in self.answer["trace"]]

    def trouble(self, fault: Fault) -> str | None:
        """What was wrong with a trial, or None."""
        answer = self.worker.run(self.scenario, fault, **self.options)
        found = problems(answer, self.answer, fault)
        if not found:
            return None
        where = f"{answer.get('call')}({answer.get('path')})"
        return f"{self.scenario} {self.options} {fault}: {where}: {'; '.join(found)}"


def problems(answer: dict[str, Any], truth: dict[str, Any], fault: Fault) -> list[str]:
    """All that may not be."""
    outcome = answer["outcome"]
    if outcome in ("died", "hung"):
        return [f"{outcome} (exit status {answer['code']}): {answer['text']}"]
    found = []
    if outcome == "ok" and answer["digest"] != truth["digest"]:
        new = [failure for failure in answer["failures"] if failure not in truth["failures"]]
        found.append(f"other data, and no error; taken for bad: {new}")
    if outcome == "error":
        if answer["kind"] != "StorageError":
            found.append(f"{answer['kind']} in place of StorageError: {answer['text']}")
        if not answer["named"]:
            found.append(f"the error names no file: {answer['text']}")
        if fault.name in NO_TROUBLE:
            found.append(f"what is no trouble was an error: {answer['text']}")
        # A new index is written again only while a build is patient.
        elif fault.lasts == "once" and fault.name not in LASTING and kind_of_file(answer["path"]) != "index":
            found.append(f"what could be had at once thereafter was an error: {answer['text']}")
    if outcome == "killed" and fault.name != "kill":
        found.append("killed")
    delivered = answer["batches"]
    if delivered != truth["batches"][: len(delivered)]:
        found.append("a batch before the error was not the right one")
    if answer["after"] != truth["after"]:
        found.append(f"the next run over the same cache folder gave something else: {answer['after']}")
    if answer["leaked"]:
        found.append(f"files left open: {answer['leaked']}")
    if answer["threads"]:
        found.append(f"threads left running: {answer['threads']}")
    return found


def spread(count: int, most: int) -> list[int]:
    """At most `most` of 1..count, the ends among them."""
    if count <= most:
        return list(range(1, count + 1))
    return sorted({1 + round(i * (count - 1) / (most - 1)) for i in range(most)})


def report(found: list[str | None]) -> None:
    """Fail with one example of each kind of trouble, silent ones first."""
    wrong = sorted([each for each in found if each], key=lambda each: "no error" not in each)
    kinds: dict[str, list[str]] = {}
    for each in wrong:
        kinds.setdefault(re.sub(r"nth=\d+|lasts='[^']*'|[0-9a-f]{12,}|E[A-Z]+|\d+", "", each), []).append(each)
    examples = [f"{len(each)} times: {each[0]}" for each in kinds.values()]
    assert not wrong, f"{len(wrong)} of {len(found)} trials, {len(kinds)} kinds:\n" + "\n".join(examples)


def walks() -> dict[str, tuple[str, dict[str, Any]]]:
    """Of each container the build of its index, its load, and the load that decompresses what was evicted; the
    index of its first samples; and of some the index of another recipe, and what prunes the cache folder, or lists it.
    """
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for name in CONTAINERS:
        found[f"{name}, build"] = ("index", {"container": name})
        if name == "points":  # which differs in what is kept of it alone
            found[f"{name}, recounted"] = ("recounted", {"container": name})
            continue
        found[f"{name}, load"] = ("start_and_epoch", {"container": name})
        if name in ("tar", "jsonl", "parquet"):
            found[f"{name}, take"] = ("take", {"container": name})
        if name in ("tar.gz", "tar.zst"):
            found[f"{name}, cache fill"] = ("start_and_epoch", {"container": name, "evicted": True})
    threads, strict = {"evicted": True, "num_threads": 2}, {"on_error": "raise"}
    found["tar.gz, threads"] = ("start_and_epoch", {"container": "tar.gz"} | threads)
    found["parquet, raise"] = ("start_and_epoch", {"container": "parquet"} | strict)
    for scenario, name in (
        ("recounted", "jsonl"),
        ("prune", "tar.gz"),
        ("prune_in_use", "jsonl"),
        ("listing", "tar.gz"),
    ):
        found[f"{name}, {scenario}"] = (scenario, {"container": name})
    return found


WALKS = walks()
EVERY_POINT = bool(os.environ.get("ORCHDATA_EVERY_POINT"))
# Else a sample of points is tried, and a smaller one of these scenarios, and of all containers but these: most of their
# calls are also calls of the others.
OF_FEW_POINTS = ("take", "prune", "prune_in_use", "listing")
OF_MANY_POINTS = ("tar", "tar.zst", "parquet", "arrow", "jsonl")
FEW_POINTS, MANY_POINTS = 25, 120


def truth_of(worker: Worker, name: str, keys: dict[str, list[str]]) -> Truth:
    """A walk without faults, which must give each sample that was written, and no failure."""
    truth = Truth(worker, *WALKS[name])
    after = truth.answer["after"]
    assert sorted(after["keys"]) == sorted(keys[truth.options["container"]]) and after["failures"] == []
    return truth


@pytest.mark.slow
def test_some_points_of_every_walk(
    worker: Worker, keys: dict[str, list[str]], record_property: Callable[[str, int], None]
) -> None:
    there, found = 0, []
    for number, name in enumerate(name for name in WALKS if WALKS[name][1]["container"] in OF_MANY_POINTS):
        truth = truth_of(worker, name, keys)
        points = every_point(truth.answer["trace"], name)
        there += len(points)
        found += [truth.trouble(points[n - 1]) for n in spread(len(points), 2 + number % 2)]
    record_property("points", len(found))
    assert there >= LEAST_POINTS  # of which `test_points_of_a_walk` tries a sample of these containers
    report(found)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", WALKS)
def test_points_of_a_walk(
    name: str, workers: list[Worker], keys: dict[str, list[str]], record_property: Callable[[str, int], None]
) -> None:
    with ThreadPoolExecutor(len(workers)) as pool:
        truths = list(pool.map(lambda worker: truth_of(worker, name, keys), workers))
        points = every_point(truths[0].answer["trace"], name)
        scenario, options = WALKS[name]
        if not EVERY_POINT:
            many = scenario not in OF_FEW_POINTS and options["container"] in OF_MANY_POINTS
            points = [points[number - 1] for number in spread(len(points), MANY_POINTS if many else FEW_POINTS)]
        shares = [points[number :: len(workers)] for number in range(len(workers))]
        tried = pool.map(lambda truth, share: [truth.trouble(fault) for fault in share], truths, shares)
        record_property("points", len(points))
        report([trouble for share in tried for trouble in share])


IN_PROCESSES: dict[str, tuple[str, dict[str, Any], int]] = {
    "epoch, mixture": ("epoch", {"evicted": True, "num_workers": 1}, 60),
    "index, mixture": ("build_index", {"jobs": 2}, 12),
}
"""Scenario, options, and how many points are tried at most."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize("name", IN_PROCESSES)
def test_points_of_processes_that_are_started(
    name: str, workers: list[Worker], record_property: Callable[[str, int], None]
) -> None:
    """Whichever process the call is one of. Processes that are killed have tests of their own."""
    scenario, options, most = IN_PROCESSES[name]
    with ThreadPoolExecutor(len(workers)) as pool:
        truths = list(pool.map(lambda worker: Truth(worker, scenario, options), workers))
        every = every_point(truths[0].answer["trace"], name)
        points = [each for number in spread(len(every), most) if (each := every[number - 1]).name != "kill"]
        shares = [points[number :: len(workers)] for number in range(len(workers))]
        tried = pool.map(lambda truth, share: [truth.trouble(fault) for fault in share], truths, shares)
        record_property("points", len(points))
        report([trouble for share in tried for trouble in share])


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_half_a_write(worker: Worker, keys: dict[str, list[str]]) -> None:
    """The kill itself is tried: amid the first write of a walk, whose file never gets its name."""
    truth = truth_of(worker, "tar, build", keys)
    kinds = [kind for kind, _, _ in truth.answer["trace"]]
    fault = Fault(name="kill", nth=1 + kinds.index("write"))
    answer = worker.run(truth.scenario, fault, **truth.options)
    assert answer["outcome"] == "killed" and answer["injected"] == 1
    assert list(answer["left"]) == [answer["path"]] and answer["left"][answer["path"]] > 0
    assert not problems(answer, truth.answer, fault)


@pytest.mark.slow
def test_fewer_bytes_than_asked_for_are_asked_for_again(worker: Worker) -> None:
    """Every read and every write gives half: as on a network file system, or at a signal."""
    for scenario, options in (("build_index", {}), ("epoch", {"evicted": True})):
        truth = Truth(worker, scenario, options)
        assert sum(kind in CUT for kind, _ in truth.calls()) > 10
        report([truth.trouble(Fault(name="short", nth=1, lasts="everything", kinds=CUT))])


def test_a_build_waits_for_trouble_to_pass(worker: Worker) -> None:
    """Twelve refusals are more than the tries of one call: the shard is scanned again later."""
    truth = Truth(worker, "build_index", {"retry_seconds": 60})
    calls = [call for _, call in truth.calls()]
    for call in ("open tar", "pread parquet"):
        fault = Fault(nth=1 + calls.index(call), times=12)
        answer = worker.run("build_index", fault, retry_seconds=60)
        assert answer["outcome"] == "ok" and answer["injected"] == 12, answer
        report([truth.trouble(fault)])


def test_trouble_that_is_taken_for_bad_data_is_found(worker: Worker) -> None:
    """The trials themselves are tried: on a build that makes a shard's failure of what the system refuses."""
    sound = Truth(worker, "build_index", {})
    fault = Fault(nth=1 + [call for _, call in sound.calls()].index("open tar"), lasts="same file")
    found = problems(worker.run("build_index", fault, swallow=True), sound.answer, fault)
    assert any("other data, and no error" in problem for problem in found)
