"""The checksum of a whole file, from blocks read in any order."""

from __future__ import annotations

import hashlib

from orchdata.loaders.storage.storage import Storage

BLOCK_BYTES = 1 << 20


class ContentDigest:
    """Collects the digests of blocks that are read anyway, and reads the other blocks at the end."""

    def __init__(self, file: Storage) -> None:
        self._file = file
        self._blocks: dict[int, bytes] = {}

    @property
    def num_blocks(self) -> int:
        return -(-self._file.size // BLOCK_BYTES)

    def note(self, block: int, data: bytes | memoryview) -> None:
        """Add all bytes of a block."""
        if block not in self._blocks:
            self._blocks[block] = hashlib.blake2b(data, digest_size=16).digest()

    def hexdigest(self) -> str:
        """Return the checksum of size and content. Raises the errors of the storage."""
        digest = hashlib.blake2b(str(self._file.size).encode(), digest_size=16)
        for block in range(self.num_blocks):
            if block not in self._blocks:
                self.note(block, self._file.read(block * BLOCK_BYTES, BLOCK_BYTES))
            digest.update(self._blocks[block])
        return digest.hexdigest()
