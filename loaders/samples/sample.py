"""A sample as a value: its parts decoded, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

import orchdata
from orchdata.loaders.modalities.modality import as_tensor

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

    if not TYPE_CHECKING:  # a type checker reports it itself

        def __getitem__(self, name: object) -> NoReturn:
            """Say where to find what other libraries keep here."""
            raise TypeError(
                f"a Sample is not a mapping, and has no [{name!r}]: sample.parts has its texts and media in order, "
                "sample.fields what Recipe.keep names"
            )
