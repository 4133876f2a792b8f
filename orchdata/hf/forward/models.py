"""Models to try a forward on: of one configuration, until one says what the user's own would do.

configuration --tiny--> random weights, widths of 32          the usual case: takes milliseconds
--fewer layers--> its own widths, no memory     where the tiny one cannot be built, or fails
--between--> widths divided                     where that is too large too
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from orchdata.hf.families import model_class, thinker
from orchdata.hf.tiny.model import built, try_text
from orchdata.hf.tiny.shrink import parts, tiny_configs

_MOST_MULTIPLIED: Final = 400_000_000
"""Parameters of a model of its own widths, without embeddings: a forward of a few hundred tokens takes seconds."""
_CONSTANT: Final = 0.01
_FEW_LOGITS: Final = 8


@dataclass(frozen=True)
class Sized:
    """A model of some size, in float32.

    Attributes:
        is_whole: whether its widths are those of the given configuration.
    """

    forward: Any
    config: Any
    is_whole: bool


def models_of(config: Any) -> Iterator[Sized]:
    """Models that can be built and run on a text, which encoder-decoders need not. For use within `undisturbed`."""
    kind, config = model_class(config), thinker(config)
    tiny, *larger = tiny_configs(config)
    whole = larger.pop() if larger else tiny
    attentions = dict.fromkeys((str(getattr(config, "_attn_implementation", None) or "sdpa"), "eager"))
    said, seen = _json_of(whole), set[str]()
    for smaller in (tiny, whole, *larger):
        text = _json_of(smaller)
        for attention in attentions if text not in seen else ():
            try:
                model = (_constant if smaller is whole and whole is not tiny else built)(kind, smaller, attention)
            except Exception:  # noqa: BLE001, S112 - classes of all kinds, on untried sizes
                continue
            seen.add(text)
            yield Sized(model.eval(), model.config, is_whole=text == said)
            break


def _json_of(config: Any) -> str:
    return str(config.to_json_string(use_diff=False))


def _constant(kind: Any, config: Any, attention: str) -> Any:
    """With one number for all its weights, which takes no memory: it shows what shapes go together, and nothing else.

    Its output layer gives a few logits, since of a whole vocabulary a copy would be made. Raises ValueError for too
    many weights.
    """
    for _, each in parts(config):
        each._attn_implementation = attention
    with torch.device("meta"):
        count = _multiplied(kind(config))
    if count > _MOST_MULTIPLIED:
        raise ValueError(f"{count:,} parameters, {_MOST_MULTIPLIED:,} at most")
    with _weightless():
        model = kind(config).eval()
    head = model.get_output_embeddings()
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                value = torch.full((), _CONSTANT).expand(parameter.shape)
                module._parameters[name] = nn.Parameter(value, requires_grad=False)
    if isinstance(head, nn.Linear):
        head.weight = nn.Parameter(torch.full((), _CONSTANT).expand(_FEW_LOGITS, head.in_features), requires_grad=False)
        head.register_parameter("bias", None)
    if not getattr(config, "is_encoder_decoder", False):
        try_text(model, config)
    return model


def _multiplied(model: nn.Module) -> int:
    """Return the number of a model's parameters, without embeddings and the output layer."""
    left_out = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    left_out.add(id(getattr(model.get_output_embeddings(), "weight", None)))  # type: ignore[operator]
    return sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in left_out)


@contextmanager
def _weightless() -> Iterator[None]:
    """Modules made meanwhile have parameters without values; buffers have theirs."""
    register = nn.Module.register_parameter

    def without_values(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            values: Tensor = parameter.detach().to("meta", torch.float32)
            module._parameters[name] = nn.Parameter(values, requires_grad=False)

    setattr(nn.Module, "register_parameter", without_values)  # noqa: B010 - what type checkers would refuse
    try:
        yield
    finally:
        setattr(nn.Module, "register_parameter", register)  # noqa: B010
