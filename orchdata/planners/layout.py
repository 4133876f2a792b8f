"""A run's layout: modules of a model, where they are, and how each is split: tensor parallelism, stages, replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.assignment import checked_count, checked_effort
from orchdata.balancers.costs.phase import PhaseCost, TransformerCost
from orchdata.planners.values import Value, checked_number

LLM: Final = "llm"
Sharding = Literal["optimizer", "full"]
Kind = Literal["one", "repeated", "shared", "first_stage", "own"]


@dataclass(frozen=True, slots=True)
class Module(Value):
    """A tower or the LLM: one phase of the loader.

    Attributes:
        name: the phase: "image", "audio", "llm", ...
        cost: shape, and what is trained of it; recomputation is the layout's matter.
        parameters: by default those of the products that `cost` counts, of all experts, and of an input embedding as
            large as the vocabulary's output.
        trained: True, False or the trained share of the parameters; by default what `cost` says.
        share: of a GPU's peak that kernels of full width reach; by default 0.5 for the LLM, 0.42 for others: declared.
        seconds: measured: tensor-parallel size -> seconds of a sequence of l positions, forward and backward, on one
            replica without a pipeline, its traffic included. Sizes that it lacks are not taken.
        error: relative error of that fit, root mean square.
        after: it runs after the LLM, as a generator.
    """

    name: str
    cost: TransformerCost
    parameters: float = None  # type: ignore[assignment]  # never None once made
    trained: bool | float = None  # type: ignore[assignment]
    share: float = None  # type: ignore[assignment]
    seconds: Mapping[int, PhaseCost] | None = None
    error: float = 0.0
    after: bool = False

    def __post_init__(self) -> None:
        named = f"Module({self.name!r})"
        if not isinstance(self.cost, TransformerCost):
            got = type(self.cost).__name__
            raise ValueError(f"{named}.cost must be an od.TransformerCost: a {got} has no layers, width and parameters")
        trained = self.cost.trainable if self.trained is None else self.trained
        cost = replace(self.cost, trainable=trained, recompute=False)
        parameters = _parameters(cost) if self.parameters is None else self.parameters
        share = self.share if self.share is not None else 0.5 if self.name == LLM else 0.42
        object.__setattr__(self, "cost", cost)
        object.__setattr__(self, "trained", cost.trainable)
        object.__setattr__(self, "parameters", checked_number(parameters, f"{named}.parameters"))
        object.__setattr__(self, "share", checked_number(share, f"{named}.share", most=1.0))
        checked_effort(self.error, f"{named}.error")

    @property
    def has_gradients(self) -> bool:
        """Whether its inputs or weights need gradients: it has a backward pass."""
        return bool(self.trained) or self.cost.input_gradients

    def operations(self, positions: NDArray[np.int64], *, recompute: bool = False, forward: bool = False) -> Any:
        """Return operations of each sequence of so many positions, float64; `forward`: of that pass alone."""
        cost = _forward(self.cost) if forward else replace(self.cost, recompute=recompute and self.has_gradients)
        return cost.phase_cost().at(positions.astype(np.float64))

    def refused(self, tp: int, pp: int) -> str:
        """Say why so many GPUs cannot split it; empty if they can."""
        heads, layers = self.cost.heads, self.cost.layers
        if heads and heads % tp:
            return f"tp={tp} does not divide its {heads} heads"
        if layers % pp:
            return f"pp={pp} does not divide its {layers} layers"
        if self.seconds is not None and tp not in self.seconds:
            return f"tp={tp} was not measured: Module.seconds has {[*self.seconds]}"
        return ""


def _forward(cost: TransformerCost) -> TransformerCost:
    frozen: dict[str, Any] = dict.fromkeys(("trainable", "input_gradients", "connector_trainable"), False)
    return replace(cost, **frozen, cross_gradients=False, recompute=False)


def _parameters(cost: TransformerCost) -> float:
    experts = cost.moe and replace(cost.moe, top_k=cost.moe.num_experts)
    whole = replace(_forward(cost), cross_positions=None, moe=experts)
    return whole.phase_cost().linear / 2 + cost.hidden * (cost.vocab or 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement(Value):
    """How a module is split.

    Attributes:
        tp, pp, dp: GPUs that share each layer; stages of equal parts of the layers; replicas with their own samples.
        sharding: None: every replica has all states (DDP); "optimizer": the optimizer's are over dp (ZeRO-1);
            "full": all are (FSDP).
        recompute: "full": layers are computed again in the backward pass.
    """

    module: Module
    tp: int = 1
    pp: int = 1
    dp: int = 1
    sharding: Sharding | None = None
    recompute: Literal["full"] | None = None

    def __post_init__(self) -> None:
        named = f"Placement({self.module.name!r})"
        for name in ("tp", "pp", "dp"):
            object.__setattr__(self, name, checked_count(getattr(self, name), f"{named}.{name}"))
        for name, values in {"sharding": (None, *get_args(Sharding)), "recompute": (None, "full")}.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{named}.{name} must be one of {values}, got {getattr(self, name)!r}")
        if refused := self.module.refused(self.tp, self.pp):
            raise ValueError(f"{named}.{refused}")
        if self.sharding == "full" and self.pp > 1:
            raise ValueError(f"{named}.sharding='full' has no formula with pp={self.pp}: use 'optimizer'")

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def again(self) -> bool:
        """Whether its layers are computed again."""
        return self.recompute is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout(Value):
    """All modules of a run.

    Attributes:
        placements: of the encoders and generators, and of the LLM, which is last.
        kind: where encoders are. On the LLM's GPUs, with its sharding: "one": split as it is, without a pipeline;
            "first_stage": the same, on those of the first stage of its pipeline; "repeated": tensor-parallel peers
            encode the same; "shared": replicas of one GPU on all of them. "own": on GPUs of their own, stages of one
            pipeline with the LLM's.
        microbatch_tokens: most LLM tokens of a microbatch: `Balance.max_tokens`.
        assignment: of the loader, where every encoder has as many replicas as the LLM; else parts are spread anyway.
    """

    placements: tuple[Placement, ...]
    kind: Kind = "one"
    microbatch_tokens: int
    assignment: Literal["joint", "per_phase"] = "joint"

    def __post_init__(self) -> None:
        checked_count(self.microbatch_tokens, "Layout.microbatch_tokens")
        names = [each.module.name for each in self.placements]
        if not names or names[-1] != LLM or len(set(names)) < len(names):
            raise ValueError(f"Layout.placements must be of different modules, {LLM!r} last, got {names}")
        if self.assignment != "joint" and self.kind not in ("one", "repeated"):
            raise ValueError(f"Layout.assignment must be 'joint' with kind={self.kind!r}, got {self.assignment!r}")
        llm, apart = self.llm, self.kind == "own"
        tp, dp = {"repeated": (1, llm.dp), "shared": (1, llm.gpus)}.get(self.kind, (llm.tp, llm.dp))
        stages = {"one": llm.pp == 1, "repeated": llm.pp == 1, "first_stage": llm.pp > 1, "shared": True, "own": True}
        for each in self.placements:
            same = each is llm or (each.tp, each.pp, each.dp, each.sharding) == (tp, 1, dp, llm.sharding)
            if not stages.get(self.kind) or not (each.sharding != "full" if apart else same):
                of, its = (f"tp={one.tp}, pp={one.pp}, dp={one.dp}, {one.sharding}" for one in (each, llm))
                raise ValueError(f"Layout.kind={self.kind!r} has no {each.module.name} of {of} next to an LLM of {its}")

    @property
    def llm(self) -> Placement:
        return self.placements[-1]

    @property
    def gpus(self) -> int:
        """GPUs that it uses."""
        return sum(each.gpus for each in self.placements) if self.kind == "own" else self.llm.gpus

    @property
    def runs(self) -> str:
        """Empty if this library's loader serves it today, else who does, or "not yet"."""
        in_pipeline = "not yet" if self.llm.pp > 1 else ""  # encoders on the GPUs of all stages
        return {"shared": in_pipeline, "own": "Megatron-LM MIMO, not this loader"}.get(self.kind, "")


def checked_modules(modules: Sequence[Module], phases: Sequence[str]) -> tuple[Module, ...]:
    """Return the modules in the order of the phases, the LLM last. Raises ValueError for a phase without a module, a
    module twice or of no phase, or gradients that cannot flow.
    """
    by_name = {module.name: module for module in modules}
    for phase in phases:
        if phase not in by_name:
            raise ValueError(f"phase {phase!r} has no module: the modules are {', '.join(by_name) or 'none'}")
    if len(modules) > len(phases):
        names = [module.name for module in modules]
        raise ValueError(f"modules must be one for each phase, {', '.join(phases)}; got {', '.join(names)}")
    ordered = tuple(by_name[phase] for phase in phases)
    llm, before = ordered[-1], [module.name for module in ordered[:-1] if module.has_gradients and not module.after]
    if before and not llm.has_gradients:
        raise ValueError(
            f"module 'llm' is frozen, and {before[0]!r} before it is trained: give its cost input_gradients=True"
        )
    return ordered
