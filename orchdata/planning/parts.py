"""Planning parts: which rank encodes each, where encoders are balanced separately (`Balance(assignment="per_phase")`).

    sample -> rank, microbatch (llm) --+
    parts of the samples, their costs -+-> part -> encoder rank, in each micro-step -> route from encoder to sample

A micro-step is the m-th microbatch of all ranks. Its parts are those of its samples, and any rank in the scope may
encode them. A part stays with its sample where that costs nothing. Under `Balance(encode=...)` the same holds in
rounds, each some consecutive micro-steps. Where the peers of a rank encode too, parts are balanced over all GPUs,
those that stay with their samples over the peers of their rank. Every rank computes the same. `GlobalBatch`, at the
end, shares out the samples of a step, and its parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.assignment import loads_by_rank_and_microbatch
from orchdata.balancers.packed import balance as balance_packed
from orchdata.balancers.placement import renamed
from orchdata.loaders.storage.cache import MappedArray
from orchdata.native.assign.packed import longest_first_in_groups
from orchdata.native.minimal_move import relabel
from orchdata.native.sorting import descending_order
from orchdata.planning.balance import Balance
from orchdata.planning.sharing.packed import NO_PADDING
from orchdata.planning.sharing.shares import Padding, Shares, assign
from orchdata.planning.sharing.teams import without_teams

if TYPE_CHECKING:
    from orchdata.planning.plan import PlanSpec

Ints = NDArray[np.int64]
Ranks = NDArray[np.int32]

_TRIES = 8  # Numbers of micro-steps tried before parts stay with their samples.
_STAY = 200  # Parts stay with their samples where that costs at most this part more.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Parts:
    """The parts of one modality in a global batch, ordered by their sample, then by their position in the sample.

    Attributes:
        sample: int64 (num_parts,), index of the sample in the global batch.
        part: int64 (num_parts,), numbers in the index.
        positions: int64 (num_parts,), what enters the encoder.
        tokens: int64 (num_parts,), rows the encoder yields.
        costs: int64 (num_parts,), at least 1.
        rank: int32 (num_parts,), the rank that encodes each.
        peer: int32 (num_parts,), the peer of that rank that does; None where each rank encodes on one GPU.
    """

    sample: Ints
    part: Ints
    positions: Ints
    tokens: Ints
    costs: Ints
    rank: Ranks
    peer: Ranks | None = None

    def __len__(self) -> int:
        return len(self.part)

    def take(self, index: Ints) -> Parts:
        """Return some of the parts."""
        columns: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        taken: dict[str, Any] = {name: of if of is None else of[index] for name, of in columns.items()}
        return Parts(**taken)


class SampleCosts(Protocol):
    """What a plan needs to know of samples, none of which is decoded.

    All methods take `row` int64 (n,), rows of the index, and return int64 (n,).
    """

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases with reported loads."""

    @property
    def balanced(self) -> tuple[str, ...]:
        """Those of them that are balanced, a subset."""

    @property
    def padded(self) -> Padding:
        """How `llm` microbatches are padded, and what that costs."""

    @property
    def exponent(self) -> int:
        """Costs are in the unit of the cost model times 2**exponent."""

    def costs(self, phase: str, row: Ints) -> Ints: ...

    def positions(self, phase: str, row: Ints) -> Ints: ...

    def loss_tokens(self, row: Ints) -> Ints: ...

    def parts(self, phase: str, row: Ints) -> Parts:
        """Return the parts of an encoder phase, each with the index of its sample in `row`, and rank -1."""


class _SampleCosts:
    """Samples with one cost each, in the single phase `llm`."""

    phases: ClassVar[tuple[str, ...]] = ("llm",)
    balanced: ClassVar[tuple[str, ...]] = ("llm",)
    padded: ClassVar[Padding] = NO_PADDING
    exponent: ClassVar[int] = 0

    def loss_tokens(self, row: Ints) -> Ints:
        return np.zeros(len(row), np.int64)

    def parts(self, phase: str, row: Ints) -> Parts:
        raise ValueError(f"costs per sample do not give the parts of phase {phase!r}: use assignment='joint'")


