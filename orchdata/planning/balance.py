"""What to balance and how: the frozen value for `DataLoader(balance=...)`; and the price of a step.

    Balance --price--> StepPrice; loads (num_ranks, num_microbatches) of each phase --StepPrice.of--> cost

Plans, `stats()`, profiles and benchmarks use the same value, so figures measure what the plan minimises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.assignment import lower_bound
from orchdata.balancers.checks import MAX_TOTAL, checked_count, checked_effort
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
