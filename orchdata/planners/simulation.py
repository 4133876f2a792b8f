"""Seconds of real steps in a layout: the loader's own plans, priced in whole nanoseconds, and pipelines by events.

step --make_plan--> microbatches of the LLM's replicas --+--> without a pipeline: priced as Balance.price
     parts of a round --balance--> replicas of encoders -+--> with one: 1F1B of all replicas, in slots
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.assignment import loads_by_rank_and_microbatch
from orchdata.balancers.packed import balance as balance_packed
from orchdata.native.microbatches.pipeline import run_modules
from orchdata.order.order import Order
from orchdata.order.steps import GlobalBatches, StepTask
from orchdata.planners.cluster import (
    Cluster,
    Means,
    forward_share,
    gpu_bytes,
    in_pipeline,
    optimizer_seconds,
    overlapped,
    reduced_bytes,
    rows_seconds,
    sent_seconds,
    sequence_seconds,
    sharded_bytes,
)
from orchdata.planners.layout import LLM, Layout, checked_modules
from orchdata.planners.values import Value
from orchdata.planners.workload import Workload, WorkloadCosts
from orchdata.planning.balance import Balance
from orchdata.planning.plan import Plan, PlanSpec, make_plan

Ints = NDArray[np.int64]

_NANO = 1e9
_KEPT_PLANS = 128


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

    seconds: NDArray[np.float64]
    parts: Mapping[str, NDArray[np.float64]]
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
    """Return seconds of each step of the workload. Plans are those of the loader, with `balance` in place of
    `balance_of(layout)` if given; all replicas are simulated.

    Raises ValueError for phases without modules, too many GPUs, teams, or a sample above `microbatch_tokens`.
    """
    return simulated(layout, Means(workload, cluster), balance)


def simulated(layout: Layout, means: Means, balance: Balance | None = None) -> Simulation:
    """As `simulate`; layouts with the same `means` share plans."""
    workload, cluster = means.workload, means.cluster
    checked_modules([each.module for each in layout.placements], [*workload.phases])
    longest = workload.phases[LLM].positions.max()
    if balance is not None and balance.teams is not None:
        raise ValueError("simulate has no formula for Balance.teams: leave teams out")
    if layout.gpus > cluster.gpus:
        raise ValueError(f"the layout uses {layout.gpus} GPUs, and the cluster has {cluster.gpus}")
    if longest > layout.microbatch_tokens:
        raise ValueError(f"microbatch_tokens={layout.microbatch_tokens} is below the longest sample, of {longest}")
    run = _Run(layout, means, balance or balance_of(layout))
    seconds, parts, positions, rows, count = zip(*map(run.step, range(workload.num_steps)), strict=True)
    most = {name: max(each[name] for each in positions) for name in positions[0]}, max(rows)
    used = gpu_bytes(layout.kind, layout.placements, layout.microbatch_tokens, most, means)
    return Simulation(
        seconds=np.array(seconds),
        parts={name: np.array([each[name] for each in parts]) for name in parts[0]},
        bytes={name: float(of) for name, of in used.items()},
        microbatches=float(np.mean(count)),
    )


class _Share(NamedTuple):
    """A module's parts of a step: the replica and micro-step of each, and the LLM's replica that has its sample."""

    parts: slice
    rank: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    home: NDArray[np.int32]
    replicas: int
    micro_steps: int
    once: bool  # All parts are encoded together.

    @property
    def rounds(self) -> tuple[NDArray[np.int32], int]:
        """In which round each part is encoded, and how many there are."""
        return (np.zeros_like(self.microbatch), 1) if self.once else (self.microbatch, self.micro_steps)

    def cells(self, values: Ints) -> Ints:
        """Return sums of values of the workload's parts: int64 (replicas, rounds)."""
        rounds, count = self.rounds
        return loads_by_rank_and_microbatch(values[self.parts], self.rank, rounds, self.replicas, count)


