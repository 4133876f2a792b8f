"""Costs of one shard under a recipe: facts + text bytes -> a table of the index, kept in the cache.

    facts --group by sample--> members --read text only--> measure() --> columns, or the error of that sample

Facts are turned to lists once, and texts are read ahead in long sequential stretches, so that the time goes to the
tokenizer.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from orchdata.loaders.compose import Member, text_members
from orchdata.loaders.errors import NOT_DATA, FieldError, as_field_error
from orchdata.loaders.fields import OTHER, RAW
from orchdata.loaders.index import ShardInfo
from orchdata.loaders.measure import Measured, measure
from orchdata.loaders.merge import replaced_file
from orchdata.loaders.modality import IMAGE
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.table import MEMBERS, PARTS, Columns, TableSize, map_table, write_table
from orchdata.loaders.totals import Totals, summarize

if TYPE_CHECKING:
    from orchdata.loaders.shards import Shard

_CHUNK_SAMPLES = 1024  # read ahead at most this many samples
_CHUNK_BYTES = 16 << 20  # ... or this much text
_RUN_BYTES = 1 << 20  # one read
_GAP_BYTES = 16 << 10  # reading over a gap is cheaper than another call up to about here


@dataclass(frozen=True, slots=True)
class CostTable:
    """The costs of one shard, in a file of the cache.

    Attributes:
        path: the table.
        shard: what it belongs to.
        size, fields, totals: as in the index.
    """

    path: Path
    shard: ShardInfo
    size: TableSize
    fields: Sequence[str]
    totals: Totals

    @classmethod
    def open(cls, path: Path, shard: ShardInfo) -> CostTable:
        """Read the metadata only. Raises FileNotFoundError, or ValueError for a file of another format."""
        metadata = map_table(path)[1]
        return cls(path, shard, TableSize(**metadata["size"]), tuple(metadata["fields"]), metadata["totals"])

    def columns(self) -> Columns:
        return map_table(self.path)[0]


class ShardCosts(NamedTuple):
    """The costs of one shard, in memory: its columns, the names that `member_field` counts in, and its totals."""

    columns: Columns
    fields: list[str]
    totals: Totals

    def write(self, path: Path) -> None:
        """Write them where `CostTable.open` finds them; the file appears when it is whole."""
        metadata = {"size": asdict(self.columns.size), "fields": self.fields, "totals": self.totals}
        with replaced_file(path) as temporary:
            write_table(temporary, self.columns, metadata)


@dataclass(slots=True)
class _Sample:
    """One sample of the facts; its members are the rows from `start` on."""

    key: str
    start: int
    members: list[Member]
    wanted: list[int]  # members whose bytes are needed
    error: FieldError | None


def cost_shard(facts: pa.Table, open_shard: Callable[[], Shard], recipe: Recipe) -> ShardCosts:
    """Measure every sample of a shard.

    A sample that cannot be used becomes a row with an error; nothing is raised for it.

    Args:
        facts: of the shard, see `loaders.columns`.
        open_shard: opens the shard, called if there is text to read; closed here.
        recipe: what to measure under.

    Raises:
        ShardError: the shard cannot be opened any more.
        StorageError, StaleIndexError, MemoryError: nothing that the samples did.
    """
    offsets, encodings = facts.column("offset").to_pylist(), facts.column("encoding").to_pylist()
    rows = _Rows(offsets, encodings)
    with ExitStack() as stack:
        shard: Shard | None = None
        for chunk in _chunks(_samples(facts, recipe)):
            texts: dict[int, _Text] = {}
            if any(sample.wanted for sample in chunk):
                shard = shard or stack.enter_context(closing(open_shard()))
                texts = _read_texts(chunk, offsets, encodings, shard)
            for sample in chunk:
                _measure(sample, texts, recipe, rows)
    columns = rows.columns()
    return ShardCosts(columns, list(rows.field_numbers), summarize(columns, rows.ignored))


def _samples(facts: pa.Table, recipe: Recipe) -> Iterator[_Sample]:
    ordinals = facts.column("sample").to_numpy()
    starts = np.flatnonzero(np.diff(ordinals, prepend=-1))
    counts = np.diff(starts, append=len(ordinals))
    keys = facts.column("key").take(pa.array(starts)).to_pylist()
    columns = {name: facts.column(name).to_pylist() for name in _MEMBER_COLUMNS}
    fields = columns["field"] = _shared_strings(facts.column("field"))
    kinds = columns["kind"]
    broken = facts.column("error").null_count < len(facts)
    members = map(Member, *columns.values())
    wanted_of: dict[tuple[Any, ...], list[int]] = {}  # samples are alike
    for key, start, count in zip(keys, starts.tolist(), counts.tolist(), strict=True):
        mine = list(islice(members, count))
        error = _shard_error(mine) if broken else None
        if error is not None:
            yield _Sample(key, start, mine, [], error)
            continue
        alike = (*fields[start : start + count], *kinds[start : start + count])
        wanted = wanted_of.get(alike)
        if wanted is None:
            try:
                wanted = wanted_of[alike] = text_members(mine, recipe)
            except NOT_DATA:
                raise
            except Exception as problem:  # noqa: BLE001 - as in _measure
                yield _Sample(key, start, mine, [], as_field_error(problem, "measured"))
                continue
        yield _Sample(key, start, mine, wanted, None)


_MEMBER_COLUMNS = ("field", "kind", "width", "height", "frames", "rate", "size", "error")  # as Member takes them


def _shared_strings(column: pa.ChunkedArray) -> list[str]:
    """A column of few distinct strings as a list that holds each of them once."""
    encoded = column.combine_chunks().dictionary_encode()
    values = encoded.dictionary.to_pylist()
    return [values[number] for number in encoded.indices.to_pylist()]


def _shard_error(members: Sequence[Member]) -> FieldError | None:
    """What is wrong with a whole sample, as against one field, which matters only when it is used."""
    for member in members:
        if member.error is not None and member.kind == OTHER:
            return FieldError(member.field, member.error)
    return None


def _chunks(samples: Iterable[_Sample]) -> Iterator[list[_Sample]]:
    """Stretches of samples whose texts are read together."""
    chunk: list[_Sample] = []
    held = 0
    for sample in samples:
        chunk.append(sample)
        for index in sample.wanted:
            held += sample.members[index].size
        if len(chunk) >= _CHUNK_SAMPLES or held >= _CHUNK_BYTES:
            yield chunk
            chunk, held = [], 0
    if chunk:
        yield chunk


_Text = bytes | memoryview | FieldError


def _read_texts(
    chunk: Sequence[_Sample], offsets: Sequence[int], encodings: Sequence[int], shard: Shard
) -> dict[int, _Text]:
    """Payload, or what is wrong with it, of every wanted member of the chunk, by row of the facts."""
    texts: dict[int, _Text] = {}
    run: list[tuple[int, Member]] = []
    run_stop = 0
    for sample in chunk:
        for index in sample.wanted:
            row, member = sample.start + index, sample.members[index]
            if member.error is not None:
                texts[row] = b""  # never looked at: the error comes first
            elif encodings[row] != RAW:
                texts[row] = _read(shard, offsets[row], member, encodings[row])
            else:
                if run and not (
                    0 <= offsets[row] - run_stop <= _GAP_BYTES
                    and offsets[row] + member.size - offsets[run[0][0]] <= _RUN_BYTES
                ):
                    _read_run(shard, run, run_stop, offsets, texts)
                    run = []
                run.append((row, member))
                run_stop = offsets[row] + member.size
    if run:
        _read_run(shard, run, run_stop, offsets, texts)
    return texts


def _read_run(
    shard: Shard, run: Sequence[tuple[int, Member]], stop: int, offsets: Sequence[int], texts: dict[int, _Text]
) -> None:
    """Read raw members that lie near each other with one call; each on its own where that fails."""
    first = offsets[run[0][0]]
    if len(run) > 1:
        try:
            data = memoryview(shard.read(first, stop - first, RAW, run[0][1].field))
        except NOT_DATA:
            raise
        except Exception:  # noqa: BLE001, S110 - each is read on its own, and says what is wrong
            pass
        else:
            for row, member in run:
                texts[row] = data[offsets[row] - first : offsets[row] - first + member.size]
            return
    for row, member in run:
        texts[row] = _read(shard, offsets[row], member, RAW)


def _read(shard: Shard, offset: int, member: Member, encoding: int) -> _Text:
    try:
        return shard.read(offset, member.size, encoding, member.field)
    except NOT_DATA:
        raise
    except Exception as error:  # noqa: BLE001 - as in _measure
        return as_field_error(error, "measured")


def _measure(sample: _Sample, texts: Mapping[int, _Text], recipe: Recipe, rows: _Rows) -> None:
    try:
        if sample.error is not None:
            raise sample.error
        payloads = {}
        for index in sample.wanted:
            payload = texts[sample.start + index]
            if isinstance(payload, FieldError):
                raise payload
            payloads[index] = payload
        rows.add(sample, measure(sample.members, payloads, recipe))
    except NOT_DATA:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a sample makes its measuring raise is that sample's failure
        rows.add_bad(sample, as_field_error(error, "measured"))


class _Rows:
    """Collects the rows of one shard."""

    def __init__(self, offsets: Sequence[int], encodings: Sequence[int]) -> None:
        self._offsets = offsets
        self._encodings = encodings
        self.field_numbers: dict[str, int] = {}
        self.ignored: Counter[str] = Counter()
        # Flat arrays of int64: tuples by the million would keep the garbage collector busy.
        self._samples = array("q")  # llm_tokens, loss_tokens, parts, members of each
        self._keys: list[str] = []
        self._errors: list[FieldError | None] = []
        self._parts = array("q")  # as PARTS
        self._members = array("q")  # as MEMBERS

    def add(self, sample: _Sample, measured: Measured) -> None:
        used, members = measured.used_members, sample.members
        numbers = self.field_numbers
        row_members, row_parts = array("q"), array("q")  # whole before they are kept: a number may not fit
        for index in used:
            member, row = members[index], sample.start + index
            name, kind, width, height, frames, rate, size, _ = member
            header = (width, height) if kind == IMAGE else (frames, rate)
            number = numbers.setdefault(name, len(numbers))
            row_members.extend((number, kind, self._encodings[row], self._offsets[row], size, *header))
        for part in measured.parts:
            row_parts.extend((part[0], used.index(part[1]), *part[2:]))
        if len(used) < len(members):
            for index, member in enumerate(members):
                if index not in used:
                    self.ignored[member.field] += 1
        self._samples.extend((measured.llm_tokens, measured.loss_tokens, len(measured.parts), len(used)))
        self._members.extend(row_members)
        self._parts.extend(row_parts)
        self._keys.append(sample.key)
        self._errors.append(None)

    def add_bad(self, sample: _Sample, error: FieldError) -> None:
        for member in sample.members:
            if member.kind == OTHER and member.error is None:
                self.ignored[member.field] += 1
        self._samples.extend((0, 0, 0, 0))
        self._keys.append(sample.key)
        self._errors.append(error)

    def columns(self) -> Columns:
        """All rows as columns."""
        samples = np.frombuffer(self._samples, np.int64).reshape(-1, 4)
        arrays: dict[str, Any] = {
            "shard": np.zeros(len(samples), np.int32),
            "llm_tokens": samples[:, 0].astype(np.int32),
            "loss_tokens": samples[:, 1].astype(np.int32),
            "part_offsets": _offsets(samples[:, 2]),
            "member_offsets": _offsets(samples[:, 3]),
        }
        for kind, names, found in (("part", PARTS, self._parts), ("member", MEMBERS, self._members)):
            table = np.frombuffer(found, np.int64).reshape(-1, len(names))
            for column, (name, dtype) in enumerate(names.items()):
                arrays[f"{kind}_{name}"] = table[:, column].astype(dtype)

        fields = ["" if error is None else error.field for error in self._errors]
        reasons = ["" if error is None else error.reason for error in self._errors]
        for column_name, strings in (("key", self._keys), ("error_field", fields), ("error_reason", reasons)):
            encoded = [string.encode("utf-8", "backslashreplace") for string in strings]
            arrays[f"{column_name}_offsets"] = _offsets(np.array([len(string) for string in encoded], np.int64))
            arrays[f"{column_name}_bytes"] = np.frombuffer(b"".join(encoded), np.uint8)
        valid = np.packbits([error is not None for error in self._errors], bitorder="little")
        return Columns(**arrays, error_field_valid=valid, error_reason_valid=valid)


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
