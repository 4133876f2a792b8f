"""Bytes of a GPU and seconds of its work, from shapes and constants: `docs/planning_a_run.md` has every formula.

Replicas and tokens may be numbers, or arrays that broadcast: a search gives thousands at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.planners.cluster import Cluster
from orchdata.planners.layout import LLM, Kind, Module, Placement, Sharding
from orchdata.planners.workload import Workload, WorkloadCosts

Numbers = Any  # a float, or float64 of any shape


class Many(NamedTuple):
    """Placements of a module: numbers, or arrays that broadcast. `work`: known seconds of a stage, as `Means.work`."""

    module: Module
    tp: Any
    pp: Any
    dp: Any
    sharding: Sharding | None
    again: Any
    work: Any = None

    @property
    def gpus(self) -> Any:
        return self.tp * self.pp * self.dp

    def take(self, chosen: Any) -> Many:
        """Return those with these indices, in the shape of the indices."""
        tp, pp, dp, again, work = (each.ravel()[chosen] for each in (self.tp, self.pp, self.dp, self.again, self.work))
        return Many(self.module, tp, pp, dp, self.sharding, again, work)

    def placement(self, *, plain: bool) -> Placement:
        """Return one of numbers as a value; `plain`: without sharding."""
        sharding, recompute = None if plain else self.sharding, "full" if self.again else None
        split: Any = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "sharding": sharding, "recompute": recompute}
        return Placement(module=self.module, **split)


Setting = Placement | Many


def state_bytes(of: Setting, cluster: Cluster) -> Numbers:
    """Return bytes of weights, gradients and optimizer on a GPU; with FSDP also two gathered layers."""
    a, trained = cluster.assumed, of.module.trained
    parameters = of.module.parameters / (of.tp * of.pp)
    kept = trained * (a.weight_bytes + a.gradient_bytes) + (1 - trained) * a.weight_bytes
    optimizer = trained * a.optimizer_bytes
    if of.sharding == "full":
        return parameters * (kept + optimizer) / of.dp + 2 * a.weight_bytes * parameters / of.module.cost.layers
    return parameters * (kept + (optimizer / of.dp if of.sharding == "optimizer" else optimizer))


def activation_bytes(of: Setting, cluster: Cluster, tokens: Numbers) -> Numbers:
    """Return bytes of the activations of one microbatch on a stage."""
    a, cost = cluster.assumed, of.module.cost
    layers = cost.layers / of.pp
    each = np.where(of.again, a.kept_bytes * layers + a.activation_bytes, a.activation_bytes * layers)
    return each * tokens * cost.hidden / of.tp


def sharded_bytes(of: Setting, cluster: Cluster) -> Numbers:
    """Return bytes that FSDP sends for a module in a micro-step."""
    a, trained = cluster.assumed, of.module.trained
    frozen = a.sharded_input_bytes if of.module.has_gradients else a.sharded_frozen_bytes
    sent = trained * a.sharded_bytes + (1 - trained) * frozen
    return sent * of.module.parameters / of.tp * (of.dp - 1) / of.dp


def reduced_bytes(of: Setting, cluster: Cluster) -> Numbers:
    """Return bytes of gradients that data parallelism without FSDP sends once a step."""
    parameters = of.module.parameters * of.module.trained / (of.tp * of.pp)
    return cluster.assumed.reduced_bytes * parameters * (of.dp - 1) / of.dp


def optimizer_seconds(of: Setting, cluster: Cluster) -> Numbers:
    """Return seconds of the optimizer: it reads and writes what this GPU holds of it."""
    parameters = of.module.parameters * of.module.trained / (of.tp * of.pp)
    held = parameters if of.sharding is None else parameters / of.dp
    return cluster.assumed.optimizer_traffic * held / cluster.memory_bandwidth


def sent_seconds(
    count: Callable[[Setting, Cluster], Numbers], settings: Sequence[Setting], cluster: Cluster
) -> Numbers:
    """Return seconds in which modules on the LLM's GPUs send bytes, each over the slowest link of all replicas."""
    llm = settings[-1]
    spans = [np.maximum(each.tp * each.dp, llm.tp * llm.dp) for each in settings]
    return sum(count(each, cluster) / cluster.link(span) for each, span in zip(settings, spans, strict=True))


def overlapped(first: Numbers, second: Numbers, cluster: Cluster) -> Numbers:
    """Return seconds of two that run at once: the larger, and a part of the smaller."""
    return np.maximum(first, second) + cluster.assumed.not_hidden * np.minimum(first, second)


