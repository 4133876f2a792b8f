"""Seconds of real steps in a layout: the loader's own plans, priced in whole nanoseconds, and pipelines by events.

step --make_plan--> microbatches of the LLM's replicas --+--> without a pipeline: priced as Balance.price
     parts of a round --balance--> replicas of encoders -+--> with one: 1F1B of all replicas, in slots
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.assignment import loads_by_rank_and_microbatch
from orchdata.balancers.packed import balance as balance_packed
from orchdata.native.microbatches.modules import run_modules
from orchdata.order.order import Order
from orchdata.order.steps import GlobalBatches, StepTask
from orchdata.planners.cluster import Cluster
from orchdata.planners.formulas import (
    Means,
    Memory,
    forward_share,
    gpu_bytes,
    optimizer_seconds,
    overlapped,
    reduced_bytes,
    rows_seconds,
    sequence_seconds,
    sharded_bytes,
    span,
)
from orchdata.planners.layout import LLM, Layout, Placement, checked_modules
from orchdata.planners.values import Value
from orchdata.planners.workload import Workload, WorkloadCosts
from orchdata.planning.balance import Balance
from orchdata.planning.make_plan import PlanSpec, make_plan
from orchdata.planning.plan import Plan

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_NANO = 1e9


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Simulation(Value):
    """What a layout takes, step by step.

    Attributes:
        seconds: of each step, float64 (num_steps,).
        parts: float64 (num_steps,) of each: seconds of every module's computing, mean over the layout's GPUs;
            "optimizer"; "links": exchange of features, parameters and gradients that computing does not hide, where
            there is no pipeline; "waiting": the rest, in a pipeline with its links.
        bytes: of the fullest GPU of each module that has its own, with the most that a microbatch has.
        microbatches: of a replica of the LLM, mean.
    """

    seconds: Floats
    parts: Mapping[str, Floats]
    bytes: Mapping[str, float]
    microbatches: float


def balance_of(layout: Layout) -> Balance:
    """Return the loader's balance in a layout. Where encoders are spread, that of the LLM alone."""
    spread = layout.kind in ("shared", "own")
    return Balance(
        assignment="joint" if spread else layout.assignment,
        objective="barrier" if layout.llm.sharding == "full" else "sum",
        max_tokens=layout.microbatch_tokens,
    )


def simulate(layout: Layout, workload: Workload, cluster: Cluster, *, balance: Balance | None = None) -> Simulation:
    """Return seconds of each step of the workload. Plans are those of the loader; all replicas are simulated.

    Args:
        balance: of the loader, in place of `balance_of(layout)`, such as another scope.

    Raises:
        ValueError: phases without modules, more GPUs than the cluster has, a sample above the layout's
            `microbatch_tokens`, or fewer samples in a step than replicas of the LLM.
    """
    check(layout, workload, cluster)
    run = _Run(layout, workload, cluster, balance or balance_of(layout))
    steps = [run.step(number) for number in range(workload.num_steps)]
    positions = {each.module.name: max(step.positions[each.module.name] for step in steps) for each in layout.encoders}
    most = Memory(positions, max(step.rows for step in steps))
    used = gpu_bytes(layout.kind, layout.placements, layout.microbatch_tokens, most, Means(workload, cluster))
    return Simulation(
        seconds=np.array([step.seconds for step in steps]),
        parts={name: np.array([step.parts[name] for step in steps]) for name in steps[0].parts},
        bytes={name: float(of) for name, of in used.items()},
        microbatches=float(np.mean([step.microbatches for step in steps])),
    )


def check(layout: Layout, workload: Workload, cluster: Cluster) -> None:
    """Raise ValueError for a layout that this workload or cluster cannot have."""
    checked_modules([each.module for each in layout.placements], [*workload.phases])
    if layout.gpus > cluster.gpus:
        raise ValueError(f"the layout uses {layout.gpus} GPUs, and the cluster has {cluster.gpus}")
    longest = int(workload.phases[LLM].positions.max())
    if longest > layout.microbatch_tokens:
        raise ValueError(
            f"Layout.microbatch_tokens={layout.microbatch_tokens} is below the longest sample, of {longest} tokens"
        )
    fewest = int(np.diff(workload.steps).min())
    if layout.llm.dp > fewest:
        raise ValueError(f"the LLM's dp={layout.llm.dp} is above the samples of a step, {fewest}")


class _Step(NamedTuple):
    seconds: float
    parts: dict[str, float]
    positions: dict[str, float]
    rows: float
    microbatches: int


class _Encoded(NamedTuple):
    """An encoder's parts of a step: the replica and micro-step of each, and those of its samples in the LLM."""

    parts: slice
    rank: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    home: NDArray[np.int32]


