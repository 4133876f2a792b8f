"""How much of a step ranks wait under each setting of balancing, planned over the same steps, with standard errors.

PlannedSteps by setting --waiting, paired differences--> Setting
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Final, Literal, get_args

from orchdata.planning.costs import IndexCosts
from orchdata.profiling.ranks.planned import CLEAR, PlannedSteps

SettingName = Literal["none", "llm", "joint", "per_phase", "grouped", "grid", "tokens"]
SETTINGS: Final[tuple[SettingName, ...]] = get_args(SettingName)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A way to assign samples to ranks, over the planned steps.

    Attributes:
        waiting: share of the step that ranks wait for each other, mean over ranks, by the cost model; padding of a
            microbatch counts as waiting.
        waiting_error: its standard error over steps, larger for few steps by Student's t; None for a single step.
        costliest: cost of the costliest step over a perfectly even one.
        phases: phase of the cost model -> its part of `waiting`; empty if ranks meet at the end of the step only.
        samples, tokens: samples and LLM tokens of a step, mean.
        microbatches: microbatches of each rank in a step, mean.
        better_than: settings with more waiting, by at least three standard errors of the difference over steps.
    """

    waiting: float
    waiting_error: float | None
    costliest: float
    phases: Mapping[str, float]
    samples: float
    tokens: float
    microbatches: float
    better_than: tuple[SettingName, ...]


@dataclass(frozen=True)
class LlmAlone(IndexCosts):
    """Costs for a balancer that looks at LLM tokens alone."""

    @classmethod
    def of(cls, costs: IndexCosts) -> LlmAlone:
        return cls(**{field.name: getattr(costs, field.name) for field in fields(costs)})

    @property
    def balanced(self) -> tuple[str, ...]:
        return ("llm",)


def is_better(one: PlannedSteps, other: PlannedSteps, *, paired: bool) -> bool:
    """Whether ranks wait less in `one`, by at least `CLEAR` standard errors of the difference.

    Without an error, of single steps, it is never known.
    """
    error = one.difference_error(other, paired=paired)
    return error is not None and other.waiting - one.waiting > max(CLEAR * error, 1e-9)


def make_settings(
    planned: Mapping[SettingName, PlannedSteps], *, of_other_steps: Collection[SettingName] = ()
) -> dict[SettingName, Setting]:
    """Return the settings.

    Args:
        of_other_steps: settings that are planned over the same steps as each other, and over others than the rest.
            "tokens" has steps of its own.
    """

    def steps_of(name: SettingName) -> str:
        return "tokens" if name == "tokens" else "other" if name in of_other_steps else "same"

    def better_than(name: SettingName) -> tuple[SettingName, ...]:
        return tuple(
            other
            for other in planned
            if other != name and is_better(planned[name], planned[other], paired=steps_of(name) == steps_of(other))
        )

    return {
        name: Setting(
            waiting=steps.waiting,
            waiting_error=steps.waiting_error,
            costliest=steps.costliest,
            phases={phase: steps.waiting_in(phase) for phase in steps.balanced} if steps.adds_up else {},
            samples=steps.mean_samples,
            tokens=steps.mean_tokens,
            microbatches=steps.mean_microbatches,
            better_than=better_than(name),
        )
        for name, steps in planned.items()
    }
