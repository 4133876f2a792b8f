"""Checks that modalities share: of parameters, and of headers against limits.

Headers of members: from a scan of their first bytes if they are plain, else from a probe of the whole member.

From a prefix, decoders return wrong lengths silently, so a member that the scan cannot handle is read in full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.limits import Limits
from orchdata.loaders.memory import pass_shortage
from orchdata.loaders.modalities.modality import ArraySpec, Header, Heads, Modality, stored_dtype
from orchdata.native.scan import FOUND, MORE

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


HEAD_BYTES: Final = 1 << 16
"""Number of bytes that are read before a member is read in full."""


def read_header(kind: type[Modality], size: int, read: Callable[[int], bytes], limits: Limits) -> Header:
    """Return the header of one member of `size` bytes, of which `read` returns the first n. `limits` are for the probe.

    Raises DecodeError for another format than its name says, or damage, and MemoryError if there may have been too
    little.
    """
    if size == 0:
        raise DecodeError("empty: 0 bytes")
    data = read(min(size, HEAD_BYTES))
    status, header = _scan_one(kind, size, data)
    if status == FOUND:
        return header
    if len(data) < size:
        data = read(size)
        if status == MORE:
            status, header = _scan_one(kind, size, data)
            if status == FOUND:
                return header
    if len(data) < size:
        raise DecodeError(f"cut: {len(data)} of {size} bytes")
    try:
        return kind.probe(data, limits)
    except Exception as error:
        pass_shortage(error)
        raise


def scan_heads(
    kind: type[Modality], buffer: NDArray[np.uint8], ranges: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Scan headers of many members: `ranges`, int64 (n, 3), are the start of each in the buffer, its bytes there, its
    size.

    Returns facts, int64 (n, num_facts), zeros where the scan failed, and the indices of those, for `read_header`.
    """
    facts = np.zeros((len(ranges), kind.num_facts), np.int64)
    status = np.empty(len(ranges), np.uint8)
    starts, available, sizes = np.ascontiguousarray(ranges.T)
    view = buffer.view()
    view.flags.writeable = False  # for numba, writable arrays are another type, and it would compile twice
    kind.scan(Heads(view, starts, available, sizes, status, facts))
    rest = np.flatnonzero(status != FOUND)
    facts[rest] = 0
    return facts, rest


def _scan_one(kind: type[Modality], size: int, data: bytes) -> tuple[int, Header]:
    """Return status and header of a member that begins with `data`."""
    facts, rest = np.zeros((1, kind.num_facts), np.int64), np.empty(1, np.uint8)
    view: NDArray[np.uint8] = np.frombuffer(data, np.uint8)
    one = np.array([0, len(data), size], np.int64)
    kind.scan(Heads(view, one[:1], one[1:2], one[2:], rest, facts))
    return int(rest[0]), tuple(facts[0].tolist())
