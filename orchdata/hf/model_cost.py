"""A Hugging Face config or model -> the CostModel of its training.

    config --balancers.costs--> sizes of each phase
    requires_grad, or names  --> which passes each phase has: forward, gradients of inputs, gradients of weights

Gradients are needed wherever something trains, and in all that lies between it and the loss. So a frozen tower is
forward only, and a frozen LLM behind a trained projector is differentiated through.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from orchdata.balancers import CostModel, PhaseCost, TransformerCost
from orchdata.balancers.costs.families import model_keys, phase_keys, phases_of

if TYPE_CHECKING:
    from torch import nn

BACKBONE = "llm"
CONNECTOR = "connector"
# In the names of PEFT's parameters.
ADAPTER = "lora_"
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
        adapters: operations a position in low-rank adapters beside the weights.
    """

    share: float = 1.0
    gradients: bool = True
    adapters: float = 0.0


FROZEN, ADAPTED = Training(0.0, False), Training(0.0, True)


def cost(
    model: Any,
    *,
    frozen: str | Iterable[str] = (),
    lora: str | Iterable[str] = (),
    video_patches: int | None = None,
    **phases: Mapping[str, Any] | PhaseCost | TransformerCost | None,
) -> CostModel:
    """The cost model of a Hugging Face model in training, in floating-point operations.

    `cost(model)` after `requires_grad_(False)` and adapters are in place, before the model is wrapped (FSDP), or
    `cost(config, frozen=("image",), lora=("llm",))`. The unit of length of a tower is what its modality counts: patches
    before merging, of all tiles together; positions of the encoder, of the whole window of 30 s in Whisper and
    Qwen2-Audio, whatever the clip.

    Args:
        model: a config, of which all is trained that is not named below; or a model, of which all is read: its
            weights' `requires_grad`, and PEFT's adapters among them.
        frozen: what is not trained: "image", "audio", "llm", and "connector" for what lies between towers and LLM.
        lora: phases that have adapters, frozen besides. Their own products are counted in a model only.
        video_patches: patches of a temporal patch of videos, as most have: adds the phase "video", of the image tower,
            which attends within each temporal patch alone, as those of Qwen-VL.
        phases: as `CostModel.from_config`: attributes of a phase's TransformerCost, as in `llm={"recompute": "full"}`,
            or its whole cost, for a phase that the config does not describe well; None leaves it out.

    Raises:
        ValueError: a config that lacks a size, contradicts itself or describes layers that are not known here, a phase
            it does not have, names for a model, or a model whose parameters are not found where others have theirs.
    """
    given = {"frozen": _names(frozen), "lora": _names(lora)}
    if hasattr(model, "named_parameters"):
        if said := [name for name, named in given.items() if named]:
            raise ValueError(f"{said[0]}= is for configs: of a model, requires_grad of its parameters says what trains")
        model = model if hasattr(model, "config") else getattr(model, "module", model)
        if not hasattr(model, "config"):
            raise ValueError(f"{type(model).__name__} has no config: give the model of transformers inside of it")
        config = model.config
        training = _read(model, _places_of(config))
    else:
        config = model
        training = _said(_places_of(config), **given)
    found = CostModel.from_config(config, **_priced(config, training, phases))
    return found if video_patches is None else _with_video(found, video_patches)


def _with_video(model: CostModel, patches: int) -> CostModel:
    """The same, and videos in the image tower: a temporal patch is a sequence there."""
    costs = dict(zip(model.phases, model.costs, strict=True))
    if "image" not in costs:
        raise ValueError(f"video_patches={patches} is of a model that has an image tower, and this has none")
    tower = costs["image"]
    windows = (*tower.windows, (patches, tower.quadratic))
    video = PhaseCost(tower.linear + tower.constant / patches, windows=windows)
    return CostModel(**costs, video=video)


def _places_of(config: Any) -> tuple[str, ...]:
    """The phases of a config, and the connectors of its towers: "image connector"."""
    phases = phases_of(config)
    # A decoder attends to its encoder, without anything between.
    towers = () if model_keys(config).get("decoder_layers") else [phase for phase in phases if phase != BACKBONE]
    return (*phases, *(f"{tower} {CONNECTOR}" for tower in towers))


