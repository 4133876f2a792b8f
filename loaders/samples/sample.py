"""A sample as a value: its parts decoded, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import orchdata
from orchdata.loaders.generators import GeneratorMaker, Pass, ShardIdentity
from orchdata.loaders.modalities.modality import PartSize, as_tensor, decode_part, stored_dtype
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.compose import composition_of
from orchdata.loaders.samples.members import Member
from orchdata.loaders.samples.spans import SizeOf, SizesInTurn, Span, TextSpan

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TextPart:
    """A stretch of text.

    Attributes:
        token_ids: int32 (num_tokens,).
        loss: bool (num_tokens,), whether each token carries loss; always False for the sample's first token.
    """

    token_ids: NDArray[np.int32]
    loss: NDArray[np.bool_]

    def __repr__(self) -> str:
        return f"TextPart({len(self.token_ids):,} tokens, {int(self.loss.sum()):,} of them with loss)"


@dataclass(frozen=True, eq=False, repr=False)
class MediaPart:
    """A part of any other modality.

    Its arrays are attributes too: `part.patches` and `part.grid_hw` (patches along height and width) of an image,
    `part.features` of a clip.

    Attributes:
        modality: its name in the recipe.
        arrays: name -> `(rows, *row_shape)`, as the modality defines them; bfloat16 as uint16 bits.
        dtypes: dtypes of the arrays, as the modality defines them.
        extras: values that follow from its size, by name.
    """

    modality: str
    arrays: Mapping[str, NDArray[Any]]
    dtypes: Mapping[str, str]
    extras: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        arrays = [f"{name} {self.dtypes[name]} {values.shape}" for name, values in self.arrays.items()]
        extras = [f"{name} {value}" for name, value in self.extras.items()]
        return f"MediaPart({self.modality}, {', '.join(arrays + extras)})"

    def __getattr__(self, name: str) -> Any:
        own = vars(self)
        for values in ("arrays", "extras"):
            if name in own.get(values, ()):
                return own[values][name]
        raise AttributeError(f"a part of {own.get('modality')} has no {name!r}")

    def tensor(self, name: str | None = None) -> torch.Tensor:
        """One of its arrays as a tensor that shares memory; the name may be left out if there is only one array."""
        if name is None:
            if len(self.arrays) != 1:
                raise ValueError(f"name one of the arrays of {self.modality}: {', '.join(self.arrays)}")
            (name,) = self.arrays
        tensor: torch.Tensor = as_tensor(self.arrays[name], self.dtypes[name])
        return tensor


Part = TextPart | MediaPart


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One decoded training example: the input of a custom collate_fn.

    Attributes:
        shard, key: its identity.
        parts: text and media, in the order in which the model sees them.
        fields: name -> bytes of the fields that `Recipe.keep` names and the sample has; gzipped text is decompressed. A
            column that is neither text nor bytes, and a key of a record, is a value.
        piece: number of the piece, from 0, if `TextPreprocessor.overflow` splits the sample; else 0.
    """

    shard: str
    key: str
    parts: tuple[Part, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)
    piece: int = 0

    _repr_html_ = orchdata._html


def decode_sample(
    members: Sequence[Member],
    payloads: Mapping[int, bytes | memoryview],
    sizes: Sequence[PartSize],
    recipe: Recipe,
    spans_of: Callable[[SizeOf], Sequence[Span]] | None = None,
    generator_of: Callable[[int], np.random.Generator] = lambda part: Pass().generator(ShardIdentity("", 0), "", part),
) -> tuple[Part, ...]:
    """Decode a sample's parts into newly allocated memory. `payloads` are of text_members() and of every member with a
    part; `sizes` from `measure`, in the order of their slots; `spans_of` returns the spans to decode (default: all);
    `generator_of` makes the generator of the part with this number. Raises FieldError as `composition_of`, or for media
    that cannot be decoded.
    """
    parts: list[Part] = []
    size_of = SizesInTurn(sizes)
    spans = composition_of(members, payloads, recipe).spans(recipe, size_of) if spans_of is None else spans_of(size_of)
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
    decode_part(modality, data, size, out, recipe.limits, field, generator)
    # Values that follow from its size: a number or a tuple of numbers; a tuple of these for several rows.
    extras: dict[str, Any] = {}
    for extra, values in modality.extras([size]).items():
        rows = [tuple(row) if isinstance(row, list) else row for row in values.tolist()]
        extras[extra] = rows[0] if len(rows) == 1 else tuple(rows)
    return MediaPart(name, out, {name: spec.dtype for name, spec in specs.items()}, extras)
