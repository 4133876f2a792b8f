"""A Hugging Face config or model -> the CostModel of its training.

    config --rule of its family--------> operations of each phase
    requires_grad, or names  ----------> which passes each has: forward, gradients of inputs, gradients of weights

Gradients are needed wherever something trains, and in all that lies between it and the loss. So a frozen tower is
forward only, and a frozen LLM after a trained projector is differentiated through.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

from orchdata.balancers.costs.families import PARTS, model_keys, phase_keys, phases_of
from orchdata.balancers.costs.model import CostModel
from orchdata.balancers.costs.phase import PhaseCost, TransformerCost

if TYPE_CHECKING:
    from torch import nn

BACKBONE: Final = "llm"
CONNECTOR: Final = "connector"
# Models whose towers and connectors have rules that tests hold equal to what torch counts, and these towers.
_WHOLE: Final = frozenset(
    "gemma3 idefics3 internvl internvl_chat llava llava_next llava_onevision paligemma qwen2_vl qwen2_5_vl qwen3_vl "
    "qwen2_5_omni qwen2_5_omni_thinker qwen2_audio smolvlm whisper".split()
)
_TOWERS: Final = frozenset(
    "clip_vision_model siglip_vision_model intern_vit_6b internvl_vision idefics3 idefics3_vision smolvlm "
    "smolvlm_vision qwen2_vl qwen2_vl_vision qwen2_5_vl qwen2_5_vl_vision qwen3_vl qwen3_vl_vision "
    "qwen2_5_omni_vision_encoder qwen2_5_omni_audio_encoder qwen2_audio_encoder whisper".split()
)
_BY_HAND: Final = "write the whole by hand, cost=od.CostModel(image=od.TransformerCost(...), llm=...)"
# In the names of PEFT's parameters.
_ADAPTER: Final = "lora_"
# What wrappers and PEFT add to the names of parameters.
_ADDED: Final = re.compile(r"\b(module|_orig_mod|base_model\.model|base_layer)\.|\.lora_\w+\..*$")
# Where parameters of a model lie, by names on their way; the first that matches. What matches none is the LLM's.
_COMPONENTS: Final = {
    "": r"\b(talker|token2wav)\b",
    CONNECTOR: r"\b(multi_modal_projector|mm_projector|connector|aligner|mlp1|(deepstack_)?merger(_list)?"
    r"|audio_tower\.(proj|proj1|proj2))\b",
    "image": r"\b(visual|vision_(tower|model|encoder)|image_(tower|encoder))\b",
    "audio": r"\b(audio_(tower|model|encoder)|encoder)\b",
}


@dataclass(frozen=True, slots=True)
class Training:
    """How much of a tower, connector or LLM is trained: the share of its weights, without adapters; whether gradients
    reach anything in it; operations a position in low-rank adapters next to the weights.
    """

    share: float = 1.0
    gradients: bool = True
    adapters: float = 0.0


_FROZEN, _ADAPTED = Training(0.0, False), Training(0.0, True)


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
    before merging, of all tiles together; positions of the encoder in Whisper, Qwen2-Audio (of the whole window of 30
    s, however short the clip) and Qwen2.5-Omni; elsewhere frames of the features of a clip.

    A text model without a rule is read by the usual keys of configs, if these say all that counts. The towers of a
    model without rules are yours to give.

    Args:
        model: a config, of which all is trained that is not named below; or a model, of which all is read: its
            weights' `requires_grad`, and PEFT's adapters among them.
        frozen: what is not trained: "image", "audio", "llm", and "connector" for what lies between towers and LLM.
        lora: phases that have adapters, frozen besides. Their own products are counted in a model only.
        video_patches: patches of a temporal patch of videos, as most have: adds the phase "video", of the image tower,
            which attends within each temporal patch alone, as those of Qwen-VL.
        phases: as `CostModel.from_config`: attributes of a phase's TransformerCost, as in `llm={"recompute": "full"}`,
            or its whole cost, for a phase without a rule; None leaves it out.

    Raises:
        ValueError: a config that lacks a size or a rule, or contradicts itself, a phase it does not have, names for a
            model, or a model whose parameters are not found where others have theirs.
    """
    words = {"frozen": frozen, "lora": lora}
    given = {name: (each,) if isinstance(each, str) else tuple(each) for name, each in words.items()}
    if hasattr(model, "named_parameters"):
        if named := [name for name, each in given.items() if each]:
            raise ValueError(
                f"{named[0]}= is for configs: of a model, requires_grad of its parameters says what trains"
            )
        model = model if hasattr(model, "config") else getattr(model, "module", model)
        if not hasattr(model, "config"):
            raise ValueError(f"{type(model).__name__} has no config: give the model of transformers inside of it")
        config = getattr(model.config, "thinker_config", None) or model.config  # of an omni model
        training = _read(model, _components_of(config))
    else:
        config = getattr(model, "thinker_config", None) or model
        training = _said(_components_of(config), **given)
    cost = CostModel(**_priced(config, training, phases))
    if video_patches is None:
        return cost
    # Videos in the image tower: a temporal patch is a sequence there.
    costs = dict(zip(cost.phases, cost.costs, strict=True))
    if "image" not in costs:
        raise ValueError(f"video_patches={video_patches} is of a model that has an image tower, and this has none")
    tower = costs["image"]
    windows = (*tower.windows, (video_patches, tower.quadratic))
    return CostModel(**costs, video=PhaseCost(tower.linear + tower.constant / video_patches, windows=windows))


