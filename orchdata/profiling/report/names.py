"""Names of shards for people: short, and without secrets."""

from __future__ import annotations

from collections.abc import Sequence

from orchdata.loaders.storage.remote.urls import identity


class ShardNames:
    """Names of shards relative to their common folder, without queries and user names of their URLs."""

    def __init__(self, urls: Sequence[str]) -> None:
        names = [identity(url) for url in urls]
        first, last = (min(names), max(names)) if names else ("", "")
        pairs = enumerate(zip(first, last, strict=False))
        same = next((place for place, (one, other) in pairs if one != other), len(first))
        self._start = first.rfind("/", 0, same) + 1
        self._folder = first[: self._start]

    def in_text(self, text: str) -> str:
        """Return a message in which shards, too, are named relative to their common folder."""
        return text.replace(self._folder, "") if len(self._folder) > 1 else text

    def __call__(self, url: str) -> str:
        name = identity(url)
        return name[self._start :] if len(name) > self._start else name.rsplit("/", 1)[-1]
