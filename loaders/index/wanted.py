"""What a step reads of the rows of an index, said ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from orchdata.loaders.index.stored import StoredSample


class Wanted(NamedTuple):
    """What a step reads of a row, as the arguments of `StoredSample.read`.

    Attributes:
        sample: that reads it, if it was made already.
    """

    row: int
    text: bool = True
    parts: Sequence[int] | None = None
    kept: bool = False
    sample: StoredSample | None = None
