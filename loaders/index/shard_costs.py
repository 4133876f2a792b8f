"""Costs of one shard under a recipe: facts + text bytes -> a table of the index, stored in the cache.

    facts --group by sample--> members --read text only--> measure() --> columns, or the error of that sample

Facts are converted to lists once, and texts are read ahead in large sequential reads, so that most of the time is spent
in the tokenizer.
"""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import groupby, islice, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import FieldError, StaleIndexError, StorageError, as_field_error, pass_trouble
from orchdata.loaders.field_names import VALUE
from orchdata.loaders.index.checks.columns import check_columns
from orchdata.loaders.index.checks.heads import check_costs
from orchdata.loaders.index.probed import Probes, with_inner
from orchdata.loaders.index.table import MEMBERS, PARTS, Columns, TableSize, body_bytes, offsets_of, pack, views
from orchdata.loaders.index.totals import Totals, summarize
from orchdata.loaders.limits import Limits
from orchdata.loaders.memory import measured_at
from orchdata.loaders.modalities.builtin import OTHER, TEXT
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.records import LEFT_OUT, LeftOut, check_function
from orchdata.loaders.samples.measure import Measured, measure, members_to_read
from orchdata.loaders.samples.members import Member, is_made
from orchdata.loaders.samples.record import record_of
from orchdata.loaders.shards.facts_table import Facts, FactsMeta, FactsTable
from orchdata.loaders.shards.fields import RAW
from orchdata.loaders.shards.shard import ShardInfo
from orchdata.loaders.slow import SCANNING, ThreadProgress, here
from orchdata.loaders.spread import Spread
from orchdata.loaders.storage.atomic import Buffer, write_whole
from orchdata.loaders.storage.coalesce import Extent, Run, read_run, runs_of
from orchdata.loaders.storage.sealed import Damaged, read_sealed, seal
from orchdata.loaders.storage.shared.access import Access
from orchdata.loaders.text.words import WORDS_SUFFIX
from orchdata.loaders.versions import TABLE_FORMAT

if TYPE_CHECKING:
    from orchdata.loaders.shards.shard import Shard

KIND = b"cost"
_CHUNK_SAMPLES = 1024  # read ahead at most this many samples
_CHUNK_BYTES = 16 << 20  # ... or this much text
_SHOWN_SAMPLES = 64  # progress is shown after so many
_RUN_BYTES = 1 << 20  # one read
_GZIP_RATIO = 1032  # the largest possible ratio of gzip
_NOT_BYTES = (
    "the recipe requests this column, but it has neither bytes nor text, and is not read: write its values as bytes or "
    "strings, or do not request it"
)
_GAP_BYTES = 16 << 10  # reading over a gap of this size costs about as much as another call


@dataclass(frozen=True, slots=True)
class CostTable:
    """The costs of one shard, in a file of the cache, verified when it was opened.

    Attributes:
        path: the file.
        meta: of the facts that they were measured from.
        url: of the shard.
        media_root: folder of the files that its records name; empty for shards that contain their media.
        size, fields, totals: as in the index.
        digest: of the whole content.
        kinds: modalities of the recipe by their codes, text first.
        packed: its columns; if None, `body` reads and verifies them again.
        access: the most that permissions of an index with this table may allow.
        columns: (old name, new name) of each renamed field.
        container: as in ShardInfo.
    """

    path: str
    url: str
    meta: FactsMeta
    size: TableSize
    fields: Sequence[str]
    totals: Totals
    digest: str
    kinds: Sequence[str]
    packed: Buffer | None = field(repr=False, compare=False)
    media_root: str = ""
    access: Access | None = None
    columns: tuple[tuple[str, str], ...] = ()
    container: str = ""

    @classmethod
    def open(
        cls, path: str, url: str, kinds: Sequence[str], media_root: str = "", access: Access | None = None
    ) -> CostTable:
        """Read and verify the file, with its columns. Raises OSError, or ValueError if it has changed.

        The values in its columns are checked when an index is made of all tables.

        Args:
            kinds: modalities of the recipe by their codes, text first.
        """
        head, body = read_sealed(path, KIND, TABLE_FORMAT)
        check_costs(head.values, kinds)
        if (head.values["url"], head.values["media_root"]) != (url, media_root):
            raise Damaged(f"it belongs to {head.values['url']}")
        return cls.of(path, head.values, head.digest, body, kinds, access)

    @classmethod
    def of(
        cls,
        path: str,
        values: dict[str, Any],
        digest: str,
        body: Buffer,
        kinds: Sequence[str],
        access: Access | None = None,
    ) -> CostTable:
        size, meta = TableSize(**values["size"]), FactsMeta(**values["meta"])
        if memoryview(body).nbytes != body_bytes(size):
            raise Damaged(f"a table of {size} has {body_bytes(size)} bytes, there are {memoryview(body).nbytes}")
        fields, totals, root = tuple(values["fields"]), values["totals"], values["media_root"]
        return cls(path, values["url"], meta, size, fields, totals, digest, kinds, body, root, access)

    @property
    def shard(self) -> ShardInfo:
        meta = self.meta
        lost = meta.lost_samples, meta.lost_bytes
        how = {"media_root": self.media_root, "columns": self.columns, "container": self.container}
        return ShardInfo(self.url, meta.size, meta.checksum, meta.version, *lost, **how)  # type: ignore[arg-type]

    def without_body(self) -> CostTable:
        """Return the same table without its columns in memory."""
        return replace(self, packed=None)

    def is_sound(self) -> bool:
        """Return whether its columns have values that a build can write. Raises as `body`."""
        try:
            check_columns(
                views(self.body(), self.size),
                modalities=self.kinds,
                num_fields=len(self.fields),
                shard_rows=np.array([0, self.size.rows], np.int64),
                totals=self.totals,
            )
        except ValueError:
            return False
        return not self.meta.lost_bytes or bool(self.size.bad)

    def body(self) -> Buffer:
        """Return its packed columns. Raises StorageError if the file was removed, StaleIndexError if replaced."""
        if self.packed is not None:
            return self.packed
        try:
            table = CostTable.open(self.path, self.url, self.kinds, self.media_root)
        except (OSError, ValueError) as error:
            raise StorageError(str(self.path), f"was removed or damaged during the build: {error}") from error
        if table.digest != self.digest:
            raise StaleIndexError(self.url, "was changed, and measured by another build, during this one: build again")
        return table.body()


