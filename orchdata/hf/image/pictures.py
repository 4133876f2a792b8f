"""The picture that rows of an image processor hold: what `native.write_rows` does, backwards, to be looked at.

rows --nearest byte of each value--> tiles, or patches put in their places --> (height, width, 3)
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.hf.image.native import cut_of
from orchdata.hf.image.processors import running
from orchdata.loaders.modalities.image_decode import laid_out, nearest_bytes


def picture_of_rows(source: str, rows: NDArray[np.float32], grid: tuple[int, int] | None) -> NDArray[np.uint8]:
    """Return the picture that rows were made of, tiles side by side. uint8 (height, width, 3).

    Args:
        source: of the processor.
        rows: (num_tiles, 3, height, width); with a grid (grid_h * grid_w, 3 * times * side * side).
        grid: patches along height and width, in blocks of merged tokens; None where rows are tiles.

    Raises:
        LookupError: rows or settings of another form.
    """
    settings: Any = running(source).settings
    if grid is None:
        if rows.ndim != 4 or rows.shape[1] != 3:
            raise LookupError(f"rows of shape {rows.shape}")
        tiles = rows.transpose(2, 0, 3, 1).reshape(rows.shape[2], -1, 3)
        return nearest_bytes(tiles, settings.byte_table)
    side, merge = int(settings.patch_size), int(settings.merge_size)
    with suppress(LookupError):  # of any other class, rows are taken to be in blocks
        merge = cut_of(source).merge
    rows = rows.reshape(len(rows), -1)
    if rows.shape[0] != grid[0] * grid[1] or rows.shape[1] % (3 * side * side):
        raise LookupError(f"rows of shape {rows.shape}")
    return nearest_bytes(laid_out(rows, side, merge, grid)[0], settings.byte_table)