def sequence_seconds(
    module: Module, cluster: Cluster, positions: NDArray[np.int64], *, tp: int, recompute: bool
) -> NDArray[np.float64]:
    """Return seconds of each sequence on a replica of `tp` GPUs without a pipeline, forward and backward: computing,
    and what tensor parallelism sends and computing does not hide.
    """
    operations: NDArray[np.float64] = module.operations(positions, recompute=recompute)
    if module.seconds is not None:
        again: NDArray[np.float64] = operations / module.operations(positions)
        return module.seconds[tp].at(positions.astype(np.float64)) * again
    a, width = cluster.assumed, module.cost.hidden / tp
    speed = tp * cluster.operations * module.share * width / (width + a.width)
    bytes_each = (a.tensor_bytes_recomputed if recompute else a.tensor_bytes) * module.cost.layers * module.cost.hidden
    sent = float((1 - a.hidden) * bytes_each * (tp - 1) / tp / cluster.link(tp))
    return operations / speed + sent * positions


def forward_share(module: Module, positions: NDArray[np.int64], *, recompute: bool) -> NDArray[np.float64]:
    """Return the part of a sequence's seconds that its forward pass takes."""
    if not module.has_gradients:
        return np.ones(len(positions))
    forward: NDArray[np.float64] = module.operations(positions, forward=True)
    shares: NDArray[np.float64] = forward / module.operations(positions, recompute=recompute)
    return shares


def rows_seconds(rows: Numbers, llm: Module, link: Numbers, cluster: Cluster) -> Numbers:
    """Return seconds in which so many rows of features reach a replica of the LLM, one way."""
    return cluster.assumed.feature_bytes * rows * llm.cost.hidden / link


