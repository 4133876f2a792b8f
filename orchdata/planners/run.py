"""Plan a run: modules, real steps, a cluster -> the layout with the fastest steps that this library serves.

closed forms over all layouts --the most promising of each kind--> simulate --> RunPlan, with the call to paste
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np

from orchdata.balancers.checks import checked_count
from orchdata.planners.cluster import Cluster
from orchdata.planners.formulas import Means
from orchdata.planners.layout import LLM, Kind, Layout, Module, Placement, checked_modules
from orchdata.planners.search import Candidate, Keep, candidates, cells, tried_tokens
from orchdata.planners.simulation import balance_of, simulate
from orchdata.planners.values import Value, check_keys
from orchdata.planners.workload import Workload
from orchdata.planning.balance import Balance

SIMULATED: Final = 8
_MOST_SCREENED, _SCREENED_SAMPLES = 384, 512
_RUN: Final = ("one", "repeated", "first_stage")
_QUANTILE: Final = 1.2816  # of the normal distribution, at 90 %
_WORDS: Final[Mapping[Kind, str]] = {
    "one": "one layout for all",
    "repeated": "each peer encodes the same",
    "shared": "encoders shared among peers",
    "first_stage": "encoders on the first stage",
    "own": "modules apart, a pipeline",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice(Value):
    """One layout, simulated over the workload's steps.

    Attributes:
        runs: empty if this library's loader serves it; else who does.
        seconds: of a step, mean, as `simulate` says; `closed`: by the closed form.
        interval: seconds between which 80 % of steps are expected: of the simulated ones, and of the fit's error.
        memory: bytes of the fullest GPU of each module that has its own; of all others with the LLM's.
        parts: seconds of each part of the time, as in `Simulation`.
        mfu: operations without recomputation over those that all GPUs of the cluster could do.
        gpu_hours: of the whole cluster for a billion LLM tokens.
    """

    layout: Layout
    runs: str
    seconds: float
    interval: tuple[float, float]
    closed: float
    memory: Mapping[str, float]
    parts: Mapping[str, float]
    mfu: float
    gpu_hours: float

    @property
    def words(self) -> str:
        """The layout in words."""
        of, llm = self.layout, self.layout.llm
        if of.kind == "own":
            return " | ".join(f"{each.module.name} {_split_words(each)}" for each in of.placements) + ", a pipeline"
        what = "" if of.kind == "one" or len(of.placements) == 1 else f", {_WORDS[of.kind]}"
        return f"{'FSDP, ' if llm.sharding == 'full' else ''}{_split_words(llm)}{what}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan(Value):
    """What a run could take, before it.

    Attributes:
        choices: the simulated layouts, the fastest first.
        recommended: index of the fastest that this library's loader serves; None if none of them.
        bound: seconds in which all GPUs do all work at the share of peak of their kernels.
        assumptions: what the seconds depend on; the first says whether they are declared or fitted.
        rejected: what is not possible, and why.
        call: Python source of the recommended layout: its mesh, and the loader. Empty if there is none.
    """

    choices: tuple[Choice, ...]
    recommended: int | None
    bound: float
    assumptions: tuple[str, ...]
    rejected: tuple[str, ...]
    call: str


def plan_run(
    modules: Sequence[Module],
    workload: Workload,
    cluster: Cluster,
    *,
    max_tokens: int | None = None,
    keep: Keep | None = None,
) -> RunPlan:
    """Return the layouts with the fastest steps, and which to take. Nothing is started, and GPUs may stay idle.

    Closed forms choose, after DistTrain (arXiv 2408.04275): of each kind of layout the best settings. Eight are
    simulated, and only what is simulated is promised.

    Args:
        modules: one for each phase, in any order.
        max_tokens: LLM tokens of a microbatch; by default 4,096, 8,192, ... 131,072 are tried, from the longest sample.
        keep: module -> "tp", "pp" or "dp" that it must have.

    Raises:
        ValueError: a phase without a module, nothing that fits (which module, and bytes), or a `keep` that leaves none.
    """
    ordered, means, kept = checked_modules(modules, [*workload.phases]), Means(workload, cluster), keep or {}
    if max_tokens is not None and checked_count(max_tokens, "max_tokens") < means.longest:
        raise ValueError(f"max_tokens={max_tokens} is below the longest sample, of {means.longest} tokens")
    check_keys(kept, [module.name for module in ordered], "keep")
    for module in ordered:
        sizes: Any = kept.get(module.name, {})
        Placement(module=module, **{"tp": min(module.seconds or (1,)), **sizes})  # Raises for one that cannot be.
    # The fewer samples a step has, the further it is from the mean one: then more are looked at.
    most = min(max(SIMULATED, 32 * _SCREENED_SAMPLES // means.fewest_samples), _MOST_SCREENED)
    tokens = (max_tokens,) if max_tokens else tried_tokens(means.longest)
    found, least = candidates(ordered, means, tokens, kept, most)
    usable = f"of {cluster.usable / 1e9:.1f} usable"
    rejected = [
        f"{_WORDS[kind]}: " + (f"at least {least[kind] / 1e9:.1f} GB a GPU, {usable}" if kind in least else "none fits")
        for kind in found
        if not found[kind]
    ]
    # Simulate the most promising; what is larger in real steps than on average may not fit after all.
    choices: list[Choice] = []
    for candidate in _promising(found, means):
        choice = _simulated(candidate, workload, means)
        if (used := max(choice.memory.values())) <= cluster.usable:
            choices.append(choice)
        else:
            rejected.append(f"{choice.words}: {used / 1e9:.1f} GB a GPU in real steps, {usable}")
        if len(choices) == SIMULATED:
            break
    if not choices:
        for module in ordered:  # Raises for one that is too large by itself.
            cells(module, workload, cluster, tokens=max_tokens if module.name == LLM else None)
        why = "; ".join(rejected[:SIMULATED])
        raise ValueError(f"no layout fits on {cluster.gpus} GPUs, tp 1, 2, 4 or 8, keep={dict(kept)}: {why}")
    choices.sort(key=lambda each: (each.seconds, each.layout.gpus))
    recommended = next((at for at, each in enumerate(choices) if not each.runs), None)
    work = sum(of / each.share for of, each in zip(means.operations(ordered).values(), ordered, strict=True))
    return RunPlan(
        choices=tuple(choices),
        recommended=recommended,
        bound=work / (cluster.gpus * cluster.operations),
        assumptions=_assumptions(ordered, cluster, workload),
        rejected=tuple(rejected),
        call="" if recommended is None else call_of(choices[recommended].layout, workload, cluster),
    )


def _promising(found: Mapping[Kind, Sequence[Candidate]], means: Means) -> list[Candidate]:
    """Return candidates by what their first steps take: the best of each kind, then those closest to the best layout
    that runs, or to the best that does not.
    """
    workload = means.workload
    first = workload.take(min(workload.num_steps, max(1, _SCREENED_SAMPLES // means.fewest_samples)))
    leaders, others = [], []
    best = {True: np.inf, False: np.inf}
    for kind, ranked in found.items():
        # One of each setting of the LLM: neighbours are much alike.
        fastest: dict[Any, tuple[float, Candidate]] = {}
        least = np.inf
        for number, each in enumerate(ranked):
            if number >= SIMULATED and each.seconds >= least:
                break
            choice, llm = _simulated(each, first, means), each.settings[-1]
            fits = max(choice.memory.values()) <= means.cluster.usable
            seconds = choice.seconds if fits else 1e3 * choice.seconds
            least, alike = min(least, seconds), (llm.tp, llm.pp, llm.sharding, each.tokens)
            fastest[alike] = min(fastest.get(alike, (np.inf, each)), (seconds, each), key=lambda place: place[0])
        places = sorted(fastest.values(), key=lambda place: place[0])
        leaders += places[:1]
        others += places[1:]
        best[kind in _RUN] = min(best[kind in _RUN], least)
    others.sort(key=lambda place: place[0] / best[place[1].kind in _RUN])
    return [each for _, each in [*leaders, *others]]


def _simulated(candidate: Candidate, workload: Workload, means: Means) -> Choice:
    """Return a candidate, simulated; where the loader may spread parts or not, as is faster."""
    cluster, modules = means.cluster, [each.module for each in candidate.settings]
    ways = ("joint", "per_phase") if candidate.kind in ("one", "repeated") and len(modules) > 1 else ("joint",)
    tried = [(layout, simulate(layout, workload, cluster)) for layout in map(candidate.layout, ways)]
    fitting = [each for each in tried if max(each[1].bytes.values()) <= cluster.usable] or tried
    layout, of = min(fitting, key=lambda each: float(each[1].seconds.mean()))
    mean = float(of.seconds.mean())
    low, high = np.quantile(of.seconds, (0.1, 0.9)).tolist()
    noise = _QUANTILE * max(module.error for module in modules) * mean
    return Choice(
        layout=layout,
        runs=layout.runs,
        seconds=mean,
        interval=(mean - float(np.hypot(mean - low, noise)), mean + float(np.hypot(high - mean, noise))),
        closed=candidate.seconds,
        memory=of.bytes,
        parts={name: float(values.mean()) for name, values in of.parts.items()},
        mfu=sum(means.operations(modules).values()) / (cluster.gpus * cluster.operations * mean),
        gpu_hours=mean * cluster.gpus / 3600 / means.tokens * 1e9,
    )


def _assumptions(modules: Sequence[Module], cluster: Cluster, workload: Workload) -> tuple[str, ...]:
    fitted = [f"{each.name}, error {each.error:.1%}" for each in modules if each.seconds is not None]
    shares = [f"{module.share:.0%} ({module.name})" for module in modules if module.seconds is None]
    speeds = [f"fitted: seconds of {', '.join(fitted)}"] if fitted else []
    if shares:
        speeds.append(f"declared: kernels reach {' and '.join(shares)} of {cluster.operations / 1e12:.0f} TFLOP/s")
    within, between, memory = (round(of / 1e9) for of in (cluster.within, cluster.between, cluster.memory))
    source = f" ({cluster.source})" if cluster.source else ""
    return (
        "; ".join(speeds),
        f"declared: {within} GB/s in nodes of {cluster.gpus_per_node}, else {between}{source}",
        f"declared: {memory} GB a GPU at {cluster.memory_bandwidth / 1e9:.0f} GB/s",
        f"{workload.num_steps} real steps, {workload.num_samples / workload.num_steps:,.0f} samples each",
        *(f"{each.name} = {getattr(cluster.assumed, each.name):g}" for each in fields(cluster.assumed)),
    )


def _split_words(of: Any) -> str:
    words = [f"{name} {size}" for name, size in (("tp", of.tp), ("pp", of.pp)) if size > 1]
    words.append(f"dp {of.dp}")
    return " x ".join(words) + (", full recomputation" if of.recompute and of.module.has_gradients else "")


def call_of(layout: Layout, workload: Workload, cluster: Cluster) -> str:
    """Return Python source that makes the mesh and the loader of a layout. `dataset` and `cost` are the program's."""
    llm, balance = layout.llm, balance_of(layout)
    shard = "dp_shard" if llm.sharding == "full" else "dp_replicate"
    dims = {name: of for name, of in (("pp", llm.pp), (shard, llm.dp), ("tp", llm.tp)) if of > 1 or name == shard}
    mesh = "mesh" if len(dims) == 1 else f'mesh["{shard}"]'
    if llm.sharding == "full":
        notes = [f"fully_shard(model, mesh={mesh})"]
    else:
        zero = ", ZeroRedundancyOptimizer" if llm.sharding else ""
        notes = [f"DistributedDataParallel(model, device_mesh={mesh}){zero}"]
    if recomputed := [of.module.name for of in layout.placements if of.recompute and of.module.has_gradients]:
        notes.append(f"full recomputation of {', '.join(recomputed)}")
    given = {name: getattr(balance, name) for name in ("max_tokens", "assignment", "objective")}
    options = ", ".join(f"{name}={of!r}" for name, of in given.items() if of != getattr(Balance(), name))
    dp = "mesh"
    if layout.kind == "shared":
        options += ", assignment='per_phase', encode='micro_step'"
        dp = "od.DataParallel(mesh, encoder_dims=('tp',))"
        notes.append("the encoders by themselves, on all GPUs; od.exchange(..., group=dp): docs/encoders_apart.md")
    if balance.assignment == "per_phase":
        notes.append("od.exchange inside of forward: docs/encoders_apart.md")
    if layout.gpus < cluster.gpus:
        notes.append(f"{cluster.gpus - layout.gpus} of {cluster.gpus} GPUs stay idle")
    amount = workload.global_batch_tokens or workload.global_batch_size or workload.num_samples // workload.num_steps
    size = "global_batch_tokens" if workload.global_batch_tokens else "global_batch_size"
    notes = [f"# {note}\n" for note in notes]
    return f"""import orchdata as od
from torch.distributed.device_mesh import init_device_mesh

{"".join(notes)}mesh = init_device_mesh("cuda", {(*dims.values(),)}, mesh_dim_names={(*dims,)})
loader = od.DataLoader(
    dataset, cost=cost, {size}={amount}, dp={dp},
    balance=od.Balance({options}),
)""".replace("'", '"')
