"""Fewer layers of every kind that a configuration has.

A layer's kind is all that is said of it: the entry in each list that has one for every layer (`layer_types`,
`mlp_layer_types`, `no_rope_layers`, ...), whether lists of layer numbers name it (`deepstack_visual_indexes`, ...), and
its place in patterns that are said by a number (`first_k_dense_replace`, `attn_layer_period`, ...). One layer of each
kind stays, in the order of the first of each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

COUNTS: Final = re.compile(
    r"(.*_)?(num_hidden_layers|num_layers|n_layers?|num_blocks|num_layers_per_stack|depth|depths|layers"
    r"|(encoder|decoder)_num_hidden_layers|(encoder|decoder)_layers|num_(encoder|decoder)_layers)"
)
_NOT_COUNTS: Final = re.compile(r".*(adapter|feat_extract|conv|lstm|residual|dense|nextn|mtp|shared|add|prediction).*")
_PERIODS: Final = re.compile(
    r".*(_pattern|_period|_interval|_freq|_frequency|_step|_every_n_layers|layer_group_size|per_attn_res_block)"
)
_OFFSETS: Final = re.compile(r".*_offset")
_LEADING: Final = re.compile(r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|max_window_layers")
_NUMBERS: Final = re.compile(
    r".*(_indexes|_indices|_idxs|_layer_ids|_layers|_layer|_layers_indices|insert_layer_id|moe_layer_end_index)"
)
_FEWEST: Final = 2
_PERIOD: Final = 3
"""Longest period that is kept: long enough for one layer that differs from its neighbours."""

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Kept:
    """The layers that stay in the tiny model.

    Attributes:
        total: number of layers of the whole model.
        layers: indices of those that stay, ascending.
    """

    total: int
    layers: tuple[int, ...]


def count_of(name: str, value: Any) -> bool:
    return type(value) is int and bool(COUNTS.fullmatch(name)) and not _NOT_COUNTS.fullmatch(name)


def fewer_layers(fields: Fields, of_each: int = 1) -> dict[str, Any]:
    """Fields of one configuration -> those that change, where `of_each` layers of each kind stay."""
    counts = {name: value for name, value in fields.items() if count_of(name, value)}
    if not counts:
        return {}
    changed: dict[str, Any] = {}
    patterns = _shorter_patterns(fields)
    for total in sorted(set(counts.values())):
        kept = _kept(total, {**fields, **patterns}, of_each)
        changed |= {name: len(kept.layers) for name, value in counts.items() if value == total}
        for name, value in fields.items():
            if (values := _of_layers(name, value, kept)) is not None:
                changed[name] = values
    shared = fields.get("num_kv_shared_layers")
    if shared and "layer_types" in changed:  # the last layers use keys of earlier layers of their kind
        changed |= _with_shared(changed)
    return patterns | changed


def _shorter_patterns(fields: Fields) -> dict[str, Any]:
    """Return the changed fields of patterns that a number describes: the period becomes at most `_PERIOD`."""
    changed: dict[str, Any] = {}
    for name, value in fields.items():
        if type(value) is not int:
            continue
        if _PERIODS.fullmatch(name) and value > _PERIOD:
            changed[name] = _PERIOD
        elif _OFFSETS.fullmatch(name) and value >= _PERIOD and _has_period(name, fields):
            changed[name] = _PERIOD - 1
        elif _LEADING.fullmatch(name) and value > 1:
            changed[name] = 1
    return changed


def _has_period(name: str, fields: Fields) -> bool:
    return name.removesuffix("_offset") + "_period" in fields


def _kept(total: int, fields: Fields, of_each: int) -> Kept:
    """Return the first layers of each kind: at least two, and one whole period of a pattern that a number describes."""
    seen: dict[Any, list[int]] = {}
    for layer in range(total):
        seen.setdefault(_kind(layer, total, fields), []).append(layer)
    layers = sorted(layer for alike in seen.values() for layer in alike[:of_each])
    period = max(
        [int(value) for name, value in fields.items() if type(value) is int and _PERIODS.fullmatch(name)], default=1
    )
    leading = max([int(fields[name]) for name in fields if _LEADING.fullmatch(name) and fields[name]], default=0)
    fewest = min(total, max(_FEWEST, period, leading + 1 if leading < total else 0))
    rest = iter(sorted(set(range(total)) - set(layers)))
    while len(layers) < fewest:
        layers = sorted([*layers, next(rest)])
    return Kept(total, tuple(layers))


def _kind(layer: int, total: int, fields: Fields) -> tuple[str, ...]:
    said = [repr(value[layer]) for value in fields.values() if _by_layer(value, total)]
    named = [repr(layer in value) for name, value in fields.items() if _numbers_layers(name, value, total)]
    return (*said, *named)


def _by_layer(value: Any, total: int) -> bool:
    """Return whether the value has an entry for each layer."""
    return isinstance(value, list | tuple | str) and len(value) == total > _FEWEST and not _counts_up(value)


def _counts_up(value: Sequence[Any]) -> bool:
    """Return whether the value is the list of all layers' numbers, which names layers and does not describe them."""
    return list(value) == list(range(len(value)))


def _numbers_layers(name: str, value: Any, total: int) -> bool:
    """Return whether the value is a list of layer numbers, each once and in ascending order from the first."""
    return (
        isinstance(value, list | tuple)
        and bool(_NUMBERS.fullmatch(name))
        and bool(value)
        and all(type(each) is int and 0 <= each < total for each in value)
        and len(set(value)) == len(value)
        and (len(value) != total or _counts_up(value))
    )


def _of_layers(name: str, value: Any, kept: Kept) -> Any:
    """A field about layers, of those that stay. None for other fields."""
    if _numbers_layers(name, value, kept.total):
        return type(value)(number for number, layer in enumerate(kept.layers) if layer in value)
    if _by_layer(value, kept.total):
        chosen = [value[layer] for layer in kept.layers]
        return "".join(chosen) if isinstance(value, str) else type(value)(chosen)
    if _NUMBERS.fullmatch(name) and not COUNTS.fullmatch(name) and kept.total > len(kept.layers):
        return clamped(value, len(kept.layers))
    return None


def clamped(value: Any, count: int) -> Any:
    """Numbers of layers, from the front or the end, within those that stay. None for what is none."""
    if type(value) is int:
        return max(-count, min(value, count - 1))
    if isinstance(value, list | tuple) and value and all(type(each) is int for each in value):
        return type(value)(max(-count, min(each, count - 1)) for each in value)
    return None


def _with_shared(changed: Fields) -> dict[str, Any]:
    """All layers twice, the second half of which uses the keys of the first."""
    count = len(changed["layer_types"])
    twice: dict[str, Any] = {
        name: value * 2 if isinstance(value, list | tuple | str) and len(value) == count else value
        for name, value in changed.items()
    }
    twice |= {name: 2 * value for name, value in changed.items() if count_of(name, value) and value == count}
    return twice | {"num_kv_shared_layers": count}