@dataclass(frozen=True)
class EqualCosts(_SampleCosts):
    """Every sample costs 1, for any number of samples."""

    def costs(self, phase: str, row: Ints) -> Ints:
        return np.ones(len(row), np.int64)

    positions = costs


@dataclass(frozen=True)
class ArrayCosts(_SampleCosts):
    """One cost a sample, int64 (num_samples,)."""

    values: Ints

    def __reduce__(self) -> tuple[Any, ...]:
        return _array_costs, (MappedArray(self.values),)

    def costs(self, phase: str, row: Ints) -> Ints:
        return np.maximum(self.values[row], 1)

    def positions(self, phase: str, row: Ints) -> Ints:
        return self.values[row]


def _array_costs(values: MappedArray) -> ArrayCosts:
    return ArrayCosts(values.array)


@dataclass(frozen=True, slots=True)
class Encoders:
    """What encodes parts: `num_peers` GPUs of each of `num_ranks` ranks. While parts are shared out, their `rank` is
    the number of a GPU, rank * num_peers + peer; `named` gives them both. `ranks_per_node` is None if not known.
    """

    balance: Balance
    num_ranks: int
    num_peers: int = 1
    ranks_per_node: int | None = None

    @property
    def num_gpus(self) -> int:
        return self.num_ranks * self.num_peers

    @property
    def gpus_per_node(self) -> int | None:
        """Moves between peers cost nothing, so a rank is a node where none is known."""
        return self.ranks_per_node if self.num_peers == 1 else (self.ranks_per_node or 1) * self.num_peers

    def home(self, parts: Parts, shares: Shares, weights: Ints | None = None) -> Ranks:
        """Return the GPU of each part if it stays with its sample, int32 (num_parts,): peers share what their rank has
        in a micro-step by `weights`; by default the costs.
        """
        home = shares.rank[parts.sample]
        if self.num_peers == 1:
            return home
        weights, number = parts.costs if weights is None else weights, shares.num_microbatches
        group = home.astype(np.int64) * number + shares.microbatch[parts.sample]
        order, peer = descending_order(weights), np.empty_like(home)
        sizes = (self.num_ranks * number, self.num_peers)
        peer[order] = longest_first_in_groups(weights[order], group[order], *sizes)
        return home * np.int32(self.num_peers) + peer

    def assign(self, costs: Ints, tokens: Ints, home: Ranks) -> Ranks:
        """Return the GPU of each part, balanced by costs in the scope; few tokens move."""
        size = self.balance.group_size and self.balance.group_size * self.num_peers
        # Limits of counts are of samples.
        balance = replace(self.balance, equal_count=False, max_samples=None, group_size=size)
        return assign({"llm": costs}, balance, self.num_gpus, home, sizes=tokens, ranks_per_node=self.gpus_per_node)

    def renamed(self, gpu: Ranks, tokens: Ints, home: Ranks) -> Ranks:
        """Return an assignment with GPUs renamed so that few tokens move."""
        if self.num_peers == 1:
            return renamed(gpu, home, tokens, self.num_ranks, self.ranks_per_node or 1)
        relabel(tokens, home, gpu, self.num_gpus)  # a table of all GPUs by all GPUs would be gigabytes
        return gpu

    def named(self, parts: Parts) -> Parts:
        """Return parts that have GPUs with their ranks and peers."""
        if self.num_peers == 1:
            return parts
        rank, peer = np.divmod(parts.rank, np.int32(self.num_peers))
        return replace(parts, rank=rank, peer=peer)


def share_out_parts(parts: Parts, shares: Shares, encoders: Encoders) -> Parts:
    """Decide which GPU encodes each part. Every micro-step is balanced by itself. `shares` are those of the samples."""
    home, step = encoders.home(parts, shares), shares.microbatch[parts.sample]
    rank = np.empty(len(parts), np.int32)
    for number in range(shares.num_microbatches):
        members = np.flatnonzero(step == number)
        if len(members):
            rank[members] = encoders.assign(parts.costs[members], parts.tokens[members], home[members])
    return replace(parts, rank=rank)


