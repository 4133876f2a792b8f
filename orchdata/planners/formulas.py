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
from orchdata.planners.layout import LLM, Kind, Module, Placement, priced
from orchdata.planners.workload import Workload

Numbers = Any  # a float, or float64 of any shape


class Many(NamedTuple):
    """Placements that differ in `dp`: a number, or int64 of any shape."""

    module: Module
    tp: int
    pp: int
    dp: Any
    sharding: str | None
    recompute: str | None


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
    each = a.activation_bytes * layers if of.recompute is None else a.kept_bytes * layers + a.activation_bytes
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
        return priced(module.seconds[tp], positions) * again
    a, width = cluster.assumed, module.cost.hidden / tp
    speed = tp * cluster.operations * module.share * width / (width + a.width)
    bytes_each = (a.tensor_bytes_recomputed if recompute else a.tensor_bytes) * module.cost.layers * module.cost.hidden
    sent = float((1 - a.hidden) * bytes_each * (tp - 1) / tp / cluster.link(tp))
    return operations / speed + sent * np.asarray(positions, np.float64)


def forward_share(module: Module, positions: NDArray[np.int64], *, recompute: bool) -> NDArray[np.float64]:
    """Return the part of a sequence's seconds that its forward pass takes."""
    if not module.has_gradients:
        return np.ones(len(positions))
    shares: NDArray[np.float64] = module.operations(positions, forward=True) / module.operations(
        positions, recompute=recompute
    )
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
    _seconds: dict[tuple[str, int, bool], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        steps, phases = self.workload.num_steps, self.workload.phases
        self.positions = {name: float(of.positions.sum()) / steps for name, of in phases.items()}
        self.rows = {name: float(of.tokens.sum()) / steps for name, of in phases.items()}
        self.largest_part = {name: int(of.positions.max(initial=1)) for name, of in phases.items()}
        self.largest_sample = {}
        for name, of in phases.items():
            sums = np.concatenate([[0], np.cumsum(of.positions)])[of.offsets]
            self.largest_sample[name] = int(np.diff(sums).max(initial=1))
        self.tokens, self.longest = self.positions[self.of], self.largest_part[self.of]
        self.fewest_samples = int(np.diff(self.workload.steps).min())

    def seconds(self, of: Setting) -> float:
        """Return seconds of all its work in the mean step on one replica without a pipeline."""
        key = of.module.name, of.tp, of.recompute is not None
        if key not in self._seconds:
            positions, counts = np.unique(self.workload.phases[key[0]].positions, return_counts=True)
            each = sequence_seconds(of.module, self.cluster, positions, tp=of.tp, recompute=key[2])
            self._seconds[key] = float(each @ counts) / self.workload.num_steps
        return self._seconds[key]

    def operations(self, modules: Sequence[Module]) -> dict[str, float]:
        """Return operations of the mean step, by module, without recomputation."""
        found = {}
        for module in modules:
            positions = self.workload.phases[module.name].positions
            found[module.name] = float(module.operations(positions).sum()) / self.workload.num_steps
        return found


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


class Column(NamedTuple):
    """A module of a pipeline of modules: numbers, or arrays over many placements.

    Attributes:
        after, again: whether it runs after the LLM, and whether layers are recomputed.
        work: seconds of the mean step's work on a stage of a replica.
        reduced, optimizer: seconds of these, once a step.
        states: bytes.
        held: bytes a position in one microbatch, with the features that it yields.
    """

    after: Any
    again: Any
    tp: Numbers
    pp: Numbers
    dp: Numbers
    work: Numbers
    reduced: Numbers
    optimizer: Numbers
    states: Numbers
    held: Numbers

    @classmethod
    def of(cls, of: Setting, means: Means, llm: Module) -> Column:
        cluster, name = means.cluster, of.module.name
        features = cluster.assumed.feature_bytes * (1 + of.module.has_gradients) * llm.cost.hidden
        yielded = 0.0 if name == LLM else features * means.rows[name] / max(1.0, means.positions[name])
        return cls(
            of.module.after,
            of.recompute is not None,
            of.tp,
            of.pp,
            of.dp,
            means.seconds(of) / (of.pp * of.dp),
            reduced_bytes(of, cluster) / cluster.link(of.tp * of.dp),
            optimizer_seconds(of, cluster),
            state_bytes(of, cluster),
            activation_bytes(of, cluster, 1) + yielded,
        )

    @property
    def gpus(self) -> Numbers:
        return self.tp * self.pp * self.dp

    def take(self, chosen: Any) -> Column:
        """Return the placements with these indices."""
        return Column(*(each[chosen] for each in self))

    def take_flat(self, index: int) -> Column:
        """Return one placement, of arrays of any shape."""
        return Column(*(each.flat[index] for each in self))


def own_bytes(
    columns: Sequence[Column], positions: Sequence[Numbers], features: Numbers, logits: Numbers
) -> list[Numbers]:
    """Return bytes of the fullest GPU of each module in a pipeline of modules.

    Args:
        columns: encoders and generators, then the LLM.
        positions: of each, the most of a microbatch.
        features, logits: bytes of the LLM's microbatch.
    """
    *encoders, llm = columns
    used: list[Numbers] = [0.0] * len(columns)
    later: Numbers = 0  # stages after a module
    for at in [at for at, each in enumerate(encoders) if np.any(each.after)][::-1]:
        used[at] = encoders[at].states + positions[at] * encoders[at].held * (encoders[at].pp + later)
        later = later + encoders[at].pp
    held = positions[-1] * llm.held
    first = llm.states + (held + features) * (llm.pp + later)
    last = llm.states + held * (1 + later) + logits
    used[-1] = np.where(llm.pp > 1, np.maximum(first, last), first + logits)
    later = later + llm.pp
    for at in [at for at, each in enumerate(encoders) if not np.any(each.after)][::-1]:
        used[at] = encoders[at].states + positions[at] * encoders[at].held * (encoders[at].pp + later)
        later = later + encoders[at].pp
    return used


def closed_own(columns: Sequence[Column], microbatches: Numbers, travel: Numbers, cluster: Cluster) -> Numbers:
    """Return seconds of a step of modules in one pipeline: the first microbatch passes all, others the slowest stage.

    Args:
        travel: seconds in which the features of a microbatch, and their gradients, travel.
    """
    fill: Numbers = travel
    slowest: Numbers = 0.0
    late: Numbers = 0.0
    optimizer: Numbers = 0.0
    for each in columns:
        stage = each.work / microbatches
        fill, slowest = fill + each.pp * stage, np.maximum(slowest, stage)
        late = np.maximum(late, overlapped(stage, each.reduced, cluster) - stage)
        optimizer = np.maximum(optimizer, each.optimizer)
    return fill + (microbatches - 1) * slowest + late + optimizer


def features_and_logits(
    encoders: Sequence[Module], llm: Module, tp: Numbers, tokens: Numbers, rows: Numbers, cluster: Cluster
) -> tuple[Numbers, Numbers]:
    """Return bytes of the LLM's features with their gradients, and of its logits, in one microbatch."""
    a = cluster.assumed
    features = a.feature_bytes * (1 + any(each.has_gradients for each in encoders)) * rows * llm.cost.hidden
    return features, a.logit_bytes * tokens * (llm.cost.vocab or 0) / tp


def gpu_bytes(
    kind: Kind, settings: Sequence[Setting], tokens: Numbers, memory: Memory, means: Means
) -> dict[str, Numbers]:
    """Return bytes of the fullest GPU of each module that has its own; all others are with the LLM's.

    Args:
        settings: of encoders and generators, the LLM's last.
        tokens: most LLM tokens of a microbatch.
    """
    cluster, (*encoders, llm) = means.cluster, settings
    features, logits = features_and_logits(
        [e.module for e in encoders], llm.module, llm.tp, tokens, memory.rows, cluster
    )
    if kind == "own":
        columns = [Column.of(each, means, llm.module) for each in settings]
        positions = [*(memory.positions[each.module.name] for each in encoders), tokens]
        return dict(
            zip([e.module.name for e in settings], own_bytes(columns, positions, features, logits), strict=True)
        )
    # Everything is on the LLM's GPUs: on the first stage only where encoders are there.
    states, held, encoded = state_bytes(llm, cluster), activation_bytes(llm, cluster, tokens), 0.0
    for each in encoders:
        activations = activation_bytes(each, cluster, memory.positions[each.module.name])
        encoded = encoded + state_bytes(each, cluster) + activations * (llm.pp if kind == "first_stage" else 1)
    first = states + (held + features) * llm.pp + encoded
    last = states + held + logits + (0.0 if kind == "first_stage" else encoded)
    return {LLM: np.maximum(first, last) if llm.pp > 1 else first + logits}


def closed_form(kind: Kind, settings: Sequence[Setting], tokens: Numbers, means: Means) -> Numbers:
    """Return seconds of a step if every microbatch were the mean one, and parts could be split anywhere."""
    cluster, (*encoders, llm) = means.cluster, settings
    microbatches = np.maximum(1, np.ceil(means.tokens / (llm.dp * tokens)))
    ways = [1 + each.module.has_gradients for each in encoders]
    rows = [means.rows[each.module.name] / llm.dp for each in encoders]
    if kind == "own":
        link = cluster.link(sum(each.tp * each.pp * each.dp for each in settings))
        travel = sum(
            w * rows_seconds(r / microbatches, llm.module, link, cluster) for w, r in zip(ways, rows, strict=True)
        )
        return closed_own([Column.of(each, means, llm.module) for each in settings], microbatches, travel, cluster)
    work = {each.module.name: means.seconds(each) / (each.pp * each.dp) for each in settings}
    reduced = sent_seconds(reduced_bytes, settings, cluster)
    optimizer = sum(optimizer_seconds(each, cluster) for each in settings)
    encoded = sum((work[each.module.name] for each in encoders), 0.0)
    if kind == "shared":
        link = cluster.link(llm.tp * llm.pp * llm.dp)
        encoded = encoded + max(ways) * rows_seconds(sum(rows), llm.module, link, cluster)
    if llm.pp == 1:
        each_step = (work[llm.module.name] + encoded) / microbatches
        if llm.sharding == "full":
            sent = sent_seconds(sharded_bytes, settings, cluster)
            return microbatches * overlapped(each_step, sent, cluster) + optimizer
        return (microbatches - 1) * each_step + overlapped(each_step, reduced, cluster) + optimizer
    # A pipeline of the LLM, with encoders on its first stage, or on all GPUs before and after it.
    stage = work[llm.module.name] / microbatches
    first = stage if kind == "shared" else stage + encoded / microbatches
    pipeline = first * microbatches + (llm.pp - 1) * stage + overlapped(first, reduced, cluster) - first
    return pipeline + optimizer + (encoded if kind == "shared" else 0.0)
