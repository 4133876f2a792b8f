"""What a run is planned for: GPUs, their speed, memory and links, and every constant of the formulas.

Bytes of a GPU and seconds of its work, from shapes and constants: `docs/planning_a_run.md` has every formula.

Replicas and tokens may be numbers, or arrays that broadcast: a search gives thousands at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.assignment import checked_count, checked_effort
from orchdata.planners.layout import LLM, Kind, Module, Placement, Sharding
from orchdata.planners.values import Value, checked_number
from orchdata.planners.workload import Workload, WorkloadCosts


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumed(Value):
    """The constants of the formulas (`docs/planning_a_run.md`). Bytes are of bf16 weights and Adam in float32."""

    # Bytes of a parameter that is trained; a frozen one has the weight.
    weight_bytes: float = 2.0
    gradient_bytes: float = 2.0
    optimizer_bytes: float = 12.0
    # Bytes a token, layer and unit of width; with recomputation `kept_bytes`, and one whole layer.
    activation_bytes: float = 34.0
    kept_bytes: float = 2.0
    logit_bytes: float = 6.0  # a token and entry of the vocabulary
    feature_bytes: float = 2.0  # a row and unit of the LLM's width, one way
    # Bytes a token, layer and unit of width that tensor parallelism sends, of which computing hides `hidden`.
    tensor_bytes: float = 16.0
    tensor_bytes_recomputed: float = 24.0
    hidden: float = 0.5
    # Bytes that FSDP sends in a micro-step: of a trained parameter, a frozen one whose inputs need gradients, another.
    sharded_bytes: float = 6.0
    sharded_input_bytes: float = 4.0
    sharded_frozen_bytes: float = 2.0
    reduced_bytes: float = 4.0  # of a trained parameter, once a step, without FSDP
    optimizer_traffic: float = 28.0  # bytes of memory that the optimizer reads and writes for a parameter
    not_hidden: float = 0.1  # part of the smaller one of sending and computing that the larger one does not hide
    usable: float = 0.9  # part of memory that states and activations may fill
    width: float = 128.0  # of a GPU's slice of a layer, at which kernels reach half of their share of peak

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if checked_effort(value, f"Assumed.{name}") > 1 and name in ("hidden", "not_hidden", "usable"):
                raise ValueError(f"Assumed.{name} is a part, at most 1, got {value!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster(Value):
    """GPUs of one kind in nodes, and two levels of links.

    Attributes:
        gpus, gpus_per_node: all of them, and those of a node, which reach each other by the faster link.
        operations: dense bf16 operations/s of a GPU, peak.
        memory, memory_bandwidth: bytes of a GPU, and bytes/s of its memory.
        within, between: bytes/s that a GPU sends, inside a node and between nodes.
        name, source: where the figures are from.
    """

    gpus: int
    operations: float
    memory: float
    memory_bandwidth: float
    within: float
    between: float
    gpus_per_node: int = 8
    name: str = ""
    source: str = ""
    assumed: Assumed = field(default_factory=Assumed)

    def __post_init__(self) -> None:
        for name in ("gpus", "gpus_per_node"):
            object.__setattr__(self, name, checked_count(getattr(self, name), f"Cluster.{name}"))
        for name in _SPEEDS:
            object.__setattr__(self, name, checked_number(getattr(self, name), f"Cluster.{name}"))

    @classmethod
    def named(cls, name: str, **changes: Any) -> Cluster:
        """Return a preset, `h100x64`: a kind (a100, a800, b200, h100, h200, h800) and a number of GPUs; `changes` are
        fields in place of its own. Raises ValueError for an unknown kind or no GPUs.
        """
        kind, _, gpus = name.partition("x")
        if kind not in _PRESETS or not gpus.isdecimal():
            raise ValueError(f"a cluster is KINDxGPUS, such as h100x64, of {', '.join(_PRESETS)}; got {name!r:.80}")
        preset = dict(zip((*_SPEEDS, "source"), _PRESETS[kind], strict=True))
        return cls(**{"gpus": int(gpus), "name": kind.upper(), **preset, **changes})

    @property
    def usable(self) -> float:
        """Bytes of a GPU that states and activations may fill."""
        return self.memory * self.assumed.usable

    def link(self, gpus: Any) -> Any:
        """Return bytes/s of the slowest link among so many neighbours; an array gives an array."""
        return np.where(np.asarray(gpus) <= self.gpus_per_node, self.within, self.between)


_SPEEDS = ("operations", "memory", "memory_bandwidth", "within", "between")
_SXM, _LINKS = "NVIDIA's data sheet, SXM", "Gb/s a GPU; links at 80 % of their rate"
_PRESETS = {
    # Operations/s, bytes, bytes/s of memory, bytes/s one way by NVLink, and by a network card for each GPU.
    "a100": (312e12, 80e9, 2.039e12, 0.8 * 300e9, 0.8 * 25e9, f"{_SXM}, NVLink 600 GB/s both ways; 200 {_LINKS}"),
    "a800": (312e12, 80e9, 2.039e12, 0.8 * 200e9, 0.8 * 25e9, f"{_SXM}, NVLink 400 GB/s both ways; 200 {_LINKS}"),
    "b200": (2250e12, 180e9, 7.7e12, 0.8 * 900e9, 0.8 * 50e9, f"{_SXM} (HGX, an eighth); 400 {_LINKS}"),
    "h100": (989e12, 80e9, 3.35e12, 0.8 * 450e9, 0.8 * 50e9, f"{_SXM}, NVLink 900 GB/s both ways; 400 {_LINKS}"),
    "h200": (989e12, 141e9, 4.8e12, 0.8 * 450e9, 0.8 * 50e9, f"{_SXM}, NVLink 900 GB/s both ways; 400 {_LINKS}"),
    "h800": (989e12, 80e9, 3.35e12, 0.8 * 200e9, 0.8 * 50e9, f"{_SXM}, NVLink 400 GB/s both ways; 400 {_LINKS}"),
}

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
    plans: dict[Any, Any] = field(default_factory=dict)  # of steps, which `simulated` keeps
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


Memory = tuple[Mapping[str, Numbers], Numbers]
"""Most positions of each encoder in a microbatch, and rows of features in one of the LLM."""


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
    return positions, rows


def in_pipeline(settings: Sequence[Any]) -> list[Any]:
    """Return modules on their own GPUs as their stages follow each other: encoders, the LLM (last here), generators."""
    return sorted(settings, key=lambda each: 2 * each.module.after + (each is settings[-1]))


def gpu_bytes(
    kind: Kind, settings: Sequence[Setting], tokens: Numbers, memory: Memory, means: Means
) -> dict[str, Numbers]:
    """Return bytes of the fullest GPU of each module that has its own; all others are with the LLM's, which is last."""
    cluster, a, (*encoders, llm), (positions, rows) = means.cluster, means.cluster.assumed, settings, memory
    wide = a.feature_bytes * llm.module.cost.hidden
    features = wide * (1 + any(each.module.has_gradients for each in encoders)) * rows
    logits = a.logit_bytes * tokens * (llm.module.cost.vocab or 0) / llm.tp
    # Encoders on the LLM's GPUs: on the first stage only where encoders are there.
    early: Numbers = 0.0
    for each in encoders if kind != "own" else ():
        activations = activation_bytes(each, cluster, positions[each.module.name])
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
            held = positions[name] * (activation_bytes(each, cluster, 1) + yielded)
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
