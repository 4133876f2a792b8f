"""Making a plan: (costs of samples, order, epoch, step) -> the rank and microbatch of each sample.

    order --positions--> rows --costs--> share out --rank, microbatch--> Plan
                                             +--parts--> balance --encoder rank--+   (per_phase)

`make_plan` is pure and does not communicate: every rank computes the same plan, to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.assignment import loads_by_rank_and_microbatch
from orchdata.loaders.storage.cache import MappedArray
from orchdata.order.order import SampleOrder, Samples
from orchdata.order.steps import Batches, Begin, GlobalBatches, OrderedSteps, StepTask
from orchdata.planning.balance import Balance
from orchdata.planning.parts import Encoders, Parts, by_rounds, fit_parts, share_out_in_rounds, share_out_parts
from orchdata.planning.plan import Plan
from orchdata.planning.sharing.accumulated import share_out_in
from orchdata.planning.sharing.packed import NO_PADDING
from orchdata.planning.sharing.shares import Padding, Shares, StepSamples, one_microbatch, stream_ranks
from orchdata.planning.sharing.teams import share_in_teams, without_teams
from orchdata.planning.windows import TokenRanges, WindowCost, piece_labels

Ints = NDArray[np.int64]

_TRIES = 8  # Numbers of micro-steps tried before parts stay with their samples.
_STAY = 200  # Parts stay with their samples where that costs at most this part more.


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


@dataclass(frozen=True, kw_only=True)
class PlanSpec:
    """Everything that a plan depends on, except its `StepTask`: a value that pickles."""

    costs: SampleCosts
    order: SampleOrder
    batches: Batches
    balance: Balance
    num_ranks: int
    # Of parts that are assigned separately: samples do not depend on these two.
    ranks_per_node: int | None = None  # consecutive ranks, in which features travel if possible; None: not known
    num_peers: int = 1  # GPUs of a rank that encode
    accumulate: int = 1  # micro-steps of every step; 1: as many as the caps need
    evens_tail: bool = False  # of map-style data: the last step has as many samples on each rank, by repeats

    def __post_init__(self) -> None:
        if self.balance.scope in ("grouped", "grid") and self.balance.group_size is None:
            raise ValueError(f"Balance.scope={self.balance.scope!r} needs group_size, the ranks of a group")
        cap = self.balance.max_samples
        if cap is None:
            return
        if not isinstance(self.batches, GlobalBatches):
            raise ValueError(
                "Balance.max_samples caps samples, but a step of global_batch_tokens has as many samples as fit: cap "
                "tokens by Balance.max_tokens, or give global_batch_size"
            )
        most = min(self.batches.size, max(self.order.num_samples, self.order.length(0)))
        if cap * self.num_ranks < most:
            raise ValueError(
                f"Balance.max_samples={cap} on {self.num_ranks} ranks allows {cap * self.num_ranks} samples, but a "
                f"global batch has {most}: raise it to at least {-(-most // self.num_ranks)}"
            )

    @property
    def steps(self) -> OrderedSteps:
        """The steps of each epoch, if the order knows its samples before they are drawn."""
        return OrderedSteps(batches=self.batches, order=self.order)

    @property
    def encoders(self) -> Encoders:
        """What encodes, where parts are assigned separately."""
        return Encoders(self.balance, self.num_ranks, self.num_peers, self.ranks_per_node)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the first epoch."""
        return self.steps.count(0)

    def last_step(self, epoch: int, begin: Begin | None) -> int:
        """Return the last step of an epoch that is cut in the present way from `begin` on."""
        return self.batches.count(self.order.length(epoch), epoch, begin) - 1


