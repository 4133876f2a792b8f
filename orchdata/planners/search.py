"""Layouts by closed forms: every setting of a module that fits, and the best combinations of settings.

one layout, repeated, shared, stage    tokens x replicas at once, for each tp, pp, sharding and recomputation
modules on GPUs of their own           for each setting of the LLM, by a bound below all that others can add:
                                       settings of the others that could still be among the best, combined
"""

from __future__ import annotations

import itertools
import math
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
_MANY: Final = 64
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
            or any(each.refused(of_encoders, 1) for each in encoders)
            or llm.refused(tp, pp)
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
                gpus = chosen[-1].tp * chosen[-1].pp * chosen[-1].dp
                ranked.append(Candidate(float(within[at]), gpus, kind, chosen, tokens[row]))
    if len(modules) > 1:
        found["own"] = _own(modules, means, tokens, keep, most)
    return {kind: sorted(ranked, key=lambda each: each[:2])[:most] for kind, ranked in found.items()}, least


def own_sizes(gpus: int) -> NDArray[np.int64]:
    """Return the replicas that are tried of modules on GPUs of their own: numbers without a prime factor above 7."""
    powers = itertools.product(*([prime**each for each in range(gpus.bit_length())] for prime in (2, 3, 5, 7)))
    return np.array(sorted(size for each in powers if (size := math.prod(each)) <= gpus))


