"""Hugging Face models: what a processor and a config say, as values of this library.

Names are imported when first used: transformers is needed where a processor or model of it is given, and only there.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchdata.hf.audio import audio_modality

_HOMES = {"audio_modality": "orchdata.hf.audio"}

__all__ = ["audio_modality"]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'orchdata.hf' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
