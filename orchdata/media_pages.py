"""The memory of one encoder modality in a microbatch: where every part's rows lie, and where its tokens go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from orchdata.batch import AudioBatch, ImageBatch
from orchdata.buffers import BufferPool
from orchdata.layout import Layout, padded_encoders
from orchdata.loaders.audio import decode_audio
from orchdata.loaders.decode_error import DecodeError
from orchdata.loaders.images import decode_image
from orchdata.loaders.index import Index
from orchdata.loaders.preprocessors import STORED
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples import as_tensor

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


class MediaPages:
    """The memory of one modality: parts of all samples, then a dummy where there is none."""

    def __init__(self, source: PageSource, rows: Ints, name: str, code: int) -> None:
        index = source.index
        self.name = name
        self._source = source
        self._index = index
        spans = [np.arange(index.part_offsets[row], index.part_offsets[row + 1]) for row in rows]
        parts = np.concatenate([np.zeros(0, np.int64), *spans])
        owner = np.repeat(np.arange(len(rows)), [len(span) for span in spans])
        mine = index.part_modality[parts] == code
        self._parts = parts[mine]
        self._owner = owner[mine]
        self._num_samples = len(rows)
        self._place = {int(part): place for place, part in enumerate(self._parts)}
        self._extent = np.stack(
            [index.part_extent0[self._parts], index.part_extent1[self._parts]], axis=1, dtype=np.int64
        ).reshape(-1, 2)
        self._tokens = index.part_tokens[self._parts].astype(np.int64)
        self._token_starts = starts_of(self._tokens)
        self.where = source.pool.empty((int(self._token_starts[-1]),), np.int64)
        self._dummy = not len(self._parts) and source.layout.empty == "dummy"
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

    def num_tokens(self, part: int) -> int:
        return int(self._tokens[self._place[part]])

    def sample_tokens(self) -> Ints:
        """Tokens of this modality in each sample, int64 (num_samples,)."""
        totals = np.zeros(self._num_samples, np.int64)
        np.add.at(totals, self._owner, self._tokens)
        return totals

    def token_slice(self, part: int) -> slice:
        place = self._place[part]
        return slice(int(self._token_starts[place]), int(self._token_starts[place + 1]))

    def merged_grid(self, part: int) -> tuple[int, int]:
        height, width = self._extent[self._place[part]]
        return int(height) // self._preprocessor.merge, int(width) // self._preprocessor.merge

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
            "num_tokens": int(self._token_starts[-1]),
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