class ShardCosts(NamedTuple):
    """The costs of one shard in memory: columns, field names for `member_field`, totals, modalities by code."""

    columns: Columns
    fields: list[str]
    totals: Totals
    kinds: Sequence[str]

    def write(
        self, path: str, url: str, meta: FactsMeta, media_root: str | None = None, access: Access | None = None
    ) -> CostTable:
        """Write them to a file for `CostTable.open`, which appears when it is complete. Raises StorageError."""
        values = {
            "url": url,
            "meta": meta.as_dict(),
            "size": self.columns.size.as_dict(),
            "fields": self.fields,
            "totals": self.totals,
            "media_root": media_root or "",
        }
        body = pack(self.columns)
        file, digest = seal(KIND, TABLE_FORMAT, values, [body])
        write_whole(path, file, access)
        return CostTable.of(path, values, digest, body, self.kinds, access)


@dataclass(slots=True)
class _Sample:
    """One sample of the facts; its members are the rows from `start` on."""

    key: str
    start: int
    members: list[Member]
    wanted: list[int]  # members to read
    error: FieldError | None


@dataclass(slots=True)
class _Chunk:
    """Samples of a shard, in order, with the texts that they need.

    Attributes:
        first: number of its first sample in the shard.
        texts: by row of the facts.
    """

    first: int
    samples: list[_Sample]
    texts: dict[int, _Text]

    def __len__(self) -> int:
        return len(self.samples)


_Outcome = Measured | tuple[str, str] | None
"""Of one sample: its counts, the field and reason of its error, or None if the recipe's function leaves it out."""


def cost_shard(
    facts: Facts, shard: Callable[[], Shard], recipe: Recipe, probes: Probes, spread: Spread | None = None
) -> ShardCosts:
    """Measure every sample of a shard.

    A sample that cannot be used becomes a row with an error, without an exception. A split sample becomes several rows.

    Args:
        facts: of the shard.
        shard: returns the open shard; called if there is something to read.
        recipe: defines the costs.
        probes: headers of the recipe's own modalities.
        spread: idle threads that may help. The result is the same.

    Raises:
        ShardError: the shard can no longer be opened.
        StorageError, StaleIndexError, MemoryError: for reasons outside of the samples.
    """
    facts = with_inner(facts, recipe)
    rows = _Rows(facts.table, recipe)
    progress = _Progress(here(), len(facts.table))

    def measured(chunk: _Chunk) -> tuple[_Chunk, list[_Outcome]]:
        outcomes = _measure_chunk(chunk, recipe, facts.meta.url, progress)
        return replace(chunk, texts={}), outcomes

    chunks = _read_chunks(facts, shard, recipe, probes)
    alone = (measured(chunk) for chunk in chunks)
    with closing(alone if spread is None else spread.in_order(measured, chunks)) as results:
        for chunk, outcomes in results:
            for sample, outcome in zip(chunk.samples, outcomes, strict=True):
                rows.put(sample, outcome)
    columns = rows.columns()
    fields = list(rows.field_numbers)
    totals = summarize(columns, recipe.kinds, {**_unscanned(facts), **rows.ignored})
    return ShardCosts(columns, fields, totals, recipe.kinds)