def fit_parts(parts: Parts, cap: int, shares: Shares, encoders: Encoders, *, or_home: bool = False) -> Parts | None:
    """`share_out_parts` with at most `cap` positions on a GPU in a micro-step, but for a single part. Where that is not
    possible, return None, or with `or_home` leave the parts of that micro-step with their samples.
    """
    shared = share_out_parts(parts, shares, encoders)
    home, step = encoders.home(parts, shares, parts.positions), shares.microbatch[parts.sample]
    for number in np.unique(_overfull(shared, step, cap, encoders.num_gpus)):
        members = np.flatnonzero(step == number)
        sizes = parts.positions[members]
        if encoders.balance.scope == "global" and int(sizes.max()) <= cap:
            with contextlib.suppress(ValueError):
                within_cap = balance_packed(sizes, encoders.num_gpus, max_cost=cap).rank
                shared.rank[members] = encoders.renamed(within_cap, parts.tokens[members], home[members])
                continue
        if not or_home:
            return None
        shared.rank[members] = home[members]
    return shared


def by_rounds(shares: Shares, rounds: Ranks) -> Shares:
    """Return `shares` with the round, int32 (num_microbatches,), of each micro-step in its place."""
    return Shares(shares.rank, rounds[shares.microbatch], int(rounds[-1]) + 1)


def share_out_in_rounds(
    parts: Mapping[str, Parts], shares: Shares, encoders: Encoders, *, stays: bool = False
) -> tuple[Ranks, dict[str, Parts]]:
    """Return int32 (num_microbatches,), the round of each micro-step, ascending from 0, and which GPU encodes each
    part. A round has as many micro-steps as `balance.encode` and the caps allow, and at least one: of that one, phases
    with a cap keep their ranks. With `stays` parts keep the ranks of their samples.
    """
    number, balance = shares.num_microbatches, encoders.balance
    most = number if balance.encode == "step" else max(1, int(balance.encode))
    capped = {phase: cap for phase, cap in balance.caps.items() if phase in parts}
    rounds, found = np.arange(number, dtype=np.int32) // np.int32(most), dict(parts)
    held = {phase: _held(parts[phase], cap, shares) for phase, cap in capped.items()}
    first = round_ = 0
    while capped and first < number:
        # Longer rounds hold more than all GPUs may have.
        fits = [
            int(np.searchsorted(of, of[first] + capped[phase] * encoders.num_gpus, "right")) - 1
            for phase, of in held.items()
        ]
        longest = max(first + 1, min(first + most, number, *fits))
        for stop in range(longest, first, -1):
            fitted = {}
            for phase, cap in capped.items():
                own = _fit_round(parts[phase], cap, shares, range(first, stop), encoders, stays)
                if own is None:
                    break
                fitted[phase] = own
            if len(fitted) == len(capped):
                break
        for phase, (members, rank) in fitted.items():
            found[phase].rank[members] = rank
        rounds[first:stop] = round_
        first, round_ = stop, round_ + 1
    met = by_rounds(shares, rounds)
    for phase in parts.keys() - capped.keys():
        its = parts[phase]
        found[phase] = replace(its, rank=encoders.home(its, met)) if stays else share_out_parts(its, met, encoders)
    return rounds, {phase: found[phase] for phase in parts}


def _held(parts: Parts, cap: int, shares: Shares) -> Ints:
    """Return the positions before each micro-step and in all; a part above the cap fills a GPU."""
    held = np.zeros(shares.num_microbatches + 1, np.int64)
    np.add.at(held, shares.microbatch[parts.sample] + 1, np.minimum(parts.positions, cap))
    return np.cumsum(held)


