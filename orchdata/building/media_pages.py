"""The memory of one encoder modality in a microbatch.

`MediaPages` is what the rank encodes: where every part's rows lie. `MediaSlots` is what its samples are made of: where
every part's tokens go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from orchdata.batch.batch import AudioBatch, ImageBatch
from orchdata.building.memory import BufferPool
from orchdata.building.work import MediaWork
from orchdata.loaders.errors import DecodeError
from orchdata.loaders.index.index import Index
from orchdata.loaders.modalities.audio_decode import decode_audio
from orchdata.loaders.modalities.image_decode import decode_image
from orchdata.loaders.modalities.preprocessors import STORED
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.sample import as_tensor
from orchdata.planning.layout import Layout, padded_encoders
from orchdata.planning.route import Route

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PageSource:
    """What pages are laid out from.

    Attributes:
        encoders: modalities every batch has, if need be as a dummy.
    """

    index: Index
    recipe: Recipe
    layout: Layout
    encoders: tuple[str, ...]
    pool: BufferPool


class MediaSlots:
    """Where the tokens of one modality go, in the sequence in which they come."""

    def __init__(self, source: PageSource, name: str, work: MediaWork, num_samples: int) -> None:
        self.name = name
        self.owner = work.owner
        self._source = source
        self._num_samples = num_samples
        self._place = {int(part): place for place, part in enumerate(work.arriving)}
        self._tokens = source.index.part_tokens[work.arriving].astype(np.int64)
        self._starts = starts_of(self._tokens)
        self.where = source.pool.empty((int(self._starts[-1]),), np.int64)

    def num_tokens(self, part: int) -> int:
        return int(self._tokens[self._place[part]])

    def sample_tokens(self) -> Ints:
        """Tokens of this modality in each sample, int64 (num_samples,)."""
        totals = np.zeros(self._num_samples, np.int64)
        np.add.at(totals, self.owner, self._tokens)
        return totals

    def put(self, part: int, start: int) -> None:
        """The tokens of `part` go to `start` and on."""
        place = self._place[part]
        self.where[self._starts[place] : self._starts[place + 1]] = np.arange(start, start + self._tokens[place])

    def merged_grid(self, part: int) -> tuple[int, int]:
        index, merge = self._source.index, self._source.recipe.image.merge  # type: ignore[union-attr]
        return int(index.part_extent0[part]) // merge, int(index.part_extent1[part]) // merge


class MediaPages:
    """The memory of the parts of one modality that are encoded here; a dummy where there is none."""

    def __init__(self, source: PageSource, name: str, work: MediaWork) -> None:
        index, parts = source.index, work.encoded
        self.name = name
        self._source = source
        self._place = {int(part): place for place, part in enumerate(parts)}
        self._route = work.route
        self._valid = np.ones(len(parts), np.bool_)
        self._extent = np.stack([index.part_extent0[parts], index.part_extent1[parts]], axis=1, dtype=np.int64)
        self._tokens = index.part_tokens[parts].astype(np.int64)
        self._dummy = not len(parts) and source.layout.empty == "dummy"
        if self._dummy:
            self._extent = np.array([self._dummy_extent()])
        self._num_rows = self._extent[:, 0] * self._extent[:, 1] if name == "image" else self._extent[:, 1]
        self._padded = padded_encoders(source.layout)
        self._row_starts = starts_of(self._places())
        pre = self._preprocessor
        width = pre.patch_dim if name == "image" else pre.num_mels
        self._data = source.pool.empty((int(self._row_starts[-1]), width), STORED[pre.dtype])
        if self._dummy:
            self._data[:] = 0

    @property
    def _preprocessor(self) -> Any:
        return getattr(self._source.recipe, self.name)

    def route(self) -> Route | None:
        """The way of the features; those of parts that failed travel as zeros."""
        if self._route is None or self._valid.all():
            return self._route
        starts = starts_of(self._tokens)
        spans = [np.arange(starts[part], starts[part + 1]) for part in np.flatnonzero(~self._valid)]
        return replace(self._route, zeroed=np.concatenate(spans))

    def blank(self, part: int) -> None:
        """`part` could not be decoded: zeros, marked so."""
        place = self._place[part]
        self._valid[place] = False
        self._data[self._row_starts[place] : self._row_starts[place + 1]] = 0

    def decode(self, part: int, data: bytes | memoryview, field: str) -> None:
        """Decode one part into its rows. Raises FieldError."""
        place = self._place[part]
        start, stop = int(self._row_starts[place]), int(self._row_starts[place + 1])
        end = start + int(self._num_rows[place])
        first, second = (int(value) for value in self._extent[place])
        limits = self._source.recipe.limits
        try:
            if self.name == "image":
                decode_image(data, self._preprocessor, limits, self._data[start:end], (first, second))
            else:
                decode_audio(data, self._preprocessor, limits, self._data[start:end], first)
        except DecodeError as error:
            raise error.at(field) from error.__cause__
        self._data[end:stop] = 0  # reused memory holds another batch

    def image(self) -> ImageBatch:
        return ImageBatch(
            patches=self._rows_tensor(), grid_hw=torch.from_numpy(self._extent.astype(np.int32)), **self._sequences()
        )

    def audio(self) -> AudioBatch:
        return AudioBatch(features=self._rows_tensor(), **self._sequences())

    def _sequences(self) -> dict[str, Any]:
        """What images and clips have in common: sequences, and the tokens made of them."""
        held: dict[str, Any] = {
            "cu_seqlens": cu_seqlens(starts_of(self._num_rows)),
            "max_seqlen": int(self._num_rows.max(initial=0)),
            "num_tokens": int(self._tokens.sum()),
            "valid": None if self._route is None else torch.from_numpy(self._valid),
        }
        if self._padded:
            held["mask"] = torch.from_numpy(row_mask(self._num_rows, held["max_seqlen"]))
            places = np.nonzero(row_mask(self._tokens, int(self._tokens.max(initial=0))))
            held["token_places"] = torch.from_numpy(np.stack(places).astype(np.int64))
        return held

    def _places(self) -> Ints:
        """Rows of memory that each part takes."""
        if not self._padded:
            return self._num_rows
        return np.full_like(self._num_rows, self._num_rows.max(initial=0))

    def _rows_tensor(self) -> torch.Tensor:
        rows = as_tensor(self._data, self._preprocessor.dtype)
        if not self._padded:
            return rows
        return rows.view(len(self._num_rows), int(self._num_rows.max(initial=0)), rows.shape[1])

    def _dummy_extent(self) -> tuple[int, int]:
        pre = self._preprocessor
        return (pre.merge, pre.merge) if self.name == "image" else (0, pre.mel_frames(1))


def starts_of(lengths: Sequence[int] | Ints) -> Ints:
    """Running sums from 0: int64 (len(lengths) + 1,)."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def cu_seqlens(starts: Ints) -> torch.Tensor:
    return torch.from_numpy(starts.astype(np.int32))


def row_mask(lengths: Ints, width: int) -> NDArray[np.bool_]:
    """True for the first `lengths[i]` of the `width` places in row i: (num_rows, width)."""
    mask: NDArray[np.bool_] = np.arange(width) < lengths[:, None]
    return mask