def _read_chunks(facts: Facts, shard: Callable[[], Shard], recipe: Recipe, probes: Probes) -> Iterator[_Chunk]:
    first = 0
    for samples in _chunks(_samples(facts, shard, recipe, probes), recipe.limits.text_bytes):
        texts: dict[int, _Text] = {}
        if any(sample.wanted for sample in samples):
            texts = _read_texts(samples, facts.table, shard(), recipe.limits)
        yield _Chunk(first, samples, texts)
        first += len(samples)


def _unscanned(facts: Facts) -> dict[str, int]:
    """Return the Parquet columns without rows in the facts, with the number of values of each."""
    ignored = facts.meta.ignored
    return {name: ignored[name] for name in ignored.keys() - set(facts.table.field)} if ignored else {}


def _samples(facts: Facts, shard: Callable[[], Shard], recipe: Recipe, probes: Probes) -> Iterator[_Sample]:
    table = facts.table
    ordinals, errors = table.sample, table.errors
    fields, keys = _shared_strings(table.field), table.key
    columns = probes.under_recipe(facts, fields, shard)
    kinds, errors = columns.kinds, columns.errors
    row_errors = repeat(None) if not errors else map(errors.get, range(len(ordinals)))
    members = map(Member, fields, kinds, columns.headers, table.size, row_errors)
    unscanned = sorted(name.removesuffix(WORDS_SUFFIX) for name in _unscanned(facts))
    lost = next((name for name in unscanned if recipe.asks_for(name)), None)
    wanted_by_layout: dict[tuple[Any, ...], list[int]] = {}  # most samples have the same layout
    start = 0
    for _, ordinal in groupby(ordinals):
        mine = list(islice(members, sum(1 for _ in ordinal)))
        first, start = start, start + len(mine)
        error = _shard_error(mine) if errors else None
        if lost is not None:
            error = FieldError(lost, _NOT_BYTES)
        if error is not None:
            yield _Sample(keys[first], first, mine, [], error)
            continue
        layout = (*fields[first:start], *kinds[first:start])
        wanted = wanted_by_layout.get(layout)
        if wanted is None:
            try:
                wanted = wanted_by_layout[layout] = members_to_read(mine, recipe)
            except Exception as problem:  # noqa: BLE001 - as in _measure
                yield _Sample(keys[first], first, mine, [], as_field_error(problem, "measured"))
                continue
        yield _Sample(keys[first], first, mine, wanted, None)


def _shared_strings(strings: list[str]) -> list[str]:
    """Return the list with equal strings as one object, to save memory."""
    shared: dict[str, str] = {}
    return [shared.setdefault(string, string) for string in strings]


def _shard_error(members: Sequence[Member]) -> FieldError | None:
    """Return the error of a whole sample; the error of one field only matters if the field is used."""
    for member in members:
        if member.error is not None and member.kind == OTHER:
            return FieldError(member.field, member.error)
    return None


def _chunks(samples: Iterable[_Sample], text_bytes: int) -> Iterator[list[_Sample]]:
    """Group samples into chunks; the texts of a chunk are read together."""
    chunk: list[_Sample] = []
    num_bytes = 0
    for sample in samples:
        chunk.append(sample)
        for index in sample.wanted:
            member = sample.members[index]
            num_bytes += min(_GZIP_RATIO * member.size, text_bytes) if member.field.endswith(".gz") else member.size
        if len(chunk) >= _CHUNK_SAMPLES or num_bytes >= _CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk


_Text = bytes | memoryview | FieldError


def _read_texts(chunk: Sequence[_Sample], table: FactsTable, shard: Shard, limits: Limits) -> dict[int, _Text]:
    """Read every wanted member of the chunk. Return its content or its error, by row of the facts."""
    offsets, encodings = table.offset, table.encoding
    texts: dict[int, _Text] = {}
    raw: list[tuple[int, Member]] = []
    for sample in chunk:
        text_bytes = 0
        for index in sample.wanted:
            row, member = sample.start + index, sample.members[index]
            if member.error is not None:
                texts[row] = b""  # not used: the error comes first
                continue
            if member.kind == TEXT:
                text_bytes += member.size
            if text_bytes > limits.text_bytes:
                texts[row] = FieldError(
                    "*", f"the sample has {text_bytes} bytes of text, above Limits.text_bytes={limits.text_bytes}"
                )
            elif encodings[row] != RAW:
                text = texts[row] = _read(shard, offsets[row], member, encodings[row])
                text_bytes += 0 if isinstance(text, FieldError) or member.kind != TEXT else len(text) - member.size
            else:
                raw.append((row, member))

    # Raw members that are neighbours are read with one call.
    extents = [(offsets[row], member.size) for row, member in raw]
    for run in runs_of(extents, gap_bytes=_GAP_BYTES, run_bytes=_RUN_BYTES):
        _read_run(shard, run, extents, raw, texts)
    return texts


