"""ShardDataset: which shards, and under which recipe. Opens nothing until an index is asked for."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from os import PathLike, fspath

from orchdata.loaders.errors import DamagedIndexError, MissingIndexError
from orchdata.loaders.index.build import BuildProgress, build_index
from orchdata.loaders.index.index import Index, absolute, is_outdated, open_index
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.storage.paths import expand_paths

Paths = str | PathLike[str] | Sequence[str | PathLike[str]]


class ShardDataset:
    """Shards of image, audio and text samples, seen through a recipe.

    Args:
        paths: shards (.tar, .tar.gz, .tar.zst, .parquet) as a path, a brace expression
            (`train-{000000..000127}.tar`), a glob, or a list of these.
        recipe: how samples become tokens; default `Recipe()`.

    Raises:
        FileNotFoundError: a path that does not exist, or a pattern that matches nothing.
        ValueError: a suffix that no reader knows, or a shard named twice.
    """

    def __init__(self, paths: Paths, recipe: Recipe | None = None) -> None:
        given = [paths] if isinstance(paths, (str, PathLike)) else list(paths)
        self.urls: tuple[str, ...] = tuple(absolute(url) for url in expand_paths(given))
        self._given = tuple(absolute(fspath(path)) for path in given)
        self.recipe = recipe if recipe is not None else Recipe()

    def index(
        self, *, num_ranks: int = 1, rebuild: bool = False, progress: Callable[[int, int], None] | None = None
    ) -> Index:
        """The index of these shards under this recipe, memory-mapped.

        One process builds it where it is missing. With more than one rank that would race on shared storage and
        leave ranks waiting at different times, so it must exist before.

        Args:
            num_ranks: ranks that will use it.
            rebuild: look at every shard again, and index those that changed.
            progress: called with (shards done, shards in all).

        Raises:
            MissingIndexError: it is missing or damaged, and num_ranks is above 1.
        """
        if not rebuild:
            found = f"no index for these {len(self.urls)} shards under this recipe"
            try:
                index = open_index(self.urls, self.recipe)
            except DamagedIndexError as error:
                found = f"the index of these {len(self.urls)} shards is damaged ({error.path}: {error.reason})"
                index = None
            if index is not None:
                return index
            if is_outdated(self.urls, self.recipe):
                found = f"the index of these {len(self.urls)} shards is of an earlier format"
            if num_ranks > 1:
                raise MissingIndexError(
                    f"{found}, and {num_ranks} ranks need one; "
                    f"build it once, before training: orchdata index {self._as_arguments()} --recipe MODULE:NAME "
                    "(no --recipe for the default one)"
                )
        return build_index(self.urls, self.recipe, progress=None if progress is None else _shards_done(progress))

    def _as_arguments(self) -> str:
        shown = " ".join(shlex.quote(path) for path in self._given[:3])
        return shown if len(self._given) <= 3 else f"{shown} ... ({len(self.urls)} shards)"

    def __repr__(self) -> str:
        return f"ShardDataset({len(self.urls)} shards, first {self.urls[0]!r})"


def _shards_done(progress: Callable[[int, int], None]) -> Callable[[BuildProgress], None]:
    return lambda built: progress(built.done, built.total)
