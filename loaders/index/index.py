"""The dataset index: the cost of every sample and the location of its bytes, as columns of one mapped file.

    recipe + shard paths --name of the file--> mapped columns --row--> members to read, parts to decode

Opening reads no shard, and reads the columns once per machine to verify their checksums. A plan touches only the rows
of its step. There is no Python object per sample, so worker processes share the pages instead of copying them.

Offsets and other positions are checked when they are used: one that points outside raises DamagedIndexError, and never
gives a wrong text or a crash.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from orchdata.loaders.amounts import counted
from orchdata.loaders.errors import DamagedIndexError, DataError, MissingIndexError, StorageError
from orchdata.loaders.index.table import (
    LAYOUT,
    MOST_BYTES,
    OFFSETS,
    TABLE_FORMAT,
    WIDTHS,
    Columns,
    TableSize,
    Totals,
)
from orchdata.loaders.modalities.modality import PartSize, outer_of
from orchdata.loaders.recipe import Recipe, digest, versions
from orchdata.loaders.samples.members import Member
from orchdata.loaders.shards.named_media import MISSING
from orchdata.loaders.shards.shard import PLAIN, Reading, ShardInfo
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.local import Buffer, Lent, lend, opened_lent
from orchdata.loaders.storage.paths import SUFFIXES, expand_paths, media_root_of, needs_listing
from orchdata.loaders.storage.remote.urls import identity, is_remote
from orchdata.loaders.storage.sealed import Head, forget, head_of, is_noted, note, still_used, verify_body
from orchdata.loaders.storage.storage import basename, tried

KIND = b"indx"
PartTable = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8], NDArray[np.int32]]
SOURCE: Final = "record_source"
_STILL_SECONDS = 24 * 3600.0
"""So often a running job records that it uses its index."""


class Place(NamedTuple):
    """Where the shards of an index file are, whose names in it are relative: their folder, with a final "/", and the
    folder of the files that their records name.
    """

    root: str
    media_root: str | None = None

    def of(self, shard: ShardInfo, made_in: str) -> ShardInfo:
        """Return a shard of an index made in another root where it is now. Times of files in another folder do not
        count. Raises ValueError for a shard outside of the folder that the user names.
        """
        is_outside = "://" in shard.url or "\0" in shard.url or not {"", ".", ".."}.isdisjoint(shard.url.split("/"))
        if is_outside or shard.media_root not in ("", "."):
            raise ValueError(f"the shard {shard.url!r:.200} is not named by a path below the common folder")
        url = self.root + shard.url
        media_root = (media_root_of(url, self.media_root) or shard.media_root) if shard.media_root else ""
        if self.root == made_in:
            return replace(shard, url=url, media_root=media_root)
        version = shard.version if is_remote(url) else ""
        is_moved = bool(media_root) and not is_remote(media_root)
        return replace(shard, url=url, media_root=media_root, version=version, moved_media=is_moved)


class Index(Columns):
    """A mapped index; pickles as its path, and as the open file: what a prune has removed is there for workers too.

    The rows of its n samples, or pieces of samples, are in the order of their shards; every column is a read-only view
    of the file. Bad samples have a row too: no tokens, parts or members, but an error.

    Attributes:
        fingerprint: identity of the content: recipe, and name, size and header checksum of every shard. Directories
            do not count, so that a state resumes after the data has moved.
        build_id: identity of the tables it was merged from; changes whenever a shard was measured again.
        num_rows, num_samples: n; and the number of samples, bad ones included.
        is_split: whether any sample has several rows.
        shards: in order; the samples of one are the rows shard_rows[s] to shard_rows[s + 1].
        modalities, fields: names by their codes in this index, text first; of all fields in use.
        own: the user's own columns, with a value for each row; None if it was not built with any.
        totals: see `table.summarize`.
        recipe: `Recipe.describe()` of the recipe that the costs belong to.
        place: where its shards are, if it was written as a file.
        fetch: opens the index from the file that a user named, on a machine without a copy of it; it pickles. None: it
            is of this cache folder.
        base: the index that it was made of, if `own` columns were added to it; it is in use as long.
    """

    fetch: Callable[[], Index] | None = None
    base: Path | None = None

    def __init__(self, path: str | Path, lent: Lent | None = None, place: Place | None = None) -> None:
        """Map the file, or the one that another process lends. It is read completely, and checked, once per machine.

        `place` says where the shards are, of an index that was written as a file. Raises FileNotFoundError;
        DamagedIndexError if it is no index of this format, or changed since it was written; StorageError.
        """
        self.path = Path(path)
        try:
            mapped = tried(str(self.path), "cannot be read", partial(_map, self.path, lent))
            if mapped is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
            metadata, columns, self.own, self._fd, self._opened = mapped
            weakref.finalize(self, os.close, self._fd)
            shards = map(ShardInfo.of_list, metadata["shards"])
            self.shards = tuple(shards if place is None else [place.of(each, metadata["root"]) for each in shards])
        except (ValueError, LookupError, TypeError, AttributeError, pa.ArrowException) as error:
            raise self.damaged(str(error)) from error
        self._used = time.monotonic()
        self.fingerprint: str = metadata["fingerprint"]
        self.build_id: str = metadata["build_id"]
        self.fields: tuple[str, ...] = tuple(metadata["fields"])
        self.modalities: tuple[str, ...] = tuple(metadata["modalities"])
        self.totals: Totals = metadata["totals"]
        self.recipe: dict[str, Any] = metadata["recipe"]
        self.place = place
        self.shard_rows: NDArray[np.int64] = np.array(metadata["shard_rows"], np.int64)

        for name in Columns.__slots__:
            setattr(self, name, getattr(columns, name))
        self.num_rows = columns.shard.size
        self.num_samples: int = self.totals["samples"]
        self.is_split = self.num_rows > self.num_samples

    def check_urls(self, urls: Sequence[str]) -> None:
        """Raise DamagedIndexError if it is not the index of these shards, which its file name promises."""
        if (known := [shard.url for shard in self.shards]) != [*urls]:
            raise self.damaged(f"it is said to be of {len(known)} shards, {known[:3]!r:.300}: not of these {len(urls)}")

    def check_unchanged(self, rows: NDArray[np.int64] | None = None) -> None:
        """Raise DamagedIndexError if the file (of several, one that has some of `rows`) was written to since it was
        opened; call it after use.
        """
        now = tried(str(self.path), "cannot be looked at", partial(os.fstat, self._fd))
        if (now.st_size, now.st_mtime_ns) != (self._opened.st_size, self._opened.st_mtime_ns):
            raise self.damaged("it was changed while it was open")
        if time.monotonic() - self._used > _STILL_SECONDS:
            self._used = time.monotonic()
            for path in filter(None, (self.path, self.base)):
                still_used(path)

    def __len__(self) -> int:
        return self.num_samples

    def __repr__(self) -> str:
        return (
            f"Index({str(self.path)!r}: {counted(self.num_samples, 'sample')} in {counted(len(self.shards), 'shard')})"
        )

    def __reduce__(self) -> tuple[Callable[..., Index], tuple[Path, Lent, Place | None]]:
        return _opened_again, (self.path, lend(self._fd), self.place)

    def head(self) -> Head:
        """Return the head of its file."""
        return head_of(self._fd, KIND, TABLE_FORMAT)

    def body(self) -> memoryview:
        """Return its columns as they are stored, without its `own`."""
        mapped: Any = self.shard.base
        start = self.head().start
        return memoryview(mapped.obj)[start : start + self.size.num_bytes]

    def damaged(self, reason: str) -> DamagedIndexError:
        """Return the error to raise for impossible values. The file will be verified again when it is next opened."""
        forget(self.path)
        return DamagedIndexError(str(self.path), reason)

    def key(self, row: int) -> str:
        return self._text("key", row)

    def called(self, row: int) -> str:
        """Return the name of a row for messages: its sample, and the piece if the sample is split."""
        name, rows = f"sample {self.key(row)!r}", self.rows_of_sample(row)
        return name if len(rows) == 1 else f"piece {row - rows.start} of {len(rows)} of {name}"

    def sample_rows(self) -> NDArray[np.int64]:
        """Return the first row of each sample, ascending, int64 (num_samples,)."""
        return np.flatnonzero(self.piece == 0) if self.is_split else np.arange(self.num_rows)

    def rows_of_sample(self, row: int) -> range:
        """Return all rows of the sample of a row."""
        self._check_row(row)
        start, stop = row - int(self.piece[row]), row + 1
        while stop < self.num_rows and self.piece[stop]:
            stop += 1
        if not 0 <= start <= row or self.piece[start]:
            raise self.damaged(f"row {row} is said to be piece {row - start} of a sample")
        return range(start, stop)

    def shard_of(self, row: int) -> ShardInfo:
        """Return the shard of a sample."""
        self._check_row(row)
        number = int(self.shard[row])
        if not 0 <= number < len(self.shards) or not self.shard_rows[number] <= row < self.shard_rows[number + 1]:
            raise self.damaged(f"row {row} is said to be of shard {number}")
        return self.shards[number]

    def part_range(self, row: int) -> range:
        """Return the range of a sample's parts."""
        parts = self._place("part", row)
        return range(parts.start, parts.stop)

    def member_of(self, part: int, num_members: int) -> int:
        """Return the index of a part's member among the `num_members` members of its sample."""
        member = int(self.part_member[part])
        if not 0 <= member < num_members:
            raise self.damaged(f"part {part} is said to be member {member} of {num_members}")
        return member

    def modality_of(self, part: int) -> str:
        """Return the modality of a part."""
        code = int(self.part_modality[part])
        if not 0 < code < len(self.modalities):
            raise self.damaged(f"part {part} is said to be of modality {code} of {len(self.modalities)}")
        return self.modalities[code]

    def sizes(self, parts: NDArray[np.int64] | range, recipe: Recipe) -> list[PartSize]:
        """Return the sizes of parts, as counted by their modality under the recipe of the index."""
        columns = (self.part_modality, self.part_positions, self.part_tokens, self.part_rows, self.part_extent)
        wanted = slice(parts.start, parts.stop) if isinstance(parts, range) else parts
        values = [column[wanted].tolist() for column in columns]
        codes = set(values[0])
        if codes and (min(map(min, values[1:4])) < 0 or not 0 < min(codes) <= max(codes) < len(self.modalities)):
            raise self.damaged(f"parts are said to be of modalities {codes} of {len(self.modalities)}, or below 0 long")
        widths = {code: recipe.modalities[self.modalities[code]].num_extents for code in codes}
        return [
            PartSize(positions, tokens, rows, tuple(extent[: widths[code]]))
            for code, positions, tokens, rows, extent in zip(*values, strict=True)
        ]

    def parts_of(self, rows: NDArray[np.int64], modality: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the parts of one modality in `rows`, in order, and the position of each in `rows`: int64, int64."""
        first, counts = self._part_spans(rows)
        parts, _ = spread(first, counts)
        mine = self.part_modality[parts] == self.modalities.index(modality)
        return parts[mine], np.repeat(np.arange(len(rows)), counts)[mine]

    @property
    def indexes(self) -> tuple[Index, ...]:
        """The indexes that are joined in it; else itself."""
        return (self,)

    @property
    def first_rows(self) -> NDArray[np.int64]:
        """The first row of each of them, and the number of all rows."""
        return np.array([0, self.num_rows])

    def source_of(self, row: int) -> int:
        """Return the number of the index of a row."""
        return 0

    def part_table(self, rows: NDArray[np.int64]) -> PartTable:
        """Return (rows, part_offsets, part_modality, part_positions) of these rows, as `part_costs` takes them."""
        return rows, self.part_offsets, self.part_modality, self.part_positions

    def check_parts(self, rows: NDArray[np.int64]) -> None:
        """Check that `rows` are rows, and the range of their parts. Raises ValueError, or DamagedIndexError."""
        self._part_spans(rows)

    def tokens_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the LLM tokens of rows, int64. Raises DamagedIndexError for impossible numbers."""
        tokens: NDArray[np.int64] = self.llm_tokens[rows].astype(np.int64)
        most = self.totals["max_llm_tokens"]
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() <= most:
            raise self.damaged(f"a row is said to have {tokens.min()} or {tokens.max()} tokens, and all at most {most}")
        empty = rows[tokens == 0]
        if len(empty) and not np.isin(empty, self.bad_rows()).all():
            raise self.damaged("a row without tokens is said to be good")
        return tokens

    def release(self) -> None:
        """Let pages of the file that were read leave this process: they come back when they are read again."""
        mapped: Any = self.shard.base
        mapped.obj.madvise(mmap.MADV_DONTNEED)

    def bad_rows(self) -> NDArray[np.int64]:
        """Return the samples that cannot be used, ascending, int64."""
        return self.bad_row

    def failure(self, row: int) -> DataError:
        """Return the error of a bad sample."""
        number = int(np.searchsorted(self.bad_row, row))
        if number == self.bad_row.size or self.bad_row[number] != row:
            raise ValueError(f"row {row} is not a bad sample")
        field, reason = self._text("error_field", number), self._text("error_reason", number)
        shard = self.shard_of(row)
        if reason.endswith(f": {MISSING}") and shard.media_root:
            reason += f" below {shard.media_root!r}"
        return DataError(shard.url, self.key(row), field, reason)

    def rows_of(self, shard: int) -> NDArray[np.int64]:
        """Return the rows of one shard, int64."""
        return np.arange(self.shard_rows[shard], self.shard_rows[shard + 1])

    def lost_samples(self) -> NDArray[np.int64]:
        """Return the number of samples of each shard that are lost to damage and have no row, int64 (num_shards,).

        If a shard does not record it, it is the larger of two estimates: its lost bytes times the samples per byte in
        shards of its format, and the samples that it lacks compared with an undamaged shard.
        """
        rows = np.diff(np.searchsorted(self.sample_rows(), self.shard_rows))
        size, lost_bytes, recorded = (
            np.array([getattr(shard, name) for shard in self.shards], np.int64)
            for name in ("size", "lost_bytes", "lost_samples")
        )
        damaged = lost_bytes > 0
        # A shard that cannot be read at all has one row without a key, which stands for one of its samples.
        stands = np.zeros(len(self.shards), np.int64)
        for number in np.flatnonzero(damaged & (rows == 1)).tolist():
            stands[number] = not self.key(int(self.shard_rows[number]))
        known = rows - stands
        typical = int(np.median(rows[~damaged])) if not damaged.all() else 0
        estimated = np.where(damaged, np.maximum(0, typical - known), 0)
        suffixes = sorted(SUFFIXES, key=len, reverse=True)
        formats = np.array(
            [next((each for each in suffixes if shard.url.lower().endswith(each)), "") for shard in self.shards]
        )
        for name in np.unique(formats[damaged]):
            alike = formats == name
            # The last sample of a damaged shard may be the damage itself, and then it has no byte that can be read.
            whole = int(np.maximum(0, known - damaged)[alike].sum())
            per_byte = whole / max(1, int((size - lost_bytes)[alike].sum()))
            by_bytes = np.rint(lost_bytes * per_byte).astype(np.int64)
            estimated = np.where(alike, np.maximum(estimated, by_bytes), estimated)
        lost: NDArray[np.int64] = np.maximum(0, np.where(recorded > 0, recorded, estimated) - stands)
        return lost

    def read_spec(self, row: int) -> list[tuple[int, int, int, str]]:
        """Return (offset, size, encoding, field) of each member, the arguments of `Shard.read_many`."""
        mine, fields = self._members_of(row)
        offsets, sizes = self.member_offset[mine].tolist(), self.member_size[mine].tolist()
        for numbers in (offsets, sizes):
            if numbers and not 0 <= min(numbers) <= max(numbers) < MOST_BYTES:
                raise self.damaged(f"members of row {row} are said to be at {offsets!r:.80} with {sizes!r:.80} bytes")
        encodings = self.member_encoding[mine].tolist()
        return list(zip(offsets, sizes, encodings, [outer_of(name)[0] for name in fields], strict=True))

    def members(self, row: int) -> list[Member]:
        """Return the members that a sample uses, as arguments of `compose`."""
        mine, fields = self._members_of(row)
        kinds, headers, sizes = (
            column[mine].tolist() for column in (self.member_kind, self.member_header, self.member_size)
        )
        return list(map(Member, fields, kinds, map(tuple, headers), sizes))

    def find(self, shard: str, key: str) -> int | None:
        """Return the first row of `find_all`, or None."""
        return next(iter(self.find_all(shard, key)), None)

    def find_all(self, shard: str | None, key: str) -> list[int]:
        """Return the rows of a sample: of all its pieces, and more if its key comes back in its shard. Only the keys of
        that shard are read: its url, a path as data sets take it, or the last component of a url; None: any shard.

        Raises ValueError if several shards with that name have the key.
        """

        def matches(is_meant: Callable[[str], bool]) -> list[list[int]]:
            numbers = [number for number, info in enumerate(self.shards) if is_meant(info.url)]
            return [rows for number in numbers if (rows := self._rows_of(number, key))]

        if shard is None:
            return [row for rows in matches(lambda url: True) for row in rows]
        found = matches(shard.__eq__)
        if not any(info.url == shard for info in self.shards):
            found = matches(_as_given(shard).__contains__) or matches(lambda url: basename(url) == shard)
        if len(found) > 1:
            urls = ", ".join(self.shards[int(self.shard[rows[0]])].url for rows in found)
            raise ValueError(f"sample {key!r} is in several shards called {shard!r}, name one of {urls}")
        return found[0] if found else []

    def keys(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Return the keys of the rows from start to stop: their offsets, int64 (stop - start + 1,), and UTF-8 bytes."""
        offsets = self.key_offsets[start : stop + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        if not 0 <= first <= last <= self.key_bytes.size or np.diff(offsets).min(initial=0) < 0:
            raise self.damaged(f"the keys of rows {start} to {stop} are said to be outside of all keys")
        return offsets - first, self.key_bytes[first:last]

    def _rows_of(self, number: int, key: str) -> list[int]:
        start, stop = self.shard_rows[number : number + 2].tolist()
        wanted = key.encode()
        offsets, data = self.keys(start, stop)
        rows = np.flatnonzero(np.diff(offsets) == len(wanted))
        for position in reversed(range(len(wanted))):  # keys of a shard differ most at their ends
            rows = rows[data[offsets[rows] + position] == wanted[position]]
        matches: list[int] = (start + rows).tolist()
        return matches

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.num_rows:
            raise ValueError(f"row {row} of an index of {self.num_rows} rows")

    def _text(self, column: str, number: int) -> str:
        """Return one value of a string column; `number` is a row for `key`, an index in `bad_row` for errors."""
        try:
            text: str = getattr(self, f"{column}_bytes")[self._place(column, number)].tobytes().decode()
        except UnicodeDecodeError as error:
            raise self.damaged(str(error)) from error
        return text

    def _place(self, column: str, number: int) -> slice:
        """Return where the parts, the members or the string of a row are; `number` as in `_text`."""
        offsets, size = getattr(self, f"{column}_offsets"), getattr(self, OFFSETS[f"{column}_offsets"]).size
        if not 0 <= number < len(offsets) - 1:
            raise ValueError(f"row {number} of an index of {self.num_rows} rows")
        start, stop = offsets[number : number + 2].tolist()
        if not 0 <= start <= stop <= size:
            raise self.damaged(f"the {column} of row {number} is said to be at {start} to {stop} of {size}")
        return slice(start, stop)

    def _members_of(self, row: int) -> tuple[slice, list[str]]:
        """Return where the members of a row are, and the names of their fields."""
        mine = self._place("member", row)
        numbers = self.member_field[mine].tolist()
        if numbers and not 0 <= min(numbers) <= max(numbers) < len(self.fields):
            raise self.damaged(f"row {row} is said to have fields {numbers}, of {len(self.fields)}")
        return mine, [self.fields[number] for number in numbers]

    def _part_spans(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first part and the number of parts of each of `rows`."""
        if len(rows) and (rows.min() < 0 or rows.max() >= self.num_rows):
            raise ValueError(f"rows {rows.min()} to {rows.max()} of an index of {self.num_rows} rows")
        first, stop = self.part_offsets[rows], self.part_offsets[rows + 1]
        counts = stop - first
        if len(rows) and (first.min() < 0 or counts.min() < 0 or stop.max() > self.part_modality.size):
            for row in rows.tolist():
                self.part_range(row)  # raises for one of them
        return first, counts


def spread(first: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers of all ranges [first, first + count), one range after the other, and their offsets there."""
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return np.repeat(first - offsets[:-1], counts) + np.arange(int(offsets[-1])), offsets


def _opened_again(path: Path, lent: Lent, place: Place | None) -> Index:
    """Open the index of another process. Raises MissingIndexError if it was removed."""
    try:
        return Index(path, lent, place)
    except FileNotFoundError:
        raise MissingIndexError(f"the index {path} was removed: run `orchdata index` again") from None


_Mapped = tuple[dict[str, Any], Columns, "pa.RecordBatch | None", int, os.stat_result]


def _map(path: Path, lent: Lent | None) -> _Mapped | None:
    """Return verified head, mapped columns and the user's own columns of an index, a descriptor, its status; None if
    there is no file.
    """
    with suppress(FileNotFoundError), opened_lent(path, lent) as fd:
        status = os.fstat(fd)
        head = head_of(fd, KIND, TABLE_FORMAT)
        noted, values = is_noted(path, status), head.values
        if not noted:
            verify_body(fd, head)
        body = memoryview(mmap.mmap(fd, status.st_size, access=mmap.ACCESS_READ))[head.start :]
        end, own = len(body) - values.get("own", 0), None
        columns = views(body[:end], TableSize(**values["size"]))
        # The first and last of all offsets, and the order of bad rows, without a full pass.
        for name, target in OFFSETS.items():
            first, last = getattr(columns, name)[[0, -1]].tolist()
            if (first, last) != (0, length := getattr(columns, target).size):
                raise ValueError(f"{name} run from {first} to {last}, and {target} has {length}")
        if (np.diff(np.concatenate([[-1], columns.bad_row, [columns.shard.size]])) < 1).any():
            raise ValueError(f"bad rows are not in order, or outside of {columns.shard.size} rows")
        if end < len(body):
            own = pa.ipc.open_stream(pa.py_buffer(body[end:])).read_next_batch()
            if own.num_rows != columns.shard.size:
                raise ValueError(f"index_fields have {own.num_rows} rows, of {columns.shard.size}")
        now = os.fstat(fd)
        if not noted and all(
            getattr(now, name) == getattr(status, name) for name in ("st_size", "st_mtime_ns", "st_ctime_ns")
        ):
            note(path, status)
        return values, columns, own, os.dup(fd), status
    return None


def _as_given(path: str) -> frozenset[str]:
    """Return the shards of a path as data sets take it: relative, a folder, or a pattern of local files."""
    with suppress(OSError, ValueError, StorageError):
        if not needs_listing(path):
            return frozenset(map(identity, expand_paths(path)))
    return frozenset()


def views(body: Buffer, size: TableSize) -> Columns:
    """Return the columns of a body, read-only if the body is. Raises ValueError if it has another length."""
    view, places = memoryview(body), size.places()
    if view.nbytes != places[""].stop:
        raise ValueError(f"a table of {size} has {places[''].stop} bytes, there are {view.nbytes}")
    arrays = {name: np.frombuffer(view[places[name]], dtype) for name, (dtype, _, _) in LAYOUT.items()}
    for name, width in WIDTHS.items():
        arrays[name] = arrays[name].reshape(getattr(size, LAYOUT[name][1]), getattr(size, width))
    return Columns(**arrays)


def open_index(
    urls: Sequence[str], recipe: Recipe, *, cache: CacheFolder | None = None, reading: Reading = PLAIN, first: int = 0
) -> Index | None:
    """Open the index that `build_index` made of these shards, or their first samples, under the recipe; None if there
    is none. No shard is read.

    Raises DamagedIndexError; StorageError; FunctionError if it was made with another function that had the same id.
    """
    try:
        index = Index(index_path(urls, recipe.count_fingerprint(), cache or CacheFolder(), reading, first=first))
    except FileNotFoundError:
        return None
    index.check_urls([identity(url) for url in (urls[: len(index.shards)] if first else urls)])
    check_function_of(index.recipe, recipe)
    return index


def stored_description(recipe: Recipe) -> dict[str, Any]:
    """Return what an index stores of its recipe: its description, and a digest of its function's source text."""
    source = {} if recipe.record is None else {SOURCE: recipe.record.digest}
    return recipe.describe() | source


def check_function_of(recorded: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise FunctionError if the function of a recipe has another source text than that of the same id in the recorded
    description of a recipe.
    """
    function, before = recipe.record, recorded.get(SOURCE)
    if function is not None and before and function.digest and before != function.digest:
        raise function.unfit(
            f"has the record_id {function.id!r} of the function that indexed these shards, and another source text: "
            "give it another record_id. If both return the same, build the index again: `orchdata index --again`"
        )


def index_path(
    urls: Sequence[str], recipe: str, cache: CacheFolder, reading: Reading = PLAIN, *, first: int = 0
) -> Path:
    """Return the path of the index of these shards, or of their `first` samples, under a recipe fingerprint."""
    only = [{"first": first}] if first else []
    name = digest([TABLE_FORMAT, versions(), recipe, [identity(url) for url in urls], *reading.identity(), *only])
    return cache.root / "index" / f"{name}.index"


def content_fingerprint(shards: Iterable[ShardInfo], recipe: str) -> str:
    """Return the identity of an index of these shards under the recipe fingerprint; their folders do not count."""
    return digest([versions(), recipe, _contents(shards)])


def shards_fingerprint(shards: Iterable[ShardInfo]) -> str:
    """Return the identity of shards in states: their names, sizes and contents, under any rules."""
    return digest(_contents(shards))


def shards_in_words(shards: Sequence[ShardInfo]) -> str:
    """Return how many shards there are, the first and last of them, and their bytes, for messages."""
    names = " to ".join(dict.fromkeys(basename(shard.url) for shard in (*shards[:1], *shards[-1:])))
    size = sum(shard.size for shard in shards)
    return f"{len(shards):,} shard{'s' * (len(shards) != 1)} ({names}), {size:,} bytes"


def _contents(shards: Iterable[ShardInfo]) -> list[list[Any]]:
    return [
        [
            *(basename(shard.url), shard.size, shard.checksum, *filter(None, [shard.columns])),
            *({name: value} for name in ("container", "reach", "key") if (value := getattr(shard, name))),
        ]
        for shard in shards
    ]
