"""Runs each loader without a stop, and stopped and resumed; compares losses and samples of the steps after the stop."""

from __future__ import annotations

import pickle
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.launch import LaunchError, torchrun
from benchmarks.loading.processes import LaneError, run_in_child
from benchmarks.peers import chosen, names_in, settings_table
from benchmarks.resume.data import KINDS, make_data
from benchmarks.resume.lanes import LANES, Lane
from benchmarks.resume.rank import Outcome, Task
from benchmarks.throughput.records import PeersJob
from orchdata.bench import WideTable, digits, work_folder

SAVED_ON: Final = 2
RESUMED_ON: Final = (2, 1, 4)
_PREPARE_SECONDS: Final = 300
_TRIES: Final = 2  # a worker that is forked off a process with threads may hang, by chance
_REFUSAL_CHARACTERS: Final = 90


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeBench:
    """What to measure.

    Attributes:
        peers: "all", "none", or names with commas between them; "torchdata" is Hugging Face's data sets too.
        kinds: "all", or kinds of data with commas between them.
        samples: of each kind of data.
        steps: of the run that is not stopped; the other one is stopped after half of them.
        batch_size: samples of a step, over all ranks.
        workers: threads, or worker processes, of each rank.
        seed: of data and order.
        folder: where to write data; by default a temporary folder.
    """

    peers: str = "all"
    kinds: str = "all"
    samples: int = 320
    steps: int = 10
    batch_size: int = 8
    workers: int = 2
    seed: int = 0
    folder: str = ""

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.batch_size % max(RESUMED_ON):
            raise ValueError(f"batch_size must be a multiple of {max(RESUMED_ON)} ranks, got {self.batch_size}")
        if self.steps < 2 or self.steps * self.batch_size > self.samples:
            raise ValueError(
                f"steps must be at least 2, and steps x batch_size at most the {self.samples} samples; "
                f"got {self.steps} x {self.batch_size}"
            )

    @property
    def stop(self) -> int:
        """Steps before the stop."""
        return self.steps // 2


def run(config: ResumeBench) -> list[WideTable]:
    """Train and compare. A loader that is not installed, or fails, is a row that says why."""
    lanes, kinds = chosen(LANES, config.peers), names_in(config.kinds, tuple(KINDS), "kind of data")
    rows: list[tuple[str, ...]] = []
    with work_folder(config.folder or None) as folder:
        data = {
            kind: make_data(
                kind,
                config.samples,
                shards=8,
                seed=config.seed,
                batch_size=config.batch_size,
                workers=config.workers,
                folder=folder / kind,
            )
            for kind in kinds
        }
        for name, lane in lanes.items():
            for ranks, cells in _compare(config, lane, data, folder / "runs"):
                rows.append((name, f"{SAVED_ON} -> {ranks}", *cells))
            shutil.rmtree(folder / "runs", ignore_errors=True)
    note = (
        "The largest difference of the loss from the run without a stop, in the steps after the stop; "
        "how many of their samples came in other steps, or not at all."
    )
    return [
        WideTable(title="resumed", columns=("loader", "ranks", *kinds), rows=tuple(rows), note=note),
        settings_table(lanes),
    ]


def _compare(
    config: ResumeBench, lane: Lane, data: Mapping[str, PeersJob], folder: Path
) -> Iterator[tuple[int, list[str]]]:
    """A number of ranks, and a cell for each kind of data, in turn."""
    folder.mkdir()
    try:
        python = lane.python
        _prepare(lane, data, folder, python)
    except LaneError as error:
        for ranks in RESUMED_ON:
            yield ranks, [f"not run: {_first_words(str(error))}"] * len(data)
        return
    whole = _train(config, lane, data, folder, python, SAVED_ON)
    first = _train(config, lane, data, folder, python, SAVED_ON, save=True)
    for ranks in RESUMED_ON:
        resumed = _train(config, lane, data, folder, python, ranks, resume=True)
        yield ranks, [cell_of(config, whole[kind], first[kind], resumed[kind]) for kind in data]


def cell_of(config: ResumeBench, whole: Outcome, first: Outcome, resumed: Outcome) -> str:
    """The figures in short, or why there are none."""
    if reason := whole.error or first.error:
        return f"not run: {_first_words(reason)}"
    if resumed.error:
        return f"{'not run' if resumed.ended else 'refused'}: {_first_words(resumed.error)}"
    difference, strays = compare_outcomes(whole, resumed, config.stop)
    due = (config.steps - config.stop) * config.batch_size
    return digits(difference) + (f", {strays} of {due} samples differ" if strays else "")


def compare_outcomes(whole: Outcome, resumed: Outcome, stop: int) -> tuple[float, int]:
    """The largest difference of the loss after the stop, and how many samples due in a step did not come in it."""
    pairs = zip(whole.losses[stop:], resumed.losses, strict=True)
    missing = [
        (Counter(due) - Counter(came)).total() for due, came in zip(whole.keys[stop:], resumed.keys, strict=True)
    ]
    return max(abs(expected - found) for expected, found in pairs), sum(missing)


def _train(
    config: ResumeBench,
    lane: Lane,
    data: Mapping[str, PeersJob],
    folder: Path,
    python: str,
    ranks: int,
    *,
    save: bool = False,
    resume: bool = False,
) -> dict[str, Outcome]:
    """Run the steps before the stop (`save`), those after it (`resume`), or all."""
    task_path, out, saved = folder / "task.pickle", folder / "outcomes.pickle", folder / "saved"
    task = Task(
        data=data,
        open=lane.open,
        first=config.stop if resume else 0,
        last=config.stop if save else config.steps,
        saved=saved if resume else None,
        save=saved if save else None,
        out=out,
    )
    task_path.write_bytes(pickle.dumps(task))
    reason = ""
    for _ in range(_TRIES):
        out.unlink(missing_ok=True)
        try:
            with (folder / "log").open("w+b") as log:
                command = ["-m", "benchmarks.resume.job", str(task_path)]
                torchrun(command, num_ranks=ranks, environment={}, log=log, python=python)
            outcomes: dict[str, Outcome] = pickle.loads(out.read_bytes())  # noqa: S301 - of this program's own job
            return outcomes
        except LaunchError as error:
            reason = str(error)
    return dict.fromkeys(data, Outcome(error=reason, ended=True))


def _prepare(lane: Lane, data: Mapping[str, PeersJob], folder: Path, python: str) -> None:
    for job in data.values():
        format_folder = job.folder / lane.folder
        if lane.prepare and not format_folder.exists():
            format_folder.mkdir()
            run_in_child(lane.prepare, (job, format_folder), folder, _PREPARE_SECONDS, python=python)


def _first_words(reason: str) -> str:
    """The beginning of an error on one line; of the last line, if a worker process or a whole run passes it on."""
    lines = reason.strip().splitlines()
    passed_on = "worker process" in lines[0] or reason.startswith("training failed")
    line = re.sub(r"\s+", " ", lines[-1 if passed_on else 0])
    return line if len(line) <= _REFUSAL_CHARACTERS else f"{line[:_REFUSAL_CHARACTERS].rsplit(' ', 1)[0]} ..."