@dataclass
class Means:
    """The mean step of a workload, under each module's formulas. Microbatches are of positions in the phase `of`."""

    workload: Workload
    cluster: Cluster
    of: str = LLM
    _work: dict[tuple[str, int, bool], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        steps, phases = self.workload.num_steps, self.workload.phases
        self.positions = {name: float(of.positions.sum()) / steps for name, of in phases.items()}
        self.rows = {name: float(of.tokens.sum()) / steps for name, of in phases.items()}
        self.largest_part = {name: int(of.positions.max(initial=1)) for name, of in phases.items()}
        samples, costs = np.arange(self.workload.num_samples), WorkloadCosts(self.workload, ())
        self.largest_sample = {name: int(costs.positions(name, samples).max(initial=1)) for name in phases}
        self.tokens, self.longest = self.positions[self.of], self.largest_part[self.of]
        self.fewest_samples = int(np.diff(self.workload.steps).min())

    def work(self, of: Setting) -> Numbers:
        """Return seconds of its work in the mean step on a stage of a replica, the same in all these placements."""
        if isinstance(of, Many) and of.work is not None:
            return of.work
        key = of.module.name, of.tp, of.again
        if key not in self._work:
            positions, counts = np.unique(self.workload.phases[key[0]].positions, return_counts=True)
            each = sequence_seconds(of.module, self.cluster, positions, tp=of.tp, recompute=of.again)
            self._work[key] = float(each @ counts) / self.workload.num_steps
        return self._work[key] / (of.pp * of.dp)

    def operations(self, modules: Sequence[Module]) -> dict[str, float]:
        """Return operations of the mean step, by module, without recomputation."""
        steps, phases = self.workload.num_steps, self.workload.phases
        return {of.name: float(of.operations(phases[of.name].positions).sum()) / steps for of in modules}


class Memory(NamedTuple):
    """Most positions of each encoder in a microbatch, and rows of features in one of the LLM."""

    positions: Mapping[str, Numbers]
    rows: Numbers


def mean_memory(kind: Kind, settings: Sequence[Setting], tokens: Numbers, means: Means) -> Memory:
    """Return it for the mean microbatch, or the largest sample or part if that is larger."""
    *encoders, llm = settings
    positions: dict[str, Numbers] = {}
    share, rows = np.minimum(tokens / means.tokens, 1), 0.0
    for each in encoders:
        name = each.module.name
        rows = rows + share * means.rows[name]
        if kind in ("own", "shared"):
            # A round has a microbatch of every replica; once a step, all of its parts.
            of_round = 1.0 if kind == "shared" and llm.pp > 1 else np.minimum(llm.dp * tokens / means.tokens, 1)
            positions[name] = np.maximum(of_round * means.positions[name] / each.dp, means.largest_part[name])
        else:
            positions[name] = np.maximum(share * means.positions[name], means.largest_sample[name])
    return Memory(positions, rows)


def in_pipeline(settings: Sequence[Any]) -> list[Any]:
    """Return modules on their own GPUs as their stages follow each other: encoders, the LLM (last here), generators."""
    return sorted(settings, key=lambda each: 2 * each.module.after + (each is settings[-1]))


def gpu_bytes(
    kind: Kind, settings: Sequence[Setting], tokens: Numbers, memory: Memory, means: Means
) -> dict[str, Numbers]:
    """Return bytes of the fullest GPU of each module that has its own; all others are with the LLM's.

    Args:
        settings: of encoders and generators, the LLM's last.
        tokens: most LLM tokens of a microbatch.
    """
    cluster, a, (*encoders, llm) = means.cluster, means.cluster.assumed, settings
    wide = a.feature_bytes * llm.module.cost.hidden
    features = wide * (1 + any(each.module.has_gradients for each in encoders)) * memory.rows
    logits = a.logit_bytes * tokens * (llm.module.cost.vocab or 0) / llm.tp
    # Encoders on the LLM's GPUs: on the first stage only where encoders are there.
    early: Numbers = 0.0
    for each in encoders if kind != "own" else ():
        activations = activation_bytes(each, cluster, memory.positions[each.module.name])
        early = early + state_bytes(each, cluster) + activations * (llm.pp if kind == "first_stage" else 1)
    late = 0.0 if kind == "first_stage" else early
    used: dict[str, Numbers] = {each.module.name: 0.0 for each in encoders if kind == "own"}
    later: Numbers = 0  # stages after a module
    for each in in_pipeline(settings)[::-1] if kind == "own" else [llm]:
        name, states = each.module.name, state_bytes(each, cluster)
        if each is llm:
            held = activation_bytes(llm, cluster, tokens)
            first = states + (held + features) * (llm.pp + later) + early
            last = states + held * (1 + later) + logits + late
            used[LLM] = np.where(llm.pp > 1, np.maximum(first, last), first + logits)
        else:
            yielded = wide * (1 + each.module.has_gradients) * means.rows[name] / max(1.0, means.positions[name])
            held = memory.positions[name] * (activation_bytes(each, cluster, 1) + yielded)
            used[name] = states + held * (each.pp + later)
        later = later + each.pp
    return used


def closed_form(kind: Kind, settings: Sequence[Setting], tokens: Numbers, means: Means) -> Numbers:
    """Return seconds of a step if every microbatch were the mean one, and parts could be split anywhere."""
    cluster, (*encoders, llm) = means.cluster, settings
    microbatches = np.maximum(1, np.ceil(means.tokens / (llm.dp * tokens)))
    ways = [1 + each.module.has_gradients for each in encoders]
    rows = [means.rows[each.module.name] / llm.dp for each in encoders]
    link = cluster.link(sum(each.gpus for each in settings) if kind == "own" else llm.gpus)
    work = [means.work(each) for each in settings]
    if kind == "own":
        # The first microbatch passes all stages, others the slowest.
        sent = [w * rows_seconds(r / microbatches, llm.module, link, cluster) for w, r in zip(ways, rows, strict=True)]
        fill, slowest, late, optimizer = sum(sent), 0.0, 0.0, 0.0
        for each, of in zip(settings, work, strict=True):
            stage, reduced = of / microbatches, reduced_bytes(each, cluster) / cluster.link(each.tp * each.dp)
            fill, slowest = fill + each.pp * stage, np.maximum(slowest, stage)
            late = np.maximum(late, overlapped(stage, reduced, cluster) - stage)
            optimizer = np.maximum(optimizer, optimizer_seconds(each, cluster))
        return fill + (microbatches - 1) * slowest + late + optimizer
    reduced = sent_seconds(reduced_bytes, settings, cluster)
    optimizer = sum(optimizer_seconds(each, cluster) for each in settings)
    encoded = sum(work[:-1], 0.0)
    if kind == "shared":
        encoded = encoded + max(ways) * rows_seconds(sum(rows), llm.module, link, cluster)
    if llm.pp == 1:
        each_step = (work[-1] + encoded) / microbatches
        if llm.sharding == "full":
            sent = sent_seconds(sharded_bytes, settings, cluster)
            return microbatches * overlapped(each_step, sent, cluster) + optimizer
        return (microbatches - 1) * each_step + overlapped(each_step, reduced, cluster) + optimizer
    # A pipeline of the LLM, with encoders on its first stage, or on all GPUs before and after it.
    stage = work[-1] / microbatches
    first = stage if kind == "shared" else stage + encoded / microbatches
    pipeline = first * microbatches + (llm.pp - 1) * stage + overlapped(first, reduced, cluster) - first
    return pipeline + optimizer + (encoded if kind == "shared" else 0.0)
