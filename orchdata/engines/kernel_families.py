"""The kernels that a loader's steps call, in families, and synthetic steps that call all of a family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.native.jit import load_numba

if TYPE_CHECKING:
    from orchdata.building.spec import BuildSpec
    from orchdata.planning.balance import Balance
    from orchdata.planning.make_plan import PlanSpec

Ints = NDArray[np.int64]

_COSTS = np.tile(np.array([9, 7, 5, 4, 3, 2, 2, 1]), 4)
_RANKS, _CAP = 4, 24


class _Family(NamedTuple):
    """Kernels that one process compiles, one after another.

    Attributes:
        head: "module:name" of a slow one, which shows whether the family is stored on disk.
        call: calls all of them that plans and batches call.
    """

    head: str
    call: Callable[[], object]


def kernel_families(
    balance: Balance,
    num_ranks: int,
    *,
    phases: Sequence[str],
    padded: bool,
    in_shards: bool,
    fixed: bool = False,
    accumulates: bool = False,
) -> list[str]:
    """Return the names of the families that a loader's steps call, the slowest first.

    Args:
        phases: the balanced ones.
        padded: whether LLM batches are padded to their longest sample.
        in_shards: whether we decode.
        fixed: whether LLM batches are padded to a length.
        accumulates: whether steps have a given number of micro-steps.
    """
    balanced = num_ranks > 1 and balance.scope != "none"
    wanted = {
        "teams": balanced and balance.teams is not None,
        "phases": balanced and len(phases) > 1,
        "moves": balanced and (balance.assignment == "per_phase" or balance.scope in ("grouped", "grid")),
        "packed": balanced,
        "bins": fixed and balance.scope != "none",
        "microbatches": bool(balance.caps) or fixed or accumulates,
        "swaps": balanced and accumulates,
        "padded": padded,
        "pipeline": balance.num_stages is not None,
        "patches": in_shards and len(phases) > 1,
    }
    return [name for name, is_wanted in wanted.items() if is_wanted]


def warm(spec: BuildSpec) -> None:
    """Load every kernel that steps of `spec` call, or compile it, in this thread. No other thread remains."""
    from orchdata.order.mixture import MixtureOrder

    load_numba()
    _warm_plans(spec.plan)
    if isinstance(spec.plan.order, MixtureOrder):
        _mixtures()
    if spec.shards is not None:
        modalities = spec.shards.recipe.modalities.values()
        _patches({array.dtype for modality in modalities for array in modality.arrays().values()})


def _warm_plans(spec: PlanSpec) -> None:
    """Compute the real costs of one sample, and plan synthetic samples: few enough to take some milliseconds, and in
    several microbatches if there are caps.
    """
    from orchdata.order.order import Order, Shuffle
    from orchdata.order.steps import GlobalBatches, StepTask
    from orchdata.planning.make_plan import make_plan

    samples = Order(len(_COSTS), shuffle=Shuffle(), seed=0)
    if spec.order.num_samples:
        first = np.zeros(1, np.int64)
        for phase in spec.costs.phases:
            spec.costs.costs(phase, first)
            spec.costs.positions(phase, first)
            if spec.balance.assignment == "per_phase" and phase != "llm":
                spec.costs.parts(phase, first)
    num_ranks = min(spec.num_ranks, _RANKS)
    balance = _synthetic_balance(spec.balance, num_ranks)
    if spec.accumulate > 1:  # Few ranks have more than a cap in a micro-step.
        balance = replace(balance, max_tokens=dict.fromkeys(balance.caps, int(_COSTS.sum())) or None)
    costs = _SyntheticCosts(spec.costs.phases, spec.costs.balanced, spec.costs.padded)
    synthetic = replace(
        spec,
        costs=costs,
        order=samples,
        batches=GlobalBatches(size=len(_COSTS)),
        balance=balance,
        num_ranks=num_ranks,
        accumulate=min(spec.accumulate, 2),
        ranks_per_node=None if spec.ranks_per_node is None else max(1, num_ranks // 2),
    )
    plan = make_plan(synthetic, StepTask(0, 0))
    # Small plans leave no ranks to renumber, nor samples that fit nowhere near, and all samples are within caps.
    if spec.balance.scope == "grid" or spec.ranks_per_node is not None:
        _renumber()
    if spec.balance.scope == "grid" or spec.balance.caps:
        _phases()
    if spec.balance.teams is not None:
        _teams()
    if spec.balance.num_stages is not None:
        plan.pipeline_order(0, spec.balance.num_stages)
    for phase in plan.phases:
        plan.loads(phase)
        plan.loads_unbalanced(phase)
        plan.lower_bound(phase)


def _synthetic_balance(balance: Balance, num_ranks: int) -> Balance:
    return replace(
        balance,
        max_tokens=dict.fromkeys(balance.caps, _CAP) or None,
        max_samples=None if balance.max_samples is None else len(_COSTS),
        group_size=None if balance.group_size is None else max(1, num_ranks // 2),
        oversize="own",
    )


@dataclass(frozen=True)
class _SyntheticCosts:
    """Costs of synthetic samples, each with one part in every phase."""

    phases: tuple[str, ...]
    balanced: tuple[str, ...]
    padded: Any
    exponent: ClassVar[int] = 0

    def costs(self, phase: str, row: Ints) -> Ints:
        return np.roll(_COSTS, self.phases.index(phase))[row]

    def positions(self, phase: str, row: Ints) -> Ints:
        return self.costs(phase, row)

    def loss_tokens(self, row: Ints) -> Ints:
        return row

    def parts(self, phase: str, row: Ints) -> Any:
        from orchdata.planning.parts import Parts

        costs = self.costs(phase, row)
        no_rank = np.full(len(row), -1, np.int32)
        return Parts(sample=np.arange(len(row)), part=row, positions=costs, tokens=costs, costs=costs, rank=no_rank)


def _phases() -> None:
    from orchdata.balancers.phases import balance_phases

    costs = {"encoder": _COSTS, "llm": _COSTS[::-1].copy()}
    balance_phases(costs, _RANKS)
    balance_phases(costs, _RANKS, sizes=_COSTS, max_size=40)


def _teams() -> None:
    """Share two long texts, next to samples of two phases, in each way."""
    from orchdata.planning.balance import Balance
    from orchdata.planning.sharing.shares import StepSamples
    from orchdata.planning.sharing.teams import share_in_teams
    from orchdata.planning.teams import Teams

    is_long = np.arange(len(_COSTS)) % 16 == 0
    tokens, encoder = np.where(is_long, 90, _COSTS), np.where(is_long, 0, _COSTS)
    costs, owner = {"encoder": encoder, "llm": tokens}, np.zeros(len(_COSTS), np.int32)
    for balance in (Balance(), Balance(max_tokens=2 * _CAP), Balance(max_tokens=2 * _CAP, objective="sum")):
        step = StepSamples(costs, dict.fromkeys(balance.caps, tokens), tokens, _RANKS, balance, owner)
        for few in (step, step.take(np.arange(8))):  # So few are also searched.
            share_in_teams(few, Teams(largest=4, cut="trainer"), 0, 1, is_long[: few.num_samples])


def _moves() -> None:
    from orchdata.balancers.grid import balance_grid, balance_grouped
    from orchdata.balancers.moves import balance_from

    owner = np.arange(len(_COSTS), dtype=np.int32) % _RANKS
    costs = {"encoder": _COSTS, "llm": _COSTS[::-1].copy()}
    balance_from(_COSTS, owner, _RANKS, sizes=_COSTS, ranks_per_node=2)
    for way in (balance_grid, balance_grouped):
        way(_COSTS, owner, _RANKS, 2)
        way(costs, owner, _RANKS, 2)
    _renumber()


def _renumber() -> None:
    from orchdata.balancers.placement import place_on_nodes
    from orchdata.native.move.minimal_move import relabel

    place_on_nodes(np.eye(_RANKS, dtype=np.int64), 2)
    owner = np.arange(len(_COSTS), dtype=np.int32) % _RANKS
    relabel(_COSTS, owner, owner.copy(), _RANKS)


def _packed() -> None:
    from orchdata.balancers.packed import balance

    balance(_COSTS, _RANKS)
    balance(_COSTS, _RANKS, equal_count=True)


def _microbatches() -> None:
    from orchdata.balancers.bins.micro_steps import LOOK_PAIRS, candidate_packings
    from orchdata.balancers.microbatches import split_microbatches
    from orchdata.native.microbatches.within_caps import looked_peaks

    rank = np.arange(len(_COSTS), dtype=np.int32) % _RANKS
    for in_step in (False, True):
        split_microbatches(_COSTS, rank, _RANKS, max_size=_CAP, oversize="own", in_step=in_step)
    both = np.stack([_COSTS, _COSTS], axis=1)
    next(candidate_packings(both, np.full(2, 160), 2, both, [(slice(None), _RANKS)], 1), None)
    looked_peaks(both, both, both, np.full(2, 160), np.zeros(len(both), np.int32), rank, 2, _RANKS, LOOK_PAIRS)


def _swaps() -> None:
    from orchdata.native.microbatches.swaps import lower_peaks

    costs, ones = np.stack([_COSTS, _COSTS], axis=1), np.ones((len(_COSTS), 1), np.int64)
    rank, microbatch = np.arange(len(_COSTS), dtype=np.int32) % _RANKS, np.zeros(len(_COSTS), np.int32)
    group = np.zeros(_RANKS, np.int32)
    lower_peaks(costs, ones, ones[0] * len(_COSTS), group, 2, rank, microbatch, True, 1)


def _bins() -> None:
    from orchdata.balancers.bins.pack import _items, pack_bins
    from orchdata.native.bins.pack import first_fit_bins

    first_fit_bins(_items(_COSTS, 12, None))
    pack_bins(_COSTS, 12, None, np.stack([_COSTS, _COSTS], axis=1), num_ranks=_RANKS)


def _padded() -> None:
    from orchdata.balancers.costs.phase import PhaseCost
    from orchdata.balancers.padded import balance_padded

    balance_padded(_COSTS, _RANKS, PhaseCost(1.0))


def _pipeline() -> None:
    from orchdata.balancers.pipeline import order_microbatches

    order_microbatches(np.ones((2, 4)), np.ones((2, 4)))


def _mixtures() -> None:
    from orchdata.native.merge import merge

    one = np.zeros(1, np.int64)
    merge(one, one, one, one, one, one, one, 0, 1, 0, np.zeros(1, np.int32), one.copy())


def _patches(dtypes: set[str] = frozenset({"bfloat16", "float32", "uint8"})) -> None:  # type: ignore[assignment]
    from orchdata.native.patchify import channel_table, patchify
    from orchdata.native.spectrum import split_complex

    split_complex(*(np.zeros(size, np.float32) for size in (2, 1, 1)))  # of clips
    for dtype in sorted(dtypes & {"bfloat16", "float32", "uint8"}):
        table = channel_table((0.5,) * 3, (0.5,) * 3, dtype)
        patchify(np.zeros((2, 2, 3), np.uint8), 1, 2, table, np.empty((4, 3), table.dtype))


FAMILIES: Final = {
    "teams": _Family("assign.teams:solve_teams", _teams),
    "phases": _Family("assign.joint:solve_joint", _phases),
    "moves": _Family("move.minimal_move:solve_from", _moves),
    "packed": _Family("assign.packed:solve", _packed),
    "microbatches": _Family("microbatches.microbatch:split", _microbatches),
    "swaps": _Family("microbatches.swaps:lower_peaks", _swaps),
    "bins": _Family("bins.pack:pack", _bins),
    "padded": _Family("assign.padded:solve_padded", _padded),
    "pipeline": _Family("microbatches.pipeline_search:search", _pipeline),
    "patches": _Family("patchify:_patchify", _patches),
    "mixtures": _Family("merge:merge", _mixtures),
}
