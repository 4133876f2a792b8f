"""What to balance and how: the frozen value behind `DataLoader(balance=...)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from orchdata.balancers.checks import checked_count

Scope = Literal["none", "grouped", "grid", "global"]
AssignmentKind = Literal["joint", "per_phase"]
Objective = Literal["barrier", "sum"]
Oversize = Literal["error", "own", "drop"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """How the samples of a global batch are shared out; which samples are in it never depends on this.

    Attributes:
        scope: "none" deals samples out in turn, "global" balances over all ranks.
        assignment: "joint" puts a whole sample on one rank, which fits any model.
        objective: "barrier" where ranks wait for each other after each phase (minimises the sum over phases of
            the largest load), "sum" where they wait only at the end of the step.
        max_tokens: positions per microbatch and rank: an int caps `llm`, a mapping caps each phase it names.
            A step has the fewest microbatches that respect it, the same number on every rank.
        max_samples: most samples one rank may get in a step.
        equal_count: give every rank the same number of samples, give or take one.
        group_size: ranks in a group under scope "grouped".
        order: the order of a rank's microbatches: None keeps the planned one.
        num_stages: pipeline stages, for `order`.
        oversize: what becomes of a sample above `max_tokens`: "error" refuses to start, "own" gives it a
            microbatch to itself, "drop" takes it out of the order on every rank.
    """

    scope: Scope = "global"
    assignment: AssignmentKind = "joint"
    objective: Objective = "barrier"
    max_tokens: int | Mapping[str, int] | None = None
    max_samples: int | None = None
    equal_count: bool = False
    group_size: int | None = None
    order: Literal["1f1b"] | None = None
    num_stages: int | None = None
    oversize: Oversize = "error"

    def __post_init__(self) -> None:
        for name, kind in (
            ("scope", Scope),
            ("assignment", AssignmentKind),
            ("objective", Objective),
            ("oversize", Oversize),
        ):
            value = getattr(self, name)
            if value not in get_args(kind):
                raise ValueError(f"Balance.{name} must be one of {', '.join(get_args(kind))}, got {value!r}")
        if self.order not in (None, "1f1b"):
            raise ValueError(f"Balance.order must be None or '1f1b', got {self.order!r}")
        if not isinstance(self.equal_count, bool):
            raise ValueError(f"Balance.equal_count must be True or False, got {self.equal_count!r}")
        for name in ("max_samples", "group_size", "num_stages"):
            if (value := getattr(self, name)) is not None:
                checked_count(value, f"Balance.{name}")
        for phase, cap in self.caps.items():
            checked_count(cap, f"Balance.max_tokens of phase {phase!r}")
        self._refuse_what_needs_training_support()

    def _refuse_what_needs_training_support(self) -> None:
        if self.scope in ("grouped", "grid"):
            raise NotImplementedError(f"Balance.scope={self.scope!r} is planned; use 'global' or 'none'")
        if self.assignment == "per_phase":
            raise NotImplementedError("Balance.assignment='per_phase' is planned; use 'joint'")
        for name in ("order", "num_stages", "group_size"):
            if getattr(self, name) is not None:
                raise NotImplementedError(f"Balance.{name} is planned; leave it None")

    @property
    def caps(self) -> dict[str, int]:
        """Positions per microbatch and rank, by phase."""
        if self.max_tokens is None:
            return {}
        if isinstance(self.max_tokens, Mapping):
            return dict(self.max_tokens)
        return {"llm": self.max_tokens}


def as_balance(value: str | Balance, *, equal_count: bool = False) -> Balance:
    """The `balance=` argument of a DataLoader: a scope's name, or the whole value."""
    if isinstance(value, Balance):
        return value
    if value not in get_args(Scope):
        raise ValueError(f"balance must be one of {', '.join(get_args(Scope))} or an od.Balance, got {value!r}")
    return Balance(scope=value, equal_count=equal_count)  # type: ignore[arg-type]
