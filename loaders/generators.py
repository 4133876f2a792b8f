"""Random generators for decoding: each is a function of (seed, source, pass, shard, key, part).

So a part is augmented equally on every machine and rank, in every worker, thread and run, and differently in each pass.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

GeneratorMaker = Callable[[], np.random.Generator]
"""Makes the generator of one part, a new one at each call."""

_SEED_BYTES: Final = 16


class ShardIdentity(NamedTuple):
    """What identifies a shard on any machine and in any folder. Times of change, in some headers, do not count."""

    name: str  # of its file, without folders
    size: int  # in bytes; shards in several folders often have the same names


class Pass(NamedTuple):
    """One pass through the samples of a source. By default the one of samples that are read without a loader."""

    seed: int = 0  # of the loader
    source: str = ""  # its name in a mixture
    number: int = 0  # of the source's pass, from 0; without a mixture that of the epoch

    def generator(self, shard: ShardIdentity, key: str, part: int) -> np.random.Generator:
        """Return a new generator of one part of a sample: its number among those of the sample with that key."""
        identity = [self.seed, self.source, self.number, *shard, key, part]
        digest = hashlib.blake2b(json.dumps(identity).encode(), digest_size=_SEED_BYTES).digest()
        return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))
