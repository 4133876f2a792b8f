"""Fields of bytes -> a decoded sample -> a batch of tensors: what all others run, in their threads or workers.

By default images, clips and text are decoded by this library's functions, under the recipe that ours has. With
`--decode pillow` images are decoded as most training code does: Pillow decodes and resizes, torch normalises and cuts.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.builtin import OTHER
from orchdata.loaders.modalities.image import ImagePreprocessor
from orchdata.loaders.modalities.modality import PartSize, read_header
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.measure import measure
from orchdata.loaders.samples.members import Member
from orchdata.loaders.samples.sample import MediaPart, Sample, TextPart, decode_sample
from orchdata.loaders.shards.fields import classify

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Decoder:
    """Decodes a sample's fields under a recipe: headers, then parts, in memory of their own."""

    recipe: Recipe

    def __call__(self, fields: Mapping[str, Any]) -> Sample:
        members: list[Member] = []
        payloads: dict[int, bytes] = {}
        for name, payload in fields.items():
            kind = OTHER if name.startswith("__") else self.recipe.kind_of(name, classify(name)[0])
            if kind == OTHER:
                continue
            payloads[len(members)] = payload
            members.append(self._member(name, kind, payload))
        sizes = [part.size for part in measure(members, payloads, self.recipe).parts]
        parts = decode_sample(members, payloads, sizes, self.recipe)
        return Sample(shard=fields["__url__"], key=fields["__key__"], parts=parts)

    def _member(self, name: str, kind: int, payload: bytes) -> Member:
        modality = self.recipe.modality(kind)
        if modality is None:
            return Member(name, kind, size=len(payload))
        header = read_header(type(modality), len(payload), lambda size: payload[:size], self.recipe.limits)
        return Member(name, kind, header, len(payload))


class PillowImages(ImagePreprocessor):
    """The patches of `resizer="pillow"`, `dtype="bfloat16"`, made with Pillow and torch alone."""

    def decode_into(
        self,
        data: bytes | memoryview,
        size: PartSize,
        out: Mapping[str, NDArray[Any]],
        _limits: Limits,
        _rng: np.random.Generator | None = None,
    ) -> None:
        rows, columns = size.extent
        side, merge = self.patch_size, self.merge
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
        resized = image.resize((columns * side, rows * side), Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(np.array(resized)).permute(2, 0, 1).float().div_(255)
        mean, std = torch.tensor(self.mean), torch.tensor(self.std)
        pixels = (pixels - mean[:, None, None]) / std[:, None, None]
        blocks = pixels.view(3, rows // merge, merge, side, columns // merge, merge, side)
        patches = blocks.permute(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, -1)
        out["patches"][:] = patches.bfloat16().view(torch.uint16).numpy()


def pack(samples: Sequence[Sample]) -> Tensors:
    """One tensor for each modality and the lengths that part it, as a packed batch has them."""
    parts = [part for sample in samples for part in sample.parts]
    media = [part for part in parts if isinstance(part, MediaPart)]
    columns = {
        name: [part.tensor() for part in media if part.modality == name] for name in {part.modality for part in media}
    }
    columns["text"] = [torch.from_numpy(part.token_ids) for part in parts if isinstance(part, TextPart)]
    batch: Tensors = {"number": torch.arange(len(samples))}
    for name, tensors in columns.items():
        if tensors:
            batch[name] = torch.cat(tensors)
            batch[f"{name}_lengths"] = torch.tensor([len(tensor) for tensor in tensors])
    return batch


@dataclass(frozen=True, slots=True)
class DecodePack:
    """Samples' fields to a batch, for loaders that decode where they collate."""

    decoder: Decoder

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> Tensors:
        return pack([self.decoder(fields) for fields in samples])
