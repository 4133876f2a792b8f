"""The dataset index: what every sample costs and where its bytes are, as columns of one mapped file.

    recipe + shard paths --name of the file--> mapped columns --row--> members to read, parts to decode

Opening reads no column and no shard; a plan touches only the rows of its step. Nothing is kept per sample in Python, so
worker processes share the pages instead of copying them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.cache import CacheFolder
from orchdata.loaders.compose import Member
from orchdata.loaders.errors import DataError
from orchdata.loaders.modality import IMAGE
from orchdata.loaders.table import FORMAT, map_table
from orchdata.loaders.totals import Totals

if TYPE_CHECKING:
    from orchdata.loaders.recipe import Recipe


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """A shard as it was indexed.

    Attributes:
        size: bytes as stored.
        checksum: of size and headers.
        version: `Storage.version`.
        lost_samples: that damage hides, where the shard tells how many it had; they have no row.
        lost_bytes: behind damage, whose samples are not known.
    """

    url: str
    size: int
    checksum: str
    version: str = ""
    lost_samples: int = 0
    lost_bytes: int = 0


class Index:
    """A mapped index; pickles as its path.

    n samples in the order of their shards, p parts, m members; every array is a read-only view of the file. Bad samples
    have a row too: no tokens, parts or members, but an error.

    Attributes:
        path: the file.
        fingerprint: identity of the content: recipe, and name, size and header checksum of every shard. Directories
            do not count, so that a state resumes after the data has moved.
        build_id: identity of the tables it was merged from; changes whenever a shard was measured anew.
        num_samples: n, bad ones included.
        shards: in order; the samples of one are the rows shard_rows[s] to shard_rows[s + 1].
        shard: shard of each sample, int32 (n,).
        llm_tokens: merged media tokens plus text, int32 (n,).
        loss_tokens: labels other than -100, int32 (n,).
        part_offsets: the parts of sample i are [part_offsets[i], part_offsets[i + 1]), int64 (n + 1,).
        part_modality: uint8 (p,), a code of `loaders.modality`; only encoder modalities have parts here.
        part_member: which of the sample's members, int32 (p,).
        part_positions: what enters the encoder, int32 (p,).
        part_tokens: merged tokens, int32 (p,).
        part_extent0, part_extent1: grid height and width of an image, samples and mel frames of audio, int32 (p,).
        member_offsets: as part_offsets, for the members that the sample uses, int64 (n + 1,).
        member_field: index into `fields`, int32 (m,).
        member_kind, member_encoding: as in the facts, uint8 (m,).
        member_offset, member_size: where the bytes are, int64 (m,).
        member_header0, member_header1: width and height of an image, frames and rate of audio, int64 and int32 (m,).
        fields: names of all fields in use.
        totals: see `loaders.totals.summarize`.
        recipe: `Recipe.describe()` of the recipe that the costs belong to.
    """

    def __init__(self, path: str | Path) -> None:
        """Map the file.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not an index, or one of another format.
        """
        self.path = Path(path)
        columns, metadata = map_table(self.path)
        if "shards" not in metadata:
            raise ValueError(f"{self.path} holds the costs of one shard, not an index")
        self.fingerprint: str = metadata["fingerprint"]
        self.build_id: str = metadata["build_id"]
        self.fields: tuple[str, ...] = tuple(metadata["fields"])
        self.totals: Totals = metadata["totals"]
        self.recipe: dict[str, Any] = metadata["recipe"]
        self.shards = tuple(ShardInfo(*shard) for shard in metadata["shards"])
        self.shard_rows: NDArray[np.int64] = np.array(metadata["shard_rows"], np.int64)

        self._columns = columns
        self.num_samples = columns.shard.size
        self.shard = columns.shard
        self.llm_tokens = columns.llm_tokens
        self.loss_tokens = columns.loss_tokens
        self.part_offsets = columns.part_offsets
        self.part_modality = columns.part_modality
        self.part_member = columns.part_member
        self.part_positions = columns.part_positions
        self.part_tokens = columns.part_tokens
        self.part_extent0 = columns.part_extent0
        self.part_extent1 = columns.part_extent1
        self.member_offsets = columns.member_offsets
        self.member_field = columns.member_field
        self.member_kind = columns.member_kind
        self.member_encoding = columns.member_encoding
        self.member_offset = columns.member_offset
        self.member_size = columns.member_size
        self.member_header0 = columns.member_header0
        self.member_header1 = columns.member_header1

    def __len__(self) -> int:
        return self.num_samples

    def __repr__(self) -> str:
        return f"Index({str(self.path)!r}: {self.num_samples} samples in {len(self.shards)} shards)"

    def __reduce__(self) -> tuple[type[Index], tuple[Path]]:
        return Index, (self.path,)

    def key(self, row: int) -> str:
        return self._columns.text("key", row)

    def parts_of(self, rows: NDArray[np.int64], modality: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The parts of one modality in `rows`, in order, and the place in `rows` of each one's sample: int64, int64."""
        first = self.part_offsets[rows]
        counts = self.part_offsets[rows + 1] - first
        parts = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
        mine = self.part_modality[parts] == modality
        return parts[mine], np.repeat(np.arange(len(rows)), counts)[mine]

    def bad_rows(self) -> NDArray[np.int64]:
        """Samples that cannot be used, ascending, int64."""
        return self._columns.bad_rows() if self.totals["bad"] else np.zeros(0, np.int64)

    def failure(self, row: int) -> DataError:
        """Why a bad sample is bad."""
        field, reason = self._columns.text("error_field", row), self._columns.text("error_reason", row)
        return DataError(self.shards[int(self.shard[row])].url, self.key(row), field, reason)

    def rows_of(self, shard: int) -> NDArray[np.int64]:
        """The rows of one shard, int64."""
        return np.arange(self.shard_rows[shard], self.shard_rows[shard + 1])

    def lost_samples(self) -> NDArray[np.int64]:
        """How many samples damage hides in each shard, beside those that have a row: int64 (num_shards,).

        What a shard does not tell is estimated from its bytes, at as many a sample as those that can be read take.
        """
        lost_bytes = np.array([shard.lost_bytes for shard in self.shards], np.int64)
        told = np.array([shard.lost_samples for shard in self.shards], np.int64)
        # A shard that cannot be read at all has one row, without a key, which stands for one of its samples.
        stands = np.zeros(len(self.shards), np.int64)
        for number in np.flatnonzero((lost_bytes > 0) & (np.diff(self.shard_rows) == 1)).tolist():
            stands[number] = not self.key(int(self.shard_rows[number]))
        readable = sum(shard.size for shard in self.shards) - int(lost_bytes.sum())
        samples_per_byte = (self.num_samples - int(stands.sum())) / max(1, readable)
        estimated = np.rint(lost_bytes * samples_per_byte).astype(np.int64)
        lost: NDArray[np.int64] = np.maximum(0, np.where(told > 0, told, estimated) - stands)
        return lost

    def read_spec(self, row: int) -> list[tuple[int, int, int, str]]:
        """(offset, size, encoding, field) of each member, as `Shard.read_many` takes them."""
        start, stop = self.member_offsets[row : row + 2].tolist()
        offsets, sizes = self.member_offset[start:stop].tolist(), self.member_size[start:stop].tolist()
        encodings, fields = self.member_encoding[start:stop].tolist(), self.member_field[start:stop].tolist()
        names = [self.fields[field] for field in fields]
        return list(zip(offsets, sizes, encodings, names, strict=True))

    def members(self, row: int) -> list[Member]:
        """The members that a sample uses, as `compose` takes them."""
        start, stop = self.member_offsets[row : row + 2].tolist()
        kinds, fields = self.member_kind[start:stop].tolist(), self.member_field[start:stop].tolist()
        firsts, seconds = self.member_header0[start:stop].tolist(), self.member_header1[start:stop].tolist()
        sizes = self.member_size[start:stop].tolist()
        result = []
        for kind, field, first, second, size in zip(kinds, fields, firsts, seconds, sizes, strict=True):
            if kind == IMAGE:
                result.append(Member(self.fields[field], kind, first, second, 0, 0, size))
            else:  # audio; both are 0 for text
                result.append(Member(self.fields[field], kind, 0, 0, first, second, size))
        return result

    def find(self, shard: str, key: str) -> int | None:
        """The row of a sample, or None. `shard` is a url as in `shards`, or its last component.

        Reads the keys of that shard only.

        Raises:
            ValueError: several shards of that name hold the key.
        """
        numbers = [number for number, info in enumerate(self.shards) if info.url == shard]
        numbers = numbers or [number for number, info in enumerate(self.shards) if basename(info.url) == shard]
        found = [row for number in numbers for row in self._rows_of(number, key)[:1]]
        if len(found) > 1:
            urls = ", ".join(self.shards[int(self.shard[row])].url for row in found)
            raise ValueError(f"sample {key!r} is in several shards called {shard!r}, name one of {urls}")
        return found[0] if found else None

    def _rows_of(self, number: int, key: str) -> list[int]:
        start, stop = self.shard_rows[number : number + 2].tolist()
        wanted = key.encode()
        offsets = self._columns.key_offsets[start : stop + 1]
        rows = np.flatnonzero(np.diff(offsets) == len(wanted))
        places = offsets[rows][:, None] + np.arange(len(wanted))
        same = (self._columns.key_bytes[places] == np.frombuffer(wanted, np.uint8)).all(axis=1)
        return [int(row) for row in start + rows[same]]


