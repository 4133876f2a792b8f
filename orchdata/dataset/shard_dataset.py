"""ShardDataset: shards, a selection of their samples, and a recipe. Opens nothing until it is used.

Open files (the index, shards from which single samples were read) are kept apart from the values, in each process.
"""

from __future__ import annotations

import copy
import operator
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

import orchdata
from orchdata.dataset.indexed import Chosen, Opened, Rows, first_rows, num_first_samples
from orchdata.dataset.selection import (
    Filter,
    OwnColumns,
    Selection,
    Split,
    Taken,
    columns_of,
    first_numbers,
    left_out,
)
from orchdata.dataset.shard_arguments import (
    NamedFile,
    check_one_folder,
    checked_fields,
    checked_file,
    checked_names,
    reading_of,
)
from orchdata.loaders.amounts import counted, these
from orchdata.loaders.errors import DamagedIndexError, FieldError, MissingIndexError
from orchdata.loaders.index.build import build_index
from orchdata.loaders.index.fields import with_fields
from orchdata.loaders.index.index import Index, open_index
from orchdata.loaders.index.index_file import IndexFile
from orchdata.loaders.index.stored import StoredSample
from orchdata.loaders.recipe import Recipe, checked_recipe, digest, load_required
from orchdata.loaders.samples.sample import Sample
from orchdata.loaders.shards.container import Container
from orchdata.loaders.shards.fields import printable
from orchdata.loaders.shards.open import OpenShards, by_identity, changed_media, find_changes
from orchdata.loaders.shards.shard import PLAIN, Reading, listed_paths
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.files import Files
from orchdata.loaders.storage.paths import Matching, needs_listing, pieces_of
from orchdata.loaders.storage.remote.urls import identity, is_remote
from orchdata.loaders.storage.storage import FileVersion
from orchdata.notices import warn_user
from orchdata.ranks.first_comer import done_by_first

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc

    from orchdata import CostModel, Profile, ShownSamples
    from orchdata.dataset.arguments import Arguments, PreparedDataset

_listings: Counter[str] = Counter()
"""How often this process has asked for the listing of some patterns."""

Paths = str | PathLike[str] | Sequence[str | PathLike[str]]


class Leaf(NamedTuple):
    """A data set of a mixture: its name with those of the mixtures around it, and its part in the outermost mixture.

    Attributes:
        top: name of the outermost mixture's source that contains it.
        share: its fraction of that source's weight.
    """

    name: str
    dataset: ShardDataset
    top: str
    share: float = 1.0
    loss_weight: float = 1.0


