"""ShardDataset: which shards, which of their samples, and under which recipe. Opens nothing until it is asked.

What is open (the index, shards that single samples were read from) is beside the values, and stays in its process.
"""

from __future__ import annotations

import copy
import os
import shlex
import threading
from collections.abc import Callable, Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.dataset.selection import Filter, Selection, Split, left_out
from orchdata.loaders.errors import DamagedIndexError, FieldError, MissingIndexError
from orchdata.loaders.index.build import BuildProgress, build_index
from orchdata.loaders.index.index import Index, absolute
from orchdata.loaders.index.locations import is_outdated, open_index
from orchdata.loaders.index.stored import StoredSample
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.required import load_required
from orchdata.loaders.samples.sample import Sample
from orchdata.loaders.shards.changes import find_changes
from orchdata.loaders.shards.fields import printable
from orchdata.loaders.shards.jsonl.media_changes import changed_media
from orchdata.loaders.shards.open import OpenShards
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.paths import expand_paths, is_folder
from orchdata.notices import warn_user
from orchdata.ranks.first_comer import done_by_first

if TYPE_CHECKING:
    import pyarrow.compute as pc

Paths = str | PathLike[str] | Sequence[str | PathLike[str]]


class ShardDataset:
    """Samples of images, audio and text, seen through a recipe.

    `len(dataset)` and `dataset[i]` are of the good samples that `filter` and `split` leave, in the order of the shards;
    they need the index, and make it where there is none. `dataset.num_rows` counts the pieces of samples that
    `TextPreprocessor.overflow` splits, which a loader draws one by one.

    Args:
        paths: shards (.tar, .tar.gz, .tar.zst, .parquet), files of records (.jsonl, .json, .csv), data sets of Hugging
            Face on disk (the folder, or its .arrow files), folders of media with metadata.jsonl or metadata.csv; as a
            path, a brace expression (`train-{000000..000127}.tar`), a glob, or a list of these.
        recipe: how samples become tokens; default `Recipe()`.
        media_root: folder below which the files lie that records name. None: they name none, but for the table of a
            folder of media, whose names are relative to that folder. One that is given holds for such tables too.

    Raises:
        FileNotFoundError: a path that does not exist, or a pattern that matches nothing.
        ValueError: a suffix that no reader knows, a shard named twice, or a media_root that is no folder.
    """

    selections: tuple[Selection, ...] = ()

    def __init__(
        self, paths: Paths, recipe: Recipe | None = None, *, media_root: str | PathLike[str] | None = None
    ) -> None:
        given = [paths] if isinstance(paths, (str, PathLike)) else list(paths)
        self.urls: tuple[str, ...] = tuple(absolute(url) for url in expand_paths(given))
        self._given = tuple(absolute(fspath(path)) for path in given)
        self.recipe = recipe if recipe is not None else Recipe()
        self.media_root = checked_media_root(media_root)
        self._opened = _Opened()

    def filter(self, expression: str | pc.Expression) -> ShardDataset:
        """The samples of which an expression over columns of the index is true; one that is split counts as a whole.

        Columns are `tokens` (of the LLM), `loss_tokens`, `text_tokens`, `bytes`, `bad`, `key`, `shard`, and of each
        modality `<name>_tokens`, `<name>_positions` and `<name>_parts`. Part of what states and ranks compare.

        Args:
            expression: as "image_tokens < 4096 and not bad", or of pyarrow.

        Raises:
            ValueError: a string that is no such expression; columns that do not exist are named when the index is read.
        """
        return self._with(Filter.of(expression))

    def split(self, part: Literal["train", "test"], fraction: float, *, seed: int = 0) -> ShardDataset:
        """One side of a held-out split by a hash of the samples' keys: "train" and "test" share nothing.

        A sample is on the same side whatever shards, machine or order of files it comes from. Samples that are named by
        their number in a file (records without an id) go by that.

        Args:
            part: which side.
            fraction: of the samples that are "train", about; the same for both sides.
            seed: another one splits differently, as to split one side again.
        """
        return self._with(Split(part=part, fraction=float(fraction), seed=seed))

    def index(
        self,
        *,
        num_ranks: int = 1,
        rank: int | None = None,
        rebuild: bool = False,
        check: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> Index:
        """The index of these shards under this recipe, memory-mapped; of all their samples, chosen or not.

        One process builds it where it is missing. Several ranks build it together, each another part of the shards,
        where each says which it is: those with one cache folder share the work, and one that is lost is made up for.
        Local shards that changed since they were indexed are measured again, with a warning.

        Args:
            num_ranks: ranks that will use it.
            rank: this one; None for a rank that is not to build.
            rebuild: look at every shard again, and index those that changed, and those with files that changed.
            check: look at the size and time of change of every local shard (0.3 seconds for 100,000), on one rank of a
                job, once. Not where several ranks are not to build.
            progress: called with (shards done, shards in all).

        Raises:
            MissingIndexError: it is missing or damaged, num_ranks is above 1, and `rank` is None.
        """
        builds = num_ranks == 1 or rank is not None
        found = self._index(num_ranks, rank, rebuild, progress)
        if not rebuild and check and builds and self._has_changed(found, warns=not rank):
            found = self._index(num_ranks, rank, True, progress)
        self._opened.note(found)
        return found

    def _has_changed(self, index: Index, *, warns: bool) -> bool:
        """Whether local shards must be measured again; with a warning that names them."""

        def find() -> list[Any]:
            limits = self.recipe.limits
            changed, unsure = find_changes(index.shards, limits=limits, cache=CacheFolder())
            changed = list(dict.fromkeys([*changed, *changed_media(index, limits)]))
            return [len(changed), *changed[:1], unsure]

        number, *first, unsure = done_by_first(f"changes/{index.build_id}", find)
        if number and warns:
            others = f" and {number - 1} others" if number > 1 else ""
            warn_user(f"{first[0]}{others} changed since the index was made: measured again")
        if unsure and warns:
            warn_user(
                f"{unsure} shards have the size that they had when they were indexed, and another time of change, as "
                "copies have. Each is compared when it is opened; `orchdata index` compares all of them now"
            )
        return bool(number)

    def _index(
        self, num_ranks: int, rank: int | None, rebuild: bool, progress: Callable[[int, int], None] | None
    ) -> Index:
        if not rebuild:
            found = f"no index for these {len(self.urls)} shards under this recipe"
            try:
                index = open_index(self.urls, self.recipe, media_root=self.media_root)
            except DamagedIndexError as error:
                found = f"the index of these {len(self.urls)} shards is damaged ({error.path}: {error.reason})"
                index = None
            if index is not None:
                return index
            if is_outdated(self.urls, self.recipe, media_root=self.media_root):
                found = f"the index of these {len(self.urls)} shards is of an earlier format"
            if num_ranks > 1 and rank is None:
                raise MissingIndexError(
                    f"{found}, and {num_ranks} ranks need one; "
                    "have them build it together, index='build' under torch.distributed, or build it once, before "
                    f"training: orchdata index {self._as_arguments()} --recipe MODULE:NAME "
                    "(no --recipe for the default one)"
                )
        told = None if progress is None else _shards_done(progress)
        share = rank or 0, num_ranks
        return build_index(self.urls, self.recipe, media_root=self.media_root, share=share, progress=told)

    def left_out(self, index: Index) -> NDArray[np.int64]:
        """Rows of its index that `filter` and `split` leave out, ascending, int64. Raises ValueError as they do."""
        return left_out(index, self.selections)

    @property
    def num_rows(self) -> int:
        """What a loader draws in an epoch: samples, and in place of those that are split their pieces."""
        return len(self._chosen().rows)

    def __len__(self) -> int:
        return len(self._chosen().first_rows)

    def __getitem__(self, place: int) -> Sample:
        """A sample, decoded; of one that is split all its text, undivided. Raises IndexError, TypeError for what is no
        integer, or DataError where it cannot be.
        """
        if not hasattr(place, "__index__"):
            raise TypeError(
                f"dataset[place] takes one integer, got {place!r}; dataset.find(key) tells the place of a key"
            )
        rows = self._chosen().first_rows
        if not -len(rows) <= place < len(rows):
            raise IndexError(f"place {place} of {len(rows)} samples")
        row = int(rows[place])  # negative places count from the end
        index, shards = self._opened.index, self._opened.open(self.recipe)
        assert index is not None
        stored = StoredSample(index, shards, row, whole=True)
        try:
            return stored.decode(self.recipe)
        except FieldError as error:
            raise error.at(stored.shard, stored.key) from error.__cause__

    def find(self, key: str, shard: str | None = None) -> int | None:
        """Where the sample of that key is: `dataset[place]`; None where none is, or it is bad or left out.

        Args:
            key: of the sample.
            shard: its path or the last component of it; None: any.

        Raises:
            TypeError: the key is no string.
            ValueError: several samples have the key.
        """
        if not isinstance(key, str):
            raise TypeError(f"keys are strings, those made of numbers too: find({str(key)!r}), got {key!r}")
        key = printable(key)
        if shard is not None and os.sep in shard:
            shard = absolute(shard)
        rows = self._chosen().first_rows
        assert self._opened.index is not None
        found = np.array(self._opened.index.find_all(shard, key), np.int64)
        found = found[np.isin(found, rows)]
        if len(found) > 1:
            shards = ", ".join(sorted({self._opened.index.shard_of(int(row)).url for row in found[:3]}))
            raise ValueError(
                f"{len(found)} samples have the key {key!r} (in {shards}): give shard=, or keys of their own"
            )
        return int(np.searchsorted(rows, found[0])) if len(found) else None

    def _chosen(self) -> _Chosen:
        """The rows of the samples."""
        opened = self._opened
        with opened.lock:
            index = opened.index or self.index()
            if opened.chosen is None:
                without = np.union1d(index.bad_rows(), self.left_out(index))
                rows = np.setdiff1d(np.arange(index.num_rows), without, assume_unique=True)
                opened.chosen = _Chosen(rows, rows[index.piece[rows] == 0] if index.is_split else rows)
            return opened.chosen

    def _with(self, selection: Selection) -> ShardDataset:
        chosen = copy.copy(self)
        chosen.selections = (*self.selections, selection)
        chosen._opened = _Opened(self._opened.index)
        return chosen

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _opened=_Opened())

    def _as_arguments(self) -> str:
        shown = " ".join(shlex.quote(path) for path in self._given[:3])
        shown = shown if len(self._given) <= 3 else f"{shown} ... ({len(self.urls)} shards)"
        return shown if self.media_root is None else f"{shown} --media-root {shlex.quote(self.media_root)}"

    def __repr__(self) -> str:
        shards = f"{len(self.urls):,} shard{'s' * (len(self.urls) != 1)}, first {self.urls[0]!r}"
        chosen = "".join(f"; {selection.describe()}" for selection in self.selections)
        index = self._opened.index
        if index is None:
            return f"ShardDataset({shards}{chosen}; not indexed yet)"
        rows, first_rows = self._chosen()
        pieces = f" in {len(rows):,} rows" if len(rows) > len(first_rows) else ""
        tokens = int(index.llm_tokens[rows].sum())
        return f"ShardDataset({len(first_rows):,} samples{pieces}, {tokens:,} tokens in {shards}{chosen})"


