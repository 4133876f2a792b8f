"""Stamps: a few bits of a version, which an index keeps for each file that records name."""

from __future__ import annotations

import hashlib
from typing import Final

STAMP_BITS: Final = 23
_STAMPED: Final = "stamp "


def stamp_of_version(version: str) -> int:
    """Return STAMP_BITS bits of a version: one change in 8 million keeps the stamp."""
    digest = hashlib.blake2b(version.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> (32 - STAMP_BITS)


def stamped(stamp: int) -> str:
    """Return the version that stands for all versions with a stamp."""
    return f"{_STAMPED}{stamp}"


def fits(wanted: str, version: str) -> bool:
    """Return whether a version is the one that is wanted, or has its stamp; "" is any."""
    if wanted.startswith(_STAMPED):
        return wanted == stamped(stamp_of_version(version))
    return not wanted or wanted == version
