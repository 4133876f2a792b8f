"""What to balance and how: the frozen value for `DataLoader(balance=...)`; the price of a step; and teams of ranks that
share long sequences. The layouts of a batch, `Packed` and `Padded`, are the frozen values for `collate_fn=`.

    Balance --price--> StepPrice; loads (num_ranks, num_microbatches) of each phase --StepPrice.of--> cost
    costs of whole sequences --Teams.member_costs--> costs of a member at each size --sharing--> StepTeams of a Plan

Plans, `stats()`, profiles and benchmarks use the same value, so figures measure what the plan minimises.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.assignment import MAX_TOTAL, checked_count, checked_effort, lower_bound
from orchdata.balancers.costs.model import coefficients_of
from orchdata.balancers.costs.phase import PhaseCost, checked_coefficient
from orchdata.native.assign.teams import NEVER, least_works, teams_bound
from orchdata.native.costs import COST_SHIFT, sequence_costs
from orchdata.native.microbatches.pipeline import slowest

Scope = Literal["none", "grouped", "grid", "global"]
AssignmentKind = Literal["joint", "per_phase"]
Objective = Literal["barrier", "sum"]
Oversize = Literal["error", "own", "drop"]
Flag = Literal[True, False]
Ints = NDArray[np.int64]
Ranks = NDArray[np.int32]


def checked_choices(value: object, **kinds: Any) -> None:
    """Raise ValueError for a field whose value is not one of its Literal's."""
    for name, kind in kinds.items():
        given = getattr(value, name)
        if not any(isinstance(given, type(each)) and given == each for each in get_args(kind)):
            choices = ", ".join(map(str, get_args(kind)))
            raise ValueError(f"{type(value).__name__}.{name} must be one of {choices}, got {given!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """How the samples of a global batch are shared out. Its samples never depend on this.

    Attributes:
        scope: "none" deals samples out in turn, "global" balances over all ranks, "grouped" inside groups of ranks
            that draw from the same streams of the order, "grid" inside groups and then among the ranks with the
            same number in all groups.
        assignment: "joint" puts a whole sample on one rank, which fits any model; "per_phase" balances each encoder
            by itself: a rank encodes parts of any sample of its micro-step, and `od.exchange` carries the features to
            the samples. Every micro-step is then balanced by itself, under either objective.
        encode: per phase, the micro-steps of a round, whose parts are balanced and encoded together: "micro_step", one;
            "step", all; or their number. `od.rounds` runs the encoders once a round. A part stays in the batch and the
            route of its sample; only its rank comes from the round.
        objective: "barrier" where ranks wait for each other after each phase, as under FSDP (minimises the sum over
            phases of the largest load, and lets microbatches of the same number cost about the same), "sum" where they
            wait only at the end of the step.
        max_tokens: positions per microbatch and rank: an int caps `llm`, a mapping caps each phase it names.
            A step has the fewest microbatches that respect it, the same number on every rank. The cap of an encoder
            holds in each round: rounds are as long as fit, and have at least one micro-step.
        max_samples: most samples one rank may get in a step.
        equal_count: give every rank the same number of samples, give or take one.
        group_size: ranks in a group, as those of a node; by default LOCAL_WORLD_SIZE, as torchrun sets it.
        order: the order of a rank's microbatches: None keeps the planned order, "1f1b" chooses one in which the stages
            of a pipeline wait little for each other.
        num_stages: pipeline stages, for `order`.
        oversize: what happens to a sample above `max_tokens`: "error" refuses to start, "own" gives it a microbatch of
            its own, "drop" removes it from the order on every rank. Per phase the same samples count as above it,
            although their parts may be shared: what is dropped does not depend on the number of ranks. Parts of an
            "own" sample are shared where that keeps all ranks within the cap.
        teams: shares sequences that are long for one rank among several, those with media per phase alone; None leaves
            every sample on one rank.
        effort: how long the search for plans under "barrier" takes, counted in pairs of samples, so plans are the same
            on every machine. 1 takes milliseconds at thousands of ranks; more finds better plans where few samples
            can be exchanged; 0 does not search.
    """

    scope: Scope = "global"
    assignment: AssignmentKind = "joint"
    encode: Literal["micro_step", "step"] | int = "micro_step"
    objective: Objective = "barrier"
    max_tokens: int | Mapping[str, int] | None = None
    max_samples: int | None = None
    equal_count: bool = False
    group_size: int | None = None
    order: Literal["1f1b"] | None = None
    num_stages: int | None = None
    oversize: Oversize = "error"
    effort: float = 1.0
    teams: Teams | None = None

    def __post_init__(self) -> None:
        checked_choices(self, scope=Scope, assignment=AssignmentKind, objective=Objective, oversize=Oversize)
        checked_choices(self, order=Literal[None, "1f1b"], equal_count=Flag)
        if self.encode != "micro_step" and self.encode != "step":
            number = checked_count(self.encode, "Balance.encode, if not 'micro_step' or 'step',")
            object.__setattr__(self, "encode", number if number > 1 else "micro_step")
        for name in ("max_samples", "group_size", "num_stages"):
            if (value := getattr(self, name)) is not None:
                checked_count(value, f"Balance.{name}")
        # Ranks compare it: 1 and 1.0 must be equal.
        object.__setattr__(self, "effort", checked_effort(self.effort, "Balance.effort"))
        for phase, cap in self._named_caps.items():
            checked_count(cap, f"Balance.max_tokens of phase {phase!r}")
        # What goes together.
        if self.group_size is not None and self.scope not in ("grouped", "grid"):
            raise ValueError(f"Balance.group_size is for scope 'grouped' or 'grid', got scope={self.scope!r}")
        if (self.order is None) != (self.num_stages is None):
            given = f"order={self.order!r}, num_stages={self.num_stages}"
            raise ValueError(f"Balance.order and num_stages go together, got {given}")
        if not isinstance(self.teams, Teams | None):
            raise ValueError(f"Balance.teams must be an od.Teams or None, got {self.teams!r}")
        counts = {"equal_count": False, "max_samples": None}
        apart, whole = {"assignment": "per_phase", "order": None}, {"scope": "global", "order": None, **counts}
        rules: list[tuple[bool, str, dict[str, Any]]] = [
            (self.scope == "grid", "scope='grid', which moves samples by cost alone,", counts),
            (self.encode != "micro_step", f"encode={self.encode!r}, of consecutive micro-steps,", apart),
            (self.teams is not None, "teams, which shares sequences,", whole),
        ]
        for name, value, what in [(name, only[name], what) for is_so, what, only in rules if is_so for name in only]:
            if (own := getattr(self, name)) != value:
                raise ValueError(f"Balance.{what} goes with {name}={value!r} alone, got {own!r}: leave one of them out")

    @property
    def price(self) -> StepPrice:
        """What a step costs, as ranks wait for each other. Per phase they meet in every exchange."""
        each_phase = self.assignment == "per_phase" or self.objective == "barrier"
        meets = self.assignment == "per_phase" or (each_phase and self.order is None)
        num_stages = None if meets else self.num_stages
        return StepPrice(levels_each_phase=each_phase, meets_in_micro_steps=meets, num_stages=num_stages)

    @property
    def caps(self) -> dict[str, int]:
        """Positions per microbatch and rank, by phase; at most 2**62, above the size of any batch."""
        return {phase: min(cap, MAX_TOTAL) for phase, cap in self._named_caps.items()}

    @property
    def _named_caps(self) -> Mapping[str, int]:
        if self.max_tokens is None:
            return {}
        return self.max_tokens if isinstance(self.max_tokens, Mapping) else {"llm": self.max_tokens}


def as_balance(value: str | Balance, *, equal_count: bool = False) -> Balance:
    """The `balance=` argument of a DataLoader: a scope's name, or the whole value."""
    if isinstance(value, Balance):
        return value
    if value not in get_args(Scope):
        raise ValueError(f"balance must be one of {', '.join(get_args(Scope))} or an od.Balance, got {value!r}")
    return Balance(scope=value, equal_count=equal_count)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPrice:
    """What a step costs, in the unit of its samples' costs.

    A micro-step is the m-th microbatch of all ranks. Where ranks wait for each other after each phase of it, a step
    costs the sum over micro-steps and phases of the largest load of a rank; of encoders, over their rounds. Where they
    meet at its end, it costs the largest total of a rank, or the makespan of the slowest pipeline. In a pipeline the
    first stage has all encoders, every stage has an equal part of the LLM, and backward takes twice the forward.

    Attributes:
        levels_each_phase: each phase is balanced; else their sum.
        meets_in_micro_steps: ranks wait for each other after each phase of each micro-step.
        num_stages: of the pipeline with the makespan that counts; None where none counts.
    """

    levels_each_phase: bool
    meets_in_micro_steps: bool
    num_stages: int | None

    def of(self, cells: Sequence[Ints]) -> int:
        """Return the cost of a step from the loads of each phase that counts, encoders before `llm`: int64 (num_ranks,
        num_microbatches), or of encoders (num_ranks, num_rounds).
        """
        if self.meets_in_micro_steps:
            return sum(int(of_phase.max(axis=0).sum()) for of_phase in cells)
        if self.num_stages is None:
            return int(np.sum([of_phase.sum(axis=1) for of_phase in cells], axis=0).max())
        return int(slowest(*_stages(cells, self.num_stages), self.num_stages))

    def of_even(self, means: Sequence[float], num_microbatches: int) -> float:
        """Return the cost of a step in which all microbatches have the same load in each phase, with these mean loads
        of a rank. A pipeline can be a little cheaper: small microbatches at both ends fill it sooner.
        """
        if self.num_stages is None:
            return sum(means)
        cells = [np.full((1, num_microbatches), mean / num_microbatches) for mean in means]
        return float(slowest(*_stages(cells, self.num_stages), self.num_stages))

    def lower_bound(self, costs: Sequence[Ints], bounds: Sequence[int], num_ranks: int) -> int:
        """Return a cost that no assignment of whole samples goes below, in any number of micro-steps, from the costs of
        each phase and the lower bounds of their largest loads.
        """
        if self.meets_in_micro_steps:
            return sum(bounds)
        if self.num_stages is None:
            return max(*bounds, int(lower_bound(np.sum(costs, axis=0), num_ranks)))
        # The first stage does all of its work, forward and twice that backward.
        return 3 * int(lower_bound(self.num_stages * np.sum(costs[:-1], axis=0, dtype=np.int64) + costs[-1], num_ranks))


def _stages(cells: Sequence[NDArray[np.generic]], num_stages: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the times of forwards on the first stage and on each other stage: float64, shaped as a phase's loads."""
    work = cells[-1].astype(np.float64)
    return work + num_stages * np.sum([np.zeros_like(work), *cells[:-1]], axis=0), work


# How a batch is laid out.

Positions = Literal["restart", "mrope"]
Empty = Literal["dummy", "zero"]
Encoders = Literal["packed", "padded"]
Attention = Literal["document", "window"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """Sequences one after another, without a batch dimension.

    Attributes:
        positions: "restart" counts from 0 in each sample; "mrope" gives (time, height, width) positions, after
            Qwen2-VL's multimodal rotary embedding: text and audio advance all three, an image's merged grid spans
            height and width and advances by its longer side; `llm.restart_position_ids` then count as "restart" does.
        empty: what a rank without any item of a modality gets: one minimal "dummy" item, which costs and caps do not
            count, with its tokens in a last sequence without loss; or tensors of "zero" length.
        multiple_of: each sample's LLM sequence is padded at its end to a multiple of this, and so is their total: 2 * C
            for context parallelism over C ranks, the ranks for sequence parallelism, 8 or 16 for FP8, or their least
            common multiple. `cu_seqlens`, costs and caps count the padding. Encoder sequences are not padded to it.
            Under `Teams(cut="loader")` sequences are joined, and each slice of them is padded to it instead.
        length: tokens of every microbatch, a multiple of `multiple_of`: one shape for compiled models, CUDA graphs and
            context parallelism. The rest is padding, a last sequence without loss. The cap of `llm` is this length
            less the tokens of dummies, and no sample may be longer. None: as long as its samples.
        encoder_lengths: modality -> positions, ascending: the input of its encoder is padded with a last sequence of
            zeros to the smallest of these lengths that is long enough; the largest is the phase's cap. The modality
            must define `Modality.padding`.
        concatenate: for pretraining on text. The documents of an epoch are joined in its order and cut into windows of
            `length` tokens. Every window is full, and each microbatch is one window. `batch_size` and
            `global_batch_size` count windows.
        attention: of windows. "document": each document in a window, or the part of it there, is a sequence of its own
            in `cu_seqlens`, with positions from 0. "window": the window is one sequence, with positions from 0.
    """

    positions: Positions = "restart"
    empty: Empty = "dummy"
    multiple_of: int = 1
    length: int | None = None
    encoder_lengths: Mapping[str, Sequence[int]] = field(default_factory=dict)
    concatenate: bool = False
    attention: Attention = "document"
    encoders: ClassVar[Encoders] = "packed"

    def __post_init__(self) -> None:
        checked_choices(self, positions=Positions, empty=Empty, concatenate=Flag, attention=Attention)
        checked_count(self.multiple_of, "Packed.multiple_of")
        if self.length is not None and checked_count(self.length, "Packed.length") % self.multiple_of:
            raise ValueError(
                f"Packed.length={self.length} is no multiple of multiple_of={self.multiple_of}, to which sequences "
                f"are padded: use {max(1, self.length // self.multiple_of) * self.multiple_of}"
            )
        if not isinstance(self.encoder_lengths, Mapping):
            raise ValueError(f"Packed.encoder_lengths is modality -> positions, got {self.encoder_lengths!r}")
        plain = {}
        for name, lengths in self.encoder_lengths.items():
            what, given = f"Packed.encoder_lengths of {name}", lengths if isinstance(lengths, Iterable) else ()
            plain[name] = tuple(checked_count(length, what) for length in given)
            if not plain[name] or list(plain[name]) != sorted(set(plain[name])):
                raise ValueError(f"{what} must be ascending positions, got {lengths!r}")
        object.__setattr__(self, "encoder_lengths", plain)  # a plain dict of tuples: ranks compare it
        if not self.concatenate and self.attention != "document":
            raise ValueError(
                f"Packed.attention={self.attention!r} is of windows of concatenated documents: pass length= and "
                "concatenate=True too"
            )
        if self.concatenate and (self.length is None or self.length < 2 or plain):
            raise ValueError(
                "Packed(concatenate=True) cuts documents of text into windows: pass length=, the tokens of a window, "
                f"at least 2, as the first has no label, and no encoder_lengths=; got length={self.length}, {plain}"
            )
        if self.concatenate and self.multiple_of > 1 and self.attention == "document":
            raise ValueError(
                f"Packed.multiple_of={self.multiple_of} pads each document, and windows of concatenated documents have "
                "no padding: leave it out, or use attention='window', with one sequence a window"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Padded:
    """One row a sample: LLM tensors (num_samples, L), with an attention mask, as Hugging Face text models take them.

    L is the longest sample of the microbatch, aligned up to `multiple_of`. If that is at least the longest sample of
    the data set, L is always `multiple_of`: a fixed shape. Samples are balanced by the cost of the rectangle: a rank's
    `llm` load is its count of rows times the cost of its longest, and `Balance.max_tokens` caps rows times L.

    Attributes:
        positions, empty: as `Packed` has them; the dummy of a rank without samples is one row of `multiple_of`.
        multiple_of: L is a multiple of it. Encoder sequences are not aligned.
        encoders: "packed" keeps patches and frames one after another with `cu_seqlens`, as vision towers take them;
            "padded" gives (num_images, max_patches, patch_dim) and (num_clips, max_frames, num_mels) with masks. The
            costs of encoder phases count no padding either way.
    """

    positions: Positions = "restart"
    empty: Empty = "dummy"
    multiple_of: int = 1
    encoders: Encoders = "packed"
    # No microbatch has a fixed length.
    length: ClassVar[None] = None
    encoder_lengths: ClassVar[Mapping[str, Sequence[int]]] = {}
    concatenate: ClassVar[bool] = False
    attention: ClassVar[Attention] = "document"

    def __post_init__(self) -> None:
        checked_choices(self, positions=Positions, empty=Empty, encoders=Encoders)
        checked_count(self.multiple_of, "Padded.multiple_of")


Layout: TypeAlias = Packed | Padded


def layout_of(collate_fn: object) -> Layout | None:
    """Return the layout of a `collate_fn`: itself, or that of a model's inputs. None for a function."""
    layout = collate_fn if isinstance(collate_fn, Packed | Padded) else getattr(collate_fn, "layout", None)
    return layout if isinstance(layout, Packed | Padded) else None


def row_lengths(layout: Layout, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the padded length in memory of each LLM sequence of `lengths` positions, int64 (num_samples,)."""
    aligned = -(-lengths // layout.multiple_of) * layout.multiple_of
    if isinstance(layout, Packed):
        return aligned
    return np.full_like(aligned, aligned.max(initial=0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Teams:
    """Ranks share long sequences: a team of 2, 4, 8, ... ranks attends to a sequence together, chosen in each step.

    A member of a team of g pays the sequence's `llm` cost / g, rounded up, and `per_token` for each of its tokens / g;
    or what `cost` says. Samples with media are shared under `assignment="per_phase"` alone.

    Attributes:
        largest: the most ranks of a team, a power of two. Which samples are usable depends on it, as it does on
            `Balance.max_tokens`.
        cut: who cuts sequences into slices. "loader": a member gets its slice of the team's sequences, which
            `od.TeamAttention` computes with. "trainer": every member gets the whole sequences.
        gain: a step shares only if its `Balance.price` falls by this part.
        per_token: cost of a shared token for the exchange between members, in the unit of the cost model's `llm`; one
            number, or one for each size. With 0 sharing costs nothing but the rounding.
        cost: of a member, by the tokens of the whole sequence, as measured for each size; in place of the above. A size
            that it lacks is not taken.
        mixed: whether one microbatch may have teams of several sizes, and whole samples next to teams.
    """

    largest: int
    cut: Literal["loader", "trainer"] = "loader"
    gain: float = 0.02
    per_token: float | Mapping[int, float] = 0.0
    cost: Mapping[int, PhaseCost] | None = None
    mixed: bool = True

    def __post_init__(self) -> None:
        checked_choices(self, cut=Literal["loader", "trainer"], mixed=Flag)
        largest = checked_count(self.largest, "Teams.largest", 2)
        if largest & (largest - 1):
            raise ValueError(f"Teams.largest must be a power of two, got {largest}")
        gain = checked_coefficient(self.gain, "Teams.gain")
        if gain >= 1:
            raise ValueError(f"Teams.gain is a part of the price of a step, below 1, got {gain}")
        object.__setattr__(self, "gain", gain)
        allowed = {1 << power for power in range(1, largest.bit_length())}
        if isinstance(self.per_token, Mapping):
            rates: Any = {size: checked_coefficient(each, "Teams.per_token") for size, each in self.per_token.items()}
            if set(rates) != allowed:
                raise ValueError(f"Teams.per_token must name each of the sizes {sorted(allowed)}, got {sorted(rates)}")
        else:
            rates = checked_coefficient(self.per_token, "Teams.per_token")
        object.__setattr__(self, "per_token", rates)
        cost = {largest: None} if self.cost is None else self.cost
        if not set(cost) <= allowed or largest not in cost:
            raise ValueError(
                f"Teams.cost must name sizes among {sorted(allowed)}, also largest={largest}, on which usable samples "
                f"depend, got {sorted(cost)}; or lower largest"
            )
        if self.cost is not None and not all(isinstance(each, PhaseCost) for each in self.cost.values()):
            raise ValueError(f"Teams.cost must map sizes of teams to od.PhaseCost, got {self.cost!r}")

    def sizes(self, num_ranks: int) -> Ints:
        """Return the sizes of teams on so many ranks, ascending from 1: int64 (num_sizes,)."""
        sizes = [1 << power for power in range(min(self.largest, num_ranks).bit_length())]
        return np.array([size for size in sizes if self.cost is None or size in (1, *self.cost)], np.int64)

    def member_costs(self, costs: Ints, tokens: Ints, sizes: Ints, exponent: int) -> Ints:
        """Return what a member pays for each sequence at each size, int64 (n, num_sizes), in the unit of `costs`: that
        of the model times 2**exponent.
        """
        table = np.empty((len(costs), len(sizes)), np.int64)
        for column, size in enumerate(sizes.tolist()):
            if size == 1:
                table[:, 0] = costs
            elif self.cost is None:
                rate = self.per_token[size] if isinstance(self.per_token, Mapping) else self.per_token
                table[:, column] = -(-costs // size)
                if rate:
                    fixed = round(math.ldexp(rate, exponent + COST_SHIFT))
                    table[:, column] += sequence_costs(-(-tokens // size), fixed, 0, 0, np.empty((0, 2), np.int64))
            else:
                table[:, column] = sequence_costs(tokens, *coefficients_of(self.cost[size], exponent))
        return table


@dataclass(frozen=True, eq=False)
class StepTeams:
    """The teams of one step: `size`, int32 (n,), the ranks that share each sample, from `Plan.rank` on; the possible
    `sizes`; and `table`, int64 (n, num_sizes), the cost of a member in `llm` at each; `NEVER` where a sample cannot
    take it.
    """

    size: Ranks
    sizes: Ints
    table: Ints

    @cached_property
    def member_costs(self) -> Ints:
        """What each member of a sample's team pays in `llm`, int64 (n,)."""
        return self.own(self.table)

    def own(self, table: Ints) -> Ints:
        """Return the entry of each sample at its size, int64 (n,), of a table like `table`."""
        found: Ints = table[np.arange(len(self.size)), np.searchsorted(self.sizes, self.size)]
        return found

    def members(self, rank: Ranks) -> tuple[NDArray[np.intp], Ranks]:
        """Return the sample and the rank of each member, by their first members: (num_members,) each."""
        sample = np.repeat(np.arange(len(self.size)), self.size)
        place = np.arange(len(sample)) - np.repeat(np.cumsum(self.size) - self.size, self.size)
        return sample, (rank[sample] + place).astype(np.int32)

    def lower_bound(self, num_ranks: int, encoders: Sequence[Ints] = ()) -> int:
        """Return a bound: no choice of teams has a smaller largest load. Costs of `encoders` add up with `llm` on whole
        samples.
        """
        table = self.table
        if encoders:
            others = np.sum(encoders, axis=0)
            table = np.where(table == NEVER, NEVER, table + np.where(self.sizes == 1, others[:, None], 0))
            table[others > 0, 1:] = NEVER
        return int(teams_bound(table, self.sizes, num_ranks, least_works(table, self.sizes)))

    def cost_bound(self, num_ranks: int, encoders: Sequence[Ints], *, meets: bool) -> int:
        """Return a bound of what a step costs, `encoders` as above; `meets`: ranks do so after each phase."""
        if not meets:
            return self.lower_bound(num_ranks, encoders)
        return self.lower_bound(num_ranks) + sum(int(lower_bound(costs, num_ranks)) for costs in encoders)


@dataclass(frozen=True, slots=True, eq=False)
class JoinedSequences:
    """The sequences of one team of `size` ranks in a microbatch, joined and padded once: `at`, consecutive, which they
    are in it; `borders`, int64 (num_sequences + 1,), of whole sequences, before padding; `tokens` of each member's
    slice.
    """

    size: int
    at: NDArray[np.intp]
    borders: Ints
    tokens: int

    def held(self, place: int) -> tuple[Ints, Ints]:
        """Return the first token, and the one after the last, that a member has of each sequence: (num_sequences,)."""
        first, lengths = place * self.tokens - self.borders[:-1], np.diff(self.borders)
        return np.clip(first, 0, lengths), np.clip(first + self.tokens, 0, lengths)


def joined_sequences(sizes: Ranks, lengths: Ints, multiple_of: int) -> list[JoinedSequences]:
    """Return the sequences of one rank's microbatch by their teams, the largest first. `sizes` are those of their
    teams, descending; the length of a slice is a multiple of `multiple_of`.
    """
    joined = []
    for size in np.unique(sizes)[::-1].tolist():
        at = np.flatnonzero(sizes == size)
        borders = np.concatenate([[0], np.cumsum(lengths[at])])
        tokens = -(-int(borders[-1]) // (size * multiple_of)) * multiple_of
        joined.append(JoinedSequences(size, at, borders, tokens))
    return joined