def _columns(module: Module, llm: Module, means: Means, keep: Keep, sizes: NDArray[np.int64]) -> Column | None:
    """Return all settings of a module on GPUs of its own, as arrays (num_settings,)."""
    found = []
    for tp, pp, recompute in itertools.product(_SIZES, stages_of(module), _RECOMPUTE):
        dp = sizes[sizes <= means.cluster.gpus // (tp * pp)]
        dp = dp[_keeps(keep, module.name, tp, pp, dp)]
        if dp.size and not module.refused(tp, pp):
            column = Column.of(Many(module, tp, pp, dp, "optimizer", recompute), means, llm)
            found.append([np.broadcast_to(each, dp.shape) for each in column])
    return Column(*map(np.concatenate, zip(*found, strict=True))) if found else None


class _Settings(NamedTuple):
    """Settings of the LLM, each with tokens of a microbatch: arrays (num_settings,), with what is left of the GPUs."""

    column: Column
    tokens: Any
    count: Any
    left: Any
    features: Any
    logits: Any


def _own(modules: Sequence[Module], means: Means, tokens: Sequence[int], keep: Keep, most: int) -> list[Candidate]:
    """Return the best layouts with modules on GPUs of their own."""
    (*encoders, llm), cluster = modules, means.cluster
    sizes = own_sizes(cluster.gpus)
    of_llm = _columns(llm, llm, means, keep, sizes[sizes <= means.fewest_samples])
    found = [_columns(each, llm, means, keep, sizes) for each in encoders]
    tables = [each for each in found if each is not None]
    if of_llm is None or len(tables) < len(encoders):
        return []
    # With each tokens of a microbatch.
    own, size = of_llm.take(np.repeat(np.arange(len(of_llm.dp)), len(tokens))), np.tile(tokens, len(of_llm.dp))
    count = np.maximum(1, np.ceil(means.tokens / (own.dp * size)))
    rows = np.minimum(size / means.tokens, 1) * sum(means.rows[each.name] for each in encoders)
    features, logits = features_and_logits(encoders, llm, own.tp, size, rows, cluster)
    given = _Settings(own, size, count, cluster.gpus - own.gpus, features, logits)
    # A bound: others share what is left as evenly as GPUs could be cut, and cost no link and no optimizer.
    work = np.array([float((each.work * each.gpus).min()) for each in tables])
    room, stage = np.maximum(given.left, 1) * count, own.work / count
    bound = own.pp * stage + np.sqrt(work).sum() ** 2 / room + (count - 1) * np.maximum(stage, work.sum() / room)
    (least,) = own_bytes([own], [size], features, logits)
    bound = np.where((given.left >= len(tables)) & (least <= cluster.usable), bound, np.inf)
    best: list[Candidate] = []
    limit = np.inf
    order = np.argsort(bound, kind="stable").tolist()
    for place in [order[0], *order]:  # the first gives a limit, and is then looked at again in full
        if bound[place] > limit or bound[place] == np.inf:
            break
        combined = _combined(tables, given, place, modules, means, limit, most)
        best = sorted(best + [each for each in combined if each not in best], key=lambda each: each[:2])[:most]
        limit = best[-1].seconds if len(best) == most else np.inf
    return best


def _combined(
    tables: Sequence[Column],
    given: _Settings,
    place: int,
    modules: Sequence[Module],
    means: Means,
    limit: float,
    most: int,
) -> list[Candidate]:
    """Return the best combinations with one setting of the LLM, of those not above `limit`."""
    cluster, (*encoders, llm), own = means.cluster, modules, given.column.take([place])
    size, count, left = int(given.tokens[place]), float(given.count[place]), int(given.left[place])
    of_round = np.minimum(own.dp * size / means.tokens, 1)

    def positions(column: Column, module: Module) -> Any:
        return np.maximum(of_round * means.positions[module.name] / column.dp, means.largest_part[module.name])

    # Of each module, settings that fit alone, and that could be below the limit if others had all other GPUs.
    least = np.sqrt([float((each.work * each.gpus).min()) for each in tables])
    columns: list[Column] = []
    for number, (table, module) in enumerate(zip(tables, encoders, strict=True)):
        free = left - table.gpus
        others = (least.sum() - least[number]) ** 2 / np.maximum(free * count, 1)
        alone = closed_own([table, own], count, 0.0, cluster) + others
        stages = table.pp + (0 if module.after else own.pp)
        fits = table.states + positions(table, module) * table.held * stages <= cluster.usable
        chosen = np.flatnonzero(fits & (free >= len(tables) - 1) & (alone <= limit))
        if len(tables) > 1:
            chosen = chosen[np.argsort(alone[chosen], kind="stable")[: int(_MOST_COMBINED ** (1 / len(tables)))]]
        if not chosen.size:
            return []
        # All combinations: a module's settings along an axis of its own.
        axis = tuple(-1 if each == number else 1 for each in range(len(tables)))
        columns.append(Column(*(each.reshape(axis) for each in table.take(chosen))))
    gpus: Any = sum(each.gpus for each in columns)
    most_positions = [positions(column, module) for column, module in zip(columns, encoders, strict=True)]
    used = own_bytes([*columns, own], [*most_positions, size], given.features[place], given.logits[place])
    fits = np.logical_and.reduce(np.broadcast_arrays(gpus <= left, *(each <= cluster.usable for each in used)))
    travel = sum(
        (1 + module.has_gradients)
        * rows_seconds(means.rows[module.name] / (own.dp * count), llm, cluster.link(gpus + own.gpus), cluster)
        for module in encoders
    )
    seconds = np.where(fits, closed_own([*columns, own], count, travel, cluster), np.inf)
    found = []
    for at in np.argsort(seconds, axis=None, kind="stable")[:most].tolist():
        if seconds.flat[at] < np.inf:
            chosen_at = [each[0].tolist() for each in np.unravel_index([at], seconds.shape)]
            rows = [column.take_flat(each) for column, each in zip(columns, chosen_at, strict=True)]
            settings = tuple(
                Many(module, int(of.tp), int(of.pp), int(of.dp), "optimizer", "full" if of.again else None)
                for module, of in zip(modules, [*rows, own.take_flat(0)], strict=True)
            )
            total = sum(each.tp * each.pp * each.dp for each in settings)
            found.append(Candidate(float(seconds.flat[at]), total, "own", settings, size))
    return found
