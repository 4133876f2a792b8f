"""The picture that rows of an image processor hold: what `native.write_rows` does, backwards, to be looked at.

rows --nearest byte of each value--> tiles, or patches put in their places --> (height, width, 3)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.hf.image.native import byte_values
from orchdata.hf.image.processors import running


def picture_of_rows(source: str, rows: NDArray[np.float32], grid: tuple[int, int] | None) -> NDArray[np.uint8]:
    """The picture that rows were made of; tiles stand beside one another. uint8 (height, width, 3).

    Args:
        source: of the processor.
        rows: (num_tiles, 3, height, width); with a grid (grid_h * grid_w, 3 * times * side * side).
        grid: patches along height and width, in blocks of merged tokens; None where rows are tiles.

    Raises:
        LookupError: rows or settings of another form.
    """
    if grid is None:
        if rows.ndim != 4 or rows.shape[1] != 3:
            raise LookupError(f"rows of shape {rows.shape}")
        tiles = rows.transpose(2, 0, 3, 1).reshape(rows.shape[2], -1, 3)
        return _bytes(source, tiles)
    settings: Any = running(source).settings
    side, merge = int(settings.patch_size), int(settings.merge_size)
    if rows.shape[0] != grid[0] * grid[1] or rows.shape[1] % (3 * side * side):
        raise LookupError(f"rows of shape {rows.shape}")
    blocks = rows.reshape(grid[0] // merge, grid[1] // merge, merge, merge, 3, -1, side, side)[:, :, :, :, :, 0]
    return _bytes(source, blocks.transpose(0, 2, 5, 1, 3, 6, 4).reshape(grid[0] * side, grid[1] * side, 3))


def _bytes(source: str, values: NDArray[np.float32]) -> NDArray[np.uint8]:
    table = byte_values(source)
    found = np.empty(values.shape, np.uint8)
    for channel, levels in enumerate(table):
        found[..., channel] = np.searchsorted((levels[1:] + levels[:-1]) / 2, values[..., channel])
    return found
