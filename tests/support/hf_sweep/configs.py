"""Default configurations of transformers by `model_type`, with the tokens of a made-up processor."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from transformers import CONFIG_MAPPING, AutoConfig

from hf_sweep.fitting import tree

_SECTIONS: Final = re.compile(r'mrope_section", \[([\d, ]+)\]')
# What published configurations make equal, and defaults do not.
_EQUAL: Final = (("vision_output_dim", "projector_output_dim"),)
_ARIA: Final = {"image_size": 980, "patch_size": 14}
"""Sides for which Aria's projector has queries: 70 x 70 patches."""
_FACTORS: Final = ("downsample_factor", "scale_factor")
_VOCABULARY: Final = 1024
_HEAD, _WINDOW = 128, 4096
"""Of a head and a window, where a default leaves them out, and the width is no multiple of the heads."""
_ENDS: Final = ("_token_id", "_token_index", "_index", "_id")


def default_config(model_type: str) -> Any:
    """The default configuration, with those of its parts where defaults leave them out, and rotary fractions that the
    sections of time, height and width fill. Raises any error of its class.
    """
    kind = CONFIG_MAPPING[model_type]
    absent = {name: each for name, each in kind.sub_configs.items() if getattr(kind(), name, None) is None}
    config = kind(**{name: each().to_dict() for name, each in absent.items() if each is not AutoConfig})
    for each in tree(config):
        _fill_absent(each)
        _fill_sections(each)
        for name, other in _EQUAL:
            if hasattr(each, name) and hasattr(each, other):
                setattr(each, name, getattr(each, other))
        if isinstance(getattr(each, "vision_feature_layers", None), list):
            each.vision_feature_layers = [-2, -1]  # that tiny towers have
        if isinstance(ratio := getattr(each, "pixel_shuffle_ratio", None), float):
            each.intermediate_size = int(each.hidden_size / ratio**2)  # patches shuffled into one are its input
    towers, text = getattr(config, "vision_config", None), getattr(config, "text_config", None)
    if hasattr(towers, "out_hidden_size") and hasattr(text, "hidden_size"):
        towers.out_hidden_size = text.hidden_size  # as published configurations say
    _set_sides(config)
    return config


def _fill_absent(config: Any) -> None:
    """Some defaults leave out what every published configuration says."""
    fields = vars(config)
    heads = fields.get("num_attention_heads")
    if isinstance(heads, int):
        if fields.get("num_key_value_heads", heads) is None:
            config.num_key_value_heads = heads
        is_whole = config.hidden_size % heads == 0 if "hidden_size" in fields else True
        if not is_whole and "image_size" in fields and "head_dim" not in fields:
            config.num_attention_heads = math.gcd(config.hidden_size, 16)  # published towers have 16
        elif not is_whole and fields.get("head_dim") is None:
            config.head_dim = _HEAD
        elif fields.get("head_dim", 0) is None and "hidden_size" in fields:
            config.head_dim = config.hidden_size // heads
    if fields.get("sliding_window", 0) is None and "sliding_attention" in (fields.get("layer_types") or ()):
        config.sliding_window = _WINDOW


def _fill_sections(config: Any) -> None:
    """Some defaults leave out sections of time, height and width, for which the model's code has a value; or that only
    a part of each head is turned, which is what the sections add up to.
    """
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict):
        return
    sections = rope.get("mrope_section") or _sections_of_code(config)
    if not sections:
        return
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope["mrope_section"] = sections
    if 2 * sum(sections) != int(head * (rope.get("partial_rotary_factor") or 1)):
        rope["partial_rotary_factor"] = 2 * sum(sections) / head


def _sections_of_code(config: Any) -> list[int]:
    module = type(config).__module__.replace(".configuration_", ".modeling_")
    if find_spec(module) is None:  # of a configuration that another model's code serves
        return []
    found = _SECTIONS.search(inspect.getsource(import_module(module)))
    return [int(each) for each in found[1].split(",")] if found else []


def _set_sides(config: Any) -> None:
    """Some defaults have tiles whose patches cannot be merged by their own factor, or that the projector lacks."""
    if getattr(config, "projector_patch_to_query_dict", None):
        config.vision_config.update(_ARIA)
    factor = next((found for name in _FACTORS if isinstance(found := getattr(config, name, None), int)), None)
    for each in tree(config) if factor else ():
        side, patch = getattr(each, "image_size", None), getattr(each, "patch_size", None)
        if isinstance(side, int) and isinstance(patch, int) and side % (patch * factor):
            each.image_size = side // (patch * factor) * patch * factor


def with_tokens(config: Any, processor: Any, features: Mapping[str, int]) -> Any:
    """The configuration itself, in which tokens are those of the processor, and no more than they: logits of the usual
    hundreds of thousands would take most of the time.
    """
    size = -(-len(processor.tokenizer) // _VOCABULARY) * _VOCABULARY
    for each in tree(config):
        for name in ("vocab_size", "vocab_size_per_layer_input"):
            if isinstance(getattr(each, name, None), int):
                setattr(each, name, min(getattr(each, name), size))
        for name in [name for name in vars(each) if any(name.endswith(end) for end in _ENDS)]:
            found = _token(name, processor)
            if found is not None and hasattr(each, name):
                setattr(each, name, found)
        for modality, token_id in features.items():
            for name in (f"{modality}_token_id", f"{modality}_token_index"):
                if hasattr(each, name):
                    setattr(each, name, token_id)
        for stem in ("vision_start", "vision_end", "audio_start", "audio_end"):  # which published ones say
            bos = f"{stem.partition('_')[0]}_{'bos' if stem.endswith('start') else 'eos'}_token"
            text = getattr(processor, bos, None)
            if isinstance(text, str) and not hasattr(each, f"{stem}_token_id"):
                setattr(each, f"{stem}_token_id", int(processor.tokenizer.convert_tokens_to_ids(text)))
    return config


def _token(name: str, processor: Any) -> int | None:
    stem = next(name.removesuffix(end) for end in _ENDS if name.endswith(end))
    tokenizer = processor.tokenizer
    for holder in (processor, tokenizer):
        found = getattr(holder, f"{stem}_token_id", None)
        if isinstance(found, int):
            return found
        text = getattr(holder, f"{stem}_token", None)
        if isinstance(text, str):
            return int(tokenizer.convert_tokens_to_ids(text))
    return None