class _Chosen(NamedTuple):
    """Rows of samples, and the first of each sample, ascending, int64."""

    rows: NDArray[np.int64]
    first_rows: NDArray[np.int64]


class _Opened:
    """What a data set has open in this process.

    Attributes:
        index: once it was asked for.
        chosen: the rows of its samples.
    """

    def __init__(self, index: Index | None = None) -> None:
        self.lock = threading.RLock()
        self.index = index
        self.chosen: _Chosen | None = None
        self._shards: OpenShards | None = None

    def note(self, index: Index) -> None:
        """Another index takes the place of the one there was."""
        with self.lock:
            if self.index is None or self.index.build_id != index.build_id:
                self.index, self.chosen, self._shards = index, None, None

    def open(self, recipe: Recipe) -> OpenShards:
        with self.lock:
            if self._shards is None:
                load_required(recipe)
                self._shards = OpenShards(limits=recipe.limits, cache=CacheFolder())
            return self._shards


def checked_media_root(media_root: str | PathLike[str] | None) -> str | None:
    """As an absolute path. Raises ValueError where it is no folder, StorageError where it cannot be looked at now."""
    if media_root is None:
        return None
    root = os.path.abspath(fspath(media_root))
    if not is_folder(root):
        raise ValueError(f"media_root {root!r} is no folder")
    return root


def _shards_done(progress: Callable[[int, int], None]) -> Callable[[BuildProgress], None]:
    return lambda built: progress(built.done, built.total)
