"""Processors of transformers by `model_type`, of their classes' default settings and a tokenizer that is made up.

What a processor asks of its tokenizer is found by making it: each special token whose name it misses is added, and so
is each that its source writes out.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from typing import Any, Final

import torchvision_operators  # noqa: F401
import transformers
from hf_families.build import NoVideo, has_torchvision
from hf_families.tokenizers_in_code import tokenizer
from transformers.models.auto import (
    feature_extraction_auto,
    image_processing_auto,
    processing_auto,
    video_processing_auto,
)

_LITERALS: Final = re.compile(r"""["'](<[^"'\\\s{}]{1,40}>|\[[A-Z_]{2,20}\])["']""")
_MISSING: Final = re.compile(r"(?:has no attribute|missing required attribute) '?(\w+?_token)(_id)?'?")
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


def processor_of(model_type: str, **settings: Any) -> Any:
    """A processor of its classes' default settings. Raises any error of its class about what was made for it.

    Args:
        settings: of the constructor, in place of its defaults.
    """
    name = processing_auto.PROCESSOR_MAPPING_NAMES.get(model_type.removesuffix("_thinker"))
    if name is None:
        raise NotImplementedError(f"transformers names no processor for {model_type}")
    kind = getattr(transformers, name)
    named = dict(_USUAL)
    for _ in range(_MOST_TOKENS):
        try:
            found = _made(kind, model_type.removesuffix("_thinker"), named, settings)
            if not (untold := _unknown_tokens(found)):
                return found
            named |= untold
        except (AttributeError, ValueError) as error:
            missing = _MISSING.search(str(error))
            if missing is None or missing[1] in named:
                raise
            named[missing[1]] = f"<{missing[1].removesuffix('_token')}>"
    raise ValueError(f"{kind.__name__} asks for more than {_MOST_TOKENS} tokens")


def _unknown_tokens(processor: Any) -> dict[str, str]:
    """Tokens that a processor has by itself, and its tokenizer has not or under another text, by name."""
    known = processor.tokenizer.get_vocab()
    own = {name: getattr(value, "content", value) for name, value in vars(processor).items() if name.endswith("token")}
    named = {name: getattr(processor.tokenizer, name, None) for name in own}
    return {
        name: text
        for name, text in own.items()
        if isinstance(text, str) and text and (text not in known or named[name] not in (None, text))
    }


def _made(kind: Any, model_type: str, named: Mapping[str, str], settings: Mapping[str, Any]) -> Any:
    source = inspect.getsource(importlib.import_module(kind.__module__))
    text = tokenizer(sorted(set(_LITERALS.findall(source))), named=named, adds_bos=False, **_BASIC)
    parts = {name: _component(name, model_type, kind, text) for name in kind.get_attributes()}
    check, kind.check_argument_for_proper_class = kind.check_argument_for_proper_class, lambda *_: None
    try:
        return kind(**{**parts, **_settings(kind, parts), **settings})
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
    if found is None and names is not video_processing_auto.VIDEO_PROCESSOR_MAPPING_NAMES:
        raise NotImplementedError(f"transformers names no processor of images or audio for {model_type}")
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
