"""Sizes of the parts of one shard that a modality counts from their bytes, kept in the cache: one file for each such
modality, under the modality's own parameters. Other recipes with the same modality read none of these parts.

Only sizes are kept. A part that its modality refused is counted again with each new recipe.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from orchdata.loaders.modalities.modality import PartSize
from orchdata.loaders.samples.measure import Sizes
from orchdata.loaders.storage.atomic import write_whole
from orchdata.loaders.storage.sealed import read_sealed, seal
from orchdata.loaders.versions import SIZES_FORMAT

FOLDER: Final = "sizes"
KIND: Final = b"size"
_LARGEST: Final = 2**63 - 1
_FIXED: Final = 6  # sample, layout, index in the sample's members, positions, tokens, rows; then the extent


@dataclass(slots=True)
class KeptSizes:
    """The sizes of a shard's parts of one modality, as they were kept."""

    _layouts: Mapping[str, int]
    _rows: NDArray[np.int64]
    _starts: NDArray[np.int64]

    def of(self, number: int, layout: str) -> dict[int, PartSize]:
        """Return the size of each part of a sample with this layout, by index in the sample's members.

        Args:
            number: of the sample in its shard.
        """
        if number + 1 >= len(self._starts):
            return {}
        rows = self._rows[self._starts[number] : self._starts[number + 1]].tolist()
        code = self._layouts.get(layout)
        return {
            member: PartSize(positions, tokens, num_rows, tuple(extent))
            for _, its_layout, member, positions, tokens, num_rows, *extent in rows
            if its_layout == code
        }


def read_sizes(path: str, identity: Sequence[str], limits: Mapping[str, float]) -> KeptSizes | None:
    """Return what is kept of a modality's parts in a shard; None if there is nothing, it is of another shard or
    version, or a limit is lower now.

    Args:
        identity: of the facts of the shard.
    """
    try:
        head, packed = read_sealed(path, KIND, SIZES_FORMAT)
        values = head.values
        kept, shape = values["limits"], (values["parts"], values["width"])
        if values["meta"] != identity or kept.keys() != limits.keys():
            return None
        if any(limits[name] < kept[name] for name in kept):
            return None
        body = pa.decompress(pa.py_buffer(packed), 8 * shape[0] * shape[1], codec="zstd")
        rows = np.frombuffer(body, np.int64).reshape(shape)
    except (OSError, ValueError, pa.ArrowException):
        return None  # absent, damaged or of another version
    num_samples = int(rows[-1, 0]) + 1 if len(rows) else 0
    starts = np.searchsorted(rows[:, 0], np.arange(num_samples + 1))
    return KeptSizes({layout: code for code, layout in enumerate(values["layouts"])}, rows, starts)


class SizesWriter:
    """Collects what is to be kept of a modality's parts, sample by sample.

    Args:
        name: of the modality.
        num_extents: `Modality.num_extents`.
    """

    def __init__(self, name: str, num_extents: int) -> None:
        self._name = name
        self._num_extents = num_extents
        self._layouts: dict[str, int] = {}
        self._rows = array("q")

    def put(self, number: int, layout: str, sizes: Sizes) -> None:
        """Add what is known of the parts of a sample; samples come in order."""
        for (name, member), (positions, tokens, num_rows, extent) in sizes.items():
            if name == self._name and max(positions, tokens, num_rows, *extent) <= _LARGEST:
                code = self._layouts.setdefault(layout, len(self._layouts))
                filled = (*extent, *(0,) * (self._num_extents - len(extent)))
                self._rows.extend((number, code, member, positions, tokens, num_rows, *filled))

    def write(self, path: str, identity: Sequence[str], limits: Mapping[str, float]) -> None:
        """Write the file for `read_sizes`, which appears when it is complete. Raises StorageError."""
        width = _FIXED + self._num_extents
        values: dict[str, Any] = {
            "meta": identity,
            "limits": dict(limits),
            "layouts": list(self._layouts),
            "parts": len(self._rows) // width,
            "width": width,
        }
        packed = pa.compress(self._rows.tobytes(), codec="zstd")
        write_whole(path, seal(KIND, SIZES_FORMAT, values, [packed])[0])
