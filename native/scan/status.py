"""Results of the scan of a member's header."""

from __future__ import annotations

from typing import Final

FOUND: Final = 0
MORE: Final = 1
"""More of its first bytes are needed."""
UNUSUAL: Final = 2
"""It takes a decoder, with the whole member, to say."""
