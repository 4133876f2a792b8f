"""Processors of transformers by `model_type`, of their classes' default settings and a tokenizer that is made up.

What a processor asks of its tokenizer is found by making it: each special token whose name it misses is added, and so
is each that its source writes out.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

import torchvision_operators  # noqa: F401
import transformers
from hf_families.build import NoVideo, has_torchvision
from hf_families.tokenizers_in_code import tokenizer
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto import (
    feature_extraction_auto,
    image_processing_auto,
    processing_auto,
    video_processing_auto,
)

# What an image processor or a feature extractor says, and what the tower of a configuration calls it.
_SAID_TWICE: Final = {
    "patch_size": "patch_size",
    "merge_size": "spatial_merge_size",
    "temporal_patch_size": "temporal_patch_size",
    "feature_size": "num_mel_bins",
}
_LITERALS: Final = re.compile(r"""["'](<[^"'\\\s{}]{1,40}>|\[[A-Z_]{2,20}\])["']""")
_MISSING: Final = re.compile(r"has no attribute '?(\w+?_token)(_id)?'?")
_MOST_TOKENS: Final = 30
# Names under which published tokenizers keep what stands for media, wherever a processor does not say another.
_USUAL: Final = {
    "image_token": "<image>",
    "audio_token": "<audio>",
    "video_token": "<video>",
    "boa_token": "<boa>",
    "eoa_token": "<eoa>",
}
_BASIC: Final = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def model_types() -> list[str]:
    """Every `model_type` that has a processor."""
    return sorted(processing_auto.PROCESSOR_MAPPING_NAMES)


def processor_of(model_type: str) -> Any:
    """A processor whose patches and mel bins are those of the default configuration. Raises whatever its class raises
    of what was made for it.
    """
    processor = _of_defaults(model_type)
    with suppress(Exception):
        _align(processor, CONFIG_MAPPING[model_type]())
    return processor


def _align(processor: Any, config: Any) -> None:
    """Set what a processor's parts and the towers of a configuration both say, as the configuration has it."""
    towers = {"image_processor": ("vision", "image"), "audio": ("audio", "encoder", "speech")}
    for part, stems in towers.items():
        names = (part,) if part == "image_processor" else ("feature_extractor", "audio_processor")
        held = next((found for name in names if (found := getattr(processor, name, None)) is not None), None)
        tower = next((each for each in _tree(config) if any(stem in each.model_type for stem in stems)), None)
        if held is None or tower is None:
            continue
        for theirs, ours in _SAID_TWICE.items():
            value = getattr(tower, ours, None)
            if isinstance(value, int) and isinstance(getattr(held, theirs, None), int):
                setattr(held, theirs, value)
        if "audio" in stems and type(held).__name__ == "WhisperFeatureExtractor":
            held.__init__(feature_size=held.feature_size)  # its filters follow


def _tree(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            yield from _tree(value)


def _of_defaults(model_type: str) -> Any:
    kind = getattr(transformers, processing_auto.PROCESSOR_MAPPING_NAMES[model_type])
    named = dict(_USUAL)
    for _ in range(_MOST_TOKENS):
        try:
            return _made(kind, model_type, named)
        except AttributeError as error:
            found = _MISSING.search(str(error))
            if found is None or found[1] in named:
                raise
            named[found[1]] = f"<{found[1].removesuffix('_token')}>"
    raise ValueError(f"{kind.__name__} asks for more than {_MOST_TOKENS} tokens")


def _made(kind: Any, model_type: str, named: Mapping[str, str]) -> Any:
    source = inspect.getsource(importlib.import_module(kind.__module__))
    text = tokenizer(sorted(set(_LITERALS.findall(source))), named=named, adds_bos=False, **_BASIC)
    parts = {name: _component(name, model_type, kind, text) for name in kind.get_attributes()}
    check, kind.check_argument_for_proper_class = kind.check_argument_for_proper_class, lambda *_: None
    try:
        return kind(**{**parts, **_settings(kind, parts)})
    finally:
        kind.check_argument_for_proper_class = check


def _component(name: str, model_type: str, kind: Any, text: Any) -> Any:
    if "tokenizer" in name:
        return text
    if "video" in name:
        found = _class_of(video_processing_auto.VIDEO_PROCESSOR_MAPPING_NAMES, model_type, kind)
        return getattr(transformers, found)() if found and has_torchvision() else NoVideo()
    if "image" in name:
        return getattr(
            transformers, str(_class_of(image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES, model_type, kind))
        )()
    found = _class_of(feature_extraction_auto.FEATURE_EXTRACTOR_MAPPING_NAMES, model_type, kind)
    return getattr(transformers, str(found))()


def _class_of(names: Mapping[str, Any], model_type: str, kind: Any) -> str | None:
    """A class by model type, else by the folder of the processor."""
    folder = kind.__module__.split(".")[-2]
    found = next((names[key] for key in (model_type, folder) if names.get(key)), None)
    if isinstance(found, Mapping):
        order = ("torchvision", "pil") if has_torchvision() else ("pil", "torchvision")
        found = next((found[backend] for backend in order if found.get(backend)), None)
    if isinstance(found, tuple | list):
        found = next((each for each in found if each), None)
    return found


def _settings(kind: Any, parts: Mapping[str, Any]) -> dict[str, Any]:
    """What a class wants said that has no default."""
    asked = inspect.signature(kind.__init__).parameters
    known = {
        "patch_size": 14,
        "vision_feature_select_strategy": "default",
        "num_image_tokens": 64,
        "num_query_tokens": 32,
    }
    return {
        name: known[name]
        for name in asked
        if name in known and name not in parts and asked[name].default in (None, inspect.Parameter.empty)
    }
