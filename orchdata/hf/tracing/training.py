"""What of a model trains, by phase: said of a config, or read from the parameters of a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

BACKBONE = "llm"
CONNECTOR = "connector"
# In the names of PEFT's parameters.
ADAPTER = "lora_"
# What wrappers and PEFT add to the names of parameters.
_ADDED = re.compile(r"\b(module|_orig_mod|base_model\.model|base_layer)\.|\.lora_\w+\..*$")
# Where parameters of a model lie, by names on their way; the first that matches. What matches none is the LLM's.
COMPONENTS = {
    "": r"\b(talker|token2wav)\b",
    CONNECTOR: r"\b(multi_modal_projector|mm_projector|connector|aligner|mlp1|(deepstack_)?merger(_list)?"
    r"|audio_tower\.(proj|proj1|proj2))\b",
    "image": r"\b(visual|vision_(tower|model|encoder)|image_(tower|encoder))\b",
    "audio": r"\b(audio_(tower|model|encoder)|encoder)\b",
}


@dataclass(frozen=True, slots=True)
class Training:
    """How much of a tower, connector or LLM is trained.

    Attributes:
        share: trained share of its weights, without adapters.
        gradients: whether anything in it is trained, so that gradients reach it.
        adapters: operations a position in low-rank adapters next to the weights.
    """

    share: float = 1.0
    gradients: bool = True
    adapters: float = 0.0


FROZEN, ADAPTED = Training(0.0, False), Training(0.0, True)


def names_in(names: str | Iterable[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def said(components: tuple[str, ...], frozen: tuple[str, ...], lora: tuple[str, ...]) -> dict[str, Training]:
    """Return the training of each component, from the names in `frozen` and `lora`.

    Raises ValueError for a name that is none of the components, or that is in both.
    """
    allowed = {"frozen": list(dict.fromkeys(map(_word, components)))}
    allowed["lora"] = [word for word in allowed["frozen"] if word != CONNECTOR]
    for option, names in (("frozen", frozen), ("lora", lora)):
        if unknown := sorted(set(names) - set(allowed[option])):
            raise ValueError(f"{option} has {unknown[0]!r}, it may name {', '.join(allowed[option]) or 'nothing'}")
    if both := sorted(set(frozen) & set(lora)):
        raise ValueError(
            f"{both[0]!r} is in frozen and in lora: weights that have adapters are frozen, name it in lora only"
        )
    return {
        component: FROZEN if _word(component) in frozen else ADAPTED if _word(component) in lora else Training()
        for component in components
    }


def _word(component: str) -> str:
    """Return the name of a component in `frozen`, which has one name for all connectors."""
    return CONNECTOR if component.endswith(CONNECTOR) else component


def read(model: nn.Module, components: tuple[str, ...], traced: Mapping[str, str]) -> dict[str, Training]:
    """Return the training of each component, from `requires_grad` of a model's parameters.

    Args:
        traced: name of a parameter -> its component, according to a trace of the model.
    """
    from torch import nn

    head = getattr(model, "get_output_embeddings", lambda: None)()
    # An embedding multiplies nothing, except if it is the output's weight too.
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    looked_up -= {id(getattr(head, "weight", None))}
    by_component: dict[str, list[tuple[str, nn.Parameter]]] = {component: [] for component in components}
    homes = _homes(traced)
    for name, parameter in model.named_parameters():
        for component in _components_of(name, components, homes):
            by_component[component].append((name, parameter))
    if missing := [
        component for component in components if not by_component[component] and _word(component) != CONNECTOR
    ]:
        raise ValueError(
            f"no parameter of {type(model).__name__} is named as those of an {missing[0]} tower are: give its config,"
            " and what of it is frozen"
        )
    return {component: _trained(parameters, looked_up, component) for component, parameters in by_component.items()}


def _trained(parameters: list[tuple[str, nn.Parameter]], looked_up: set[int], component: str) -> Training:
    weights = [
        (each.numel(), each.requires_grad)
        for name, each in parameters
        if each.dim() > 1 and id(each) not in looked_up and ADAPTER not in name
    ]
    total = sum(count for count, _ in weights)
    adapters = [each for name, each in parameters if ADAPTER in name and _word(component) != CONNECTOR]
    return Training(
        share=sum(count for count, trained in weights if trained) / total if total else 0.0,
        gradients=any(each.requires_grad for _, each in parameters),
        adapters=float(sum((6 if each.requires_grad else 2) * each.numel() for each in adapters)),
    )


def _homes(traced: Mapping[str, str]) -> dict[str, str]:
    """Map names of parameters and modules to their component, for modules with one component or tower."""
    within: dict[str, set[str]] = {}
    for name, component in traced.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            within.setdefault(".".join(parts[:depth]), set()).add(component)
    homes: dict[str, str] = {}
    for name, inside in within.items():
        towers = {component for component in inside if _word(component) != CONNECTOR} or inside
        if len(towers) == 1:
            homes[name] = towers.pop()
    return homes


def _components_of(name: str, components: tuple[str, ...], homes: Mapping[str, str]) -> list[str]:
    plain = _ADDED.sub("", name)
    for start in (plain, f"model.{plain}", plain.removeprefix("model.")):
        parts = start.split(".")
        # Not the whole model: its own parameters are recognised by name.
        inside = (homes.get(".".join(parts[:depth])) for depth in range(len(parts), 1, -1))
        if (home := next((each for each in inside if each), None)) is not None:
            return [home] if home in components else []
    return _named(name, components)


def _named(name: str, components: tuple[str, ...]) -> list[str]:
    named = next((component for component, pattern in COMPONENTS.items() if re.search(pattern, name)), BACKBONE)
    if named != CONNECTOR:
        return [named] if named in components else []
    connectors = [component for component in components if _word(component) == CONNECTOR]
    inside = [component for component in connectors if re.search(COMPONENTS[component.split()[0]], name)]
    return inside or connectors
