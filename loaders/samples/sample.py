"""A sample as a value: its parts decoded, in order.

    members, texts --compose--> text spans and media slots --measure--> counts (the index)
                                                           --decode_sample--> arrays (the batch)

All names that samples are made with can be imported from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.modalities.audio_decode import decode_audio
from orchdata.loaders.modalities.image_decode import decode_image
from orchdata.loaders.modalities.preprocessors import STORED
from orchdata.loaders.modality import IMAGE
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.compose import MediaSlot, Span, TextSpan, compose, text_members
from orchdata.loaders.samples.measure import Measured, MeasuredPart, measure, measure_part
from orchdata.loaders.samples.members import Member

if TYPE_CHECKING:
    import torch

__all__ = [
    "AudioPart",
    "ImagePart",
    "Measured",
    "MeasuredPart",
    "MediaSlot",
    "Member",
    "Part",
    "Sample",
    "Span",
    "TextPart",
    "TextSpan",
    "as_tensor",
    "compose",
    "decode_media",
    "decode_sample",
    "measure",
    "text_members",
]


@dataclass(frozen=True, slots=True, eq=False)
class TextPart:
    """A stretch of text.

    Attributes:
        token_ids: int32 (num_tokens,).
        loss: bool (num_tokens,), which of them carry loss; never the sample's first token.
    """

    token_ids: NDArray[np.int32]
    loss: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class ImagePart:
    """An image as patches.

    Attributes:
        patches: (grid_h * grid_w, patch_dim), in merge blocks; the recipe's dtype, bfloat16 as uint16 bits.
        grid_hw: patches along height and width.
        dtype: the recipe's.
    """

    patches: NDArray[Any]
    grid_hw: tuple[int, int]
    dtype: str

    def tensor(self) -> torch.Tensor:
        """The patches as a tensor of the recipe's dtype, sharing memory."""
        return as_tensor(self.patches, self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class AudioPart:
    """A clip as log-mel frames.

    Attributes:
        features: (mel_frames, num_mels); the recipe's dtype, bfloat16 as uint16 bits.
        dtype: the recipe's.
    """

    features: NDArray[Any]
    dtype: str

    def tensor(self) -> torch.Tensor:
        """The features as a tensor of the recipe's dtype, sharing memory."""
        return as_tensor(self.features, self.dtype)


Part = TextPart | ImagePart | AudioPart


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One training example, decoded: what a custom collate_fn receives.

    Attributes:
        shard, key: its identity.
        parts: text, images and clips, in the order the model sees them.
    """

    shard: str
    key: str
    parts: tuple[Part, ...]


def decode_sample(
    members: Sequence[Member], payloads: Mapping[int, bytes | memoryview], recipe: Recipe
) -> tuple[Part, ...]:
    """Decode a sample's parts into memory of their own.

    Args:
        payloads: bytes by index in `members`, of text_members() and of every image and audio member used.

    Raises:
        FieldError: as `compose` and `measure`, or media that cannot be decoded.
    """
    parts: list[Part] = []
    for span in compose(members, payloads, recipe):
        if isinstance(span, MediaSlot):
            part = measure_part(span, members[span.member], recipe)
            parts.append(decode_media(part, members[span.member].field, payloads[span.member], recipe))
        else:
            loss = np.full(len(span.token_ids), span.loss)
            loss[:1] &= bool(parts)
            parts.append(TextPart(span.token_ids, loss))
    return tuple(parts)


def decode_media(part: MeasuredPart, field: str, payload: bytes | memoryview, recipe: Recipe) -> ImagePart | AudioPart:
    """Decode one image or clip of the size `part` says. Raises FieldError."""
    try:
        if part.modality == IMAGE:
            assert recipe.image is not None
            patches = np.empty((part.positions, recipe.image.patch_dim), STORED[recipe.image.dtype])
            grid = (part.extent0, part.extent1)
            decode_image(payload, recipe.image, recipe.limits, patches, grid)
            return ImagePart(patches, grid, recipe.image.dtype)
        assert recipe.audio is not None
        features = np.empty((part.extent1, recipe.audio.num_mels), STORED[recipe.audio.dtype])
        decode_audio(payload, recipe.audio, recipe.limits, features, part.extent0)
        return AudioPart(features, recipe.audio.dtype)
    except DecodeError as error:
        raise error.at(field) from error.__cause__


def as_tensor(array: NDArray[Any], dtype: str) -> torch.Tensor:
    """The array, stored as `preprocessors.STORED` says, as a tensor of the recipe's dtype; shares memory."""
    import torch

    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
