"""A Hugging Face config or model -> the CostModel of its training.

    config --rule of its family, or trace--> operations of each phase
    requires_grad, or names  --------------> which passes each has: forward, gradients of inputs, gradients of weights

Gradients are needed wherever something trains, and in all that lies between it and the loss. So a frozen tower is
forward only, and a frozen LLM after a trained projector is differentiated through.

Families whose rules are held equal to what torch counts are read from the config alone. Of any other the model that
transformers builds is run without its numbers (`orchdata.hf.tracing`), and what it multiplies is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from orchdata.balancers import CostModel, PhaseCost, TransformerCost
from orchdata.balancers.costs.families import model_keys, phase_keys, phases_of
from orchdata.hf.tracing.training import BACKBONE, CONNECTOR, FROZEN, Training, names_in, read, said

# Families whose rules tests hold equal to what torch counts: of the LLM, of the whole model with its connector, and of
# the towers that such a model may have.
_RULED: Final = {
    "llm": frozenset(
        "gemma gemma2 gemma3_text glm4_moe gpt_oss llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe qwen2_vl_text "
        "qwen2_5_vl_text qwen3_vl_text qwen2_5_omni_text whisper".split()
    ),
    "whole": frozenset(
        "gemma3 idefics3 internvl internvl_chat llava llava_next llava_onevision paligemma qwen2_vl qwen2_5_vl "
        "qwen3_vl qwen2_5_omni qwen2_5_omni_thinker qwen2_audio smolvlm whisper".split()
    ),
    "tower": frozenset(
        "clip_vision_model siglip_vision_model intern_vit_6b internvl_vision idefics3 idefics3_vision smolvlm "
        "smolvlm_vision qwen2_vl qwen2_vl_vision qwen2_5_vl qwen2_5_vl_vision qwen3_vl qwen3_vl_vision "
        "qwen2_5_omni_vision_encoder qwen2_5_omni_audio_encoder qwen2_audio_encoder whisper".split()
    ),
}
# What may be said of a phase that is traced; all else are sizes, which are its config's.
_PASSES: Final = frozenset(("trainable", "input_gradients", "connector_trainable", "recompute", "flash", "causal"))


@dataclass(frozen=True, slots=True)
class _Described:
    """The phases of a model, and how each is priced.

    Attributes:
        phases: in the order in which CostModel has them.
        traced: of these, what a trace found.
        parameters: name of a parameter -> where it lies, as traced.
    """

    phases: tuple[str, ...]
    traced: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)


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

    Families without a rule are traced: the model is built without memory and run without its numbers, at several
    lengths, in a few seconds, once a process. It takes a config that transformers has a model for. The same config
    costs the same on every machine that has the same transformers; random state is left as it is.

    Args:
        model: a config, of which all is trained that is not named below; or a model, of which all is read: its
            weights' `requires_grad`, and PEFT's adapters among them.
        frozen: what is not trained: "image", "audio", "llm", and "connector" for what lies between towers and LLM.
        lora: phases that have adapters, frozen besides. Their own products are counted in a model only.
        video_patches: patches of a temporal patch of videos, as most have: adds the phase "video", of the image tower,
            which attends within each temporal patch alone, as those of Qwen-VL.
        phases: as `CostModel.from_config`: attributes of a phase's TransformerCost, as in `llm={"recompute": "full"}`,
            or its whole cost, for a phase that cannot be traced; None leaves it out. Of a phase that is traced:
            trainable, input_gradients, connector_trainable, recompute, flash and causal; with sizes it is read by the
            usual keys.

    Raises:
        ValueError: a config that lacks a size, contradicts itself or whose model cannot be traced, a phase it does not
            have, names for a model, or a model whose parameters are not found where others have theirs.
    """
    given = {"frozen": names_in(frozen), "lora": names_in(lora)}
    if hasattr(model, "named_parameters"):
        if named := [name for name, words in given.items() if words]:
            raise ValueError(
                f"{named[0]}= is for configs: of a model, requires_grad of its parameters says what trains"
            )
        model = model if hasattr(model, "config") else getattr(model, "module", model)
        if not hasattr(model, "config"):
            raise ValueError(f"{type(model).__name__} has no config: give the model of transformers inside of it")
        config = _thinker(model.config)
        described = _described(config, phases)
        training = read(model, _components_of(config, described.phases), described.parameters)
    else:
        config = _thinker(model)
        described = _described(config, phases)
        training = said(_components_of(config, described.phases), **given)
    cost = CostModel(**_priced(config, described, training, phases))
    return cost if video_patches is None else _with_video(cost, video_patches)


