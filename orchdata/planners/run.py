"""Plan a run: modules, real steps, a cluster -> the layout with the fastest steps that this library serves.

closed forms over all layouts --the most promising of each kind--> simulate --> RunPlan, with the call to paste

Layouts by closed forms: every setting of a module that fits, and the best combinations of settings.

one layout, repeated, shared, stage    tokens x replicas at once, for each tp, pp, sharding and recomputation
modules on GPUs of their own           for each setting of the LLM, by a bound below all that others can add:
                                       settings of the others that could still be among the best, combined
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple

import numpy as np

from orchdata.balancers.assignment import checked_count
from orchdata.planners.cluster import Cluster, Many, Means, closed_form, gpu_bytes, mean_memory
from orchdata.planners.layout import LLM, Kind, Layout, Module, Placement, Sharding, checked_modules
from orchdata.planners.simulation import balance_of, simulated
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
        choice = _simulated(candidate, means)
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
    num_steps = min(means.workload.num_steps, max(1, _SCREENED_SAMPLES // means.fewest_samples))
    first = Means(means.workload.take(num_steps), means.cluster)
    leaders, others = [], []
    best = {True: np.inf, False: np.inf}
    for kind, ranked in found.items():
        # One of each setting of the LLM: neighbours are much alike.
        fastest: dict[Any, tuple[float, Candidate]] = {}
        least = np.inf
        for number, each in enumerate(ranked):
            if number >= SIMULATED and each.seconds >= least:
                break
            choice, llm = _simulated(each, first), each.settings[-1]
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


def _simulated(candidate: Candidate, means: Means) -> Choice:
    """Return a candidate, simulated; where the loader may spread parts or not, as is faster."""
    cluster, modules = means.cluster, [each.module for each in candidate.settings]
    ways = ("joint", "per_phase") if candidate.kind in ("one", "repeated") and len(modules) > 1 else ("joint",)
    tried = [(layout, simulated(layout, means)) for layout in map(candidate.layout, ways)]
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


_SIZES: Final = (1, 2, 4, 8)
_MOST_STAGES, _MOST_STAGES_OF_OTHERS = 20, 4
_MOST_COMBINED: Final = 1 << 20
_MANY: Final = 64
Keep = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell(Value):
    """A setting of one module that fits: seconds of the mean step if it were alone, and bytes of its fullest GPU."""

    placement: Placement
    microbatch_tokens: int
    seconds: float
    bytes: float


class Candidate(NamedTuple):
    """A layout by its closed form."""

    seconds: float
    gpus: int
    kind: Kind
    settings: tuple[Many, ...]
    tokens: int

    def layout(self, assignment: Any = "joint") -> Layout:
        """Return it as a value; one replica of all has nothing to shard."""
        alone = all(each.dp == 1 for each in self.settings)
        placements = tuple(of.placement(plain=alone or (self.kind == "own" and of.dp == 1)) for of in self.settings)
        return Layout(placements=placements, kind=self.kind, microbatch_tokens=self.tokens, assignment=assignment)


def tried_tokens(longest: int) -> tuple[int, ...]:
    """Return the tokens of a microbatch that are tried, 4,096 to 131,072: none is below the longest sample."""
    return tuple(4096 << each for each in range(6) if 4096 << each >= longest) or (longest,)


def cells(module: Module, workload: Workload, cluster: Cluster, *, tokens: int | None = None) -> list[Cell]:
    """Return every setting of a module that fits on the cluster's GPUs, as a table of seconds by GPUs (Crius' cells).

    Args:
        tokens: positions of a microbatch, of this module's own; by default those that are tried.

    Raises:
        ValueError: no phase of this name, or a module that fits in no setting: it names the bytes of the smallest.
    """
    if module.name not in workload.phases:
        raise ValueError(f"module {module.name!r} is of no phase: the samples have {', '.join(workload.phases)}")
    means = Means(workload, cluster, module.name)
    found, smallest = [], np.inf
    tried = (tokens,) if tokens else tried_tokens(means.longest)
    for _, (of,), seconds, used in grids([module], means, tried, {}, (None, "optimizer", "full")):
        smallest = min(smallest, float(used.min()))
        for row, column in np.argwhere(used <= cluster.usable).tolist():
            one = of._replace(dp=of.dp[0, column])
            if one.sharding and one.dp == 1:
                continue  # Nothing to shard: the same as without.
            size = {"seconds": float(seconds[row, column]), "bytes": float(used[row, column])}
            found.append(Cell(placement=one.placement(plain=False), microbatch_tokens=tried[row], **size))
    if not found:
        raise ValueError(
            f"module {module.name!r} fits on no GPU: it needs at least {smallest / 1e9:.1f} GB on each, and a GPU has "
            f"{cluster.usable / 1e9:.1f} GB for it ({cluster.assumed.usable:.0%} of {cluster.memory / 1e9:.0f})"
        )
    return found


def grids(
    modules: Sequence[Module],
    means: Means,
    tokens: Sequence[int],
    keep: Keep,
    shardings: Sequence[Sharding | None] = ("optimizer", "full"),
) -> Iterator[tuple[Kind, tuple[Many, ...], Any, Any]]:
    """Yield layouts without GPUs of their own for encoders: kind, settings with all dp, int64 (1, num_dp), and seconds
    and bytes of the fullest GPU, float64 (num_tokens, num_dp).
    """
    (*encoders, llm), cluster = modules, means.cluster
    column = np.array(tokens)[:, None]
    kinds: tuple[Kind, ...] = ("one", "repeated", "shared", "first_stage") if encoders else ("one", "first_stage")
    for kind, tp, pp, sharding in itertools.product(kinds, _SIZES, stages_of(llm), shardings):
        of_encoders = tp if kind in ("one", "first_stage") else 1
        has = {"one": pp == 1, "first_stage": pp > 1, "repeated": pp == 1 and tp > 1, "shared": tp * pp > 1}[kind]
        refused = llm.refused(tp, pp) or any(each.refused(of_encoders, 1) for each in encoders)
        if not has or refused or (sharding == "full" and pp > 1):
            continue
        dp = np.arange(1, min(cluster.gpus // (tp * pp), means.fewest_samples) + 1)
        of_encoder = of_encoders, 1, dp * tp * pp if kind == "shared" else dp
        shapes = [*[of_encoder] * len(encoders), (tp, pp, dp)]
        kept = np.logical_and.reduce([_keeps(keep, of.name, *shape) for of, shape in zip(modules, shapes, strict=True)])
        for recompute in itertools.product((False, True), repeat=len(modules)) if kept.any() else ():
            settings = tuple(
                Many(of, tp_of, pp_of, dp_of[kept][None], sharding, again)
                for of, (tp_of, pp_of, dp_of), again in zip(modules, shapes, recompute, strict=True)
            )
            memory = mean_memory(kind, settings, column, means)
            used = gpu_bytes(kind, settings, column, memory, means)[LLM]
            seconds = closed_form(kind, settings, column, means)
            shape = len(tokens), int(kept.sum())
            yield kind, settings, np.broadcast_to(seconds, shape), np.broadcast_to(used, shape)


def stages_of(module: Module) -> list[int]:
    """Return the numbers of stages that are tried."""
    most = _MOST_STAGES if module.name == LLM else _MOST_STAGES_OF_OTHERS
    return [each for each in range(1, most + 1) if not module.cost.layers % each]


def _keeps(keep: Keep, name: str, tp: int, pp: int, dp: Any) -> Any:
    """Return which settings a user keeps, in the shape of `dp`."""
    given, kept = {"tp": tp, "pp": pp, "dp": dp}, np.full(np.shape(dp), True)
    for size, value in keep.get(name, {}).items():
        kept &= given[size] == value
    return kept


def candidates(
    modules: Sequence[Module], means: Means, tokens: Sequence[int], keep: Keep, most: int
) -> tuple[dict[Kind, list[Candidate]], dict[Kind, float]]:
    """Return the best layouts of each kind by their closed forms, at most `most` of a kind; and the least bytes of
    a GPU in each kind, but for modules on GPUs of their own.
    """
    usable = means.cluster.usable
    found: dict[Kind, list[Candidate]] = {}
    least: dict[Kind, float] = {}
    for kind, settings, seconds, used in grids(modules, means, tokens, keep):
        ranked = found.setdefault(kind, [])
        least[kind] = min(least.get(kind, np.inf), float(used.min()))
        within = np.where(used <= usable, seconds, np.inf)
        if within.shape[1] > _MANY:  # neighbours are alike: the best alone
            is_best = within.argmin(axis=1)[:, None] == np.arange(within.shape[1])
            within = np.where(is_best, within, np.inf)
        within = within.ravel()
        for at in np.argsort(within, kind="stable")[:most].tolist():
            if within[at] < np.inf:
                row, column = divmod(at, seconds.shape[1])
                chosen = tuple(each._replace(dp=int(each.dp[0, column])) for each in settings)
                ranked.append(Candidate(float(within[at]), chosen[-1].gpus, kind, chosen, tokens[row]))
    if len(modules) > 1:
        found["own"] = _own(modules, means, tokens, keep, most)
    return {kind: sorted(ranked, key=lambda each: each[:2])[:most] for kind, ranked in found.items()}, least


def _table(module: Module, means: Means, keep: Keep) -> Many | None:
    """Return all settings of a module on GPUs of its own, as arrays (num_settings,)."""
    most = min(means.cluster.gpus, means.fewest_samples) if module.name == LLM else means.cluster.gpus
    # Replicas without a prime factor above 7: numbers that divide a power of 2 x 3 x 5 x 7.
    sizes = np.array([each for each in range(1, most + 1) if not pow(210, most.bit_length(), each)])
    found = []
    for tp, pp, again in itertools.product(_SIZES, stages_of(module), (False, True)):
        dp = sizes[sizes <= means.cluster.gpus // (tp * pp)]
        dp = dp[_keeps(keep, module.name, tp, pp, dp)]
        if dp.size and not module.refused(tp, pp):
            work = means.work(Many(module, tp, pp, dp, "optimizer", again))
            found.append([np.broadcast_to(each, dp.shape) for each in (tp, pp, dp, again, work)])
    if not found:
        return None
    all_tp, all_pp, all_dp, all_again, all_work = map(np.concatenate, zip(*found, strict=True))
    return Many(module, all_tp, all_pp, all_dp, "optimizer", all_again, all_work)


def _own(modules: Sequence[Module], means: Means, tokens: Sequence[int], keep: Keep, most: int) -> list[Candidate]:
    """Return the best layouts with modules on GPUs of their own."""
    cluster = means.cluster
    tables = [table for each in modules if (table := _table(each, means, keep)) is not None]
    if len(tables) < len(modules):
        return []
    # With each tokens of a microbatch.
    llm = tables.pop()
    own, size = llm.take(np.repeat(np.arange(len(llm.dp)), len(tokens))), np.tile(tokens, len(llm.dp))
    count = np.maximum(1, np.ceil(means.tokens / (own.dp * size)))
    # A bound: others share what is left as evenly as GPUs could be cut, and cost no link and no optimizer.
    left = cluster.gpus - own.gpus
    work = np.array([float((each.work * each.gpus).min()) for each in tables])
    room, stage = np.maximum(left, 1) * count, own.work / count
    bound = own.pp * stage + np.sqrt(work).sum() ** 2 / room + (count - 1) * np.maximum(stage, work.sum() / room)
    least = gpu_bytes("own", [own], size, ({}, 0.0), means)[LLM]
    bound = np.where((left >= len(tables)) & (least <= cluster.usable), bound, np.inf)
    best: list[Candidate] = []
    limit = np.inf
    order = np.argsort(bound, kind="stable").tolist()
    for place in [order[0], *order]:  # the first gives a limit, and is then looked at again in full
        if bound[place] > limit or bound[place] == np.inf:
            break
        combined = _combined(tables, own.take([place]), int(size[place]), means, limit, most)
        best = sorted(best + [each for each in combined if each not in best], key=lambda each: each[:2])[:most]
        limit = best[-1].seconds if len(best) == most else np.inf
    return best


def _combined(tables: Sequence[Many], own: Many, size: int, means: Means, limit: float, most: int) -> list[Candidate]:
    """Return the best combinations with one setting of the LLM, of those not above `limit`."""
    cluster, left = means.cluster, means.cluster.gpus - int(own.gpus[0])
    count = np.maximum(1, np.ceil(means.tokens / (own.dp * size)))

    def priced(settings: list[Many]) -> tuple[Any, list[Any]]:
        used = gpu_bytes("own", settings, size, mean_memory("own", settings, size, means), means)
        return closed_form("own", settings, size, means), [each <= cluster.usable for each in used.values()]

    # Of each module, settings that fit alone, and that could be below the limit if others had all other GPUs.
    least = np.sqrt([float((each.work * each.gpus).min()) for each in tables])
    columns: list[Many] = []
    for number, table in enumerate(tables):
        free = left - table.gpus
        seconds, (fits, _) = priced([table, own])
        alone = seconds + (least.sum() - least[number]) ** 2 / np.maximum(free * count, 1)
        chosen = np.flatnonzero(fits & (free >= len(tables) - 1) & (alone <= limit))
        if len(tables) > 1:
            chosen = chosen[np.argsort(alone[chosen], kind="stable")[: int(_MOST_COMBINED ** (1 / len(tables)))]]
        # All combinations: a module's settings along an axis of its own.
        columns.append(table.take(chosen.reshape([-1 if each == number else 1 for each in range(len(tables))])))
    if not all(each.dp.size for each in columns):
        return []
    seconds, fits = priced([*columns, own])
    enough = sum(each.gpus for each in columns) <= left
    seconds = np.where(np.logical_and.reduce(np.broadcast_arrays(enough, *fits)), seconds, np.inf)
    found = []
    for at in np.argsort(seconds, axis=None, kind="stable")[:most].tolist():
        if seconds.flat[at] < np.inf:
            places = np.unravel_index(at, seconds.shape)
            settings = *(each.take(place) for each, place in zip(columns, places, strict=True)), own.take(0)
            gpus = sum(int(each.gpus) for each in settings)
            found.append(Candidate(float(seconds.flat[at]), gpus, "own", settings, size))
    return found
