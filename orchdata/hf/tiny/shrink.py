"""A configuration -> smaller ones of the same model, the smallest first.

By roles: what a field is follows from its name, and each role has one small value in the whole tree of configurations.
Where such a model does not run, two layers of each kind are kept, or heads keep their size; then all widths are divided
by one number, and at last only layers are left out.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import torch

from orchdata.hf.tiny.layers import clamped, count_of, fewer_layers
from orchdata.hf.tiny.widths import WINDOW, Widths, by_role, divided

_DIVISORS: Final = (16, 4)
# What makes two runs of the same model differ, or adds to its loss.
_RANDOM: Final = re.compile(r".*(dropout|drop_rate|drop_path_rate|pdrop|layerdrop|layer_drop|jitter|_drop)(_.*)?")
_LOSSES: Final = re.compile(r".*(aux_loss_coef|z_loss_coefficient|z_loss_coef|moe_loss_weight|mtp_loss_scaling_factor)")
# Which layers of a tower its features are of, as the whole configuration says it: `vision_feature_layers`.
_FEATURES: Final = re.compile(r"(\w+)_feature_layers?")
_POSITIONS: Final = re.compile(r"(original_)?max_position_embeddings|n_positions|n_ctx|max_sequence_length|max_seq_len")
_OFF: Final = ("output_router_logits", "apply_spec_augment", "use_cache", "use_mamba_kernels", "use_mem_eff_path")

Change = Callable[..., Mapping[str, Any]]


def tiny_configs(config: Any) -> Iterator[Any]:
    """Copies of a configuration of transformers, the smallest first: which of them runs, only trying tells.

    Kept are the kinds of layers, the vocabulary and special tokens, and what images and clips depend on: patches,
    tiles, mel bins, tokens an image. Windows and chunks of the language model reach back 8 positions. Dropout, router
    losses and quantisation are off; weights are float32. The given configuration is not changed.
    """
    widths = Widths.of([vars(each) for _, each in parts(config)])
    known = widths.with_heads_of(vars(text_part(config)))
    yield _changed(config, partial(by_role, widths=widths))
    yield _changed(config, partial(by_role, widths=widths), of_each=2)
    if known.head > widths.head:
        yield _changed(config, partial(by_role, widths=known))
    for by in _DIVISORS:
        yield _changed(config, partial(divided, by=by))
    yield _changed(config, partial(divided, by=1))


def parts(config: Any, *, of_text: bool | None = None) -> Iterator[tuple[bool, Any]]:
    """The configurations in a tree, the whole first, each with whether it is of the language model."""
    text = text_part(config) if of_text is None else None
    is_text = bool(of_text) if of_text is not None else text is config or not _inner(config)
    yield is_text, config
    for inner in _inner(config).values():
        yield from parts(inner, of_text=is_text or (text is not None and _holds(inner, text)))


def text_part(config: Any) -> Any:
    """The configuration of the language model; of several texts the one that is written."""
    for decoder in (None, True):
        try:
            return config.get_text_config(decoder=decoder)
        except ValueError:  # several
            continue
    return config


def _inner(config: Any) -> dict[str, Any]:
    from transformers import PretrainedConfig

    return {name: value for name, value in vars(config).items() if isinstance(value, PretrainedConfig)}


def _holds(config: Any, text: Any) -> bool:
    return config is text or any(_holds(inner, text) for inner in _inner(config).values())


def _changed(config: Any, change: Change, of_each: int = 1) -> Any:
    smaller = copy.deepcopy(config)
    for is_text, each in parts(smaller):
        fields = {name: value for name, value in _fields(each).items() if not name.startswith("_")}
        new_fields = {**fewer_layers(fields, of_each), **_quiet(fields)}
        new_fields |= change({**fields, **new_fields}, text=is_text)
        for name, value in new_fields.items():
            each.__dict__[name] = value
        each.__dict__.pop("quantization_config", None)
    for _, each in parts(smaller):
        _keep_features(each)
    return smaller


def with_positions(config: Any, count: int) -> None:
    """Have the language model know so many positions at most, in place: what it does beyond is tried by longer rows."""
    for is_text, each in parts(config):
        if not is_text:
            continue
        for name, value in _fields(each).items():
            if _POSITIONS.fullmatch(name) and type(value) is int and value > count:
                each.__dict__[name] = count
            if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
                each.__dict__[name] = _with_positions(value, count)


def _with_positions(value: Any, count: int) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        name: min(each, count) if name == "original_max_position_embeddings" else _with_positions(each, count)
        for name, each in value.items()
    }


def _fields(config: Any) -> dict[str, Any]:
    """Values of a configuration, also numbers that are said once for its class."""
    from transformers import PretrainedConfig

    own = [kind for kind in type(config).__mro__ if issubclass(kind, PretrainedConfig) and kind is not PretrainedConfig]
    own_fields: dict[str, Any] = {}
    for kind in reversed(own):
        own_fields |= {name: value for name, value in vars(kind).items() if type(value) is int}
    return {**own_fields, **vars(config)}


def _keep_features(config: Any) -> None:
    """Features are of layers that towers still have."""
    for name, value in list(vars(config).items()):
        match = _FEATURES.fullmatch(name)
        tower = getattr(config, f"{match[1]}_config", None) if match else None
        counts = [count for each, count in vars(tower).items() if count_of(each, count)] if tower is not None else []
        if counts and (kept := clamped(value, counts[0])) is not None:
            config.__dict__[name] = kept


def _quiet(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes that turn off chance and all losses except that of the next token; in float32."""
    changed: dict[str, Any] = {name: False for name in _OFF if fields.get(name) is True}
    for name, value in fields.items():
        if type(value) is float and value and (_RANDOM.fullmatch(name) or _LOSSES.fullmatch(name)):
            changed[name] = 0.0
    if "dtype" in fields:
        changed["dtype"] = torch.float32
    return changed


__all__ = ["WINDOW", "parts", "tiny_configs"]