def _read_run(
    shard: Shard, run: Run, extents: Sequence[Extent], raw: Sequence[tuple[int, Member]], texts: dict[int, _Text]
) -> None:
    """Read neighbouring raw members with one call; if that fails, one by one."""
    mine = [raw[index] for index in run.members]
    if len(mine) > 1:
        try:
            contents = read_run(lambda offset, size: shard.read(offset, size, RAW, mine[0][1].field), run, extents)
        except Exception as error:  # noqa: BLE001 - each is then read alone, and gets its own error
            pass_trouble(error)
        else:
            texts |= {row: content for (row, _), content in zip(mine, contents, strict=True)}
            return
    for (row, member), index in zip(mine, run.members, strict=True):
        texts[row] = _read(shard, extents[index][0], member, RAW)


def _read(shard: Shard, offset: int, member: Member, encoding: int) -> _Text:
    try:
        return shard.read(offset, member.size, encoding, member.field)
    except Exception as error:  # noqa: BLE001 - as in _measure
        field_error = as_field_error(error, "measured")
        return FieldError(field_error.field, field_error.reason)  # a copy without the traceback, which refers to it


class _Progress:
    """How much of a shard is measured, by any of the threads that measure it.

    Args:
        shown: notes of the thread that has the shard.
        num_members: of the shard.
    """

    def __init__(self, shown: ThreadProgress, num_members: int) -> None:
        self._shown = shown
        self._num_members = num_members
        self._done = 0
        self._lock = threading.Lock()

    def add(self, num_members: int) -> None:
        with self._lock:
            self._done += num_members
            self._shown.fraction = SCANNING + (1 - SCANNING) * self._done / self._num_members


def _measure_chunk(chunk: _Chunk, recipe: Recipe, url: str, progress: _Progress) -> list[_Outcome]:
    """Measure samples, in any thread. Raises MemoryError, and what ends a build."""
    current, num_members = here(), 0
    outcomes: list[_Outcome] = []
    for number, sample in enumerate(chunk.samples, chunk.first):
        current.key = sample.key
        outcomes.append(_measure(sample, number, chunk.texts, recipe, url))
        num_members += len(sample.members)
        if len(outcomes) % _SHOWN_SAMPLES == 0 or len(outcomes) == len(chunk):
            progress.add(num_members)
            num_members = 0
    current.key = None
    return outcomes


def _measure(sample: _Sample, number: int, texts: Mapping[int, _Text], recipe: Recipe, url: str) -> _Outcome:
    """Return the outcome of a sample, which is the `number`-th of its shard. Errors are returned without a traceback,
    which would keep texts in memory.
    """
    if sample.error is not None:
        return sample.error.field, sample.error.reason
    payloads: dict[int, bytes | memoryview] = {}
    for index in sample.wanted:
        payload = texts[sample.start + index]
        if isinstance(payload, FieldError):
            return payload.field, payload.reason
        payloads[index] = payload
    try:
        if is_made(sample.members, recipe):
            assert recipe.record is not None
            check_function(recipe.record, number, lambda: record_of(sample.members, payloads, recipe))
        return measure(sample.members, payloads, recipe)
    except LeftOut:
        return None
    except MemoryError as error:
        raise measured_at(error, url, sample.key, "*") from error
    except Exception as error:  # noqa: BLE001 - an exception while measuring a sample fails that sample
        bad = as_field_error(error, "measured")
        return bad.field, bad.reason


