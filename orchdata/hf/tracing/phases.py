"""A config -> operations of each phase of its model, by the part that computes them.

config --TracedModel, media, text--> products --parts, fit--> TracedPhase --how it trains--> PhaseCost
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any, Final, Literal

import torch

from orchdata.balancers import PhaseCost
from orchdata.hf.families import model_class
from orchdata.hf.tracing import media
from orchdata.hf.tracing.fit import Attention, Operations, Run, fit, fit_decoder, fit_encoder, run_of, total
from orchdata.hf.tracing.model import TracedModel, configs_of
from orchdata.hf.tracing.parts import Part, active, last_layer, main_list, parts_of, tower_of

Component = Literal["tower", "connector", "llm"]

# Below any window as it is run; and multiples of the chunks in which layers with a state compute.
_LENGTHS: Final = (24, 256, 512)
# Of models that have positions for no longer texts.
_SHORT: Final = (24, 128, 250)
_WINDOWS: Final = re.compile(
    r"(.*_)?(sliding|local|attention|attn)_(.*_)?(window|chunk|span)s?(_(size|len|length|width)s?)?|window_sizes?|index_topk"
)
_NARROW: Final = 48
_METHODS: Final = {"image": "get_image_features", "audio": "get_audio_features"}
_CONFIGS: Final = {
    "image": re.compile(r"vision|image|visual"),
    "audio": re.compile(r"audio|speech|acoustic|^encoder_config"),
}
_MEDIA: Final = {"image": media.images, "audio": media.audio}


@dataclass(frozen=True, slots=True)
class TracedPhase:
    """Operations of one phase, forward.

    Attributes:
        weights: part -> products with weights.
        attention: products of activations: on the pairs that attend.
        all_pairs: the same on all pairs.
        components: name of a parameter that it multiplies with -> the component that has it.
    """

    weights: Mapping[Part, Operations]
    attention: Operations
    all_pairs: Operations
    components: Mapping[str, Component] = field(default_factory=dict)

    def cost(
        self,
        *,
        trainable: float = 1.0,
        gradients: bool = True,
        connector_trainable: float = 1.0,
        recompute: bool | str = False,
        flash: bool = False,
        causal: bool = True,
    ) -> PhaseCost:
        """Operations in training, with the passes that `TransformerCost` has.

        Args:
            trainable: share of the weights that is trained; of the connector `connector_trainable`.
            gradients: gradients of what comes before are computed.
            recompute, flash: as `TransformerCost` has them.
            causal: False counts all pairs of positions.
        """
        again = int(gradients) if recompute in (True, "full") else 0
        own, joint = Fraction(trainable), Fraction(connector_trainable)
        through = int(gradients)
        passes: dict[Part, Fraction] = {
            "stem": 1 + own,
            "layers": 1 + through + own + again,
            "unused": Fraction(1),
            "connector_first": 1 + joint + through,
            "connector": 1 + joint + max(through, int(bool(joint))),
            "head": 1 + through + own,
        }
        attended: Fraction = 1 + through * (Fraction(5, 2) if flash else Fraction(2)) + through * bool(recompute)
        parts = [_times(each, passes[part]) for part, each in self.weights.items()]
        summed = total([*parts, _times(self.attention if causal else self.all_pairs, attended)])
        return PhaseCost(
            float(summed.linear),
            float(summed.quadratic),
            float(summed.constant),
            tuple((width, float(each)) for width, each in summed.windows),
        )


def _times(operations: Operations, factor: Fraction) -> Operations:
    windows = tuple((width, each * factor) for width, each in operations.windows)
    return Operations(operations.linear * factor, operations.quadratic * factor, operations.constant * factor, windows)


def traced(config: Any, phases: frozenset[str]) -> Mapping[str, TracedPhase | Exception]:
    """Those of `phases` that a config of transformers has, each once a process.

    A phase that cannot be traced is the reason why. Raises what building the model raises.
    """
    return _traced(_Key(config), phases)


def has_media(config: Any) -> list[str]:
    """Phases of the media that the model of a config encodes: it has a config of each, and a method that encodes it."""
    classes = vars(sys.modules[model_class(config).__module__]).values()
    keys = [key for key, value in vars(config).items() if hasattr(value, "to_dict")]
    return [
        phase
        for phase, method in _METHODS.items()
        if any(_CONFIGS[phase].search(key) for key in keys) and any(hasattr(each, method) for each in classes)
    ]


class _Key:
    """A config, equal to one of equal content."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.content = f"{type(config).__qualname__} {config.to_json_string(use_diff=False)}"

    def __hash__(self) -> int:
        return hash(self.content)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other.content == self.content


@lru_cache(maxsize=16)
def _traced(key: _Key, phases: frozenset[str]) -> Mapping[str, TracedPhase | Exception]:
    config, windows = _narrowed(key.config)
    model = TracedModel(config, model_class(config))
    by_phase: dict[str, TracedPhase | Exception] = {}
    layers = ""
    try:
        try:
            runs = _runs(model, _texts(config, _LENGTHS))
        except (IndexError, RuntimeError):
            runs = _runs(model, _texts(config, _SHORT))
        layers = main_list(model, runs[-1])
        by_phase["llm"] = _decoder(config, runs, layers, windows)
    except Exception as error:  # noqa: BLE001 - a model may raise anything for its inputs
        by_phase["llm"] = error
    for phase in sorted(phases & _METHODS.keys()):
        try:
            by_phase[phase] = _encoder(model, config, phase, layers)
        except Exception as error:  # noqa: BLE001
            by_phase[phase] = error
    return by_phase


