"""Layouts by closed forms: every setting of a module that fits, and the best combinations of settings.

one layout, repeated, shared, stage    tokens x replicas at once, for each tp, pp, sharding and recomputation
modules on GPUs of their own           for each setting of the LLM, by a bound below all that others can add:
                                       settings of the others that could still be among the best, combined
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.planners.cluster import Cluster
from orchdata.planners.formulas import (
    Column,
    Many,
    Means,
    closed_form,
    closed_own,
    features_and_logits,
    gpu_bytes,
    mean_memory,
    own_bytes,
    rows_seconds,
)
from orchdata.planners.layout import LLM, Kind, Layout, Module, Placement
from orchdata.planners.values import Value
from orchdata.planners.workload import Workload

TRIED_TOKENS: Final = tuple(4096 << each for each in range(6))
_SIZES: Final = (1, 2, 4, 8)
_MOST_STAGES, _MOST_STAGES_OF_OTHERS = 20, 4
_RECOMPUTE: Final = (None, "full")
_MOST_COMBINED: Final = 1 << 20
Keep = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell(Value):
    """A setting of one module that fits into memory.

    Attributes:
        placement: GPUs, tp, pp, dp, sharding, recomputation.
        microbatch_tokens: positions of a microbatch.
        seconds: of the mean step, if the module were alone.
        bytes: of its fullest GPU.
    """

    placement: Placement
    microbatch_tokens: int
    seconds: float
    bytes: float

    @property
    def gpus(self) -> int:
        return self.placement.gpus


class Candidate(NamedTuple):
    """A layout by its closed form."""

    seconds: float
    gpus: int
    kind: Kind
    settings: tuple[Many, ...]
    tokens: int

    def placements(self) -> tuple[Placement, ...]:
        """Return them as values; one replica of all has nothing to shard."""
        where: Any = self.kind if self.kind in ("own", "first_stage") else "all"
        alone = all(each.dp == 1 for each in self.settings)
        return tuple(
            Placement(
                module=of.module,
                tp=of.tp,
                pp=of.pp,
                dp=int(of.dp),
                sharding=None if alone or (self.kind == "own" and of.dp == 1) else of.sharding,  # type: ignore[arg-type]
                recompute=of.recompute,  # type: ignore[arg-type]
                where="all" if of.module.name == LLM and self.kind != "own" else where,
            )
            for of in self.settings
        )

    def layout(self, assignment: Any = "joint") -> Layout:
        return Layout(placements=self.placements(), microbatch_tokens=self.tokens, assignment=assignment)


def tried_tokens(longest: int) -> tuple[int, ...]:
    """Return the tokens of a microbatch that are tried: none is below the longest sample."""
    return tuple(each for each in TRIED_TOKENS if each >= longest) or (longest,)


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
    for kind, (of,), seconds, used in grids([module], means, tried, {}):
        smallest = min(smallest, float(used.min()))
        for row, column in np.argwhere(used <= cluster.usable).tolist():
            candidate = Candidate(0.0, 0, kind, (of._replace(dp=of.dp[0, column]),), tried[row])
            size = {"seconds": float(seconds[row, column]), "bytes": float(used[row, column])}
            found.append(Cell(placement=candidate.placements()[0], microbatch_tokens=tried[row], **size))
    if not found:
        raise ValueError(too_large(module.name, smallest, cluster))
    return found


def too_large(name: str, smallest: float, cluster: Cluster) -> str:
    """Say that a module fits on no GPU."""
    return (
        f"module {name!r} fits on no GPU: it needs at least {smallest / 1e9:.1f} GB on each, and a GPU has "
        f"{cluster.usable / 1e9:.1f} GB for it ({cluster.assumed.usable:.0%} of {cluster.memory / 1e9:.0f})"
    )


def grids(
    modules: Sequence[Module], means: Means, tokens: Sequence[int], keep: Keep
) -> Iterator[tuple[Kind, tuple[Many, ...], Any, Any]]:
    """Yield layouts without GPUs of their own for encoders: kind, settings with all dp, int64 (1, num_dp), and seconds
    and bytes of the fullest GPU, float64 (num_tokens, num_dp).
    """
    (*encoders, llm), cluster = modules, means.cluster
    column = np.array(tokens)[:, None]
    kinds: tuple[Kind, ...] = ("one", "repeated", "shared", "first_stage") if encoders else ("one", "first_stage")
    for kind, tp, pp, sharding in itertools.product(kinds, _SIZES, stages_of(llm), ("optimizer", "full")):
        of_encoders = tp if kind in ("one", "first_stage") else 1
        if (
            (pp > 1 and (kind in ("one", "repeated") or sharding == "full"))
            or (pp == 1 and kind == "first_stage")
            or (kind == "repeated" and tp == 1)
            or (kind == "shared" and tp * pp == 1)
            or not all(each.allows(of_encoders, 1) for each in encoders)
            or not llm.allows(tp, pp)
        ):
            continue
        dp = np.arange(1, min(cluster.gpus // (tp * pp), means.fewest_samples) + 1)[None]
        dp_of_encoders = dp * tp * pp if kind == "shared" else dp
        kept = _keeps(keep, llm.name, tp, pp, dp)
        for each in encoders:
            kept = kept & _keeps(keep, each.name, of_encoders, 1, dp_of_encoders)
        dp, dp_of_encoders = dp[:, kept[0]], dp_of_encoders[:, kept[0]]
        for recompute in itertools.product(_RECOMPUTE, repeat=len(modules)) if dp.size else ():
            settings = tuple(
                Many(each, of_encoders, 1, dp_of_encoders, sharding, how)
                for each, how in zip(encoders, recompute[:-1], strict=True)
            )
            settings += (Many(llm, tp, pp, dp, sharding, recompute[-1]),)
            memory = mean_memory(kind, settings, column, means)
            used = next(iter(gpu_bytes(kind, settings, column, memory, means).values()))
            seconds = closed_form(kind, settings, column, means)
            shape = len(tokens), dp.size
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
    """Return the best layouts of each kind by their closed forms, at most `most` of a kind and setting of the LLM; and
    the least bytes of a GPU in each kind, but for modules on GPUs of their own.
    """
    usable = means.cluster.usable
    found: dict[Kind, list[Candidate]] = {}
    least: dict[Kind, float] = {}
    for kind, settings, seconds, used in grids(modules, means, tokens, keep):
        ranked = found.setdefault(kind, [])
        least[kind] = min(least.get(kind, np.inf), float(used.min()))
        within = np.where(used <= usable, seconds, np.inf).ravel()
        for at in np.argsort(within, kind="stable")[:most].tolist():
            if within[at] < np.inf:
                row, column = divmod(at, seconds.shape[1])
                chosen = tuple(each._replace(dp=int(each.dp[0, column])) for each in settings)
                gpus = chosen[-1].tp * chosen[-1].pp * chosen[-1].dp
                ranked.append(Candidate(float(within[at]), gpus, kind, chosen, tokens[row]))
    if len(modules) > 1:
        found["own"] = _own(modules, means, tokens, keep, most)
    return {kind: sorted(ranked, key=lambda each: each[:2]) for kind, ranked in found.items()}, least


class _Table(NamedTuple):
    """Settings of one module: a column of arrays (num_settings,), and the settings."""

    column: Column
    gpus: NDArray[np.int64]
    settings: list[Many]

    def take(self, chosen: Any) -> _Table:
        column = self.column._replace(
            **{name: value[chosen] for name, value in self.column._asdict().items() if name != "after"}
        )
        return _Table(
            column, self.gpus[chosen], [self.settings[at] for at in np.arange(len(self.gpus))[chosen].tolist()]
        )


def _table(module: Module, llm: Module, means: Means, keep: Keep, sizes: NDArray[np.int64]) -> _Table:
    """Return all settings of a module on GPUs of its own."""
    settings: list[Many] = []
    columns = []
    for tp, pp, recompute in itertools.product(_SIZES, stages_of(module), _RECOMPUTE):
        dp = sizes[sizes <= means.cluster.gpus // (tp * pp)]
        dp = dp[_keeps(keep, module.name, tp, pp, dp)]
        if dp.size and module.allows(tp, pp):
            many = Many(module, tp, pp, dp, "optimizer", recompute)
            columns.append([np.broadcast_to(each, dp.shape) for each in Column.of(many, means, llm)[1:]])
            settings += [many._replace(dp=each) for each in dp.tolist()]
    if not columns:
        return _Table(Column(module.after, *[np.zeros(0)] * 8), np.zeros(0, np.int64), [])
    column = Column(module.after, *map(np.concatenate, zip(*columns, strict=True)))
    return _Table(column, (column.tp * column.pp * column.dp).astype(np.int64), settings)


def own_sizes(gpus: int) -> NDArray[np.int64]:
    """Return the replicas that are tried of modules on GPUs of their own: numbers without a prime factor above 7."""
    sizes = np.arange(1, gpus + 1)
    rest = sizes.copy()
    for prime in (2, 3, 5, 7):
        for _ in range(int(np.log(gpus) / np.log(prime)) + 1):
            rest = np.where(rest % prime, rest, rest // prime)
    smooth: NDArray[np.int64] = sizes[rest == 1]
    return smooth


def _own(modules: Sequence[Module], means: Means, tokens: Sequence[int], keep: Keep, most: int) -> list[Candidate]:
    """Return the best layouts with modules on GPUs of their own."""
    (*encoders, llm), cluster = modules, means.cluster
    sizes = own_sizes(cluster.gpus)
    tables = [_table(each, llm, means, keep, sizes) for each in encoders]
    own = _table(llm, llm, means, keep, sizes[sizes <= means.fewest_samples])
    if not own.settings or not all(each.settings for each in tables):
        return []
    # Settings of the LLM, with each tokens of a microbatch; those with a smaller microbatch and no more of them do.
    at, row = (
        each.ravel() for each in np.meshgrid(np.arange(len(own.settings)), np.arange(len(tokens)), indexing="ij")
    )
    size = np.array(tokens)[row]
    count = np.maximum(1, np.ceil(means.tokens / (own.column.dp[at] * size)))
    more = np.concatenate([[True], (at[1:] != at[:-1]) | (count[1:] < count[:-1])])
    at, row, size, count = (each[more] for each in (at, row, size, count))
    of_llm = own.take(at)
    rows = sum(means.rows[each.name] for each in encoders)
    share = np.minimum(size / means.tokens, 1)
    features = np.zeros(len(at))
    logits = np.zeros(len(at))
    for tp in _SIZES:
        setting = Many(llm, tp, 1, 1, None, None)
        where = of_llm.column.tp == tp
        both = features_and_logits(encoders, setting, size[where], share[where] * rows, cluster)
        features[where], logits[where] = both
    # A bound: others share what is left as evenly as GPUs could be cut, and cost no link and no optimizer.
    left = cluster.gpus - of_llm.gpus
    work = np.array([float((each.column.work * each.gpus).min()) for each in tables])
    room = np.maximum(left, 1) * count
    stage = of_llm.column.work / count
    bound = (
        of_llm.column.pp * stage + np.sqrt(work).sum() ** 2 / room + (count - 1) * np.maximum(stage, work.sum() / room)
    )
    (least,) = own_bytes([of_llm.column], [size], features, logits)
    bound = np.where((left >= len(tables)) & (least <= cluster.usable), bound, np.inf)
    best: list[Candidate] = []
    limit = np.inf
    order = np.argsort(bound, kind="stable").tolist()
    for place in [order[0], *order]:  # the first gives a limit, and is then looked at again in full
        if bound[place] > limit or bound[place] == np.inf:
            break
        given = _Given(
            of_llm.take([place]),
            int(size[place]),
            float(count[place]),
            int(left[place]),
            float(features[place]),
            float(logits[place]),
        )
        found = [each for each in _combined(tables, given, encoders, llm, means, limit, most) if each not in best]
        best = sorted(best + found, key=lambda each: each[:2])[:most]
        limit = best[-1].seconds if len(best) == most else np.inf
    return best


class _Given(NamedTuple):
    """A setting of the LLM, and what is left of the GPUs."""

    llm: _Table
    tokens: int
    microbatches: float
    left: int
    features: float
    logits: float


def _combined(
    tables: Sequence[_Table],
    given: _Given,
    encoders: Sequence[Module],
    llm: Module,
    means: Means,
    limit: float,
    most: int,
) -> list[Candidate]:
    """Return the best combinations with a setting of the LLM, of those below `limit`."""
    cluster, own, count = means.cluster, given.llm.column, given.microbatches
    of_round = np.minimum(own.dp * given.tokens / means.tokens, 1)
    # Of each module, settings that fit alone, and that could be below the limit if others had all other GPUs.
    least = [float((table.column.work * table.gpus).min()) for table in tables]
    kept: list[_Table] = []
    for number, (table, module) in enumerate(zip(tables, encoders, strict=True)):
        column = table.column
        positions = np.maximum(of_round * means.positions[module.name] / column.dp, means.largest_part[module.name])
        after = 0 if module.after else own.pp
        free = given.left - table.gpus
        others = (np.sqrt(least).sum() - np.sqrt(least[number])) ** 2 / np.maximum(free * count, 1)
        alone = closed_own([column, own], count, 0.0, cluster) + others
        fits = (free >= len(tables) - 1) & (alone <= limit)
        fits &= column.states + positions * column.held * (column.pp + after) <= cluster.usable
        chosen = np.flatnonzero(fits)
        if len(tables) > 1:
            chosen = chosen[np.argsort(alone[chosen], kind="stable")[: int(_MOST_COMBINED ** (1 / len(tables)))]]
        if not chosen.size:
            return []
        kept.append(table.take(chosen))
    # All combinations: a module's settings along an axis of its own.
    axes = [tuple(-1 if axis == number else 1 for axis in range(len(kept))) for number in range(len(kept))]
    columns = [
        Column(of.column.after, *(each.reshape(axis) for each in of.column[1:]))
        for of, axis in zip(kept, axes, strict=True)
    ]
    gpus: Any = sum(of.gpus.reshape(axis) for of, axis in zip(kept, axes, strict=True))
    positions = [
        np.maximum(of_round * means.positions[module.name] / column.dp, means.largest_part[module.name])
        for module, column in zip(encoders, columns, strict=True)
    ]
    used = own_bytes([*columns, own], [*positions, given.tokens], given.features, given.logits)
    fits = np.logical_and.reduce(np.broadcast_arrays(gpus <= given.left, *(each <= cluster.usable for each in used)))
    link = cluster.link(gpus + given.llm.gpus[0])
    travel = sum(
        (1 + module.has_gradients) * rows_seconds(means.rows[module.name] / (own.dp * count), llm, link, cluster)
        for module in encoders
    )
    seconds = np.where(fits, closed_own([*columns, own], count, travel, cluster), np.inf)
    found = []
    for at in np.argsort(seconds, axis=None, kind="stable")[:most].tolist():
        place = np.unravel_index(at, seconds.shape)
        if seconds[place] < np.inf:
            combined = (*(of.settings[each] for of, each in zip(kept, place, strict=True)), given.llm.settings[0])
            total = int(gpus[place] + given.llm.gpus[0])
            found.append(Candidate(float(seconds[place]), total, "own", combined, given.tokens))
    return found
