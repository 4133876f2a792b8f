"""Versions of stored files: after an increase, what is of an older version is made again."""

from __future__ import annotations

import hashlib
import json
from typing import Final

FACTS_FORMAT = 1
"""Layout of facts files: their head and their table."""

TEXTS_FORMAT = 1
"""Layout of files with the counts of a shard's texts."""

SIZES_FORMAT = 1
"""Layout of files with the sizes of a shard's parts that a modality counts from their bytes."""

COSTS_FORMAT = 1
"""Layout of cost tables."""

TABLE_FORMAT = 1
"""Layout of the merged index."""

RULES: Final = {
    "tar": 11,
    "parquet": 11,
    "arrow": 11,
    "records": 12,
    "containers": 11,
    "image": 10,
    "audio": 10,
    "video": 10,
    "text": 12,
    "chats": 12,
    "counts": 10,
}
"""How samples are judged, by topic: a topic is increased by each change after which the same shard, under the same
recipe, has other facts, costs or errors. What is kept of the topic is then made again, and nothing else:

- a container: the facts of its shards;
- `image`, `audio`, `video`: the facts of shards that have such members;
- `text`, `chats`: the counts of samples with plain text, and of chats;
- `counts`: what is computed from facts and counts, which reads and tokenizes nothing.
"""


def rules_digest() -> str:
    """Return a digest of all rules."""
    return hashlib.blake2b(json.dumps(RULES, sort_keys=True).encode(), digest_size=8).hexdigest()
