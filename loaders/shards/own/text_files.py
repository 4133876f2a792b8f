"""Text files that are one document each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from orchdata.loaders.shards.own.shard import ByteRange, Container, OpenContext, Shard

if TYPE_CHECKING:
    from orchdata.loaders.shards.own.source import ShardSource


@dataclass(frozen=True)
class TextFiles(Container):
    """A container for text files that are one document each; without it, each line of a `.txt` file is a sample.

    Each file is a shard with one sample: text in UTF-8, whose key is the name of the file without its suffix. It is for
    thousands of long documents. Millions of short ones are read faster as lines of JSON: `{"text": ...}`.

    Args:
        suffixes: of the files; a suffix with `.gz` is decompressed.

    Raises:
        ValueError: no suffix, or one without its dot.
    """

    suffixes: tuple[str, ...] = (".txt", ".txt.gz")

    def __post_init__(self) -> None:
        if isinstance(self.suffixes, str) or not self.suffixes:
            raise ValueError(f'suffixes must be a tuple of suffixes, as in (".txt", ".md"), got {self.suffixes!r}')
        if bad := [suffix for suffix in self.suffixes if suffix[:1] != "." or len(suffix) < 2]:
            raise ValueError(f'a suffix begins with a dot, as in ".txt", got {bad[0]!r}')

    def claims(self, path: str) -> bool:
        return self._suffix(path) is not None

    def open(self, source: ShardSource, context: OpenContext) -> Shard:
        name, suffix = PurePath(source.url).name, self._suffix(source.url) or ""
        return _Document(name[: len(name) - len(suffix)] or name, source.size, is_gzip=suffix.lower().endswith(".gz"))

    def _suffix(self, path: str) -> str | None:
        """Return the longest suffix that a path has."""
        found = [suffix for suffix in self.suffixes if path.lower().endswith(suffix.lower())]
        return max(found, key=len, default=None)


class _Document(Shard):
    """A file as a shard with one sample."""

    parallel = True

    def __init__(self, key: str, size: int, *, is_gzip: bool) -> None:
        self._key = key
        self._sample = {"txt.gz" if is_gzip else "txt": ByteRange(0, size)}

    def keys(self) -> list[str]:
        return [self._key]

    def sample(self, number: int) -> dict[str, ByteRange]:
        return self._sample