def _fit_round(
    parts: Parts, cap: int, shares: Shares, micro_steps: range, encoders: Encoders, stays: bool
) -> tuple[Ints, Ranks] | None:
    """Return the parts of a round and their GPUs within the cap; None where there are none. One micro-step stays as it
    is.
    """
    step = shares.microbatch[parts.sample]
    members = np.flatnonzero((step >= micro_steps.start) & (step < micro_steps.stop))
    own, one = parts.take(members), Shares(shares.rank, np.zeros_like(shares.microbatch), 1)
    if len(micro_steps) == 1:
        return members, own.rank
    if stays:
        own = replace(own, rank=encoders.home(own, one, own.positions))
        overfull = len(_overfull(own, np.zeros(len(own), np.int32), cap, encoders.num_gpus))
        return None if overfull else (members, own.rank)
    fitted = fit_parts(own, cap, one, encoders)
    return None if fitted is None else (members, fitted.rank)


def own_parts(parts: Parts, rank: int, peer: int, shares: Shares) -> tuple[list[Ints], list[Ints]]:
    """Return what `peer` of `rank` has of `parts`, for each micro-step, int64 indices: what it encodes, grouped by the
    first rank that needs it, so rows are sent without a copy; and parts of the rank's samples, in the order in which
    they arrive, by peer, then rank that encodes them. `shares` are those of the samples of the global batch.
    """
    peers = np.zeros_like(parts.rank) if parts.peer is None else parts.peer

    def by_step(members: Ints, others: Ranks) -> list[Ints]:
        step = shares.microbatch[parts.sample[members]]
        ordered = members[np.lexsort((others[members], peers[members], step))]  # stable: the index breaks ties
        return np.split(ordered, np.cumsum(np.bincount(step, minlength=shares.num_microbatches))[:-1])

    home = shares.rank[parts.sample]
    last = home if shares.teams is None else home + shares.teams.size[parts.sample] - 1
    encoded = by_step(np.flatnonzero((parts.rank == rank) & (peers == peer)), home)
    return encoded, by_step(np.flatnonzero((home <= rank) & (rank <= last)), parts.rank)