def make_plan(spec: PlanSpec, task: StepTask) -> Plan:
    """Return the plan of one step. Raises IndexError for a step outside the epoch."""
    ranges, repeats, padded = None, False, spec.costs.padded

    # The samples: a torch sampler drew them, the task carries them, or the order computes them.
    if task.rows is None:
        samples = task.samples or spec.batches.samples(spec.order, task)
    else:
        samples = Samples(np.zeros(len(task.rows), np.int32), task.rows, np.zeros(len(task.rows), np.int64))
    source, row, stream, passes, tokens, first, epoch = samples

    if isinstance(padded, WindowCost):
        # Pieces of documents, which fill windows.
        costs, positions = {"llm": padded.of_pieces(tokens)}, {"llm": tokens}
        loss_tokens = piece_labels(tokens, spec.costs.loss_tokens(row))
        ranges = TokenRanges(first, epoch, loss_tokens)
    else:
        is_tail = spec.evens_tail and task.step == spec.last_step(task.epoch, task.begin)
        if repeats := is_tail and len(row) % spec.num_ranks > 0:
            size = -(-len(row) // spec.num_ranks) * spec.num_ranks
            source, row, stream = np.resize(source, size), np.resize(row, size), np.zeros(size, np.int64)
        costs = {phase: spec.costs.costs(phase, row) for phase in spec.costs.phases}
        loss_tokens = spec.costs.loss_tokens(row)
        positions = {phase: spec.costs.positions(phase, row) for phase in dict.fromkeys(("llm", *spec.balance.caps))}

    # The rank and microbatch of each sample, and per phase the rank of each part.
    stream_rank = stream_ranks(stream, spec.num_ranks)
    batch = _GlobalBatch(spec, row, costs, positions, stream_rank)
    parts, rounds = dict[str, Parts](), None
    if repeats:
        shares = one_microbatch(stream_rank)
    elif spec.balance.assignment == "joint":
        shares = batch.share_out()
    else:
        shares, on_gpus, rounds = batch.share_out_per_phase()
        parts = {phase: spec.encoders.named(of) for phase, of in on_gpus.items()}
    sources, of_sources = spec.order.sources, None
    if sources:
        of_sources = np.zeros(len(sources), np.int64)
        np.add.at(of_sources, source, loss_tokens)
    return Plan(
        epoch=task.epoch,
        step=task.step,
        num_ranks=spec.num_ranks,
        num_microbatches=shares.num_microbatches,
        source=source,
        row=row,
        rank=shares.rank,
        microbatch=shares.microbatch,
        costs=costs,
        llm_positions=positions["llm"],
        padded=padded,
        loss_tokens=int(loss_tokens.sum()),
        stream_rank=stream_rank,
        group_size=spec.balance.group_size,
        ranks_per_node=spec.ranks_per_node,
        num_peers=spec.num_peers,
        parts=parts,
        rounds=rounds,
        ranges=ranges,
        teams=shares.teams,
        sources=tuple(each.name for each in sources),
        passes=passes if sources else None,
        source_loss_tokens=of_sources,
        # Losses of tokens are multiplied by float32 weights: sums and denominators agree.
        loss_weights=tuple(float(np.float32(each.loss_weight)) for each in sources),
    )


@dataclass(frozen=True)
class _GlobalBatch:
    """The samples of one step, their costs in every phase, and their positions in `llm` and capped phases."""

    spec: PlanSpec
    row: Ints
    costs: Mapping[str, Ints]
    positions: Mapping[str, Ints]
    stream_rank: NDArray[np.int32]

    def share_out(
        self,
        phases: Sequence[str] | None = None,
        caps: Sequence[str] | None = None,
        num_microbatches: int | None = None,
    ) -> Shares:
        """Return ranks and microbatches of whole samples, by all balanced phases and within all caps, or by some of
        them; in the fewest microbatches, or `PlanSpec.accumulate` of them.
        """
        spec, balance = self.spec, self.spec.balance
        costs = {phase: self.costs[phase] for phase in phases or spec.costs.balanced}
        sizes = {phase: self.positions[phase] for phase in (balance.caps if caps is None else caps)}
        step = StepSamples(costs, sizes, self.positions["llm"], spec.num_ranks, balance, self.stream_rank)
        if spec.balance.teams is not None:
            # A model that encodes a whole sample has it whole.
            is_text = np.all([column == 0 for phase, column in self.costs.items() if phase != "llm"], axis=0)
            may_share = np.broadcast_to(is_text | (spec.balance.assignment == "per_phase"), len(self.row))
            given = spec.costs.exponent, spec.accumulate, may_share, self._multiple_of
            return share_in_teams(step, spec.balance.teams, *given)
        if spec.accumulate > 1:
            return share_out_in(step, spec.costs.padded, spec.accumulate)
        return spec.costs.padded.share_out(step, num_microbatches)

    @property
    def _multiple_of(self) -> int:
        """Of which the length of joined sequences is a multiple."""
        return getattr(self.spec.costs.padded, "joined_to", None) or 1

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
            alone = replace(spec, balance=without_teams(spec.balance, self._multiple_of))
            return replace(self, spec=alone).share_out_per_phase()
        spread = self._in_rounds(shares, parts)
        if len(spec.costs.balanced) > 1:
            whole = self.share_out()
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
            spread = self.share_out(["llm"], llm)
            fitted = self._fit(unassigned, spread)
            if len(fitted) == len(unassigned):
                return spread, fitted
        shares = self.share_out(["llm"])
        if capped and shares.num_microbatches > 1 and self.spec.accumulate == 1 and self.spec.balance.teams is None:
            sums = {phase: int(unassigned[phase].positions.sum()) for phase in capped}
            room = [-(-sums[phase] // (cap * self.spec.encoders.num_gpus)) for phase, cap in capped.items()]
            fewest = max(self.share_out(["llm"], llm).num_microbatches, *room)
            for number in range(fewest, min(fewest + _TRIES, shares.num_microbatches)):
                candidate = self.share_out(["llm"], llm, number)
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