def _priced(config: Any, training: Mapping[str, Training], phases: Mapping[str, Any]) -> dict[str, Any]:
    """Phase -> its cost, of the phases that are not given whole."""
    priced = dict(phases)
    before = any(trained.gradients for place, trained in training.items() if place != BACKBONE)
    for phase in phases_of(config):
        given, trained = phases.get(phase, {}), training[phase]
        if not isinstance(given, Mapping):
            continue
        passes = {"trainable": trained.share, "input_gradients": trained.gradients}
        if phase == BACKBONE:
            passes |= {"input_gradients": trained.gradients or before, "cross_gradients": before}
        else:
            passes["connector_trainable"] = training.get(f"{phase} {CONNECTOR}", FROZEN).share
        try:
            whole = TransformerCost.from_config(config, phase, **{**passes, **given})
        except ValueError as error:
            raise ValueError(
                f"{error}. To cost() a size is said as {phase}={{name: value}}, a phase as {phase}=TransformerCost(...)"
                f" or {phase}=PhaseCost(...)"
            ) from error
        found = _used(config, phase, whole)
        priced[phase] = found + PhaseCost(trained.adapters) if trained.adapters else found
    return priced


def _used(config: Any, phase: str, tower: TransformerCost) -> PhaseCost:
    """The cost of a phase, in which what no feature comes from is computed forward only."""
    keys = model_keys(config)
    chosen = keys.get("vision_feature_layer") if phase == "image" else None
    unused = 0
    if chosen is not None:
        # Numbered from 0, the embedding; or from the end.
        chosen = chosen if isinstance(chosen, list | tuple) else [chosen]
        last = max(layer if layer >= 0 else tower.layers + 1 + layer for layer in chosen)
        unused = min(max(0, tower.layers - last), tower.layers - 1)
    found = replace(tower, layers=tower.layers - unused).phase_cost()
    idle: dict[str, Any] = {
        "trainable": False,
        "input_gradients": False,
        "stem_macs": 0,
        "connector_macs": 0,
        "connector_first_macs": 0,
    }
    if unused:
        found += replace(tower, layers=unused, **idle).phase_cost()
    if (
        phase == "image"
        and phase_keys(keys, phase) is not keys
        and (phase_keys(keys, phase) or {}).get("vision_use_head")
    ):
        found += PhaseCost(4.0 * tower.hidden**2)  # SigLIP's pooling: keys and values
    return found


def _names(names: str | Iterable[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _said(places: tuple[str, ...], frozen: tuple[str, ...], lora: tuple[str, ...]) -> dict[str, Training]:
    allowed = {"frozen": list(dict.fromkeys(map(_word, places)))}
    allowed["lora"] = [word for word in allowed["frozen"] if word != CONNECTOR]
    for option, names in (("frozen", frozen), ("lora", lora)):
        if unknown := sorted(set(names) - set(allowed[option])):
            raise ValueError(f"{option} has {unknown[0]!r}, it may name {', '.join(allowed[option]) or 'nothing'}")
    if both := sorted(set(frozen) & set(lora)):
        raise ValueError(f"{both[0]!r} is in frozen and in lora: weights beside adapters are frozen, name it in lora")
    return {
        place: FROZEN if _word(place) in frozen else ADAPTED if _word(place) in lora else Training() for place in places
    }


def _word(place: str) -> str:
    """What `frozen` calls it: all connectors are one."""
    return CONNECTOR if place.endswith(CONNECTOR) else place


def _read(model: nn.Module, places: tuple[str, ...]) -> dict[str, Training]:
    from torch import nn

    head = getattr(model, "get_output_embeddings", lambda: None)()
    # A look-up is no product; where it is the output's weight too, it is.
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    looked_up -= {id(getattr(head, "weight", None))}
    found: dict[str, list[tuple[str, nn.Parameter]]] = {place: [] for place in places}
    for name, parameter in model.named_parameters():
        for place in _places_of_parameter(name, places):
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


def _places_of_parameter(name: str, places: tuple[str, ...]) -> list[str]:
    found = next((place for place, pattern in PLACES.items() if re.search(pattern, name)), BACKBONE)
    if found != CONNECTOR:
        return [found] if found in places else []
    connectors = [place for place in places if _word(place) == CONNECTOR]
    inside = [place for place in connectors if re.search(PLACES[place.split()[0]], name)]
    return inside or connectors