class _Run:
    """A layout over a workload: nanoseconds of every part, then of each step."""

    def __init__(self, layout: Layout, means: Means, balance: Balance) -> None:
        self.layout, self.workload, self.cluster, self.balance = layout, means.workload, means.cluster, balance
        self.kind, self.llm = layout.kind, layout.llm
        workload, self.plans = means.workload, means.plans
        self.once = self.kind == "shared" and self.llm.pp > 1
        self.spread = self.kind in ("shared", "own")
        self.spec = PlanSpec(
            costs=WorkloadCosts(workload, (LLM,) if self.spread else tuple(workload.phases)),
            order=Order(workload.num_samples, shuffle=None, seed=0),
            batches=GlobalBatches(size=workload.num_samples),
            balance=balance,
            num_ranks=self.llm.dp,
        )
        self.modules = {each.module.name: each for each in layout.placements}
        self.total: dict[str, Ints] = {}
        self.forward: dict[str, Ints] = {}
        for name, of in self.modules.items():
            # There are few different lengths.
            kinds, where = np.unique(workload.phases[name].positions, return_inverse=True)
            seconds = sequence_seconds(of.module, self.cluster, kinds, tp=of.tp, recompute=of.again)
            if not float(seconds.max(initial=0)) * len(where) < 1e9:  # In int64 nanoseconds.
                raise ValueError(f"module {name!r} takes {seconds.max():.3g} s for a sequence: its speed is wrong")
            whole = np.maximum(np.rint(_NANO * seconds / of.pp), 1).astype(np.int64)
            ahead = np.rint(whole * forward_share(of.module, kinds, recompute=of.again)).astype(np.int64)
            self.total[name], self.forward[name] = whole[where], ahead[where]

    def step(self, number: int) -> tuple[float, dict[str, float], dict[str, float], float, int]:
        """Return its seconds, their parts, most positions of each encoder and rows in a microbatch, and how many."""
        # Layouts share plans if they differ only in what a plan does not depend on.
        key = self.spread, self.balance, self.llm.dp, number
        if (plan := self.plans.get(key)) is None:
            rows = np.arange(*self.workload.steps[number : number + 2])
            plan = self.plans[key] = make_plan(self.spec, StepTask(0, number, rows=rows))
            if len(self.plans) > _KEPT_PLANS:
                del self.plans[next(iter(self.plans))]
        shares = {name: self._share(name, plan, number) for name in self.modules}
        encoders = {name: shares[name] for name in shares if name != LLM}
        # Without a pipeline ranks meet in micro-steps, or at the end; with one, by events.
        is_pipeline = self.kind in ("own", "first_stage") or self.llm.pp > 1
        seconds, links = (self._pipeline if is_pipeline else self._even)(shares, encoders)
        held = [float(optimizer_seconds(each, self.cluster)) for each in self.layout.placements]
        optimizer = max(held) if self.kind == "own" else sum(held)
        parts = {}
        for name, of in shares.items():
            tp = self.llm.tp if self.kind == "repeated" else self.modules[name].tp
            work = float(self.total[name][of.parts].sum()) / _NANO
            parts[name] = work * self.modules[name].pp * tp / self.layout.gpus
        parts |= {"links": links, "optimizer": optimizer}
        parts["waiting"] = seconds + optimizer - sum(parts.values())
        positions = {name: float(of.cells(self.workload.phases[name].positions).max()) for name, of in encoders.items()}
        most_rows = sum(self._rows(name, of._replace(once=False)) for name, of in encoders.items())
        return seconds + optimizer, parts, positions, float(np.max(most_rows)), plan.num_microbatches

    def _share(self, name: str, plan: Plan, number: int) -> _Share:
        """Decide which replica has each part: its sample's, the plan's, or the least loaded in its round."""
        workload, dp, count = self.workload, self.modules[name].dp, plan.num_microbatches
        offsets = workload.phases[name].offsets[workload.steps[number] : workload.steps[number + 1] + 1]
        parts, sample = slice(*offsets[[0, -1]]), np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        home, microbatch = plan.rank[sample], plan.microbatch[sample]
        if name == LLM or not self.spread:
            own = plan.parts[name].rank if name in plan.parts else home
            return _Share(parts, own, microbatch, home, dp, count, False)
        share = _Share(parts, np.zeros(len(sample), np.int32), microbatch, home, dp, count, self.once)
        rounds, total = share.rounds[0], self.total[name][parts]
        for members in np.split(np.argsort(rounds, kind="stable"), np.cumsum(np.bincount(rounds, minlength=1))[:-1]):
            if len(members):
                share.rank[members] = balance_packed(total[members], dp).rank
        return share

    def _rows(self, name: str, of: _Share, *, all_rows: bool = True) -> Ints:
        """Return the most rows of features that a replica of the LLM gets in each round, int64 (rounds,); not
        `all_rows`: without those that stay on their rank.
        """
        moved = self.workload.phases[name].tokens[of.parts] * (all_rows | (of.rank != of.home))
        rows: Ints = loads_by_rank_and_microbatch(moved, of.home, of.rounds[0], self.llm.dp, of.rounds[1]).max(axis=0)
        return rows

    def _exchange(self, encoders: Mapping[str, _Share]) -> Any:
        """Return seconds of the exchange of features in each round, both ways, on the LLM's GPUs."""
        rows = sum(self._rows(name, of, all_rows=self.kind == "shared") for name, of in encoders.items())
        ways = 1 + any(each.module.has_gradients for each in self.layout.placements[:-1])
        return ways * rows_seconds(rows, self.llm.module, self.cluster.link(self.llm.gpus), self.cluster)

    def _even(self, shares: Mapping[str, _Share], encoders: Mapping[str, _Share]) -> tuple[float, float]:
        """Return seconds of a step without a pipeline, and those of its links that computing does not hide."""
        cells = [of.cells(self.total[name]) for name, of in shares.items()]
        if self.balance.price.meets_in_micro_steps or self.kind == "shared":
            computing = np.sum([of.max(axis=0) for of in cells], axis=0)[None] / _NANO
        else:
            computing = np.sum(cells, axis=0) / _NANO
        busy = computing + self._exchange(encoders)
        if self.llm.sharding == "full":
            sent = sent_seconds(sharded_bytes, self.layout.placements, self.cluster)
            seconds = float(overlapped(busy, sent, self.cluster).sum(axis=1).max())
        else:
            sent = sent_seconds(reduced_bytes, self.layout.placements, self.cluster)
            seconds = float((busy[:, :-1].sum(axis=1) + overlapped(busy[:, -1], sent, self.cluster)).max())
        return seconds, seconds - float(computing.sum(axis=1).max())

    def _pipeline(self, shares: Mapping[str, _Share], encoders: Mapping[str, _Share]) -> tuple[float, float]:
        """Return the same of a step with a pipeline, whose links count as waiting."""
        cluster, own, ways = self.cluster, self.kind == "own", (self.forward, self.total)
        # Of each module, forward and whole: (2, replicas, micro-steps).
        times = {name: np.array([of.cells(way[name]) for way in ways], float) for name, of in shares.items()}
        # Blocks of equal stages: of each module on its own GPUs, else the first stage of the LLM and the others.
        chain = in_pipeline(self.layout.placements)
        if own:
            blocks = [(each.pp, times[each.module.name]) for each in chain]
            sent = [reduced_bytes(each, cluster) / cluster.link(each.tp * each.dp) for each in chain]
        else:
            of_first = [*times] if self.kind == "first_stage" else [LLM]
            first = np.sum([times[name] for name in of_first], axis=0)
            blocks = [(1, first), (self.llm.pp - 1, times[LLM])][: self.llm.pp]
            sent = [sent_seconds(reduced_bytes, self.layout.placements, cluster)]
        before = 0.0
        if self.kind == "shared":  # all GPUs encode once, before and after the pipeline
            before = sum(float(times[name][1].max()) for name in encoders) / _NANO
            before += float(self._exchange(encoders).sum())
        travel = np.zeros((2, len(blocks), shares[LLM].micro_steps))
        for border, each in enumerate(chain if own else ()):
            if each is not self.llm:
                rows = self._rows(each.module.name, encoders[each.module.name])
                seconds = rows_seconds(rows, self.llm.module, cluster.link(self.layout.gpus), cluster)
                at = border + (not each.module.after)  # the border at which features leave, or enter
                travel[:, at] += np.outer([1, each.module.has_gradients], seconds)
        ahead, whole = np.concatenate([of for _, of in blocks], axis=1)
        stages, replicas = np.array([(pp, of.shape[1]) for pp, of in blocks]).T.copy()
        to, back = _NANO * travel
        end = run_modules(ahead, whole - ahead, to, back, stages, replicas, own)
        # The last micro-step hides the exchange of gradients.
        last = [float(of[1][:, -1].max()) / _NANO for _, of in blocks]
        late = max(float(overlapped(a, b, cluster)) - a for a, b in zip(last, sent, strict=False))
        return before + end / _NANO + late, 0.0