class Sharded:
    """A data set of shards with an index: an `od.ShardDataset`, or an `od.Mixture` of several.

    Attributes:
        orchdata_preloads: modules that the fork server of worker processes imports.
    """

    orchdata_preloads: tuple[str, ...] = ()

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The data sets of a mixture; a ShardDataset is the only one of itself, without a name."""
        return (Leaf("", self, ""),)  # type: ignore[arg-type]

    def parts(self, index: Any) -> list[tuple[Leaf, Any, int]]:
        """Return each leaf with its own index, and its first row in `index`, the one of all."""
        return list(zip(self.leaves, index.indexes, index.first_rows.tolist(), strict=False))

    def profile(
        self,
        *,
        cost: CostModel | None = None,
        ranks: Sequence[int] | None = None,
        batch_size: int = 8,
        **others: Any,
    ) -> Profile:
        """Return what the samples are made of, and what numbers of ranks would lose to imbalance.

        The index is built where it is missing. No sample is decoded.

        Args:
            cost: the model's cost; with None every phase costs its positions.
            ranks: numbers of data-parallel ranks to plan for; None for 8 to 2,560, as far as the data suffice.
            batch_size: samples per rank and step.
            others: other arguments of `od.profile`: balance, layout, batch_tokens, group_size, streams, seed, steps,
                encoder_peers.

        Raises as `od.profile`.
        """
        import orchdata

        return orchdata.profile(self, cost=cost, ranks=ranks, batch_size=batch_size, **others)  # type: ignore[arg-type]

    def show(self, samples: int | str | Sequence[int | str]) -> ShownSamples:
        """Return samples as the model sees them, for a notebook: text with what is trained, pictures.

        The samples are read now. See `od.show`.
        """
        import orchdata

        return orchdata.show(self, samples)  # type: ignore[arg-type]


class ShardDataset(Sharded):
    """Samples of images, audio and text, under a recipe.

    `len(dataset)` and `dataset[i]` count the good samples that `filter` and `split` keep, in the order of the shards.
    They need the index, and build it if there is none. `dataset.num_rows` counts pieces: `TextPreprocessor.overflow`
    may split a sample into pieces, which a loader draws one by one.

    Args:
        paths: shards (.tar, .tar.gz, .tar.zst, .parquet), files of records (.jsonl, .json, .csv, .tsv, .txt, also
            with .gz or .zst), Hugging Face data sets on disk (the folder, or its .arrow files), folders of media with
            metadata.jsonl or metadata.csv; as a path, a brace expression (`train-{000000..000127}.tar`), a glob, or a
            list of these.
        recipe: how samples become tokens; default `Recipe()`.
        media_root: folder of the files that records name. None: records name no files, except in the table of a folder
            of media, where names are relative to that folder. If given, it applies to such tables too.
        columns: old name -> new name of fields (columns, keys of records, members of tars) to rename before anything
            else reads them; part of the identity of the data set.
        key: "last_dot" for tars with dots in the names of their files: a sample's key ends at the last dot (before
            `.gz`), not at the first; part of the identity of the data set.
        containers: kinds of shards of your own, values of subclasses of `od.Container`. They are asked first which of
            the paths they read; part of the identity of the data set.
        index_fields: fields of yours (columns, keys of records, members of tars) with numbers, short strings or
            booleans, which the index keeps for `filter`; names after `columns`.
        ignore: names of fields, with all below them, of which the warning of fields that are not read says nothing.
        storage_options: how objects of storage are read: names of obstore (`endpoint`, `region`, `access_key_id`,
            `allow_http`, `read_timeout`, ...), and `retry_seconds`, `profile`, `anonymous`. Credentials that are not
            here are found as usual.
        store: an obstore store or an fsspec filesystem, which is used as it is for all URLs.
        index_file: path or URL of the index, as written by `orchdata index --out`: each node fetches it once, and no
            shard is listed or opened before the first step. It is read with the same credentials as the shards, and is
            never built: a recipe or paths that do not fit are an error.

    Raises:
        FileNotFoundError: a path that does not exist, or a pattern that matches nothing.
        ValueError: a suffix that no reader knows, a shard named twice, a media_root that is not a folder, or two
            columns with one new name; a name of index_fields that is no identifier, or a column that every index has.
        ContainerError: a container of yours breaks the rules of containers, or claims none of the paths.
    """

    selections: tuple[Selection | Taken, ...] = ()
    reading: Reading = PLAIN
    index_file: str | None = None
    ignore: tuple[str, ...] = ()
    _urls: tuple[str, ...] | None = None
    _file: IndexFile | None = None

    orchdata_preloads = ("orchdata.dataset.preload",)

    def __init__(
        self,
        paths: Paths,
        recipe: Recipe | None = None,
        *,
        media_root: str | PathLike[str] | None = None,
        columns: Mapping[str, str] | None = None,
        key: Literal["", "last_dot"] = "",
        containers: Iterable[Container] = (),
        index_fields: Sequence[str] = (),
        ignore: Sequence[str] = (),
        storage_options: Mapping[str, Any] | None = None,
        store: Any = None,
        index_file: str | PathLike[str] | None = None,
    ) -> None:
        given = listed_paths(paths)
        how: dict[str, Any] = {"key": key, "storage_options": storage_options, "store": store, "paths": given}
        self.reading = reading_of(media_root, columns, containers, **how)
        self._given = tuple(pieces_of(given))
        self.index_file = checked_file(index_file, given, store)
        if self.index_file is None and not needs_listing(given):
            self._urls = self._expanded(given)
        self.recipe = checked_recipe(recipe)
        self.index_fields = checked_fields(index_fields, self.recipe)
        self.ignore = checked_names(ignore, "ignore is a tuple of names of fields, such as ('label', 'meta')")
        self._opened = Opened()

    @property
    def urls(self) -> tuple[str, ...]:
        """The shards: absolute paths, and URLs without secrets. Those of an index file are taken from it; without one,
        objects that a pattern matches are listed once.
        """
        if self._urls is None:
            with self._opened.lock:
                if self.index_file is None:
                    self.find_shards()
                else:
                    self._from_file()
        assert self._urls is not None
        return self._urls

    def find_shards(self, *, again: bool = False) -> None:
        """Find the shards that the paths name, if that was not done: one rank lists the objects of patterns for all.

        Args:
            again: also if it was done.
        """
        if self._urls is not None and not again:
            return
        files = self.reading.files
        listed: dict[str, list[Any]] = {}

        def matching(pattern: str) -> list[str]:
            found = {url: list(file) for url, file in files.matches(pattern).items()}
            listed.update(found)
            return list(found)

        def find() -> list[Any]:
            return [list(self._expanded(self._given, matching)), listed]

        key = digest(list(self._given))
        _listings[key] += 1  # a data set that is made later in a job sees what is there then
        urls, versions = done_by_first(f"listing/{key}/{_listings[key]}", find)
        known = files.knowing({url: FileVersion(*file) for url, file in versions.items()})
        self._urls, self.reading = tuple(urls), replace(self.reading, files=known)

    def listed(self) -> tuple[str, ...]:
        """Return the shards that the paths name now, also those that the index lacks. Raises as the constructor."""
        return self._expanded(self._given)

    def named_file(self, url: str) -> NamedFile:
        """Return how the index of this data set is written to a file, or read from it."""
        how: dict[str, Any] = {"recipe": self.recipe, "reading": self.reading, "command": self.index_command}
        return NamedFile(url=url, paths=self._given, **how)

    def _expanded(self, given: Sequence[Any], matching: Matching | None = None) -> tuple[str, ...]:
        return tuple(identity(url) for url in self.reading.expand(given, matching))

    @property
    def media_root(self) -> str | None:
        """The folder of the files that records name, as an absolute path."""
        return self.reading.media_root

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """(old name, new name) of each renamed field."""
        return self.reading.columns

    @property
    def containers(self) -> tuple[Container, ...]:
        """The containers of the user's."""
        return self.reading.containers

    @property
    def files(self) -> Files:
        """Where the shards are, and how they are read from there."""
        return self.reading.files

    def filter(self, expression: str | pc.Expression) -> ShardDataset:
        """Return the data set with only the samples for which an expression over columns of the index is true. A split
        sample counts as a whole.

        Columns are `tokens` (of the LLM), `loss_tokens`, `text_tokens`, `bytes`, `bad`, `key`, `shard`, and for each
        modality `<name>_tokens`, `<name>_positions` and `<name>_parts`, and your own of `index_fields`: a comparison
        with a missing value is false, and `score is None` finds it. States and ranks compare the filter.

        Args:
            expression: a string such as "image_tokens < 4096 and not bad", or a pyarrow expression.

        Raises:
            ValueError: the string is not such an expression. An unknown column raises when the index is read.
        """
        return self._with(Filter.of(expression))

    def split(self, part: Literal["train", "test"], fraction: float, *, seed: int = 0) -> ShardDataset:
        """Return one side of a held-out split by a hash of the samples' keys: "train" and "test" share nothing.

        A sample is on the same side in any shards, on any machine and in any order of files. For records without an id
        the key is the number of the record in its file.

        Args:
            part: the side to return.
            fraction: approximate fraction of the samples that are "train"; pass the same for both sides.
            seed: another seed splits differently, for example to split one side again.
        """
        return self._with(Split(part=part, fraction=fraction, seed=seed))

    def take(self, count: int) -> ShardDataset:
        """Return the data set with only its first `count` samples, or all of them if it has fewer.

        Without an index only the first shards are measured, as many as these samples take: they are the same as those
        of the full index. After a `filter`, or with index_fields, all shards are indexed.
        """
        if not hasattr(count, "__index__") or count.__index__() < 1:
            raise ValueError(f"take needs a number of samples, at least 1, got {count!r}")
        return self._with(Taken(range(count.__index__())))

    def select(self, numbers: Any) -> ShardDataset:
        """Return the data set with only some samples, by number.

        Args:
            numbers: as for `dataset[number]`, ascending and without repeats: a range, a list or an integer array.

        Raises:
            IndexError: a sample does not exist.
            ValueError: the numbers are not ascending. TypeError: they are no integers.
        """
        return self._with(Taken.of(numbers, len(self)))

    def keys(self) -> pa.Table:
        """Return a table with `shard`, its path, and `key` of each sample, in the order of `dataset[number]`, to join
        with a table of yours for `where`.
        """
        import pyarrow as pa

        chosen = self._chosen()
        index = self._opened.index
        assert index is not None
        rows = chosen.first_rows.listed()
        shards = pa.array([shard.url for shard in index.shards], pa.large_string())
        keys = columns_of(index)["key"](0, index.num_rows)
        return pa.table({"shard": shards.take(pa.array(index.shard[rows])), "key": keys.take(pa.array(rows))})

    def where(self, mask: Any) -> ShardDataset:
        """Return the data set with only the samples for which a mask is true.

        Args:
            mask: a boolean for each sample, in the order of `keys()`: an array, or a column of pandas, Polars or
                pyarrow. Loaders on all ranks, and states, compare it.

        Raises ValueError for another length or type; a loader, if there are more or fewer samples than then.
        """
        return self._with(Taken.of_mask(mask, len(self)))

    def index(
        self,
        *,
        num_ranks: int = 1,
        rank: int | None = None,
        rebuild: bool = False,
        check: bool = True,
        progress: Callable[[float, int], None] | None = None,
    ) -> Index:
        """Return the index of these shards under this recipe, memory-mapped. It has all samples, selected or not.

        One process builds it if it is missing. Several ranks build it together, each for different shards, if each
        passes its `rank`: ranks with one cache folder share the work, and the others do the part of a lost rank.
        Local shards that changed since they were indexed are measured again, with a warning, and so are objects of a
        pattern, which is listed.

        Args:
            num_ranks: number of ranks that will use it.
            rank: number of this rank; None for a rank that must not build.
            rebuild: check every shard again, and index those that changed, and those with files that changed; not with
                `index_file`.
            check: compare the size and time of change of every local shard (0.3 seconds for 100,000), once, on one rank
                of a job; not with `index_file`. Ignored if several ranks must not build.
            progress: called about twice a second with the shards that are done, in which those that are being indexed
                count in part, and the number of all shards.

        Raises:
            MissingIndexError: it is missing or damaged, num_ranks is above 1, and `rank` is None.
        """
        builds = num_ranks == 1 or rank is not None
        index = self._index(num_ranks, rank, rebuild, progress)
        looks = check and builds and not rebuild and self.index_file is None
        if looks and self._has_changed(index, warns=not rank):
            index = self._index(num_ranks, rank, True, progress)
        if self.index_fields:
            index = self.with_fields(index, may_build=builds, progress=progress)
        self._opened.note(index)
        return index

    def with_fields(self, index: Index, *, may_build: bool = True, force: bool = False, progress: Any = None) -> Index:
        """Return an index of these shards with the columns of `index_fields`. Arguments are as of `fields.with_fields`.

        Raises:
            ValueError: a value that the index does not keep, columns of several types, or a name that no sample has.
            MissingIndexError: it was not built with them, and `may_build` is false.
        """
        how: dict[str, Any] = {"containers": self.containers, "files": self.files, "may_build": may_build}
        try:
            return with_fields(index, self.index_fields, self.recipe, force=force, progress=progress, **how)
        except MissingIndexError as error:
            raise MissingIndexError(f"{error}; {self._how_to_index}") from None

    def _index(
        self, num_ranks: int, rank: int | None, rebuild: bool, progress: Callable[[float, int], None] | None
    ) -> Index:
        if self.index_file is not None:
            if rebuild:
                raise ValueError(f"index_file={self.index_file!r} is never built here: {self.index_command}")
            return self._from_file()
        self.find_shards(again=rebuild and needs_listing(self._given))
        urls, recipe, reading = self.urls, self.recipe, self.reading
        # The number of the first good samples that the selections choose from; None: all.
        first = None if self.index_fields else num_first_samples(self.selections)

        # The full index is used where it is there, even if the first samples suffice.
        problem = ""
        is_full = first is None
        try:
            index = None if rebuild and is_full else open_index(urls, recipe, reading=reading)
            if index is not None and not rebuild:
                return index
            is_full = is_full or index is not None
            if first is not None and not is_full and not rebuild:
                index = open_index(urls, recipe, reading=reading, first=first)
                if index is not None:
                    return index
        except DamagedIndexError as error:
            problem = f"the index of {these(len(urls), 'shard')} is damaged ({error.path}: {error.reason})"
        if not rebuild and num_ranks > 1 and rank is None:
            problem = problem or f"no index for {these(len(urls), 'shard')} under this recipe"
            raise MissingIndexError(f"{problem}, and {num_ranks} ranks need one; {self._how_to_index}")
        if first is not None and not is_full:
            return build_index(urls, recipe, reading=reading, first=first, under_way=progress)

        # Else it is built, or brought up to date. Ranks must find each other's parts.
        if num_ranks > 1 and any(map(is_remote, urls)):
            check_one_folder(self._as_arguments())
        share = rank or 0, num_ranks
        return build_index(urls, recipe, reading=reading.looked_up(urls), share=share, under_way=progress)

    def _has_changed(self, index: Index, *, warns: bool) -> bool:
        """Return whether shards must be measured again, and warn about them. One rank looks for all."""
        limits, record, listed = self.recipe.limits, self.recipe.record, self.files.listed

        def find() -> list[Any]:
            how: dict[str, Any] = {"cache": CacheFolder(), "containers": by_identity(self.containers), "listed": listed}
            changed, unsure = find_changes(index.shards, limits=limits, **how)
            changed = list(dict.fromkeys([*changed, *changed_media(index, limits, record)]))
            return [len(changed), *changed[:1], unsure]

        number, *first, unsure = done_by_first(f"changes/{index.build_id}", find)
        if number and warns:
            others = f" and {number - 1} others" if number > 1 else ""
            warn_user(f"{first[0]}{others} changed since the index was built: measured again")
        if unsure and warns:
            warn_user(
                f"{counted(unsure, 'shard')} of the same size as when indexed, but with another time of change, like "
                "copies: each is compared when it is opened; `orchdata index` compares all of them now"
            )
        return bool(number)

    def _from_file(self) -> Index:
        """Open the index file, and take its shards: this data set keeps them, if the file is replaced."""
        assert self.index_file is not None
        named = self.named_file(self.index_file)
        self._file = self._file or named.look()
        index = named.opened(self._file)
        self._urls = tuple(shard.url for shard in index.shards)
        return index

    def prepare(self, arguments: Arguments) -> PreparedDataset:
        """Return what a loader needs of it. Raises as `DataLoader`."""
        from orchdata.dataset.shards import prepare_shards  # which imports torch

        return prepare_shards(self, arguments)

    def left_out(self, index: Index) -> NDArray[np.int64]:
        """Return the rows of its index that `filter` and `split` leave out, ascending, int64. Raises as they do."""
        if not self.selections:
            return np.zeros(0, np.int64)
        return left_out(index, self.selections, self.own_columns(index))

    def own_columns(self, index: Index, *, may_build: bool = True) -> OwnColumns:
        """Return the columns of `index_fields`; they are read when a filter uses one that this index lacks."""
        opened = cache(lambda: self.with_fields(index, may_build=may_build))

        def column(name: str, start: int, stop: int) -> Any:
            own = opened().own
            assert own is not None
            return own.column(name).slice(start, stop - start)

        return {name: partial(column, name) for name in self.index_fields}

    @property
    def num_rows(self) -> int:
        """Number of rows that a loader draws in an epoch: samples, or the pieces of split samples."""
        return len(self._chosen().rows)

    def __len__(self) -> int:
        return len(self._chosen().first_rows)

    @overload
    def __getitem__(self, number: int) -> Sample: ...
    @overload
    def __getitem__(self, number: slice) -> ShardDataset: ...
    def __getitem__(self, number: int | slice) -> Sample | ShardDataset:
        """Return a decoded sample, a split one with all of its text; for a slice, the data set of these samples.

        Raises IndexError, TypeError for a number that is not an integer, ValueError for a slice that goes backwards, or
        DataError if the sample cannot be decoded.
        """
        if isinstance(number, slice):
            ahead = first_numbers(number)
            return self._with(Taken(ahead) if ahead is not None else Taken.of(range(len(self))[number], len(self)))
        try:
            number = operator.index(number)
        except TypeError:
            raise TypeError(
                f"dataset[number] takes one integer or a slice, got {number!r:.60}; dataset.select(numbers) takes "
                "several, and dataset.find(key) returns the number of a key"
            ) from None
        rows = self._chosen().first_rows
        index = self._opened.index
        assert index is not None
        if not -len(rows) <= number < len(rows):
            text = f"sample {number} of {counted(len(rows), 'sample')} does not exist"
            if not len(rows) and len(bad := np.setdiff1d(index.bad_rows(), self.left_out(index))):
                text += f": none of {counted(len(bad), 'sample')} can be used; the first: {index.failure(int(bad[0]))}"
            raise IndexError(text)
        opened = self._opened
        with opened.lock:
            if opened.shards is None:
                load_required(self.recipe)
                how: dict[str, Any] = {"containers": by_identity(self.containers), "files": self.files}
                opened.shards = OpenShards(limits=self.recipe.limits, cache=CacheFolder(), **how)
            stored = StoredSample(index, opened.shards, rows[number], whole=True)
        try:
            return stored.decode(self.recipe)
        except FieldError as error:
            raise error.at(stored.shard, stored.key) from error.__cause__

    def find(self, key: str, shard: str | None = None) -> int | None:
        """Return the number of the sample with this key, for `dataset[number]`; None if there is none, or it is bad or
        left out.

        Args:
            key: key of the sample.
            shard: path of its shard, or the last component of it; None: any shard.

        Raises:
            TypeError: the key is not a string.
            ValueError: several samples have the key.
        """
        if not isinstance(key, str):
            raise TypeError(f"keys are strings, also those that are numbers: find({str(key)!r}), got {key!r}")
        key = printable(key)
        if shard is not None and os.sep in shard:
            shard = identity(shard)
        rows = self._chosen().first_rows
        assert self._opened.index is not None
        found = [int(row) for row in self._opened.index.find_all(shard, key)]
        matches = {row: number for row in found if (number := rows.number_of(row)) is not None}
        if len(matches) > 1:
            shards = ", ".join(sorted({self._opened.index.shard_of(row).url for row in [*matches][:3]}))
            raise ValueError(
                f"{len(matches)} samples have the key {key!r} (in {shards}): pass shard=, or use unique keys"
            )
        return next(iter(matches.values()), None)

    def _chosen(self) -> Chosen:
        """Return the rows of the samples."""
        opened = self._opened
        with opened.lock:
            index = opened.index or self.index()
            if opened.chosen is None:
                without = np.union1d(index.bad_rows(), self.left_out(index))
                rows = Rows(index.num_rows, without)
                opened.chosen = Chosen(rows, first_rows(index, without) if index.is_split else rows)
            return opened.chosen

    def _with(self, selection: Selection | Taken) -> ShardDataset:
        chosen = copy.copy(self)
        chosen.selections = (*self.selections, selection)
        chosen._opened = Opened(self._opened.index)
        return chosen

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _opened=Opened())

    def _as_arguments(self) -> str:
        """Return the arguments of `orchdata index` for it, to be shown: values of options are secret."""
        given, reading = self._given, self.reading
        shown = " ".join(shlex.quote(path) for path in given[:3])
        shown = shown if len(given) <= 3 else f"{shown} ... ({len(given)} paths)"
        shown += "" if reading.media_root is None else f" --media-root {shlex.quote(reading.media_root)}"
        shown += f" --key {reading.key}" if reading.key else ""
        shown += " --container MODULE:NAME" * len(reading.containers)
        shown += "".join(f" --index-field {name}" for name in self.index_fields)
        options = self.files.options if any(map(is_remote, (*given, self.index_file or ""))) else ()
        return shown + "".join(f" --storage-options {name}=..." for name in options)

    @property
    def _how_to_index(self) -> str:
        return (
            "let them build it together (index='build' under torch.distributed), or build it once before training: "
            f"{self.index_command}"
        )

    @property
    def index_command(self) -> str:
        """The command that builds the index, to be shown: values of options are secret."""
        out = "" if self.index_file is None else f" --out {shlex.quote(self.index_file)}"
        return f"orchdata index {self._as_arguments()}{out} --recipe MODULE:NAME (no --recipe for the default one)"

    def __repr__(self) -> str:
        if self._urls is None:
            return f"ShardDataset({', '.join(self._given[:3])}; not listed yet)"
        shards = f"{counted(len(self.urls), 'shard')}, first {self.urls[0]!r}"
        chosen = "".join(f"; {selection.describe()}" for selection in self.selections)
        index = self._opened.index
        if index is None:
            return f"ShardDataset({shards}{chosen}; not indexed yet)"
        rows, first_rows = self._chosen()
        pieces = f" in {len(rows):,} rows" if len(rows) > len(first_rows) else ""
        tokens = int(index.llm_tokens.sum()) - int(index.llm_tokens[rows.without].sum())
        return f"ShardDataset({len(first_rows):,} samples{pieces}, {tokens:,} tokens in {shards}{chosen})"

    _repr_html_ = orchdata._html
