"""Checks that modalities share: of parameters, and of headers against limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.modality import ArraySpec, Modality, stored_dtype

_INT32_MAX: Final = 2**31 - 1
# Names of a batch's model inputs under every recipe, and of a modality's further inputs next to its arrays.
_INPUTS: Final = frozenset("input_ids position_ids labels cu_seqlens max_seqlen attention_mask".split())
_COMPANIONS: Final = ("cu_seqlens", "max_seqlen", "mask", "token_places", "positions", "route")
# Attributes of the objects with a modality's arrays, in batches and samples.
_ATTRIBUTES: Final = frozenset("arrays num_tokens valid map modality dtypes extras tensor".split())

LONGEST_SIDE: Final = 1 << 25
"""For a longer side, Pillow's resizing overflows 32 bits and reports a lack of memory."""


def check_pixels(width: int, height: int, limits: Limits, kind: str = "image") -> None:
    """Raise DecodeError for a picture that is too large."""
    if width * height > limits.image_pixels:
        size = f"{width}x{height} = {width * height} pixels"
        raise DecodeError(f"{kind} of {size}, above Limits.image_pixels={limits.image_pixels}")
    if max(width, height) > LONGEST_SIDE:
        raise DecodeError(f"{kind} of {width}x{height} pixels: no side above {LONGEST_SIDE} can be resized")


def check_size(width: int, height: int, limits: Limits) -> None:
    """Raise DecodeError for the size of an image that cannot be decoded."""
    check_pixels(width, height, limits)
    if width < 1 or height < 1:
        raise DecodeError(f"not a readable image: its header says {width} x {height} pixels")


def check_seconds(frames: int, rate: int, limits: Limits) -> None:
    """Raise DecodeError for a clip that is too long."""
    if rate and frames > limits.audio_seconds * rate:
        raise DecodeError(f"audio of {frames / rate:.0f} s, above Limits.audio_seconds={limits.audio_seconds:g}")


def starts_with(data: bytes) -> str:
    """The first eight bytes, for an error: as text if they are printable."""
    head = data[:8]
    return repr(head.decode("ascii")) if head.isascii() and head.decode("ascii").isprintable() else repr(head)[1:]


def check_at_least_one(owner: str, name: str, value: object) -> None:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{owner}.{name} must be an int of at least 1, got {value!r}")


def check_choice(owner: str, name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{owner}.{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_words(name: str, modality: Modality) -> None:
    """Check the names of a modality in members and texts, and its slot. Raises ValueError."""
    for kind in ("fields", "words"):
        names = getattr(modality, kind)
        if isinstance(names, str) or not all(isinstance(word, str) and word for word in names):
            raise ValueError(f"{kind} of {name} must be a tuple of names, got {names!r}")
    for field in modality.fields:
        if field.startswith("."):
            raise ValueError(f"a field of {name} must be called {field.lstrip('.')!r}, without its dot, got {field!r}")
    slot = modality.slot
    if not isinstance(slot.mark, str | None):
        raise ValueError(f"the mark of {name} must be a string or None, got {slot.mark!r}")
    for kind in ("token_id", "start_id", "end_id"):
        token = getattr(slot, kind)
        missing = token is None and kind != "token_id"
        if not missing and not (isinstance(token, int) and 0 <= token <= _INT32_MAX):
            raise ValueError(f"the {kind} of {name} must be an int in [0, {_INT32_MAX}], got {token!r}")


def check_arrays(modalities: Mapping[str, Modality]) -> None:
    """Check the arrays of modalities: each must be valid, and have a unique name in a batch.

    Raises TypeError for a dtype that tensors do not have, otherwise ValueError.
    """
    owners = dict.fromkeys(_INPUTS, "every batch")
    for name, modality in modalities.items():
        specs = modality.arrays()
        for array, spec in specs.items():
            if not array.isidentifier() or array in _ATTRIBUTES or array in _COMPANIONS:
                raise ValueError(f"an array of {name} cannot be called {array!r}: batches use that name")
            _check_spec(f"{name}.{array}", spec)
        for suffix in (*specs, *_COMPANIONS):
            owner = owners.setdefault(f"{name}_{suffix}", name)
            if owner != name:
                raise ValueError(f"{owner} and {name} both have an input called {name}_{suffix}: rename one of them")


def _check_spec(name: str, spec: ArraySpec) -> None:
    if spec.per not in ("row", "part"):
        raise ValueError(f"{name} has per={spec.per!r}: it is 'row' or 'part'")
    if not all(isinstance(side, int) and side >= 1 for side in spec.row_shape):
        raise ValueError(f"{name} has rows of shape {spec.row_shape!r}: sides are ints of at least 1")
    if stored_dtype(spec.dtype).kind not in "biufc":
        raise TypeError(f"{name} has dtype {spec.dtype!r}: name one that tensors have")