def _phases(config: Any) -> tuple[str, ...]:
    """Return the phases of a config. Raises ValueError for parts of it that are none."""
    keys, known = model_keys(config), {name for names in PARTS.values() for name in names}
    parts = {name for name, value in keys.items() if isinstance(value, Mapping) and value.get("model_type")}
    phases = phases_of(config)
    if BACKBONE not in phases or (parts and parts - known):
        what = ", ".join(sorted(parts - known)) or "no text model"
        raise ValueError(f"od.hf.cost does not read a {keys.get('model_type')} config, which has {what}: {_BY_HAND}")
    return phases


def _components_of(config: Any) -> tuple[str, ...]:
    """The phases of a config, and the connectors of its towers: "image connector"."""
    phases = _phases(config)
    # A decoder attends to its encoder, without anything between.
    towers = () if model_keys(config).get("decoder_layers") else [phase for phase in phases if phase != BACKBONE]
    return (*phases, *(f"{tower} {CONNECTOR}" for tower in towers))


def _priced(config: Any, training: Mapping[str, Training], given: Mapping[str, Any]) -> dict[str, Any]:
    """Phase -> its cost, of all phases."""
    phases = _phases(config)
    if unknown := sorted(set(given) - set(phases)):
        raise ValueError(f"the config has no phase {unknown[0]!r}, it describes {', '.join(phases)}")
    priced: dict[str, Any] = {}
    before = any(trained.gradients for component, trained in training.items() if component != BACKBONE)
    for phase in phases:
        sizes, trained = given.get(phase, {}), training[phase]
        if not isinstance(sizes, Mapping):
            priced[phase] = sizes
            continue
        passes = {"trainable": trained.share, "input_gradients": trained.gradients}
        if phase == BACKBONE:
            passes |= {"input_gradients": trained.gradients or before, "cross_gradients": before}
        else:
            passes["connector_trainable"] = training.get(f"{phase} {CONNECTOR}", _FROZEN).share
        if wrong := sorted(set(sizes) - {each.name for each in fields(TransformerCost)}):
            raise ValueError(
                f"{phase}={dict(sizes)!r} must map attributes of TransformerCost to values, and {wrong[0]!r} is none "
                "of them; a PhaseCost or TransformerCost is taken as it is, None leaves the phase out"
            )
        cost = _by_rule(config, phase, {**passes, **sizes})
        priced[phase] = cost + PhaseCost(trained.adapters) if trained.adapters else cost
    return priced


