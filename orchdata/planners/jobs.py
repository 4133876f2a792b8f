"""Which job runs on which GPUs, and when: seconds of an iteration by cell -> runs of each job on nodes.

jobs, kinds of GPUs --gain in completions a second, a GPU--> a cell for each job --nodes--> until a job ends or comes

After Crius/Arena (Xue et al., EuroSys 2026, arXiv 2403.16125): a cell is a number of GPUs of a kind with their shape by
nodes. The rule is ours: the first GPUs go to the job with the least work left, and each further change of a job, from
none to a cell or from a cell to another, is made in the order of what it adds to the sum of 1 / seconds left, a GPU.
"""

from __future__ import annotations

import csv
import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from orchdata.balancers.assignment import checked_count, checked_effort
from orchdata.planners.values import Value, checked_number

MOST_TRIED = 64  # First choices whose future is simulated; with more, the rule alone decides.


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuKind(Value):
    """The nodes of a cluster with one kind of GPU: how many, and how many GPUs each has."""

    name: str
    nodes: int
    gpus_a_node: int

    def __post_init__(self) -> None:
        _check_shape(self, f"GpuKind({self.name!r})")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCell(Value):
    """A shape that a job can run on, nodes x GPUs of a kind, and how fast.

    Attributes:
        seconds: of an iteration, as estimated: decisions are made from it.
        measured_seconds: of an iteration: the job runs at this pace. By default it is `seconds`.
    """

    kind: str
    nodes: int
    gpus_a_node: int
    seconds: float
    measured_seconds: float | None = None

    def __post_init__(self) -> None:
        _check_shape(self, "JobCell")
        checked_number(self.seconds, "JobCell.seconds")
        checked_number(self.pace, "JobCell.measured_seconds")

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_a_node

    @property
    def pace(self) -> float:
        """Seconds of an iteration as it runs."""
        return self.seconds if self.measured_seconds is None else self.measured_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Job(Value):
    """A job: its iterations, the cells that it can run on, and when it comes, in seconds."""

    name: str
    iterations: float
    cells: tuple[JobCell, ...]
    submitted_seconds: float = 0.0

    def __post_init__(self) -> None:
        checked_number(self.iterations, f"Job({self.name!r}).iterations")
        checked_effort(self.submitted_seconds, f"Job({self.name!r}).submitted_seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRun(Value):
    """A job on a cell without a change: the nodes, by number within their kind, and when, in seconds."""

    job: str
    cell: JobCell
    nodes: tuple[int, ...]
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class JobsPlan(Value):
    """Who runs where and when: by start, then by name. A job with several runs was moved, or waited in between.

    Attributes:
        completion_seconds: of each job, from when it came to its end.
        moves: changes of a job that has run before; each took `move_seconds` in which it computed nothing.
    """

    runs: tuple[JobRun, ...]
    completion_seconds: Mapping[str, float]
    moves: int

    @property
    def mean_completion_seconds(self) -> float:
        return sum(self.completion_seconds.values()) / len(self.completion_seconds)


def plan_jobs(
    jobs: Sequence[Job], kinds: Sequence[GpuKind], *, round_seconds: float = 0.0, move_seconds: float = 60.0
) -> JobsPlan:
    """Return which job runs on which cell, and when, for a small mean completion.

    At each end and arrival all jobs are decided again, without knowledge of those to come, as this file says at its
    top. A GPU counts as one of whichever kind. A move counts as `move_seconds`, so one that does not pay is not made.
    With few jobs (64 first choices) each is followed to the end by simulation, and the best is taken.

    Args:
        jobs: cells that do not fit the cluster are left out.
        kinds: the cluster. GPUs a node of the cells of one kind, and of its nodes, must divide one another.
        round_seconds: decisions and ends are at multiples of it; 0: at once.
        move_seconds: what a job loses when it changes nodes or starts again.

    Raises:
        ValueError: two jobs or kinds of one name, a job that fits no kind, or sizes that do not divide one another.
    """
    return run_jobs(jobs, kinds, Running.decide, round_seconds, move_seconds)


def read_jobs(path: str | Path, cells: Mapping[str, Sequence[JobCell]]) -> list[Job]:
    """Read jobs from a CSV file with the columns job, submitted_seconds, iterations and model.

    `cells` are of each model. Raises ValueError that names the file, its line, and what is missing or no number.
    """
    jobs = []
    with open(path, newline="") as file:
        rows = csv.DictReader(file)
        if missing := {"job", "submitted_seconds", "iterations", "model"} - set(rows.fieldnames or ()):
            raise ValueError(f"{path}: column {min(missing)!r} is missing; it has {', '.join(rows.fieldnames or ())}")
        for row in rows:
            try:
                if row["model"] not in cells:
                    raise ValueError(f"model is {row['model']!r}, which has no cells")
                iterations, submitted = (float(row[column] or "") for column in ("iterations", "submitted_seconds"))
                of_model = tuple(cells[row["model"]])
                jobs.append(Job(name=row["job"], iterations=iterations, cells=of_model, submitted_seconds=submitted))
            except ValueError as error:
                raise ValueError(f"{path} line {rows.line_num}: {error}") from None
    return jobs


def _check_shape(of: GpuKind | JobCell, name: str) -> None:
    checked_count(of.nodes, f"{name}.nodes")
    checked_count(of.gpus_a_node, f"{name}.gpus_a_node")


@dataclass(slots=True)
class ActiveJob:
    """A job that came and has not ended: its iterations left, its cell (None: it waits) and nodes."""

    job: Job
    left: float
    cell: JobCell | None = None
    nodes: tuple[int, ...] = ()
    since: float = 0.0
    ready: float = 0.0  # It computes from here on.
    has_run: bool = False


Cells = Sequence[JobCell | None]  # Of each active job; None: it waits.
Decide = Callable[["Running"], Cells]


def run_jobs(
    jobs: Sequence[Job], kinds: Sequence[GpuKind], decide: Decide, round_seconds: float, move_seconds: float
) -> JobsPlan:
    """Run jobs as `decide` says at each arrival and end."""
    cluster = {kind.name: kind for kind in kinds}
    checked_effort(round_seconds, "round_seconds")
    checked_effort(move_seconds, "move_seconds")
    for values, name in ((jobs, "jobs"), (kinds, "kinds")):
        names = sorted(value.name for value in values)
        if not names or len(set(names)) < len(names):
            raise ValueError(f"{name} must be one at least, each with its own name, got {', '.join(names) or 'none'}")
    coming = sorted(_checked(jobs, cluster), key=lambda job: (job.submitted_seconds, job.name), reverse=True)
    running = Running(cluster, round_seconds, move_seconds, [], coming[-1].submitted_seconds)
    while coming or running.active:
        while coming and running.snapped(coming[-1].submitted_seconds) <= running.now:
            running.active.append(ActiveJob(coming[-1], coming.pop().iterations))
        running.place(decide(running))
        running.advance(running.snapped(coming[-1].submitted_seconds) if coming else math.inf)
    return JobsPlan(
        runs=tuple(sorted(running.runs, key=lambda run: (run.start_seconds, run.job))),
        completion_seconds={job.name: running.ends[job.name] - job.submitted_seconds for job in jobs},
        moves=running.moves,
    )


def _checked(jobs: Sequence[Job], cluster: Mapping[str, GpuKind]) -> Iterator[Job]:
    """Yield the jobs with the cells that fit, in an order that does not depend on the given one."""
    sizes = {name: {kind.gpus_a_node} for name, kind in cluster.items()}
    for job in jobs:
        kept: list[JobCell] = []
        for cell in sorted(job.cells, key=lambda cell: (cell.kind, cell.gpus, cell.seconds, cell.nodes)):
            kind = cluster.get(cell.kind)
            if kind and cell.nodes <= kind.nodes and cell.gpus_a_node <= kind.gpus_a_node:
                sizes[cell.kind].add(cell.gpus_a_node)
                # No slower one with as many GPUs.
                if not kept or kept[-1].kind != cell.kind or cell.seconds < kept[-1].seconds:
                    kept.append(cell)
        if not kept:
            shapes = ", ".join(f"{cell.nodes} x {cell.gpus_a_node} {cell.kind}" for cell in job.cells)
            raise ValueError(f"Job({job.name!r}).cells fit no kind of GPUs, got {shapes or 'none'}")
        yield replace(job, cells=tuple(kept))
    for name, of in sizes.items():
        # So pieces of nodes, the largest first, leave no hole that a smaller one does not fill.
        for small, large in pairwise(sorted(of)):
            if large % small:
                raise ValueError(f"JobCell.gpus_a_node of {name!r} must divide one another, got {small} and {large}")


@dataclass(slots=True)
class Running:
    """Jobs on nodes, from one decision to the next; `judged` by measured seconds, and then with a record.

    The active jobs are in the order of their arrival.
    """

    cluster: Mapping[str, GpuKind]
    round_seconds: float
    move_seconds: float
    active: list[ActiveJob]
    now: float
    judged: bool = True
    moves: int = 0
    runs: list[JobRun] = field(default_factory=list)
    ends: dict[str, float] = field(default_factory=dict)

    def snapped(self, seconds: float) -> float:
        """Return the first time of decisions from `seconds` on."""
        return math.ceil(seconds / self.round_seconds - 1e-9) * self.round_seconds if self.round_seconds else seconds

    def place(self, cells: Cells) -> None:
        """Give each job its cell, on the nodes that it has if the cell stays. A job that finds no nodes waits."""
        for active, cell, nodes in zip(self.active, cells, self._nodes(cells), strict=True):
            cell = cell if nodes else None
            if cell is active.cell and nodes == active.nodes:
                continue
            self._record(active)
            moved = active.has_run and cell is not None
            self.moves += moved
            active.cell, active.nodes, active.since = cell, nodes, self.now
            active.ready = self.now + self.move_seconds * moved
            active.has_run |= cell is not None

    def advance(self, until: float) -> None:
        """Run to the next end, at most to `until`."""
        pairs = [(each, each.cell.pace if self.judged else each.cell.seconds) for each in self.active if each.cell]
        ends = [max(active.ready, self.now) + active.left * pace for active, pace in pairs]
        now = min(until, max(self.snapped(min(ends)), self.now + self.round_seconds)) if ends else until
        before, self.now = self.now, now
        for active, pace in pairs:
            active.left -= max(0.0, now - max(active.ready, before)) / pace
            if active.left <= 1e-9 * active.job.iterations or max(active.ready, now) + active.left * pace <= now:
                self._record(active)
                self.ends[active.job.name] = now
        self.active = [active for active in self.active if active.job.name not in self.ends]

    def _record(self, active: ActiveJob) -> None:
        if self.judged and active.cell:
            span = {"start_seconds": active.since, "end_seconds": self.now}
            self.runs.append(JobRun(job=active.job.name, cell=active.cell, nodes=active.nodes, **span))

    def _nodes(self, cells: Cells) -> list[tuple[int, ...]]:
        """Return nodes for each job: those with more GPUs a node first, and of equal ones those that stay."""
        free = {name: [kind.gpus_a_node] * kind.nodes for name, kind in self.cluster.items()}
        held = {name: [0] * kind.nodes for name, kind in self.cluster.items()}  # By jobs that may stay.
        order = []
        for at, (active, cell) in enumerate(zip(self.active, cells, strict=True)):
            if cell:
                stays = active.nodes if cell is active.cell else ()
                order.append((-cell.gpus_a_node, not stays, at, cell, stays))
                for node in stays:
                    held[cell.kind][node] += cell.gpus_a_node
        found: list[tuple[int, ...]] = [()] * len(cells)
        for _, _, at, cell, chosen in sorted(order):
            size, room, kept = cell.gpus_a_node, free[cell.kind], held[cell.kind]
            for node in chosen:
                kept[node] -= size
            if not chosen or any(room[node] < size for node in chosen):
                # Where fewest others must move, then where least stays free.
                idle = [one - two for one, two in zip(room, kept, strict=True)]
                usable = [(max(0, size - each), each, node) for node, each in enumerate(idle) if room[node] >= size]
                chosen = tuple(node for *_, node in heapq.nsmallest(cell.nodes, usable))
            if len(chosen) == cell.nodes:
                found[at] = chosen
                for node in chosen:
                    room[node] -= size
        return found

    def decide(self) -> Cells:
        """Return a cell of each job, by the rule alone or, if they are few, the best of all first choices."""
        best = self._by_rule({})
        tried = [(at, cell) for at, each in enumerate(self.active) for cell in (None, *each.job.cells)]
        if len(tried) <= MOST_TRIED and len(self.active) > 1:
            least = self._sum_of_ends(best)
            for at, cell in tried:
                cells = self._by_rule({at: cell})
                total = self._sum_of_ends(cells) if any(cells) else math.inf
                if total < least * (1 - 1e-9):
                    best, least = cells, total
        return best

    def _sum_of_ends(self, cells: Cells) -> float:
        """Return the sum of estimated seconds from now to the end of each job, decided by the rule later on."""
        jobs = [replace(each) for each in self.active]
        later = Running(self.cluster, 0.0, self.move_seconds, jobs, self.now, judged=False)
        while later.active:
            later.place(cells)
            later.advance(math.inf)
            cells = later._by_rule({})
        return sum(end - self.now for end in later.ends.values())

    def _seconds(self, active: ActiveJob, cell: JobCell) -> float:
        """Return estimated seconds to the end of a job on a cell."""
        move = self.move_seconds if active.has_run else 0.0
        wait = max(0.0, active.ready - self.now) if cell is active.cell else move
        return wait + active.left * cell.seconds

    def _by_rule(self, given: Mapping[int, JobCell | None]) -> Cells:
        """Return a cell of each job by the rule, with those that are given."""
        free = {kind.name: kind.nodes * kind.gpus_a_node for kind in self.cluster.values()}
        cells: list[JobCell | None] = [None] * len(self.active)

        def change_of(at: int) -> tuple[float, str, int, int] | None:
            """Return the change of a job that adds most a GPU: (-gain, name, job, cell)."""
            each, mine = self.active[at], cells[at]
            rate = 1 / self._seconds(each, mine) if mine else 0.0
            found = []
            for number, cell in enumerate(each.job.cells):
                own = mine.gpus if mine and mine.kind == cell.kind else 0
                gain = 1 / self._seconds(each, cell) - rate
                if cell.gpus <= free[cell.kind] + own and gain > 1e-12 * rate and cell is not mine:
                    more = cell.gpus - (mine.gpus if mine else 0)
                    found.append((-gain / more if more > 0 else -math.inf, each.job.name, at, number))
            return min(found, default=None)

        def take(at: int, cell: JobCell | None) -> None:
            for each, sign in ((cells[at], 1), (cell, -1)):
                if each:
                    free[each.kind] += sign * each.gpus
            cells[at] = cell

        for at, cell in given.items():
            take(at, cell)
        changes = [change for at in range(len(cells)) if at not in given and (change := change_of(at))]
        heapq.heapify(changes)
        while changes:
            # Others have taken GPUs since.
            at = heapq.heappop(changes)[2]
            change = change_of(at)
            if change and not (changes and changes[0] < change):
                take(at, self.active[at].job.cells[change[3]])
                change = change_of(at)
            if change:
                heapq.heappush(changes, change)
        return cells