class _Rows:
    """Collects the rows of one shard."""

    def __init__(self, table: FactsTable, recipe: Recipe) -> None:
        self._codes = {name: code for code, name in enumerate(recipe.kinds)}
        self._header_width, self._extent_width = recipe.num_facts, recipe.num_extents
        self._offsets = table.offset
        self._encodings = table.encoding
        self.field_numbers: dict[str, int] = {}
        self.ignored: Counter[str] = Counter()
        # Flat arrays of int64: millions of tuples would slow the garbage collector.
        self._rows = array("q")  # llm_tokens, loss_tokens, text_start, piece, cut_tokens, parts, members of each
        self._keys: list[str] = []
        self._errors: list[tuple[str, str] | None] = []  # (field, reason): an exception would keep texts in memory
        self._parts = array("q")  # as PARTS
        self._members = array("q")  # as MEMBERS

    def put(self, sample: _Sample, outcome: _Outcome) -> None:
        """Add the next sample of the shard."""
        if outcome is None:
            self.ignored[LEFT_OUT] += 1
        elif isinstance(outcome, tuple):
            self.add_bad(sample, *outcome)
        else:
            self.add(sample, outcome)

    def add(self, sample: _Sample, measured: Measured) -> None:
        header_width, extent_width = self._header_width, self._extent_width
        used, members = measured.used_members, sample.members
        position_of = {index: position for position, index in enumerate(used)}
        numbers = self.field_numbers
        for _ in measured.pieces:  # each piece lists all members
            for index in used:
                row = sample.start + index
                name, kind, header, size, _ = members[index]
                number = numbers.setdefault(name, len(numbers))
                if len(header) != header_width:
                    header = _filled(header, header_width)
                self._members.extend((number, kind, self._encodings[row], self._offsets[row], size, *header))
        for name, index, (positions, tokens, rows, extent) in measured.parts:
            if len(extent) != extent_width:
                extent = _filled(extent, extent_width)
            self._parts.extend((self._codes[name], position_of[index], positions, tokens, rows, *extent))
        if len(used) < len(members):
            for index, member in enumerate(members):
                if index not in position_of:
                    self.ignored[member.field] += 1
        for piece, counts in enumerate(measured.pieces):
            self._rows.extend((*counts, piece, measured.cut_tokens, len(measured.parts), len(used)))
            self._keys.append(sample.key)
            self._errors.append(None)

    def add_bad(self, sample: _Sample, field: str, reason: str) -> None:
        for member in sample.members:
            if member.kind == OTHER and member.error is None and not member.field.endswith(VALUE):
                self.ignored[member.field] += 1
        self._rows.extend((0, 0, 0, 0, 0, 0, 0))
        self._keys.append(sample.key)
        self._errors.append((field, reason))

    def columns(self) -> Columns:
        """Return all rows as columns."""
        rows = _rows_of(self._rows, 7, np.int32)
        llm_tokens, loss_tokens, text_start, piece, cut_tokens, num_parts, num_members = rows
        arrays: dict[str, Any] = {
            "shard": np.zeros(llm_tokens.size, np.int32),
            "llm_tokens": llm_tokens,
            "loss_tokens": loss_tokens,
            "piece": piece,
            "cut_tokens": cut_tokens,
            "text_start": text_start,
            "part_offsets": offsets_of(num_parts),
            "member_offsets": offsets_of(num_members),
        }
        widths = {"part": self._extent_width, "member": self._header_width}
        for kind, layout, numbers in (("part", PARTS, self._parts), ("member", MEMBERS, self._members)):
            *names, listed = layout  # the list comes last
            rows = _rows_of(numbers, len(names) + widths[kind], np.int32 if kind == "part" else np.int64)
            for row, name in zip(rows, names, strict=False):
                arrays[f"{kind}_{name}"] = row.astype(layout[name], copy=False)
            arrays[f"{kind}_{listed}"] = np.ascontiguousarray(rows[len(names) :].T, layout[listed])

        errors = [error for error in self._errors if error is not None]
        arrays["bad_row"] = np.array([row for row, error in enumerate(self._errors) if error is not None], np.int64)
        fields, reasons = [field for field, _ in errors], [reason for _, reason in errors]
        for column_name, strings in (("key", self._keys), ("error_field", fields), ("error_reason", reasons)):
            encoded = [string.encode("utf-8", "backslashreplace") for string in strings]
            arrays[f"{column_name}_offsets"] = offsets_of([len(string) for string in encoded])
            arrays[f"{column_name}_bytes"] = np.frombuffer(b"".join(encoded), np.uint8)
        return Columns(**arrays)


def _filled(numbers: tuple[int, ...], width: int) -> tuple[int, ...]:
    """Cut to a width, or fill with zeros: headers of the facts may be wider than the recipe needs."""
    return numbers if len(numbers) == width else (*numbers[:width], *(0,) * (width - len(numbers)))


def _rows_of(numbers: array[int], width: int, dtype: Any) -> NDArray[Any]:
    """Convert records of `width` numbers to `width` contiguous columns."""
    return np.frombuffer(numbers, np.int64).reshape(-1, width).T.astype(dtype, order="C")