def _with_video(model: CostModel, patches: int) -> CostModel:
    """The same, and videos in the image tower: a temporal patch is a sequence there."""
    costs = dict(zip(model.phases, model.costs, strict=True))
    if "image" not in costs:
        raise ValueError(f"video_patches={patches} is of a model that has an image tower, and this has none")
    tower = costs["image"]
    windows = (*tower.windows, (patches, tower.quadratic))
    video = PhaseCost(tower.linear + tower.constant / patches, windows=windows)
    return CostModel(**costs, video=video)


def _thinker(config: Any) -> Any:
    """Return the thinker of an omni model's configuration."""
    return getattr(config, "thinker_config", None) or config


def _described(config: Any, given: Mapping[str, Any]) -> _Described:
    """Return the phases of a config. A phase without a rule is traced, unless the user gives its cost or its sizes."""
    by_keys = phases_of(config)
    kind = model_keys(config).get("model_type")
    # Of a model that is known as a whole: another may have towers that its keys do not show.
    is_ruled = kind in _RULED["whole"] | _RULED["llm"] and all(_is_ruled(config, phase) for phase in by_keys)
    config = None if is_ruled else _object_of(config)
    if config is None:
        return _Described(by_keys)
    from orchdata.hf.tracing.phases import has_media, traced

    media = has_media(config)
    phases = tuple(
        phase
        for phase in ("image", "audio", BACKBONE)
        if phase == BACKBONE or phase in media or (phase in by_keys and _is_ruled(config, phase))
    )
    wanted = frozenset(phase for phase in phases if not _is_ruled(config, phase) and _is_open(given.get(phase, {})))
    if not wanted:
        return _Described(phases)
    try:
        by_phase = traced(config, wanted)
    except Exception as error:  # noqa: BLE001 - a config may make its model raise anything
        by_phase = dict.fromkeys(wanted, error)
    parameters: dict[str, str] = {}
    for phase, each in by_phase.items():
        words = {"tower": phase, "connector": f"{phase} {CONNECTOR}", "llm": BACKBONE}
        parameters |= {name: words[component] for name, component in getattr(each, "components", {}).items()}
    return _Described(phases, {phase: by_phase[phase] for phase in wanted}, parameters)


def _is_open(given: Any) -> bool:
    """Return whether the cost of a phase must be computed: neither the cost nor sizes are given."""
    return isinstance(given, Mapping) and set(given) <= _PASSES


def _object_of(config: Any) -> Any:
    """The config as transformers has it; None where it knows no model for it."""
    try:
        from transformers import AutoConfig

        from orchdata.hf.families import model_class

        if isinstance(config, Mapping):
            config = AutoConfig.for_model(**config)
        model_class(config)
    except Exception:  # noqa: BLE001 - a config of another kind or version may raise anything
        return None
    return config


def _is_ruled(config: Any, phase: str) -> bool:
    """Return whether a phase has a rule, which tests compare with what torch counts."""
    keys = model_keys(config)
    kind = (phase_keys(keys, phase) or {}).get("model_type")
    if phase == BACKBONE:
        return kind in _RULED["llm"]
    return keys.get("model_type") in _RULED["whole"] and kind in _RULED["tower"]


def _components_of(config: Any, phases: Iterable[str]) -> tuple[str, ...]:
    """The phases of a config, and the connectors of its towers: "image connector"."""
    phases = tuple(phases)
    # A decoder attends to its encoder, without anything between.
    towers = () if model_keys(config).get("decoder_layers") else [phase for phase in phases if phase != BACKBONE]
    return (*phases, *(f"{tower} {CONNECTOR}" for tower in towers))


