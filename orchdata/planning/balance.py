"""What to balance and how: the frozen value for `DataLoader(balance=...)`; and the price of a step.
The layouts of a batch, `Packed` and `Padded`, are the frozen values for `collate_fn=`.

    Balance --price--> StepPrice; loads (num_ranks, num_microbatches) of each phase --StepPrice.of--> cost

Plans, `stats()`, profiles and benchmarks use the same value, so figures measure what the plan minimises.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.assignment import MAX_TOTAL, checked_count, checked_effort, lower_bound
from orchdata.native.microbatches.pipeline import slowest
from orchdata.planning.teams import Teams

Scope = Literal["none", "grouped", "grid", "global"]
AssignmentKind = Literal["joint", "per_phase"]
Objective = Literal["barrier", "sum"]
Oversize = Literal["error", "own", "drop"]
Ints = NDArray[np.int64]


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
        kinds = {"scope": Scope, "assignment": AssignmentKind, "objective": Objective, "oversize": Oversize}
        for name, kind in kinds.items():
            value = getattr(self, name)
            if value not in get_args(kind):
                raise ValueError(f"Balance.{name} must be one of {', '.join(get_args(kind))}, got {value!r}")
        if self.order not in (None, "1f1b"):
            raise ValueError(f"Balance.order must be None or '1f1b', got {self.order!r}")
        if not isinstance(self.equal_count, bool):
            raise ValueError(f"Balance.equal_count must be True or False, got {self.equal_count!r}")
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
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.group_size is not None and self.scope not in ("grouped", "grid"):
            raise ValueError(f"Balance.group_size is for scope 'grouped' or 'grid', got scope={self.scope!r}")
        if self.scope == "grid" and (self.equal_count or self.max_samples is not None):
            raise ValueError(
                "Balance.scope='grid' moves samples by cost alone, without limits on counts: use 'grouped' or 'global'"
            )
        if (self.order is None) != (self.num_stages is None):
            raise ValueError(
                f"Balance.order and num_stages go together, got order={self.order!r}, num_stages={self.num_stages}"
            )

        if self.encode != "micro_step" and (self.assignment, self.order) != ("per_phase", None):
            raise ValueError(
                f"Balance.encode={self.encode!r} encodes consecutive micro-steps together: it needs "
                f"assignment='per_phase', and order=None, which keeps them consecutive; got "
                f"assignment={self.assignment!r}, order={self.order!r}"
            )
        if self.teams is not None:
            if not isinstance(self.teams, Teams):
                raise ValueError(f"Balance.teams must be an od.Teams or None, got {self.teams!r}")
            only = {"scope": "global", "order": None, "equal_count": False, "max_samples": None}
            for name, value in only.items():
                if (given := getattr(self, name)) != value:
                    why = f"Balance.teams shares sequences under {name}={value!r} alone, got {given!r}"
                    raise ValueError(f"{why}: leave {name} out, or teams")

    @property
    def price(self) -> StepPrice:
        """What a step costs, as ranks wait for each other. Per phase they meet in every exchange."""
        each_phase = self.assignment == "per_phase" or self.objective == "barrier"
        meets = self.assignment == "per_phase" or (each_phase and self.order is None)
        return StepPrice(
            levels_each_phase=each_phase,
            meets_in_micro_steps=meets,
            num_stages=None if meets else self.num_stages,
        )

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
        _check(self)
        if self.length is not None:
            checked_count(self.length, "Packed.length")
            if self.length % self.multiple_of:
                raise ValueError(
                    f"Packed.length={self.length} is no multiple of multiple_of={self.multiple_of}, to which sequences "
                    f"are padded: use {max(1, self.length // self.multiple_of) * self.multiple_of}"
                )
        if not isinstance(self.encoder_lengths, Mapping):
            raise ValueError(f"Packed.encoder_lengths is modality -> positions, got {self.encoder_lengths!r}")
        for name, lengths in self.encoder_lengths.items():
            if not isinstance(lengths, Iterable):
                raise ValueError(f"Packed.encoder_lengths of {name} must be ascending positions, got {lengths!r}")
            checked = tuple(checked_count(length, f"Packed.encoder_lengths of {name}") for length in lengths)
            if not checked or list(checked) != sorted(set(checked)):
                raise ValueError(f"Packed.encoder_lengths of {name} must be ascending positions, got {lengths!r}")
        # Ranks compare it: a plain dict of tuples.
        plain = {name: tuple(lengths) for name, lengths in self.encoder_lengths.items()}
        object.__setattr__(self, "encoder_lengths", plain)
        _check_windows(self)


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
        _check(self)
        if self.encoders not in get_args(Encoders):
            raise ValueError(f"Padded.encoders must be 'packed' or 'padded', got {self.encoders!r}")


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


def _check(layout: Layout) -> None:
    name = type(layout).__name__
    if layout.positions not in get_args(Positions):
        raise ValueError(f"{name}.positions must be 'restart' or 'mrope', got {layout.positions!r}")
    if layout.empty not in get_args(Empty):
        raise ValueError(f"{name}.empty must be 'dummy' or 'zero', got {layout.empty!r}")
    checked_count(layout.multiple_of, f"{name}.multiple_of")


def _check_windows(layout: Packed) -> None:
    if not isinstance(layout.concatenate, bool):
        raise ValueError(f"Packed.concatenate must be True or False, got {layout.concatenate!r}")
    if layout.attention not in get_args(Attention):
        raise ValueError(f"Packed.attention must be 'document' or 'window', got {layout.attention!r}")
    if not layout.concatenate:
        if layout.attention != "document":
            raise ValueError(
                f"Packed.attention={layout.attention!r} is of windows of concatenated documents: pass length= and "
                "concatenate=True too"
            )
        return
    if layout.length is None:
        raise ValueError("Packed(concatenate=True) cuts documents into windows: pass length=, the tokens of a window")
    if layout.length < 2:
        raise ValueError(
            f"Packed(length={layout.length}, concatenate=True): the first token of a window has no label, so a window "
            "needs at least 2 tokens"
        )
    if layout.encoder_lengths:
        raise ValueError("Packed(concatenate=True) is for text alone, so encoder_lengths= has no meaning: leave it out")
    if layout.multiple_of > 1 and layout.attention == "document":
        raise ValueError(
            f"Packed.multiple_of={layout.multiple_of} pads each document, and windows of concatenated documents have "
            "no padding: leave it out, or use attention='window', with one sequence a window"
        )