def _overfull(parts: Parts, step: Ranks, cap: int, num_gpus: int) -> Ints:
    """Return the micro-steps in which several parts together exceed the cap on some GPU."""
    num_steps = int(step.max(initial=-1)) + 1
    positions = loads_by_rank_and_microbatch(parts.positions, parts.rank, step, num_gpus, num_steps)
    counts = loads_by_rank_and_microbatch(np.ones_like(parts.positions), parts.rank, step, num_gpus, num_steps)
    return np.nonzero((positions > cap) & (counts > 1))[1]


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one step, their costs in every phase, and their positions in `llm` and capped phases."""

    spec: PlanSpec
    row: Ints
    costs: Mapping[str, Ints]
    positions: Mapping[str, Ints]
    stream_rank: Ranks

    def _share_out(self, *given: Any) -> Shares:
        return self.spec.share_out(self.costs, self.positions, self.stream_rank, *given)

    def share_out_per_phase(self) -> tuple[Shares, dict[str, Parts], NDArray[np.int32] | None]:
        """Return the same, in the fewest microbatches in which encoders keep their caps; the GPU of each part; and
        `Plan.rounds`.

        Parts are spread over ranks, so larger micro-steps fit than with parts on the ranks of their samples. The plan
        of whole samples is compared: it is taken with spread parts if it has fewer micro-steps, and unchanged, so that
        no part moves, if it costs about the same. Teams are chosen by `llm` alone.
        """
        spec = self.spec
        unassigned = {phase: spec.costs.parts(phase, self.row) for phase in spec.costs.phases[:-1]}
        shares, parts = self._spread(unassigned)
        if shares.teams is not None:
            return shares, *self._in_rounds(shares, parts)
        if spec.balance.teams is not None:
            alone = replace(spec, balance=without_teams(spec.balance, self.spec.multiple_of))
            return replace(self, spec=alone).share_out_per_phase()
        spread = self._in_rounds(shares, parts)
        if len(spec.costs.balanced) > 1:
            whole = self._share_out()
            if whole.num_microbatches < shares.num_microbatches:
                shares = whole
                spread = self._in_rounds(whole, self._fit(unassigned, whole, or_home=True))
            if whole.num_microbatches == shares.num_microbatches:
                home = spec.encoders.home
                at_home = {phase: replace(of, rank=home(of, whole)) for phase, of in unassigned.items()}
                stay = self._in_rounds(whole, at_home, stays=True)
                if self._price(whole, *stay) * _STAY <= self._price(shares, *spread) * (_STAY + 1):
                    return whole, *stay
        return shares, *spread

    def _in_rounds(
        self, shares: Shares, parts: dict[str, Parts], *, stays: bool = False
    ) -> tuple[dict[str, Parts], NDArray[np.int32] | None]:
        """Return parts balanced in rounds, and `Plan.rounds`."""
        spec = self.spec
        if spec.balance.encode == "micro_step" or not parts:
            return parts, None
        rounds, parts = share_out_in_rounds(parts, shares, spec.encoders, stays=stays)
        return parts, rounds if int(rounds[-1]) + 1 < shares.num_microbatches else None

    def _spread(self, unassigned: Mapping[str, Parts]) -> tuple[Shares, dict[str, Parts]]:
        """Balance `llm` by itself, and each encoder over the ranks of each micro-step."""
        capped = {phase: cap for phase, cap in self.spec.balance.caps.items() if phase in unassigned}
        llm = [phase for phase in self.spec.balance.caps if phase == "llm"]
        if capped and (self.spec.accumulate > 1 or self.spec.balance.teams is not None):
            spread = self._share_out(["llm"], llm)
            fitted = self._fit(unassigned, spread)
            if len(fitted) == len(unassigned):
                return spread, fitted
        shares = self._share_out(["llm"])
        if capped and shares.num_microbatches > 1 and self.spec.accumulate == 1 and self.spec.balance.teams is None:
            sums = {phase: int(unassigned[phase].positions.sum()) for phase in capped}
            room = [-(-sums[phase] // (cap * self.spec.encoders.num_gpus)) for phase, cap in capped.items()]
            fewest = max(self._share_out(["llm"], llm).num_microbatches, *room)
            for number in range(fewest, min(fewest + _TRIES, shares.num_microbatches)):
                candidate = self._share_out(["llm"], llm, number)
                fitted = self._fit(unassigned, candidate)
                if len(fitted) == len(unassigned):
                    return candidate, fitted
        return shares, self._fit(unassigned, shares, or_home=True)

    def _price(self, shares: Shares, parts: Mapping[str, Parts], rounds: NDArray[np.int32] | None) -> int:
        """Return what ranks wait for in the phases that are balanced: `Plan.cost`."""
        spec = self.spec
        met = shares if rounds is None else by_rounds(shares, rounds)
        where = (spec.encoders.num_gpus, met.num_microbatches)
        encoders = [
            spec.num_peers * loads_by_rank_and_microbatch(of.costs, of.rank, met.microbatch[of.sample], *where)
            for phase, of in parts.items()
            if phase in spec.costs.balanced
        ]
        llm = spec.costs.padded.loads(self.costs["llm"], self.positions["llm"], shares, spec.num_ranks)
        return spec.balance.price.of([*encoders, llm])

    def _fit(self, unassigned: Mapping[str, Parts], shares: Shares, *, or_home: bool = False) -> dict[str, Parts]:
        """Assign parts to GPUs in each micro-step; those of phases without a cap not yet, if they are balanced in
        rounds. A phase is left out if its cap cannot be kept and parts may not stay at home.
        """
        balance, encoders = self.spec.balance, self.spec.encoders
        fitted: dict[str, Parts | None] = dict(unassigned)
        for phase, parts in unassigned.items():
            if (cap := balance.caps.get(phase)) is not None:
                fitted[phase] = fit_parts(parts, cap, shares, encoders, or_home=or_home)
            elif balance.encode == "micro_step":
                fitted[phase] = share_out_parts(parts, shares, encoders)
        return {phase: parts for phase, parts in fitted.items() if parts is not None}
