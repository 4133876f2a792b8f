"""Opening a shard for its first samples: of a compressed one, only the first bytes are decompressed, into memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Final

from orchdata.loaders.errors import ShardError
from orchdata.loaders.limits import Limits
from orchdata.loaders.shards.builtin import Builtin, OpenContext, RecordContainer, TarContainer, builtin_of
from orchdata.loaders.shards.compressed import UnpackedFile, compression, unpack
from orchdata.loaders.shards.field_rules import NO_RULES, FieldRules
from orchdata.loaders.shards.first.beginning import Beginning, first_samples
from orchdata.loaders.shards.open import open_shard
from orchdata.loaders.shards.shard import Shard
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.files import PLAIN_FILES, Files
from orchdata.loaders.storage.paths import is_compressed
from orchdata.loaders.storage.storage import Storage

_FIRST_BYTES: Final = 4 << 20
_GROWTH: Final = 4
MOST_BYTES: Final = 256 << 20
"""Most bytes of a compressed shard that are decompressed into memory."""


@contextmanager
def begun(
    url: str,
    most: int,
    *,
    limits: Limits,
    cache: CacheFolder,
    media_root: str | None = None,
    rules: FieldRules = NO_RULES,
    files: Files = PLAIN_FILES,
) -> Iterator[tuple[Shard, Beginning]]:
    """Open a shard for the block, with its first `most` samples: only these can be read from it.

    A compressed shard may have fewer of them, if so many would take more than `MOST_BYTES`: `is_short` says so.

    Args:
        limits, cache, media_root, rules, files: as of `open_shard`; nothing is kept in the cache.

    Raises:
        ValueError, ShardError: as `open_shard`.
        StorageError, StaleIndexError: it cannot be read now, or changes while it is read.
    """
    builtin = None if rules.container is not None else builtin_of(url)
    if isinstance(builtin, TarContainer) or (isinstance(builtin, RecordContainer) and is_compressed(url)):
        with closing(files.open(url)) as file:
            if compression(file.read(0, 4)) is not None:
                context = OpenContext(limits=limits, cache=cache, media_root=media_root, files=files)
                yield _unpacked(builtin, file, most, context, rules)
                return
    with closing(open_shard(url, limits=limits, cache=cache, media_root=media_root, rules=rules, files=files)) as shard:
        yield shard, shard.begin(most)


def _unpacked(
    container: Builtin, file: Storage, most: int, context: OpenContext, rules: FieldRules
) -> tuple[Shard, Beginning]:
    size = _FIRST_BYTES
    while True:
        content = unpack(file, context.limits, size)
        shard = container.open(UnpackedFile(file, content.data), context, rules)
        beginning = shard.begin(most)
        is_short = beginning.is_whole and not content.is_whole  # its last sample may be cut
        if not is_short or content.damage is not None or size >= MOST_BYTES:
            break
        size *= _GROWTH
    if is_short:
        table = beginning.facts.table
        table = first_samples(table, table.sample[-1] if len(table) else 0)
        if content.damage is not None or not len(table):
            raise ShardError(file.url, content.damage or f"its first sample has more than {MOST_BYTES} bytes")
        beginning = beginning._replace(facts=beginning.facts._replace(table=table), is_whole=False, is_short=True)
    facts = beginning.facts._replace(meta=replace(beginning.facts.meta, size=file.size, version=file.version))
    share = beginning.share * content.share
    return shard, beginning._replace(facts=facts, share=share, reach=len(content.data))
