"""Many tables -> one index file: sizes first, then one allocation, then one table after another is copied in.

Memory is bounded by one table, whatever the number of samples. The file appears under its name when it is whole; an
interrupted build leaves the older one in place.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.index import ShardInfo, content_fingerprint
from orchdata.loaders.retries import storage_error
from orchdata.loaders.table import STRINGS, Columns, TableSize, allocate_table
from orchdata.loaders.totals import Totals, add_totals

TEMPORARY_SUFFIX = ".tmp"


class TableSource(Protocol):
    """The costs of one shard: what is needed to allocate, and the columns when their turn comes."""

    @property
    def shard(self) -> ShardInfo: ...
    @property
    def size(self) -> TableSize: ...
    @property
    def fields(self) -> Sequence[str]: ...
    @property
    def totals(self) -> Totals: ...
    def columns(self) -> Columns: ...


class RecipeIdentity(NamedTuple):
    """What an index keeps of a recipe."""

    fingerprint: str
    description: dict[str, Any]


def merge_tables(path: Path, sources: Sequence[TableSource], recipe: RecipeIdentity, *, build_id: str = "") -> None:
    """Write the index of `sources`, in their order, to `path`.

    Args:
        path: where.
        sources: one table a shard.
        recipe: kept in the index.
        build_id: kept in the index, to tell whether it was made from the same tables.

    Raises:
        StorageError: the disk is full, or not writable.
    """
    fields = {name: number for number, name in enumerate(dict.fromkeys(f for s in sources for f in s.fields))}
    sizes = [source.size for source in sources]
    metadata = {
        "fingerprint": content_fingerprint([source.shard for source in sources], recipe.fingerprint),
        "build_id": build_id,
        "recipe": recipe.description,
        "shards": [astuple(source.shard) for source in sources],
        "shard_rows": np.cumsum([0, *(size.samples for size in sizes)]).tolist(),
        "fields": list(fields),
        "totals": reduce(add_totals, (source.totals for source in sources)),
    }
    with replaced_file(path) as temporary:
        merged = allocate_table(temporary, reduce(TableSize.__add__, sizes), metadata)
        filler = _Filler(merged)
        for number, source in enumerate(sources):
            numbers = np.array([fields[name] for name in source.fields], np.int32)
            filler.add(source.columns(), number, numbers)


class _Filler:
    """Copies tables into the merged columns, each behind the one before."""

    def __init__(self, out: Columns) -> None:
        self.out = out
        self.row = self.part = self.member = 0
        self.bytes = dict.fromkeys(STRINGS, 0)

    def add(self, columns: Columns, shard: int, field_numbers: NDArray[np.int32]) -> None:
        out, samples = self.out, columns.shard.size
        rows = slice(self.row, self.row + samples)
        offsets = slice(self.row + 1, self.row + samples + 1)
        out.shard[rows] = shard
        for name in ("llm_tokens", "loss_tokens"):
            getattr(out, name)[rows] = getattr(columns, name)
        for kind, start in (("part", self.part), ("member", self.member)):
            getattr(out, f"{kind}_offsets")[offsets] = getattr(columns, f"{kind}_offsets")[1:] + start
            for name in Columns.__slots__:
                if name.startswith(f"{kind}_") and name not in (f"{kind}_offsets", "member_field"):
                    values = getattr(columns, name)
                    getattr(out, name)[start : start + values.size] = values
        out.member_field[self.member : self.member + columns.member_field.size] = field_numbers[columns.member_field]

        for name in STRINGS:
            start, values = self.bytes[name], getattr(columns, f"{name}_bytes")
            getattr(out, f"{name}_offsets")[offsets] = getattr(columns, f"{name}_offsets")[1:] + start
            getattr(out, f"{name}_bytes")[start : start + values.size] = values
            self.bytes[name] += values.size
        bad = columns.bad_rows() + self.row
        for valid in (out.error_field_valid, out.error_reason_valid):
            if valid.size:
                np.bitwise_or.at(valid, bad >> 3, np.uint8(1) << (bad & 7).astype(np.uint8))

        self.row += samples
        self.part += columns.part_modality.size
        self.member += columns.member_field.size


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`; its file takes the place of `path` when the block ends without an error.

    Writers of the same path do not disturb each other: the last one wins.
    """
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}"
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise storage_error(str(path), "cannot be written", error) from error
    finally:
        temporary.unlink(missing_ok=True)
