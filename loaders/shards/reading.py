"""How the shards of a data set are read: one value, which everything that looks up or builds its index takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

from orchdata.loaders.errors import ContainerError
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards.container import Container, container_of, identity_of, name_of
from orchdata.loaders.shards.fields import FieldRules
from orchdata.loaders.storage.files import PLAIN_FILES, Files
from orchdata.loaders.storage.paths import Matching, Paths, expand_paths, media_root_of
from orchdata.loaders.storage.remote.urls import identity, is_remote


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How shards are read; part of the identity of their index.

    Attributes:
        media_root: folder of the media files that records name, as an absolute path; None: records name no files.
        columns: (old name, new name) of each field to rename, by old name.
        containers: of the user's, which are asked first.
        key: as in FieldRules.
        files: where the shards are; no part of the identity.
    """

    media_root: str | None = None
    columns: tuple[tuple[str, str], ...] = ()
    containers: tuple[Container, ...] = ()
    key: str = ""
    files: Files = field(default=PLAIN_FILES, compare=False)

    def identity(self) -> list[Any]:
        """Return what an index depends on besides shards and recipe, JSON-safe; empty for the default."""
        parts: list[Any] = [] if self.media_root is None else [self.media_root]
        parts += [{"columns": [list(pair) for pair in self.columns]}] if self.columns else []
        parts += [{"key": self.key}] if self.key else []
        return parts + ([{"containers": list(map(identity_of, self.containers))}] if self.containers else [])

    def rules(self, url: str, recipe: Recipe) -> FieldRules:
        """Return how the samples of a shard at an absolute path are read under a recipe. Raises ContainerError as
        `container_of`.
        """
        container = container_of(self.containers, url) if self.containers else None
        return FieldRules(self.columns, recipe.record, recipe.keep, container, self.key)

    def root_of(self, url: str, rules: FieldRules) -> str | None:
        """Return the folder of the media that a shard names; None if its kind names none."""
        return media_root_of(url, self.media_root) if rules.container is None else None

    def looked_up(self, urls: Sequence[str]) -> Reading:
        """Return how shards are read, with sizes and versions of those that are objects of storage, from few requests.
        Raises StorageError.
        """
        remote = [url for url in map(identity, urls) if is_remote(url)]
        return replace(self, files=self.files.looked_up(remote)) if remote else self

    def expand(self, paths: Paths, matching: Matching | None = None) -> list[str]:
        """Return one path per shard, as `expand_paths`; a file or folder that a container of the user's claims is one.
        Raises as `expand_paths`; ContainerError for a container that breaks the rules, or claims none of the paths.
        """
        matching = matching or self.files.matches
        if not self.containers:
            return expand_paths(paths, matching=matching)
        urls = _expanded(paths, self.containers, matching)
        used = _used(self.containers, urls)
        for each in self.containers:
            if not any(each is one for one in used):
                raise ContainerError(
                    f"{name_of(each)} claims none of the {len(urls)} paths (the first is {urls[0]}): let claims() "
                    "return True for the paths that it reads, or leave the container out"
                )
        return urls


def used_containers(containers: tuple[Container, ...], paths: Paths) -> tuple[Container, ...]:
    """Return the containers that claim some of the paths: of several data sets, each takes those that it needs. Raises
    as `Reading.expand`.
    """
    return _used(containers, _expanded(paths, containers, PLAIN_FILES.matches)) if containers else ()


def _expanded(paths: Paths, containers: tuple[Container, ...], matching: Matching) -> list[str]:
    def claims(path: str) -> bool:
        return container_of(containers, identity(path)) is not None

    return expand_paths(paths, own=claims, matching=matching)


def _used(containers: tuple[Container, ...], urls: list[str]) -> tuple[Container, ...]:
    claiming = [container_of(containers, identity(url)) for url in urls]
    return tuple(each for each in containers if any(each is one for one in claiming))


PLAIN = Reading()


def listed_paths(paths: str | PathLike[str] | Iterable[str | PathLike[str]]) -> list[str | PathLike[str]]:
    """Return the given paths and patterns, one by one. Raises TypeError for anything else."""
    given: list[str | PathLike[str]] = []
    for path in [paths] if isinstance(paths, str | PathLike) or not isinstance(paths, Iterable) else paths:
        if not isinstance(path, str | PathLike):
            got = repr(path)[:100]
            if hasattr(paths, "__getitem__") and not isinstance(paths, list | tuple | dict):
                got = f"a {type(paths).__name__}: od.DataLoader takes a data set of torch or Hugging Face itself"
            raise TypeError(f"ShardDataset takes a path, a pattern or a list of these, got {got}")
        given.append(path)
    return given
