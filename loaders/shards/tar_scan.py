"""One pass over a tar: facts of every member from its headers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.limits import Limits, shortened
from orchdata.loaders.memory import measured_at
from orchdata.loaders.modalities.builtin import BUILTINS, NUM_FACTS, OTHER, TEXT
from orchdata.loaders.modalities.modality import Header, Modality
from orchdata.loaders.modalities.probing import read_header, scan_heads
from orchdata.loaders.shards.facts_table import FactsTable, shard_failure
from orchdata.loaders.shards.fields import SPARSE, SPLITS, Met, classify_renamed, nfc, printable
from orchdata.loaders.shards.tar_walk import SparseError, TarBatch, read_sparse
from orchdata.loaders.slow import here
from orchdata.loaders.storage.storage import Storage


class ScannedTar(NamedTuple):
    """Facts of an archive, the number of bytes after damage, with unknown content, and `FactsMeta.met`."""

    table: FactsTable
    lost_bytes: int
    met: dict[str, int]


class TarScan:
    """One pass over an archive: groups members into samples and reads their media headers.

    Args:
        most: it ends where a sample begins after so many.
    """

    def __init__(self, file: Storage, limits: Limits, names: Mapping[str, str], key: str, most: int) -> None:
        self._file = file
        self._limits = limits
        self._names = names
        self.met = Met(names.items())
        self._table = FactsTable()
        self._split = SPLITS[key]
        self._key = self._same_key = ""  # as written, and as it is compared
        self._key_error: str | None = None
        self._fields: set[str] = set()
        self._first_row: dict[str, int] = {}  # by key
        self._sample = -1
        self._classes: dict[str, tuple[int, int]] = {}
        self._nameless: list[str] = []
        self._regular = 0
        self._most = most

    def run(self, batches: Iterator[TarBatch]) -> ScannedTar:
        damage: str | None = None
        end = 0
        for batch in batches:
            here().check()
            first_row = len(self._table)
            taken = self._group(batch)
            if len(self._table) > self._limits.shard_rows:
                reason = f"more than {self._limits.shard_rows} members, above Limits.shard_rows"
                return ScannedTar(shard_failure(reason), self._file.size, self.met.counts)
            self._scan_headers(batch, taken, first_row)
            if self._sample >= self._most:  # those before it are complete
                break
            damage = batch.damage
            if batch.offsets:
                end = max(end, batch.offsets[-1] + batch.sizes[-1])  # a link's content is further ahead
        table = self._table
        if damage is not None and len(table):
            # The archive ends inside this sample or right after it, so the sample may be incomplete.
            table.errors.pop(len(table) - 1, None)
            table.fail_structure(len(table) - 1, damage)
        if not len(table):
            lost_bytes = 0 if damage is None else self._file.size
            return ScannedTar(shard_failure(damage or self._no_samples()), lost_bytes, self.met.counts)
        # It is unknown how much is missing from an archive that ends early: at least one byte marks it as damaged.
        lost_bytes = 0 if damage is None else max(1, self._file.size - end)
        return ScannedTar(table, lost_bytes, self.met.counts)

    def _no_samples(self) -> str:
        if not self._regular:
            return "no samples: the archive has no files"
        shown = ", ".join(repr(name) for name in self._nameless)
        more = ", ..." if self._regular > len(self._nameless) else ""
        return f"no samples: no member is named key.field ({shown}{more})"

    def _group(self, batch: TarBatch) -> NDArray[np.int64]:
        """Append the members of a batch that belong to samples; return their indices in the batch."""
        rows: list[tuple[int, str, str, int, int, int, int]] = []
        taken: list[int] = []
        structural: list[tuple[int, str]] = []
        first_row = len(self._table)
        limits, classes, unread, names = self._limits, self._classes, batch.unread, self._names
        # Most members pass these checks without a function call.
        largest, short = min(limits.member_bytes, limits.text_bytes), limits.short_name
        offsets, sizes, encodings = batch.offsets, batch.sizes, batch.encodings
        for i, name in enumerate(batch.names):
            is_ascii = name.isascii()
            split = self._split(name if is_ascii else printable(name))
            if split is None:
                continue
            key, field = split if is_ascii else map(nfc, split)
            if key[-1] == "/" and (field[:1] == "_" or field == "ds_store"):
                continue  # macOS adds `._a.png` to `a.png` in a folder, and `.DS_Store`
            stored, field = field, names.get(field, field)
            if names:
                self.met.add((stored,))
            row = first_row + len(taken)

            # A new key begins a new sample.
            if key != self._same_key:
                self._key, self._same_key = split[0], key
                self._sample += 1
                self._fields = {"__key__", "__url__"}  # reserved by webdataset: not allowed as fields
                self._key_error = limits.name_error("key", key) if len(key) > short else None
                earlier = row if self._key_error else self._first_row.setdefault(key, row)
                if earlier != row:
                    reason = f"key {key!r} comes back after other keys: a sample's members must be consecutive"
                    structural += [(earlier, reason), (row, reason)]

            # Errors of its names, and duplicates.
            key = self._key
            if self._key_error is not None or len(field) > short:
                too_long = self._key_error or limits.name_error("field's name", field)
                if too_long is not None:
                    structural.append((row, too_long))
                    key, field = (shortened(key) if self._key_error else key), shortened(field)
            if field in self._fields:
                structural.append((row, f"field {field!r} comes twice in sample {key!r}"))
            self._fields.add(field)

            # Its kind and size.
            kind, encoding = classes.get(stored) or classes.setdefault(stored, classify_renamed(stored, field))
            size = sizes[i]
            if unread and i in unread:
                structural.append((row, unread[i]))
            if size > largest:
                self._too_large(row, kind, size)
            rows.append((self._sample, key, field, kind, offsets[i], size, encodings[i] or encoding))
            taken.append(i)
        self._table.extend(rows)
        for row, reason in structural:
            self._table.fail_structure(row, reason)
        if not len(self._table):
            self._note_nameless(batch.names)
        return np.array(taken, np.int64)

    def _too_large(self, row: int, kind: int, size: int) -> None:
        reason = self._limits.size_error(size, is_text=kind == TEXT) if kind != OTHER else None
        if reason is not None:
            self._table.errors[row] = reason

    def _note_nameless(self, names: list[str]) -> None:
        self._regular += len(names)
        self._nameless += [printable(name) for name in names[: 3 - len(self._nameless)]]

    def _scan_headers(self, batch: TarBatch, taken: NDArray[np.int64], first_row: int) -> None:
        """Add the headers of the rows from `first_row` on, which are the members `taken` of the batch."""
        table = self._table
        kinds = np.array(table.kind[first_row:], np.uint8)
        if table.errors:
            kinds[[first_row + i in table.errors for i in range(taken.size)]] = OTHER
        headers = np.zeros((taken.size, NUM_FACTS), np.int64)
        for code, modality in enumerate(BUILTINS.values(), TEXT + 1):
            mine = np.flatnonzero(kinds == code)
            if not mine.size:
                continue
            found, rest = scan_heads(modality, batch.buffer, batch.heads[taken[mine]])
            current = here()
            for i in rest.tolist():  # the first bytes were not enough
                row = first_row + int(mine[i])
                current.key = table.key[row]
                try:
                    found[i] = self._read_header(modality, row)
                except DecodeError as error:
                    table.errors[row] = error.reason
                except MemoryError as error:
                    raise measured_at(error, self._file.url, table.key[row], table.field[row]) from error
            current.key = None
            headers[mine, : modality.num_facts] = found
        table.extend_headers(headers)

    def _read_header(self, modality: type[Modality], row: int) -> Header:
        table = self._table
        offset, size = table.offset[row], table.size[row]
        if table.encoding[row] == SPARSE:

            def read(count: int) -> bytes:
                return bytes(read_sparse(self._file, offset, size, limits=self._limits, count=count))

            try:
                return read_header(modality, size, read, self._limits)
            except SparseError as error:
                raise DecodeError(str(error)) from error
        return read_header(modality, size, lambda count: self._file.read(offset, count), self._limits)