def open_index(urls: Sequence[str], recipe: Recipe, *, cache: CacheFolder | None = None) -> Index | None:
    """The index that `build_index` made of these shards under the recipe, or None. Looks at no shard.

    Args:
        urls: paths of the shards, expanded, in order.
        recipe: what the costs must belong to.
        cache: where indexes are kept; default: the folder that the environment names.
    """
    try:
        return Index(index_path(urls, recipe.fingerprint(), cache or CacheFolder()))
    except (FileNotFoundError, ValueError):
        return None


def index_path(urls: Sequence[str], recipe: str, cache: CacheFolder) -> Path:
    """Where the index of these shards under a recipe fingerprint is kept: no shard is looked at to know."""
    return cache.file("index", digest([FORMAT, recipe, [absolute(url) for url in urls]]) + ".arrow")


def absolute(url: str) -> str:
    """A path that means the same in every working directory; other URLs as they are."""
    return url if "://" in url else os.path.abspath(url)


def basename(url: str) -> str:
    """Last component of a path or URL."""
    return url.rstrip("/").rsplit("/", 1)[-1]


def content_fingerprint(shards: Iterable[ShardInfo], recipe: str) -> str:
    """Identity of what an index of these shards under the recipe fingerprint holds, wherever the shards lie."""
    parts = [[basename(shard.url), shard.size, shard.checksum] for shard in shards]
    return digest([FORMAT, recipe, parts])


def digest(value: object) -> str:
    """32 hex digits of a JSON-safe value."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
