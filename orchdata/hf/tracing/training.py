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
PLACES = {
    "": r"\b(talker|token2wav)\b",
    CONNECTOR: r"\b(multi_modal_projector|mm_projector|connector|aligner|mlp1|(deepstack_)?merger(_list)?"
    r"|audio_tower\.(proj|proj1|proj2))\b",
    "image": r"\b(visual|vision_(tower|model|encoder)|image_(tower|encoder))\b",
    "audio": r"\b(audio_(tower|model|encoder)|encoder)\b",
}


@dataclass(frozen=True, slots=True)
class Training:
    """What of a tower, connector or LLM is trained.

    Attributes:
        share: of its weights, without adapters, those that are trained.
        gradients: something in it is trained, so that gradients come as far as here.
        adapters: operations a position in low-rank adapters next to the weights.
    """

    share: float = 1.0
    gradients: bool = True
    adapters: float = 0.0


FROZEN, ADAPTED = Training(0.0, False), Training(0.0, True)


def names_in(names: str | Iterable[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def said(places: tuple[str, ...], frozen: tuple[str, ...], lora: tuple[str, ...]) -> dict[str, Training]:
    """Training of each place, by what is named.

    Raises ValueError for a name that is none of the places, or that is in both.
    """
    allowed = {"frozen": list(dict.fromkeys(map(_word, places)))}
    allowed["lora"] = [word for word in allowed["frozen"] if word != CONNECTOR]
    for option, names in (("frozen", frozen), ("lora", lora)):
        if unknown := sorted(set(names) - set(allowed[option])):
            raise ValueError(f"{option} has {unknown[0]!r}, it may name {', '.join(allowed[option]) or 'nothing'}")
    if both := sorted(set(frozen) & set(lora)):
        raise ValueError(
            f"{both[0]!r} is in frozen and in lora: weights that have adapters are frozen, name it in lora only"
        )
    return {
        place: FROZEN if _word(place) in frozen else ADAPTED if _word(place) in lora else Training() for place in places
    }


def _word(place: str) -> str:
    """What `frozen` calls it: all connectors are one."""
    return CONNECTOR if place.endswith(CONNECTOR) else place


def read(model: nn.Module, places: tuple[str, ...], traced: Mapping[str, str]) -> dict[str, Training]:
    """Training of each place, by `requires_grad` of a model's parameters.

    Args:
        traced: name of a parameter -> its place, where a trace of the model found it.
    """
    from torch import nn

    head = getattr(model, "get_output_embeddings", lambda: None)()
    # A look-up is no product; where it is the output's weight too, it is.
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    looked_up -= {id(getattr(head, "weight", None))}
    found: dict[str, list[tuple[str, nn.Parameter]]] = {place: [] for place in places}
    homes = _homes(traced)
    for name, parameter in model.named_parameters():
        for place in _places_of(name, places, homes):
            found[place].append((name, parameter))
    if missing := [place for place in places if not found[place] and _word(place) != CONNECTOR]:
        raise ValueError(
            f"no parameter of {type(model).__name__} is named as those of an {missing[0]} tower are: give its config,"
            " and what of it is frozen"
        )
    return {place: _trained(parameters, looked_up, place) for place, parameters in found.items()}


def _trained(parameters: list[tuple[str, nn.Parameter]], looked_up: set[int], place: str) -> Training:
    weights = [
        (each.numel(), each.requires_grad)
        for name, each in parameters
        if each.dim() > 1 and id(each) not in looked_up and ADAPTER not in name
    ]
    total = sum(count for count, _ in weights)
    adapters = [each for name, each in parameters if ADAPTER in name and _word(place) != CONNECTOR]
    return Training(
        share=sum(count for count, trained in weights if trained) / total if total else 0.0,
        gradients=any(each.requires_grad for _, each in parameters),
        adapters=float(sum((6 if each.requires_grad else 2) * each.numel() for each in adapters)),
    )


def _homes(traced: Mapping[str, str]) -> dict[str, str]:
    """Name of a parameter or module -> its place, where all that is traced in a module is of one place or tower."""
    found: dict[str, set[str]] = {}
    for name, place in traced.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            found.setdefault(".".join(parts[:depth]), set()).add(place)
    homes: dict[str, str] = {}
    for name, inside in found.items():
        towers = {place for place in inside if _word(place) != CONNECTOR} or inside
        if len(towers) == 1:
            homes[name] = towers.pop()
    return homes


def _places_of(name: str, places: tuple[str, ...], homes: Mapping[str, str]) -> list[str]:
    plain = _ADDED.sub("", name)
    for start in (plain, f"model.{plain}", plain.removeprefix("model.")):
        parts = start.split(".")
        # Not the whole model: its own parameters are recognised by name.
        inside = (homes.get(".".join(parts[:depth])) for depth in range(len(parts), 1, -1))
        if (home := next((each for each in inside if each), None)) is not None:
            return [home] if home in places else []
    return _named(name, places)


def _named(name: str, places: tuple[str, ...]) -> list[str]:
    found = next((place for place, pattern in PLACES.items() if re.search(pattern, name)), BACKBONE)
    if found != CONNECTOR:
        return [found] if found in places else []
    connectors = [place for place in places if _word(place) == CONNECTOR]
    inside = [place for place in connectors if re.search(PLACES[place.split()[0]], name)]
    return inside or connectors