def _priced(
    config: Any, described: _Described, training: Mapping[str, Training], phases: Mapping[str, Any]
) -> dict[str, Any]:
    """Phase -> its cost, of all phases."""
    if unknown := sorted(set(phases) - set(described.phases)):
        has = ", ".join(described.phases) or "none"
        raise ValueError(f"the config has no phase {unknown[0]!r}, it describes {has}")
    priced: dict[str, Any] = {}
    before = any(trained.gradients for component, trained in training.items() if component != BACKBONE)
    for phase in described.phases:
        given, trained = phases.get(phase, {}), training[phase]
        if not isinstance(given, Mapping):
            priced[phase] = given
            continue
        passes = {"trainable": trained.share, "input_gradients": trained.gradients}
        if phase == BACKBONE:
            passes |= {"input_gradients": trained.gradients or before, "cross_gradients": before}
        else:
            passes["connector_trainable"] = training.get(f"{phase} {CONNECTOR}", FROZEN).share
        _check_known(phase, given)
        if phase in described.traced:
            cost = _of_trace(config, phase, described.traced[phase], {**passes, **given})
        else:
            cost = _by_rule(config, phase, {**passes, **given})
        priced[phase] = cost + PhaseCost(trained.adapters) if trained.adapters else cost
    return priced


def _check_known(phase: str, given: Mapping[str, Any]) -> None:
    known = {each.name for each in fields(TransformerCost)}
    if wrong := sorted(set(given) - known):
        raise ValueError(
            f"{phase}={dict(given)!r} must map attributes of TransformerCost to values, and {wrong[0]!r} is none of "
            "them; a PhaseCost or TransformerCost is taken as it is, None leaves the phase out"
        )


def _by_rule(config: Any, phase: str, given: Mapping[str, Any]) -> PhaseCost:
    try:
        whole = TransformerCost.from_config(config, phase, **given)
    except ValueError as error:
        raise ValueError(
            f"{error}. To cost() a size is said as {phase}={{name: value}}, a phase as {phase}=TransformerCost(...)"
            f" or {phase}=PhaseCost(...)"
        ) from error
    return _used(config, phase, whole)


def _of_trace(config: Any, phase: str, traced_phase: Any, given: Mapping[str, Any]) -> PhaseCost:
    if isinstance(traced_phase, Exception):
        kind = model_keys(config).get("model_type")
        raise ValueError(
            f"od.hf.cost has no rule for the {phase} phase of {kind}, and cannot trace it: "
            f"{type(traced_phase).__name__}: {str(traced_phase)[:300]}. Give its cost, {phase}=od.PhaseCost(...), "
            f"leave it out, {phase}=None, or write the whole by hand: cost={_by_hand(config)}"
        ) from traced_phase
    options = {name: value for name, value in given.items() if name not in ("input_gradients", "cross_gradients")}
    gradients = bool(given["trainable"] or given["input_gradients"])
    cost: PhaseCost = traced_phase.cost(**options, gradients=gradients)
    return cost


def _by_hand(config: Any) -> str:
    """A cost model to begin with, as it can be copied: of the sizes that the config has."""
    keys = model_keys(config)
    lines = []
    for phase in ("image", "audio", BACKBONE):
        part = phase_keys(keys, phase)
        if part is None and phase != BACKBONE:
            continue
        sizes = {
            "hidden": _size(part, "hidden_size", "embed_dim", "d_model", "n_embd", default=1024),
            "layers": _size(part, "num_hidden_layers", "depth", "encoder_layers", "n_layer", default=24),
            "ffn": _size(part, "intermediate_size", "encoder_ffn_dim", "n_inner", default=4096),
        }
        more = f", vocab={_size(part, 'vocab_size', default=32_000)}, causal=True" if phase == BACKBONE else ""
        lines.append(f"{phase}=od.TransformerCost({', '.join(f'{name}={size}' for name, size in sizes.items())}{more})")
    return f"od.CostModel({', '.join(lines)})"


def _size(keys: Mapping[str, Any] | None, *names: str, default: int) -> int:
    sizes = ((keys or {}).get(name) for name in names)
    return next((each for each in sizes if isinstance(each, int) and each > 0), default)


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
    idle: dict[str, Any] = {
        "trainable": False,
        "input_gradients": False,
        "stem_macs": 0,
        "connector_macs": 0,
        "connector_first_macs": 0,
    }
    if unused:
        cost += replace(tower, layers=unused, **idle).phase_cost()
    if (
        phase == "image"
        and phase_keys(keys, phase) is not keys
        and (phase_keys(keys, phase) or {}).get("vision_use_head")
    ):
        cost += PhaseCost(4.0 * tower.hidden**2)  # SigLIP's pooling: keys and values
    return cost
