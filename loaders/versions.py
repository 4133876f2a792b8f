"""Versions of stored files: after an increase, what is of an older version is made again."""

from __future__ import annotations

from typing import Final

KEPT_FORMAT = 2
"""Layout of what is kept of one shard: facts, counts and costs."""

TABLE_FORMAT = 1
"""Layout of the merged index."""

VERDICTS: Final = 1
"""How samples are judged: raised by each change after which the same shard, under the same recipe, has other bad ones.
An index file of another number is used as it is, with a warning."""

COUNTS: Final = 2
"""How samples are counted: raised by each change after which they have other tokens, labels, frames, patches or values.
It is part of every fingerprint. An index file of another number is refused."""


def rules() -> list[int]:
    """Return the two numbers: what the cache folder keeps of others is made again."""
    return [VERDICTS, COUNTS]