class _Run:
    """A layout over a workload: nanoseconds of every part, then of each step."""

    def __init__(self, layout: Layout, workload: Workload, cluster: Cluster, balance: Balance) -> None:
        self.layout, self.workload, self.cluster, self.balance = layout, workload, cluster, balance
        self.kind = layout.kind
        self.once = self.kind == "shared" and layout.llm.pp > 1
        spread = self.kind in ("shared", "own")
        costs = WorkloadCosts(workload, (LLM,) if spread else tuple(workload.phases))
        self.spec = PlanSpec(
            costs=costs,
            order=Order(workload.num_samples, shuffle=None, seed=0),
            batches=GlobalBatches(size=workload.num_samples),
            balance=balance,
            num_ranks=layout.llm.dp,
        )
        self.total: dict[str, Ints] = {}
        self.forward: dict[str, Ints] = {}
        for each in layout.placements:
            positions = workload.phases[each.module.name].positions
            kinds, where = np.unique(positions, return_inverse=True)  # there are few different lengths
            recompute = each.recompute is not None
            seconds = sequence_seconds(each.module, cluster, kinds, tp=each.tp, recompute=recompute)
            whole = np.maximum(np.rint(_NANO * seconds / each.pp), 1).astype(np.int64)
            ahead = np.rint(whole * forward_share(each.module, kinds, recompute=recompute)).astype(np.int64)
            self.total[each.module.name], self.forward[each.module.name] = whole[where], ahead[where]
        self.modules = {each.module.name: each for each in layout.placements}

    def step(self, number: int) -> _Step:
        start, stop = (int(self.workload.steps[number + each]) for each in (0, 1))
        plan = make_plan(self.spec, StepTask(0, number, rows=np.arange(start, stop)))
        encoded = {each.module.name: self._encoded(each, plan, number) for each in self.layout.encoders}
        # Without a pipeline ranks meet in micro-steps, or at the end; with one, by events.
        seconds, links = (
            self._pipeline(plan, encoded, start, stop) if self._is_pipeline else self._even(plan, encoded, start, stop)
        )
        held = [float(optimizer_seconds(each, self.cluster)) for each in self.layout.placements]
        optimizer = max(held) if self.kind == "own" else sum(held)
        parts = {}
        for name, of in self.modules.items():
            where = self.workload.part_range(name, number)
            replicas = self.layout.llm.tp if self.kind == "repeated" and name != LLM else of.tp
            parts[name] = float(self.total[name][where].sum()) / _NANO * of.pp * replicas / self.layout.gpus
        parts |= {"links": links, "optimizer": optimizer}
        parts["waiting"] = seconds + optimizer - sum(parts.values())
        positions, rows = self._most(plan, encoded)
        return _Step(seconds + optimizer, parts, positions, rows, plan.num_microbatches)

    @property
    def _is_pipeline(self) -> bool:
        return self.kind in ("own", "first_stage") or self.layout.llm.pp > 1

    def _encoded(self, of: Placement, plan: Plan, number: int) -> _Encoded:
        """Decide which replica encodes each part: its sample's, the plan's, or the least loaded in its round."""
        name = of.module.name
        where = self.workload.part_range(name, number)
        offsets = self.workload.phases[name].offsets[self.workload.steps[number] : self.workload.steps[number + 1] + 1]
        sample = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        home, microbatch = plan.rank[sample], plan.microbatch[sample]
        if self.kind not in ("shared", "own"):
            rank = plan.parts[name].rank if name in plan.parts else home
            return _Encoded(where, rank, microbatch, home)
        rounds = np.zeros_like(microbatch) if self.once else microbatch
        rank = np.zeros(len(sample), np.int32)
        total = self.total[name][where]
        order = np.argsort(rounds, kind="stable")
        for members in np.split(order, np.cumsum(np.bincount(rounds, minlength=1))[:-1]):
            if len(members):
                rank[members] = balance_packed(total[members], of.dp).rank
        return _Encoded(where, rank, rounds, home)

    def _cells(self, name: str, values: Ints, encoded: _Encoded, plan: Plan) -> Ints:
        """Return sums of values of a step's parts: int64 (replicas, micro-steps)."""
        count = 1 if self.once else plan.num_microbatches
        return loads_by_rank_and_microbatch(values, encoded.rank, encoded.microbatch, self.modules[name].dp, count)

    def _llm_cells(self, values: Ints, plan: Plan) -> Ints:
        return loads_by_rank_and_microbatch(values, plan.rank, plan.microbatch, plan.num_ranks, plan.num_microbatches)

    def _rows(self, name: str, encoded: _Encoded, plan: Plan, *, all_rows: bool) -> Ints:
        """Return the most rows of features that a replica of the LLM gets in each micro-step, int64 (micro-steps,)."""
        tokens = self.workload.phases[name].tokens[encoded.parts]
        moved = tokens if all_rows else np.where(encoded.rank == encoded.home, 0, tokens)
        count = 1 if self.once else plan.num_microbatches
        rows: Ints = loads_by_rank_and_microbatch(moved, encoded.home, encoded.microbatch, plan.num_ranks, count).max(
            axis=0
        )
        return rows

    def _exchange(self, plan: Plan, encoded: Mapping[str, _Encoded]) -> Floats:
        """Return seconds of the exchange of features in each micro-step, both ways, on the LLM's GPUs."""
        llm = self.layout.llm
        seconds = np.zeros(1 if self.once else plan.num_microbatches)
        if not plan.parts and self.kind != "shared":
            return seconds
        link = self.cluster.link(llm.gpus)
        rows = [self._rows(name, of, plan, all_rows=self.kind == "shared") for name, of in encoded.items()]
        ways = 1 + any(each.module.has_gradients for each in self.layout.encoders)
        total = np.sum(rows, axis=0) if rows else 0
        seconds += ways * rows_seconds(total, llm.module, link, self.cluster)
        return seconds

    def _even(self, plan: Plan, encoded: Mapping[str, _Encoded], start: int, stop: int) -> tuple[float, float]:
        """Return seconds of a step without a pipeline, and those of its links that computing does not hide."""
        cells = [self._cells(name, self.total[name][of.parts], of, plan) for name, of in encoded.items()]
        cells.append(self._llm_cells(self.total[LLM][start:stop], plan))
        price, cluster, llm = self.balance.price, self.cluster, self.layout.llm
        if price.meets_in_micro_steps or self.kind == "shared":
            computing = np.sum([of.max(axis=0) for of in cells], axis=0)[None] / _NANO
        else:
            computing = np.sum(cells, axis=0) / _NANO
        busy = computing + self._exchange(plan, encoded)
        if llm.sharding == "full":
            sent = sum(sharded_bytes(e, cluster) / cluster.link(span(e, llm)) for e in self.layout.placements)
            seconds = float(overlapped(busy, sent, cluster).sum(axis=1).max())
        else:
            sent = sum(reduced_bytes(e, cluster) / cluster.link(span(e, llm)) for e in self.layout.placements)
            seconds = float((busy[:, :-1].sum(axis=1) + overlapped(busy[:, -1], sent, cluster)).max())
        return seconds, seconds - float(computing.sum(axis=1).max())

    def _pipeline(self, plan: Plan, encoded: Mapping[str, _Encoded], start: int, stop: int) -> tuple[float, float]:
        """Return the same of a step with a pipeline, whose links count as waiting."""
        cluster, llm, count = self.cluster, self.layout.llm, plan.num_microbatches
        times = {
            name: [self._cells(name, of[name][e.parts], e, plan) for of in (self.forward, self.total)]
            for name, e in encoded.items()
        }
        times[LLM] = [self._llm_cells(of[LLM][start:stop], plan) for of in (self.forward, self.total)]
        before, chain = 0.0, sorted(self.layout.placements, key=lambda each: 2 * each.module.after + (each is llm))
        if self.kind == "shared":  # all GPUs encode once, before and after the pipeline
            before = sum(float(times[each.module.name][1].max()) for each in self.layout.encoders) / _NANO
            before += float(self._exchange(plan, encoded).sum())
        if self.kind == "own":
            blocks = [(each.pp, times[each.module.name]) for each in chain]
        else:
            first = times[LLM]
            if self.kind == "first_stage":
                first = [np.sum([of[way] for of in times.values()], axis=0) for way in (0, 1)]
            blocks = [(1, first), (llm.pp - 1, times[LLM])] if llm.pp > 1 else [(1, first)]
        ways = np.zeros((2, len(blocks), count))
        for border, each in enumerate(chain if self.kind == "own" else ()):
            if each is not llm:
                rows = self._rows(each.module.name, encoded[each.module.name], plan, all_rows=True)
                seconds = rows_seconds(rows, llm.module, cluster.link(self.layout.gpus), cluster)
                to = border + (not each.module.after)  # the border at which features leave, or enter
                ways[:, to] += np.outer([1, each.module.has_gradients], seconds)
        ahead = np.concatenate([of[0] for _, of in blocks]).astype(np.float64)
        whole = np.concatenate([of[1] for _, of in blocks]).astype(np.float64)
        end = run_modules(
            ahead,
            whole - ahead,
            _NANO * ways[0],
            _NANO * ways[1],
            np.array([pp for pp, _ in blocks]),
            np.array([len(of[0]) for _, of in blocks]),
            np.array([self.kind == "own"] * len(blocks)),
        )
        # The last micro-step hides the exchange of gradients.
        late = [0.0]
        if self.kind == "own":
            for each in chain:
                last = float(times[each.module.name][1][:, -1].max()) / _NANO
                sent = reduced_bytes(each, cluster) / cluster.link(each.tp * each.dp)
                late.append(float(overlapped(last, sent, cluster)) - last)
        else:
            last = float(blocks[0][1][1][:, -1].max()) / _NANO
            sent = sum(reduced_bytes(e, cluster) / cluster.link(span(e, llm)) for e in self.layout.placements)
            late.append(float(overlapped(last, sent, cluster)) - last)
        return before + end / _NANO + max(late), 0.0

    def _most(self, plan: Plan, encoded: Mapping[str, _Encoded]) -> tuple[dict[str, float], float]:
        """Return the most positions of each encoder in a microbatch, and rows of features in one of the LLM."""
        positions, rows = {}, np.zeros(plan.num_microbatches, np.int64)
        for name, of in encoded.items():
            columns = self.workload.phases[name]
            positions[name] = float(self._cells(name, columns.positions[of.parts], of, plan).max())
            if not self.once:
                rows += self._rows(name, of, plan, all_rows=True)
        return positions, float(rows.max())