def _narrowed(config: Any) -> tuple[Any, dict[int, int]]:
    """A copy whose windows of the LLM are narrower than the texts that are run, and width -> as it was."""
    config = copy.deepcopy(config)
    narrow: dict[int, int] = {}
    for each in configs_of(config.get_text_config()):
        for key, value in vars(each).items():
            widths = value if isinstance(value, list | tuple) else [value]
            if not _WINDOWS.fullmatch(key) or not all(type(width) is int and width > 0 for width in widths):
                continue
            for width in widths:
                narrow.setdefault(width, _NARROW + 24 * len(narrow))
            setattr(each, key, [narrow[width] for width in widths] if widths is value else narrow[value])
    return config, {width: real for real, width in narrow.items()}


def _texts(config: Any, lengths: Sequence[int]) -> Iterator[tuple[int, Callable[[Any], Any]]]:
    """Texts without media, of several lengths."""
    special = {
        value
        for each in configs_of(config)
        for key, value in vars(each).items()
        if key.endswith(("token_id", "token_index")) and isinstance(value, int)
    }
    token = next(each for each in range(3, 4096) if each not in special)
    for length in lengths:
        yield length, partial(_read, ids=torch.full((1, length), token))


def _read(model: Any, ids: torch.Tensor) -> Any:
    return model(input_ids=ids, use_cache=False)


def _runs(model: TracedModel, calls: Any) -> list[Run]:
    return [run_of(length, model.run(call)) for length, call in calls]


def _decoder(config: Any, runs: Sequence[Run], layers: str, windows: Mapping[int, int]) -> TracedPhase:
    """Trace a decoder: its layers, and what follows them, which is not recomputed."""

    def part(name: str) -> Part:
        return "layers" if not layers or name.startswith(f"{layers}.") else "head"

    counts: dict[Part, list[int | Fraction]] = {}
    for number, run in enumerate(runs):
        for each in run.weights:
            values = counts.setdefault(part(each.module), [0] * len(runs))
            values[number] += each.flops * active(config, each, run.length)
    lengths = [run.length for run in runs]
    weights = {name: fit(lengths, values, f"the LLM's {name}") for name, values in counts.items()}
    names = dict.fromkeys(module for run in runs for module in run.attention)
    pairs = [
        fit_decoder(lengths, [run.attention.get(name, Attention()) for run in runs], windows, name) for name in names
    ]
    components: dict[str, Component] = {each.weight: "llm" for run in runs for each in run.weights}
    return TracedPhase(weights, total([seen for seen, _ in pairs]), total([every for _, every in pairs]), components)


def _encoder(model: TracedModel, config: Any, phase: str, llm: str) -> TracedPhase:
    """Trace a tower and its connector, with the first form of media that it accepts."""
    method, why = _METHODS[phase], None
    names = media.names_of(model.model, method)
    for way in _MEDIA[phase](config, names):
        try:
            runs = [_encoded(model, method, medium, names) for medium in way]
            return _fitted(model, config, phase, llm, runs)
        except Exception as error:  # noqa: BLE001 - of media of another form than this model takes
            why = why or error
    raise ValueError(f"{method} took no {phase} that was tried: {type(why).__name__}: {why}") from why


def _encoded(model: TracedModel, method: str, medium: media.Medium, names: set[str]) -> Run:
    given = {name: value for name, value in medium.arguments.items() if name in names}
    made: list[Any] = []
    owner = media.owner_of(model.model, method)
    products = model.run(lambda _: made.append(getattr(owner, method)(**given)))
    return run_of(medium.length or media.tokens_of(made[-1]), products)


def _fitted(model: TracedModel, config: Any, phase: str, llm: str, runs: Sequence[Run]) -> TracedPhase:
    layers = main_list(model, runs[-1])
    tower = tower_of(layers, llm)
    last = last_layer(config, phase, model, layers)
    counts: dict[Part, list[int | Fraction]] = {}
    components: dict[str, Component] = {}
    for number, run in enumerate(runs):
        for each, part in zip(run.weights, parts_of(run, layers, tower, last), strict=True):
            counts.setdefault(part, [0] * len(runs))[number] += each.flops
            components[each.weight] = "connector" if part.startswith("connector") else "tower"
    lengths = [run.length for run in runs]
    weights = {part: fit(lengths, values, f"{phase} {part}") for part, values in counts.items()}
    attention = []
    for name in dict.fromkeys(module for run in runs for module in run.attention):
        seen = [run.attention[name].seen if name in run.attention else Fraction(0) for run in runs]
        attention.append(fit_encoder(lengths, seen, name))
    attention_cost = total(attention)
    return TracedPhase(weights, attention_cost, attention_cost, components)
