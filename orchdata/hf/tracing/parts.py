"""Which part of a model a product belongs to: the stem, the layers, the connector or the head."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, Final, Literal

from orchdata.hf.tracing.fit import Run
from orchdata.hf.tracing.mode import Product
from orchdata.hf.tracing.model import TracedModel

Part = Literal["stem", "layers", "unused", "connector_first", "connector", "head"]

_CONNECTOR: Final = re.compile(
    r"(merger|project(or|ion)|connector|adapt[eo]r|resampler|perceiver|aligner|mlp1|abstractor|\bproj\d?\b)"
)
_HEAD: Final = re.compile(r"\bhead\b")
_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE: Final = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k")


def main_list(model: TracedModel, run: Run) -> str:
    """The list of layers that computes most; "" where none does."""
    outer = [name for name in model.lists if not any(name.startswith(f"{each}.") for each in model.lists)]
    flops = {name: sum(each.flops for each in run.weights if each.module.startswith(f"{name}.")) for name in outer}
    return max(flops, key=lambda name: flops[name]) if any(flops.values()) else ""


def active(config: Any, product: Product, length: int) -> Fraction:
    """Return the share of experts that a position is sent to, for a product over all experts."""
    text = config.get_text_config()
    experts = next((count for key in _EXPERTS if isinstance(count := getattr(text, key, None), int)), 0)
    active = next((count for key in _ACTIVE if isinstance(count := getattr(text, key, None), int)), 0)
    every = len(product.shape) == 3 and product.shape[0] == experts and product.shape[1] == length
    return Fraction(active, experts) if every and active and experts > 1 else Fraction(1)


def tower_of(layers: str, llm: str) -> str:
    """The outermost module that holds a tower's layers, and not the LLM's."""
    path = layers.split(".")
    for depth in range(1, len(path) + 1):
        name = ".".join(path[:depth])
        if not f"{llm}.".startswith(f"{name}."):
            return name
    return layers


def last_layer(config: Any, phase: str, model: TracedModel, layers: str) -> int | None:
    """The last layer, from 0, that features are taken from; None where it is the last of all."""
    chosen = getattr(config, "vision_feature_layer", None) if phase == "image" else None
    if chosen is None or not layers:
        return None
    count = len(model.model.get_submodule(layers))  # type: ignore[arg-type]
    taken = [
        each if each >= 0 else count + 1 + each for each in (chosen if isinstance(chosen, list | tuple) else [chosen])
    ]
    return max(taken) - 1 if max(taken) < count else None


def parts_of(run: Run, layers: str, tower: str, last: int | None) -> Iterator[Part]:
    """Return the part that each product with a tower's weights belongs to, in the order in which they run."""
    entered = joined = False
    for each in run.weights:
        inside = each.module.startswith(f"{layers}.") if layers else False
        entered |= inside
        of_tower = f"{each.module}.".startswith(f"{tower}.") and not (
            entered and not inside and _CONNECTOR.search(each.module)
        )
        if inside:
            number = int(each.module.removeprefix(f"{layers}.").split(".")[0])
            yield "unused" if last is not None and number > last else "layers"
        elif of_tower and not entered:
            yield "stem"
        elif of_tower:
            yield "unused" if _HEAD.search(each.module) else "layers"
        else:
            yield "connector" if joined else "connector_first"
            joined = True
