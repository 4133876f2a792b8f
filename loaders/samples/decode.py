"""Bytes of a sample -> its parts. All calls of a modality's decoder are here.

members, texts --compose--> text spans and media slots --measure--> sizes (the index)
--decode---> arrays (the batch)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DecodeError, FieldError
from orchdata.loaders.failures import as_field_error
from orchdata.loaders.generators import GeneratorMaker, Pass, ShardIdentity
from orchdata.loaders.memory import DECODER_BYTES, pass_shortage, room
from orchdata.loaders.modalities.modality import Modality, PartSize, counts_from_header, decode_into, stored_dtype
from orchdata.loaders.modalities.probing import read_header
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.compose import Span, TextSpan, compose
from orchdata.loaders.samples.members import Member
from orchdata.loaders.samples.sample import MediaPart, Part, TextPart
from orchdata.loaders.samples.spans import SizeOf, SizesInTurn

_LEAST_BYTES: Final = 1 << 26
"""Memory that a decoder may take for data of any size."""


def decode_part(
    name: str,
    data: bytes | memoryview,
    size: PartSize,
    out: Mapping[str, NDArray[Any]],
    recipe: Recipe,
    field: str,
    generator: GeneratorMaker,
) -> None:
    """Decode one part of the modality `name` into the given arrays, as `Modality.decode_into`.

    Args:
        generator: makes the part's generator; called only if the modality draws.

    Raises FieldError. Raises MemoryError for lack of memory, and for any failure that may be that in a process with its
    own memory limit.
    """
    modality = recipe.modalities[name]
    rng = generator() if modality.draws() else None
    try:
        decode_into(modality, data, size, out, recipe.limits, rng)
    except DecodeError as error:
        doubt = _doubt(error, modality, data, size, recipe)
        failure = error.at(field)
        raise FieldError(field, failure.reason + doubt) from error.__cause__
    except Exception as error:  # any exception of a decoder is a failure of its part
        doubt = _doubt(error, modality, data, size, recipe)
        failure = as_field_error(error, "decoded", field)
        raise FieldError(failure.field, failure.reason + doubt) from error


def _doubt(error: Exception, modality: Modality, data: bytes | memoryview, size: PartSize, recipe: Recipe) -> str:
    """Return a remark if less memory is left than a decoder may need for a part of this size; else "".

    Raises MemoryError in a process with its own memory limit: other processes then decode the sample alone.
    """
    left = room()
    if left is None:
        return ""
    need_bytes = DECODER_BYTES
    if counts_from_header(modality):
        try:
            header = read_header(type(modality), len(data), lambda count: bytes(data[:count]), recipe.limits)
            need_bytes = _LEAST_BYTES + 4 * modality.decoding_bytes(((header, size),))
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001, S110 - `error` is reported already
            pass
    if left.is_own:
        pass_shortage(error, need_bytes)
    if left.left_bytes >= need_bytes:
        return ""
    return f" (or for lack of memory: {left.left_bytes} bytes are left under {left.limit})"


def _generator_without_shard(part: int) -> np.random.Generator:
    return Pass().generator(ShardIdentity("", 0), "", part)


def decode_sample(
    members: Sequence[Member],
    payloads: Mapping[int, bytes | memoryview],
    sizes: Sequence[PartSize],
    recipe: Recipe,
    spans_of: Callable[[SizeOf], Sequence[Span]] | None = None,
    generator_of: Callable[[int], np.random.Generator] = _generator_without_shard,
) -> tuple[Part, ...]:
    """Decode a sample's parts into newly allocated memory.

    Args:
        payloads: bytes by index in `members`, of text_members() and of every member with a part.
        sizes: sizes of its parts from `measure`, in the order of their slots.
        spans_of: returns the spans to decode; default: all spans from `compose`.
        generator_of: number of a part in the sample -> its generator, for modalities that draw.

    Raises:
        FieldError: as `compose`, or media that cannot be decoded.
    """
    parts: list[Part] = []
    size_of = SizesInTurn(sizes)
    spans = compose(members, payloads, recipe, size_of) if spans_of is None else spans_of(size_of)
    numbers = {member: number for number, member in enumerate(size_of.by_member)}
    for span in spans:
        if isinstance(span, TextSpan):
            parts.append(TextPart(span.token_ids, span.loss_mask()))
        elif span.first == 0:
            field, data = members[span.member].field, payloads[span.member]
            generator = partial(generator_of, numbers[span.member])
            parts.append(decode_media(span.modality, data, size_of.by_member[span.member], recipe, field, generator))
    size_of.check_none_left()
    return tuple(parts)


def decode_media(
    name: str, data: bytes | memoryview, size: PartSize, recipe: Recipe, field: str, generator: GeneratorMaker
) -> MediaPart:
    """Decode one part of the modality `name` into newly allocated memory. Raises FieldError."""
    modality = recipe.modalities[name]
    specs = modality.arrays()
    out = {
        name: np.empty((size.num_rows if spec.per == "row" else 1, *spec.row_shape), stored_dtype(spec.dtype))
        for name, spec in specs.items()
    }
    decode_part(name, data, size, out, recipe, field, generator)
    extras = {name: _plain(values.tolist()) for name, values in modality.extras([size]).items()}
    return MediaPart(name, out, {name: spec.dtype for name, spec in specs.items()}, extras)


def _plain(rows: list[Any]) -> Any:
    """Values that follow from a part's size: a number or a tuple of numbers; a tuple of these for several rows."""
    plain = [tuple(row) if isinstance(row, list) else row for row in rows]
    return plain[0] if len(plain) == 1 else tuple(plain)