def _by_rule(config: Any, phase: str, given: Mapping[str, Any]) -> PhaseCost:
    keys = model_keys(config)
    kind = (phase_keys(keys, phase) or {}).get("model_type")
    if phase != BACKBONE and not (keys.get("model_type") in _WHOLE and kind in _TOWERS):
        raise ValueError(
            f"od.hf.cost has no rule for the {phase} phase of {keys.get('model_type')}. Give its cost, "
            f"{phase}=od.PhaseCost(...), leave it out, {phase}=None, or {_BY_HAND}"
        )
    try:
        whole = TransformerCost.from_config(config, phase, **given)
    except ValueError as error:
        raise ValueError(
            f"{error}. To cost() a size is said as {phase}={{name: value}}, a phase as {phase}=TransformerCost(...)"
            f" or {phase}=PhaseCost(...)"
        ) from error
    return _used(config, phase, whole)


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
    cost = replace(tower, layers=tower.layers - unused).phase_cost()
    if unused:
        idle: dict[str, Any] = dict.fromkeys(("stem_macs", "connector_macs", "connector_first_macs"), 0)
        cost += replace(tower, layers=unused, trainable=False, input_gradients=False, **idle).phase_cost()
    own = phase_keys(keys, phase)
    if phase == "image" and own is not keys and (own or {}).get("vision_use_head"):
        cost += PhaseCost(4.0 * tower.hidden**2)  # SigLIP's pooling: keys and values
    return cost


def _said(components: tuple[str, ...], frozen: tuple[str, ...], lora: tuple[str, ...]) -> dict[str, Training]:
    """Return the training of each component, from the names in `frozen` and `lora`."""
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
        component: _FROZEN if _word(component) in frozen else _ADAPTED if _word(component) in lora else Training()
        for component in components
    }


def _word(component: str) -> str:
    """Return the name of a component in `frozen`, which has one name for all connectors."""
    return CONNECTOR if component.endswith(CONNECTOR) else component


def _read(model: nn.Module, components: tuple[str, ...]) -> dict[str, Training]:
    """Return the training of each component, from `requires_grad` of a model's parameters."""
    from torch import nn

    head = getattr(model, "get_output_embeddings", lambda: None)()
    # An embedding multiplies nothing, except if it is the output's weight too.
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    looked_up -= {id(getattr(head, "weight", None))}
    by_component: dict[str, list[tuple[str, nn.Parameter]]] = {component: [] for component in components}
    for name, parameter in model.named_parameters():
        for component in _named(_ADDED.sub("", name), components):
            by_component[component].append((name, parameter))
    if missing := [each for each in components if not by_component[each] and _word(each) != CONNECTOR]:
        raise ValueError(
            f"no parameter of {type(model).__name__} is named as those of an {missing[0]} tower are: give its config,"
            " and what of it is frozen"
        )
    read = {}
    for component, named in by_component.items():
        weights = [
            each for name, each in named if each.dim() > 1 and id(each) not in looked_up and _ADAPTER not in name
        ]
        total = sum(each.numel() for each in weights)
        adapters = [each for name, each in named if _ADAPTER in name and _word(component) != CONNECTOR]
        read[component] = Training(
            share=sum(each.numel() for each in weights if each.requires_grad) / total if total else 0.0,
            gradients=any(each.requires_grad for _, each in named),
            adapters=float(sum((6 if each.requires_grad else 2) * each.numel() for each in adapters)),
        )
    return read


def _named(name: str, components: tuple[str, ...]) -> list[str]:
    """Return the components that a parameter of a name is in."""
    named = next((component for component, pattern in _COMPONENTS.items() if re.search(pattern, name)), BACKBONE)
    if named != CONNECTOR:
        return [named] if named in components else []
    connectors = [component for component in components if _word(component) == CONNECTOR]
    inside = [component for component in connectors if re.search(_COMPONENTS[component.split()[0]], name)]
    return inside or connectors
