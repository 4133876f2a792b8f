"""The plan of a step: the rank of each sample of a global batch, and the rank that encodes each part; and `make_plan`,
which is pure and does not communicate: every rank computes the same plan, to the bit.

    order --positions--> rows --costs--> share out --rank, microbatch--> Plan
                                             +--parts--> balance --encoder rank--+   (per_phase)

Segments: rows of parts -> the members of a team that may have their tokens, where ranks share samples with media.

    sample:  text, media, text                          members:  |  slice 0  |  slice 1  |
    row r of a modality, before its place is known:     r <= token of it <= r + all other tokens of the sample

A plan knows how long samples and parts are, not where text stands between them. So a member is sent the rows that may
be in its slice, and drops those that are not (`Route.receive_order`): at most the sample's other tokens at each border.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import orchdata
from orchdata.balancers.assignment import checked_max_samples, loads_by_rank_and_microbatch, lower_bound
from orchdata.balancers.microbatches import order_microbatches
from orchdata.loaders.generators import Pass
from orchdata.order.order import SampleOrder, Samples
from orchdata.order.steps import Batches, Begin, GlobalBatches, OrderedSteps, StepTask
from orchdata.planning.balance import Balance, StepPrice, StepTeams
from orchdata.planning.parts import Encoders, GlobalBatch, Parts, SampleCosts, by_rounds, own_parts
from orchdata.planning.route import Route, grouped_route, in_segments
from orchdata.planning.sharing.accumulated import share_out_in
from orchdata.planning.sharing.packed import NO_PADDING, NoPadding
from orchdata.planning.sharing.shares import Padding, Shares, StepSamples, one_microbatch, stream_ranks
from orchdata.planning.sharing.teams import share_in_teams
from orchdata.planning.windows import TokenRanges, WindowCost, piece_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Ints = NDArray[np.int64]
_Own = tuple[list[Ints], list[Ints]]  # as `own_parts` returns


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Plan:
    """The rank and microbatch of each of the n samples of one global batch.

    Builders and reports ask what a rank has: `places`, `encoded`, `arriving`, `route`, `cells`. Only these know that
    `rank` is the first of `team_size` ranks that have a sample.

    Attributes:
        source, row: the global batch, int32 (n,) and int64 (n,), in the sequence of the order.
        rank, microbatch: int32 (n,). Within a rank and microbatch, samples of equal teams keep that sequence.
        costs: phase -> int64 (n,), 0 where the sample lacks the phase.
        llm_positions: int64 (n,).
        loss_tokens: planned loss tokens of the whole step over all ranks.
        stream_rank: int32 (n,), the rank from whose streams each sample is drawn.
        group_size: ranks of a group; None where ranks are not grouped.
        ranks_per_node: consecutive ranks of a node; None if not known.
        num_peers: GPUs of each rank that encode: each part has a peer of its rank where there are several.
        padded: how `llm` microbatches are padded, and what that costs.
        sources: names of a mixture's sources by `source`; empty where there is none.
        passes: int32 (n,), the pass through its source that each sample belongs to; None without sources.
        source_loss_tokens: planned loss tokens of each source in the step, int64 (num_sources,); else None.
        loss_weights: weight of a loss token of each source.
        parts: encoder phase -> its parts and the ranks that encode them, where phases are assigned separately; empty
            where each rank encodes its own samples.
        rounds: where encoders run once for several micro-steps (`Balance(encode=...)`): int32 (num_microbatches,), the
            round of each micro-step, ascending from 0. None where each is a round of its own.
        ranges: of windows of concatenated documents: what each sample, a piece of the document `row`, has of it. None
            where samples are whole.
        teams: ranks that share samples; None where every sample is whole.
    """

    epoch: int
    step: int
    num_ranks: int
    num_microbatches: int
    source: NDArray[np.int32]
    row: Ints
    rank: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    costs: Mapping[str, Ints]
    llm_positions: Ints
    loss_tokens: int
    stream_rank: NDArray[np.int32]
    group_size: int | None = None
    ranks_per_node: int | None = None
    num_peers: int = 1
    padded: Padding = NO_PADDING
    sources: tuple[str, ...] = ()
    passes: NDArray[np.int32] | None = None
    source_loss_tokens: Ints | None = None
    loss_weights: tuple[float, ...] = ()
    parts: Mapping[str, Parts] = field(default_factory=dict)
    rounds: NDArray[np.int32] | None = None
    ranges: TokenRanges | None = None
    teams: StepTeams | None = None
    _own_parts: dict[tuple[str, int, int], tuple[list[Ints], list[Ints]]] = field(
        default_factory=dict, init=False, repr=False
    )

    def __repr__(self) -> str:
        sizes = f"ranks={self.num_ranks}, samples={len(self.row)}, microbatches={self.num_microbatches}"
        return f"Plan(epoch={self.epoch}, step={self.step}, {sizes}, hash={self.hash!r})"

    _repr_html_ = orchdata._html

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the loads of ranks, dealt out in turn and as planned, summed over phases. Return the axes.

        Args:
            ax: axes of matplotlib; None for those of a new figure.

        Raises PackageError if matplotlib, of the extra `plots`, is missing.
        """
        axes: Axes = orchdata._views().plan_plot(self, ax)
        return axes

    @property
    def phases(self) -> tuple[str, ...]:
        return tuple(self.costs)

    @property
    def global_loss_tokens(self) -> float:
        """Divisor of the step's loss: its planned loss tokens, each times the loss weight of its source."""
        if self.source_loss_tokens is None or all(weight == 1 for weight in self.loss_weights):
            return self.loss_tokens
        total = 0.0
        for weight, tokens in zip(self.loss_weights, self.source_loss_tokens.tolist(), strict=True):
            total += weight * tokens
        return total

    @property
    def team_size(self) -> NDArray[np.int32]:
        """The number of ranks that share each sample, int32 (n,): `rank` is the first; 1 where a sample is whole."""
        return np.ones_like(self.rank) if self.teams is None else self.teams.size

    @property
    def keeps_shapes(self) -> bool:
        """Whether samples that fail stay in their microbatches, because other ranks wait for their parts or slices."""
        return bool(self.parts) or self.teams is not None

    def places(self, rank: int, microbatch: int | None = None) -> Ints:
        """Return the indices in the global batch of the samples of `rank`, shared ones too; of one microbatch or of
        all. They ascend; in a microbatch samples of the largest teams come first.
        """
        mine = self.rank == rank if self.teams is None else (self.rank <= rank) & (rank < self.rank + self.teams.size)
        if microbatch is None:
            return np.flatnonzero(mine)
        found = np.flatnonzero(mine & (self.microbatch == microbatch))
        return found if self.teams is None else found[np.argsort(-self.teams.size[found], kind="stable")]

    def pass_of(self, at: int, seed: int) -> Pass:
        """Return the pass of a sample, by its index in the global batch, of a loader with this seed; without a mixture
        it is the epoch.
        """
        if self.passes is None:
            return Pass(seed, "", self.epoch)
        return Pass(seed, self.sources[self.source[at]], int(self.passes[at]))

    def round_of(self, microbatch: int) -> int:
        """Return the round in which encoders run for a micro-step, from 0: the same on every rank."""
        return microbatch if self.rounds is None else int(self.rounds[microbatch])

    def assignment(self, phase: str) -> NDArray[np.int32]:
        """Return the (first) rank of each sample in `phase`, int32 (n,); -1 where it lacks the phase. Where parts are
        assigned separately, return the rank of each part, int32 (num_parts,).
        """
        if phase in self.parts:
            return self.parts[phase].rank
        return np.where(self.costs[phase] > 0, self.rank, np.int32(-1))

    def encoded(self, phase: str, rank: int, microbatch: int, peer: int = 0) -> Ints:
        """Return the indices in `parts[phase]` of what `peer` of `rank` encodes in a micro-step, in the order of
        encoding.
        """
        return self._own(phase, rank, peer)[0][microbatch]

    def arriving(self, phase: str, rank: int, microbatch: int, peer: int = 0) -> Ints:
        """Return the indices in `parts[phase]` of parts of `rank`'s samples in a micro-step, in order of arrival: the
        same on all of its peers.
        """
        return self._own(phase, rank, peer)[1][microbatch]

    def route(self, phase: str, rank: int, microbatch: int, peer: int = 0) -> Route:
        """Return the route of `phase`'s features in a micro-step, from `encoded` to `arriving`, seen from `peer` of
        `rank`.
        """
        parts = self.parts[phase]
        encoded, arriving = (of(phase, rank, microbatch, peer) for of in (self.encoded, self.arriving))
        number, receivers, first, sent = self._segments(phase, encoded)
        order = np.lexsort((encoded[number], receivers))
        route = grouped_route(
            rank,
            self.num_ranks,
            receivers=receivers[order],
            sent=sent[order],
            senders=parts.rank[arriving],
            received=self.held_rows(phase, arriving, rank)[1],
            label=f"{phase}, step {self.step}, micro-step {microbatch}",
            peer=peer,
            num_peers=self.num_peers,
            arriving_peers=None if parts.peer is None else parts.peer[arriving],
        )
        if (self.team_size[parts.sample[np.append(encoded, arriving)]] == 1).all():
            return route
        return in_segments(route, parts.tokens[encoded], number[order], first[order], sent[order])

    def _segments(self, phase: str, part: Ints) -> tuple[Ints, NDArray[np.int32], Ints, Ints]:
        """Return what ranks need of some parts, (num_segments,) each: the number in `part`, the rank that needs it, and
        its first row and number of rows, maybe none.
        """
        sample = self.parts[phase].sample[part]
        if self.teams is None:
            return np.arange(len(part)), self.rank[sample], np.zeros_like(part), self.parts[phase].tokens[part]
        number, rank = replace(self.teams, size=self.teams.size[sample]).members(self.rank[sample])
        return number, rank, *self.held_rows(phase, part[number], rank)

    def held_rows(self, phase: str, part: Ints, rank: int | NDArray[np.int32]) -> tuple[Ints, Ints]:
        """Return the first row, and the number of rows, int64 (num_parts,) each, that `rank` gets of parts of its
        samples: all, or where it has a slice those that may be in it.
        """
        parts = self.parts[phase]
        sample, tokens = parts.sample[part], parts.tokens[part]
        if self.teams is None or self.joined_to is None:
            return np.zeros_like(part), tokens
        # Rows of the modality before each part in its sample, and the sample's tokens that are not of the modality.
        ends = np.cumsum(parts.tokens)
        of_sample = np.searchsorted(parts.sample, sample), np.searchsorted(parts.sample, sample, "right")
        first, stop = (np.append(0, ends)[at] for at in of_sample)
        lengths = self.llm_positions[sample]
        before, others = ends[part] - tokens - first, lengths - (stop - first)
        # Its slice of the sample, from a token to before another.
        starts, slice_tokens = (column[sample] for column in self._slices)
        begin = (rank - self.rank[sample]).astype(np.int64) * slice_tokens - starts
        end, begin = np.clip(begin + slice_tokens, 0, lengths), np.clip(begin, 0, lengths)
        low, high = np.clip(begin - others - before, 0, tokens), np.clip(end - before, 0, tokens)
        return low, np.where(end > begin, np.maximum(high - low, 0), 0)

    @cached_property
    def _slices(self) -> tuple[Ints, Ints]:
        """Where each sequence begins among those of its team, joined, and the tokens of a member's slice, int64 (n,)
        each, as `joined_sequences` has them; 0 and its length where it is whole.
        """
        assert self.teams is not None and self.joined_to is not None
        lengths, size = self.llm_positions, self.teams.size
        start, tokens, shared = np.zeros_like(lengths), lengths.copy(), np.flatnonzero(size > 1)
        if len(shared):
            keys = np.stack([self.microbatch, self.rank, size])
            shared = shared[np.lexsort(keys[:, shared])]  # stable: samples of a team stay in their order
            begins = np.flatnonzero(np.diff(keys[:, shared], axis=1, prepend=-1).any(axis=0))
            team = np.repeat(np.arange(len(begins)), np.diff(np.append(begins, len(shared))))
            before = np.cumsum(lengths[shared]) - lengths[shared]
            start[shared] = before - before[begins][team]
            pieces = size[shared[begins]].astype(np.int64) * self.joined_to
            tokens[shared] = (-(-np.add.reduceat(lengths[shared], begins) // pieces) * self.joined_to)[team]
        return start, tokens

    def feature_rows(self, phase: str) -> Ints:
        """Count the rows of `phase`'s features over all ranks: int64 (3,), those that stay on their rank, move inside a
        node and cross nodes. Where nodes are not known, each rank counts as one.
        """
        number, needs, _, count = self._segments(phase, np.arange(len(self.parts[phase])))
        encoder, node = self.parts[phase].rank[number], self.ranks_per_node or 1
        way = (encoder != needs).astype(np.int64) + (encoder // node != needs // node)
        rows = np.zeros(3, np.int64)
        np.add.at(rows, way, count)
        return rows

    def _own(self, phase: str, rank: int, peer: int) -> _Own:
        """Return a rank's parts, sorted once for all micro-steps. Several threads may call it: results are equal."""
        own = self._own_parts.get((phase, rank, peer))
        if own is None:
            own = own_parts(self.parts[phase], rank, peer, self._shares)
            self._own_parts[phase, rank, peer] = own
        return own

    def cells(self, phase: str) -> Ints:
        """Return the cost of `phase` in each rank's microbatches, with padding: int64 (num_ranks, num_microbatches).

        Of an encoder in `parts`, int64 (num_ranks * num_peers, num_rounds): the row of a GPU is rank * num_peers +
        peer, and without `rounds` each microbatch is one.
        """
        if phase in self.parts:
            parts = self.parts[phase]
            met = self._shares if self.rounds is None else by_rounds(self._shares, self.rounds)
            gpu = parts.rank if parts.peer is None else parts.rank * np.int32(self.num_peers) + parts.peer
            where = (gpu, met.microbatch[parts.sample], self.gpus(phase), met.num_microbatches)
            return loads_by_rank_and_microbatch(parts.costs, *where)
        costs = self.costs[phase] if self.teams is None or phase != "llm" else self.teams.member_costs
        return self._padding(phase).loads(costs, self.llm_positions, self._shares, self.num_ranks)

    def gpus(self, phase: str) -> int:
        """Return the number of rows of `cells`: ranks, or the GPUs that share the parts of an encoder."""
        return self.num_ranks * self.peers_of(phase)

    def peers_of(self, phase: str) -> int:
        """Return the number of GPUs of a rank that share the parts of an encoder; 1 of another phase."""
        return self.num_peers if phase in self.parts else 1

    def waits(self, phase: str) -> Ints:
        """Return `cells` in one unit of time, in which the GPUs of a rank take as long for its LLM as its cost says:
        where peers encode, one GPU takes `num_peers` times as long for the same cost.
        """
        return self.cells(phase) * self.peers_of(phase)

    def loads(self, phase: str) -> Ints:
        """Return the cost of `phase` on each rank or encoding GPU, int64 (gpus(phase),): the sum of its `cells`."""
        loads: Ints = self.cells(phase).sum(axis=1)
        return loads

    def cells_unbalanced(self, phase: str) -> Ints:
        """Return what `cells` would be with samples dealt out in turn, as by torch's DistributedSampler, and cut into
        as many microbatches, and these into the same rounds, without regard to caps: of `num_ranks` ranks, because
        each peer encodes all of its rank's.
        """
        sizes = (self.num_ranks, self.num_microbatches)
        cells = self._padding(phase).cells_in_turn(self.costs[phase], self.llm_positions, *sizes)
        if phase not in self.parts or self.rounds is None:
            return cells
        first = np.flatnonzero(np.diff(self.rounds, prepend=-1))
        in_rounds: Ints = np.add.reduceat(cells, first, axis=1)
        return in_rounds

    def loads_unbalanced(self, phase: str) -> Ints:
        """Return what `loads` would be with samples dealt out in turn."""
        loads: Ints = self.cells_unbalanced(phase).sum(axis=1)
        return loads

    @property
    def _shares(self) -> Shares:
        return Shares(self.rank, self.microbatch, self.num_microbatches, self.teams)

    def _padding(self, phase: str) -> Padding:
        return self.padded if phase == "llm" else NO_PADDING

    def own_streams(self, rank: int) -> float | None:
        """Return the share of a rank's samples from its group's own streams; None where ranks are not grouped."""
        if self.group_size is None:
            return None
        mine = self.stream_rank[self.rank == rank] // self.group_size
        return float(np.mean(mine == rank // self.group_size)) if len(mine) else 1.0

    def lower_bound(self, phase: str) -> int:
        """Bound: no assignment of whole samples, of separately assigned parts, or, in a step that shares samples, of
        teams, has a smaller largest load.
        """
        if self.teams is not None and phase == "llm":
            return self.teams.lower_bound(self.num_ranks)
        if phase in self.parts:
            return lower_bound(self.parts[phase].costs, self.gpus(phase))
        sizes = (self.num_ranks, self.num_microbatches)
        return self._padding(phase).lower_bound(self.costs[phase], self.llm_positions, *sizes)

    def cost(self, price: StepPrice, phases: Sequence[str]) -> int:
        """Return the cost of the step, by `waits` in these phases, `SampleCosts.balanced`; others have units of their
        own.
        """
        return price.of([self.waits(phase) for phase in phases])

    def cost_bound(self, price: StepPrice, phases: Sequence[str]) -> int:
        """Return a bound: no assignment as in `lower_bound` has a smaller `cost`."""
        if self.teams is not None and not self.parts:
            encoders = [self.costs[phase] for phase in phases if phase != "llm"]
            return self.teams.cost_bound(self.num_ranks, encoders, meets=price.meets_in_micro_steps)
        bounds = [self.lower_bound(phase) * self.peers_of(phase) for phase in phases]
        return price.lower_bound([self.costs[phase] for phase in phases], bounds, self.num_ranks)

    @property
    def joined_to(self) -> int | None:
        """The multiple to which joined slices are padded; None where members of teams have whole sequences."""
        return self.padded.joined_to if isinstance(self.padded, NoPadding) else None

    @property
    def microbatch_tokens(self) -> Ints:
        """The LLM tokens of packed microbatches with padding, without dummies: int64 (num_ranks, num_microbatches)."""
        if self.joined_to is None:
            return self._shares.loads(self.llm_positions, self.num_ranks)
        size, tokens = self.team_size, np.zeros((self.num_ranks, self.num_microbatches), np.int64)
        for each in np.unique(size).tolist():
            at, count = size == each, self.num_ranks // each
            where = self.rank[at] // each, self.microbatch[at], count, self.num_microbatches
            joined = loads_by_rank_and_microbatch(self.llm_positions[at], *where)
            slices = -(-joined // (each * self.joined_to)) * self.joined_to
            tokens[: count * each] += np.repeat(slices, each, axis=0)
        return tokens

    @property
    def tokenized(self) -> int:
        """LLM tokens that ranks read and tokenize: a member does all of each sequence of which it has a part."""
        size, lengths = self.team_size.astype(np.int64), self.llm_positions
        if self.teams is None or self.joined_to is None:
            return int((lengths * size).sum())
        start, tokens = self._slices
        tokens = np.maximum(tokens, 1)
        return int((lengths * (-(-(start + lengths) // tokens) - start // tokens)).sum())

    @property
    def filled(self) -> tuple[int, int] | None:
        """Tokens of samples, and of all microbatches, which have one length; None where lengths vary."""
        capacity = self.padded.capacity(self.num_ranks * self.num_microbatches)
        return None if capacity is None else (int(self.llm_positions.sum()), capacity)

    def pipeline_order(self, rank: int, num_stages: int) -> NDArray[np.int32]:
        """Return the microbatches of one rank in a good order for 1F1B: int32 (num_microbatches,), planned numbers.

        Costs stand for times; only their ratios matter. Every stage has an equal share of the LLM, the first stage has
        all encoders too, and backward takes twice the forward. Where encoders are balanced separately, ranks meet in
        every micro-step: all take the order of the largest costs.

        Raises ValueError where encoders run in rounds, which are of consecutive micro-steps.
        """
        if self.rounds is not None:
            raise ValueError("pipeline_order would tear rounds of micro-steps apart: plan with encode='micro_step'")
        llm = self.cells("llm")
        encoders = [self.waits(phase).reshape(len(llm), -1, llm.shape[1]).max(axis=1) for phase in self.phases[:-1]]
        cells = np.stack([np.sum([np.zeros_like(llm), *encoders], axis=0), llm])
        work = cells.max(axis=1) if self.parts else cells[:, rank]
        forward = np.tile(work[1], (num_stages, 1))
        forward[0] += num_stages * work[0]
        return order_microbatches(forward, 2 * forward).order

    def imbalance(self, phase: str) -> float:
        """Return max/mean of the rank loads in `phase`; 1 where the phase is empty."""
        loads = self.loads(phase)
        total = int(loads.sum())
        return float(int(loads.max()) * len(loads) / total) if total else 1.0

    @cached_property
    def hash(self) -> str:
        """Equal on all ranks, machines and runs for the same plan."""
        digest = hashlib.blake2b(digest_size=16)
        sizes = (self.epoch, self.step, self.num_ranks, self.num_microbatches, self.loss_tokens)
        digest.update(np.array(sizes, "<i8").tobytes())
        columns: list[NDArray[Any]] = [self.source, self.row, self.rank, self.microbatch]
        if self.teams is not None:
            columns.append(self.teams.size)
        if self.rounds is not None:
            columns.append(self.rounds)
        if self.ranges is not None:
            columns += [self.ranges.first, self.llm_positions]
        columns += [parts.rank for parts in self.parts.values()]
        columns += [parts.peer for parts in self.parts.values() if parts.peer is not None]
        for column in columns:
            digest.update(column.astype(column.dtype.newbyteorder("<"), copy=False).tobytes())
        return digest.hexdigest()


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
        if (cap := self.balance.max_samples) is None:
            return
        if not isinstance(self.batches, GlobalBatches):
            raise ValueError(
                "Balance.max_samples caps samples, and a step of global_batch_tokens has as many as fit: cap tokens by "
                "Balance.max_tokens, or give global_batch_size"
            )
        most = min(self.batches.size, max(self.order.num_samples, self.order.length(0)))
        checked_max_samples(cap, most, self.num_ranks)

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

    @property
    def multiple_of(self) -> int:
        """Of which the length of joined sequences is a multiple."""
        return getattr(self.costs.padded, "joined_to", None) or 1

    def share_out(
        self,
        costs: Mapping[str, Ints],
        positions: Mapping[str, Ints],
        stream_rank: NDArray[np.int32],
        phases: Sequence[str] | None = None,
        caps: Sequence[str] | None = None,
        num_microbatches: int | None = None,
    ) -> Shares:
        """Return ranks and microbatches of whole samples, by all balanced phases and within all caps, or by some of
        them; in the fewest microbatches, or `accumulate` of them. `costs` are those of every phase.
        """
        balance, padded = self.balance, self.costs.padded
        balanced = {phase: costs[phase] for phase in phases or self.costs.balanced}
        sizes = {phase: positions[phase] for phase in (balance.caps if caps is None else caps)}
        step = StepSamples(balanced, sizes, positions["llm"], self.num_ranks, balance, stream_rank)
        if balance.teams is not None:
            # A model that encodes a whole sample has it whole.
            is_text = np.all([column == 0 for phase, column in costs.items() if phase != "llm"], axis=0)
            may_share = np.broadcast_to(is_text | (balance.assignment == "per_phase"), len(stream_rank))
            given = self.costs.exponent, self.accumulate, may_share, self.multiple_of
            return share_in_teams(step, balance.teams, *given)
        if self.accumulate > 1:
            return share_out_in(step, padded, self.accumulate)
        return padded.share_out(step, num_microbatches)

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
    parts: Mapping[str, Parts] = {}
    rounds: NDArray[np.int32] | None = None
    if repeats:
        shares = one_microbatch(stream_rank)
    elif spec.balance.assignment == "joint":
        shares = spec.share_out(costs, positions, stream_rank)
    else:
        batch = GlobalBatch(spec, row, costs, positions, stream_rank)
        shares, on_gpus, rounds = batch.share_out_per_phase()
        parts = {phase: spec.encoders.named(of) for phase, of in on_gpus.items()}
    of_sources: Ints | None = None
    if sources := spec.order.sources:
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
        sources=spec.order.names,
        passes=passes if sources else None,
        source_loss_tokens=of_sources,
        loss_weights=spec.order.loss_weights,
    )
