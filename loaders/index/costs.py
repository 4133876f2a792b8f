"""Costs of one shard under a recipe: facts + text bytes -> a table of the index, kept in the cache.

    facts --group by sample--> members --read text only--> measure() --> columns, or the error of that sample

Facts are converted to lists once, and texts are read ahead in large sequential reads, so that most of the time is spent
in the tokenizer. A chunk of samples is measured in any thread or process, its texts together.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, islice, repeat
from typing import Any, Final, NamedTuple

import numpy as np

from orchdata.loaders.compact import Strings
from orchdata.loaders.errors import FieldError, StaleIndexError, StorageError, as_field_error, pass_trouble
from orchdata.loaders.field_names import VALUE, is_kept_as
from orchdata.loaders.index.facts import Probes, with_inner
from orchdata.loaders.index.kept import KEPT_FORMAT, KeptCounts, ShardSample, Text
from orchdata.loaders.index.table import (
    MEMBERS,
    PARTS,
    ROWS,
    Columns,
    TableSize,
    Totals,
    offsets_of,
    pack,
    summarize,
)
from orchdata.loaders.limits import Limits
from orchdata.loaders.memory import measured_at
from orchdata.loaders.modalities.builtin import OTHER, TEXT
from orchdata.loaders.pace import Spread
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.records import LEFT_OUT, LeftOut, check_function
from orchdata.loaders.samples.compose import LAST_DOT, SEVERAL_TEXTS
from orchdata.loaders.samples.measure import (
    Measured,
    Outline,
    Prepared,
    Sizes,
    counted,
    outlines,
    part_sizes,
    parts_to_read,
    prepare,
    texts_to_read,
)
from orchdata.loaders.samples.members import Member, has_keys, is_made
from orchdata.loaders.samples.record import record_of
from orchdata.loaders.shards.container import identity_of
from orchdata.loaders.shards.fields import NO_RULES, RAW, SPARSE, FieldRules, split_at_last_dot
from orchdata.loaders.shards.shard import Facts, FactsMeta, FactsTable, Shard, ShardInfo
from orchdata.loaders.storage.local import Buffer, write_whole
from orchdata.loaders.storage.sealed import Damaged, head_for, read_sealed
from orchdata.loaders.storage.storage import runs_of, views_of
from orchdata.loaders.text.conversation import WORDS_SUFFIX
from orchdata.loaders.unread_names import UnreadNames, above, name_of_member
from orchdata.loaders.watch import SCANNING, ThreadProgress, here

_KIND: Final = b"cost"
_NOT_BYTES: Final = (
    "the recipe requests this column, but it has neither bytes nor text, and is not read: write its values as bytes or "
    "strings, or do not request it"
)


@dataclass(frozen=True, slots=True)
class CostTable:
    """The costs of one shard, in a file of the cache, verified when it was opened."""

    path: str  # empty for a table that is in no file
    shard: ShardInfo
    meta: FactsMeta
    size: TableSize
    fields: Sequence[str]
    totals: Totals
    digest: str  # of the whole content
    packed: Buffer | None = field(repr=False, compare=False)  # its columns; None: `body` reads and verifies them again

    @classmethod
    def open(cls, path: str, url: str, media_root: str | None = None, rules: FieldRules = NO_RULES) -> CostTable:
        """Read and verify the file of a shard, with its columns. Raises OSError, or ValueError if it has changed."""
        head, body = read_sealed(path, _KIND, KEPT_FORMAT)
        values = head.values
        if (values["url"], values["media_root"]) != (url, media_root or ""):
            raise Damaged(f"it belongs to {values['url']}")
        return cls.of(path, values, head.digest, body, rules)

    @classmethod
    def of(
        cls, path: str, values: Mapping[str, Any], digest: str, body: Buffer, rules: FieldRules, reach: int = 0
    ) -> CostTable:
        """Return a table with a head and a body that `ShardCosts.values` and `pack` gave; `reach` as in ShardInfo."""
        size, meta = TableSize(**values["size"]), FactsMeta(**values["meta"])
        if memoryview(body).nbytes != size.num_bytes:
            raise Damaged(f"a table of {size} has {size.num_bytes} bytes, there are {memoryview(body).nbytes}")
        shard = ShardInfo(
            values["url"],
            meta.size,
            meta.checksum,
            meta.version,
            meta.lost_samples,
            meta.lost_bytes,
            values["media_root"],
            rules.columns,
            "" if rules.container is None else identity_of(rules.container),
            reach,
            meta.packed,
            key=rules.key,
        )
        return cls(path, shard, meta, size, tuple(values["fields"]), values["totals"], digest, body)

    def body(self) -> Buffer:
        """Return its packed columns. Raises StorageError if the file was removed, StaleIndexError if it was
        replaced.
        """
        if self.packed is not None:
            return self.packed
        url = self.shard.url
        try:
            table = CostTable.open(self.path, url, self.shard.media_root)
        except (OSError, ValueError) as error:
            code = getattr(error, "errno", None)
            raise StorageError(self.path, f"was removed or damaged during the build: {error}", code) from error
        if table.digest != self.digest:
            raise StaleIndexError(url, "was changed, and measured by another build, during this one: build again")
        return table.body()


@dataclass(frozen=True, slots=True)
class ShardCosts:
    """The costs of one shard in memory; `fields` are names for `member_field`."""

    columns: Columns
    fields: list[str]
    totals: Totals

    def values(self, url: str, meta: FactsMeta, media_root: str | None) -> dict[str, Any]:
        """Return the head of a table, JSON-safe: all but its columns."""
        values = {"url": url, "meta": meta.as_dict(), "size": asdict(self.columns.size), "fields": self.fields}
        return {**values, "totals": self.totals, "media_root": media_root or ""}

    def write(
        self, path: str, url: str, meta: FactsMeta, media_root: str | None = None, rules: FieldRules = NO_RULES
    ) -> CostTable:
        """Write them to a file for `CostTable.open`, which appears when it is complete. Raises StorageError."""
        values, body = self.values(url, meta, media_root), pack(self.columns)
        head, digest = head_for(_KIND, KEPT_FORMAT, values, body)
        write_whole(path, body, head=head)
        return CostTable.of(path, values, digest, body, rules)


def cost_shard(
    facts: Facts,
    shard: Callable[[], Shard],
    recipe: Recipe,
    probes: Probes,
    spread: Spread | None = None,
    counts: KeptCounts | None = None,
) -> ShardCosts:
    """Measure every sample of a shard: one that cannot be used becomes a row with an error, a split one several rows.

    `shard` returns the open shard, and is called if there is something to read; `spread` has idle threads that may
    help; `counts` is what is kept of the shard's counts, and gets those to keep.

    Raises ShardError if the shard can no longer be opened; StorageError, StaleIndexError and MemoryError for reasons
    outside of the samples.
    """
    scanned, facts = facts, with_inner(facts, recipe)
    rows = _Rows(facts.table, recipe)
    progress = Progress(here(), len(facts.table))
    way_out: str | None = None

    def measured(chunk: Chunk) -> tuple[Chunk, list[Result]]:
        results = measure_chunk(chunk, recipe, facts.meta.url, progress)
        return replace(chunk, texts={}), results

    chunks = read_chunks(_samples(facts, shard, recipe, probes, counts), facts.table, shard, recipe.limits)
    alone = (measured(chunk) for chunk in chunks)
    with closing(alone if spread is None else spread.in_order(measured, chunks)) as results:
        for chunk, outcomes in results:
            for sample, (outcome, text, sizes) in zip(chunk.samples, outcomes, strict=True):
                if counts is not None:
                    counts.put(sample, text, sizes)
                if outcome is None:
                    rows.ignored[LEFT_OUT] += 1
                elif isinstance(outcome, Measured):
                    rows.add(sample, outcome, text if isinstance(text, Outline) else None)
                else:
                    name, reason = outcome
                    if reason.endswith(SEVERAL_TEXTS):
                        way_out = _way_out_of_dots(scanned.table) if way_out is None else way_out
                        reason += way_out
                    rows.add_bad(sample, name, reason)
    columns = rows.columns()
    unscanned = _unscanned(facts)
    for name, count in unscanned.items():
        if count and name != LEFT_OUT:
            rows.unread.add((name_of_member(name),), count=count)
    totals = summarize(columns, recipe.kinds, {**unscanned, **rows.ignored}, rows.unread.totals())
    return ShardCosts(columns, list(rows.fields), totals)


def _way_out_of_dots(table: FactsTable) -> str:
    """Return LAST_DOT if keys of a tar that end at the last dot make more samples, all with the same fields."""
    fields: dict[str, set[str]] = {}
    for name in map(".".join, zip(table.key, table.field, strict=True)):
        key, field = split_at_last_dot(name) or ("", "")
        fields.setdefault(key, set()).add(field)
    is_more = max(table.encoding) <= SPARSE and len(fields) > len({*table.key})
    return LAST_DOT if is_more and len({*map(frozenset, fields.values())}) == 1 else ""


def _unscanned(facts: Facts) -> dict[str, int]:
    """Return the Parquet columns without rows in the facts, with the number of values of each."""
    ignored = facts.meta.ignored
    return {name: ignored[name] for name in ignored.keys() - set(facts.table.field)} if ignored else {}


def _samples(
    facts: Facts, shard: Callable[[], Shard], recipe: Recipe, probes: Probes, counts: KeptCounts | None
) -> Iterator[ShardSample]:
    table = facts.table
    fields, keys = table.field, table.key
    kinds, headers, errors = probes.under_recipe(facts, shard)
    row_errors = repeat(None) if not errors else map(errors.get, range(len(table)))
    members = map(Member, fields, kinds, headers, table.size, row_errors)
    unscanned = sorted(name.removesuffix(WORDS_SUFFIX) for name in _unscanned(facts))
    lost = next((FieldError(name, _NOT_BYTES) for name in unscanned if recipe.asks_for(name)), None)
    # Most samples have the same layout: members with text, parts to count from bytes, and digests.
    known: dict[tuple[Any, ...], tuple[list[int], list[tuple[str, int]], str, str]] = {}
    start = 0
    for number, (_, ordinal) in enumerate(groupby(table.sample)):
        mine = list(islice(members, sum(1 for _ in ordinal)))
        first, start = start, start + len(mine)
        error = lost
        if error is None and errors:  # of the whole sample; the error of one field only matters if the field is used
            error = next((FieldError(m.field, m.error) for m in mine if m.error is not None and m.kind == OTHER), None)
        layout = (*fields[first:start], *kinds[first:start])
        if error is None and layout not in known:
            try:
                digests = _layout_digest(layout), _layout_digest(fields[first:start])
                known[layout] = (texts_to_read(mine, recipe), parts_to_read(mine, recipe), *digests)
            except Exception as problem:  # noqa: BLE001 - an exception while measuring a sample fails that sample
                error = as_field_error(problem, "measured")
        if error is not None:
            yield ShardSample(keys[first], first, mine, error=error)
            continue
        wanted, parts, digest, names = known[layout]
        sizes = counts.sizes_of(number, names) if parts and counts is not None else {}
        if parts:
            wanted = sorted({*wanted, *(member for name, member in parts if (name, member) not in sizes)})
        sample = ShardSample(keys[first], first, mine, wanted, digest, names, sizes=sizes)
        yield sample if counts is None else counts.used(sample, number)


def _layout_digest(layout: Sequence[object]) -> str:
    return hashlib.blake2b(repr(layout).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


class _Rows:
    """Collects the rows of one shard, without an object for each: millions would slow the garbage collector."""

    def __init__(self, table: FactsTable, recipe: Recipe) -> None:
        self._codes = {name: code for code, name in enumerate(recipe.kinds)}
        self._header_width, self._extent_width = recipe.num_facts, recipe.num_extents
        self._offsets = table.offset
        self._encodings = table.encoding
        self.fields: dict[str, int] = {}  # name -> its number
        self.ignored: Counter[str] = Counter()
        self.unread = UnreadNames()
        self._asked = recipe.keep
        self._rows = {name: array("i") for name in (*ROWS, "num_parts", "num_members")}
        self._keys = Strings()
        self._errors: dict[int, tuple[str, str]] = {}  # (field, reason): an exception would keep texts in memory
        self._parts = {name: array(dtype.char) for name, dtype in PARTS.items()}
        self._members = {name: array(dtype.char) for name, dtype in MEMBERS.items()}

    def add(self, sample: ShardSample, measured: Measured, text: Outline | None) -> None:
        """Add the rows of a sample, and the names of it that are not read."""
        header_width, extent_width = self._header_width, self._extent_width
        used, members = measured.used_members, sample.members
        position_of = {index: position for position, index in enumerate(used)}
        numbers, columns = self.fields, self._members
        for _ in measured.pieces:  # each piece lists all members
            for index in used:
                row = sample.start + index
                name, kind, header, size, _ = members[index]
                columns["field"].append(numbers.setdefault(name, len(numbers)))
                columns["kind"].append(kind)
                columns["encoding"].append(self._encodings[row])
                columns["offset"].append(self._offsets[row])
                columns["size"].append(size)
                columns["header"].extend(header if len(header) == header_width else _filled(header, header_width))
        columns = self._parts
        for name, index, (positions, tokens, rows, extent) in measured.parts:
            columns["modality"].append(self._codes[name])
            columns["member"].append(position_of[index])
            columns["positions"].append(positions)
            columns["tokens"].append(tokens)
            columns["rows"].append(rows)
            columns["extent"].extend(extent if len(extent) == extent_width else _filled(extent, extent_width))
        if len(used) < len(members):
            for index, member in enumerate(members):
                if index not in position_of:
                    self.ignored[member.field] += 1
        for piece, (llm_tokens, loss_tokens, start) in enumerate(measured.pieces):
            cut, num_parts = measured.cut_tokens, len(measured.parts)
            self._put(sample.key, llm_tokens, loss_tokens, piece, cut, start, num_parts, len(used))
        if text is not None and (text.unread or text.others):
            unread = tuple(self._not_kept(text.unread, members)) if self._asked else text.unread
            self.unread.add(unread, text.others)

    def add_bad(self, sample: ShardSample, name: str, reason: str) -> None:
        for member in sample.members:
            if member.kind == OTHER and member.error is None and not member.field.endswith(VALUE):
                self.ignored[member.field] += 1
        self._errors[len(self._keys)] = (name, reason)
        self._put(sample.key, 0, 0, 0, 0, 0, 0, 0)

    def _put(self, key: str, *values: int) -> None:
        self._keys.append(key)
        for column, value in zip(self._rows.values(), values, strict=True):
            column.append(value)

    def _not_kept(self, names: tuple[str, ...], members: Sequence[Member]) -> Iterator[str]:
        """Yield the names of what the recipe neither keeps nor counts, and of no key of a kept record."""
        asked: set[str] = set()
        records = [self._is_asked(member.field) for member in members if has_keys(member.field)]
        fields = {name_of_member(member.field) for member in members} if records and all(records) else None
        for name in names:
            if fields is not None and fields.isdisjoint(above(name)):
                continue
            if asked.isdisjoint(above(name)) and ("[" in name or not self._is_asked(name)):
                yield name
            else:
                asked.add(name)

    def _is_asked(self, name: str) -> bool:
        return any(is_kept_as(name, each) for each in self._asked)

    def columns(self) -> Columns:
        """Return all rows as columns. No more can be added after that: they are not copied."""
        arrays: dict[str, Any] = {name: np.asarray(column) for name, column in self._rows.items()}
        arrays |= {"shard": np.zeros(len(self._keys), np.int32)}
        arrays |= {f"{kind}_offsets": offsets_of(arrays.pop(f"num_{kind}s")) for kind in ("part", "member")}
        arrays |= {f"part_{name}": np.asarray(column) for name, column in self._parts.items()}
        arrays |= {f"member_{name}": np.asarray(column) for name, column in self._members.items()}
        arrays["part_extent"] = arrays["part_extent"].reshape(len(self._parts["member"]), self._extent_width)
        arrays["member_header"] = arrays["member_header"].reshape(len(self._members["field"]), self._header_width)

        arrays["bad_row"] = np.array(list(self._errors), np.int64)
        fields, reasons = (Strings([error[part] for error in self._errors.values()]) for part in (0, 1))
        for column_name, strings in (("key", self._keys), ("error_field", fields), ("error_reason", reasons)):
            arrays[f"{column_name}_offsets"], encoded = strings.encoded()
            arrays[f"{column_name}_bytes"] = np.frombuffer(encoded, np.uint8)
        return Columns(**arrays)


def _filled(numbers: tuple[int, ...], width: int) -> tuple[int, ...]:
    """Cut to a width, or fill with zeros: headers of the facts may be wider than the recipe needs."""
    return (*numbers[:width], *(0,) * (width - len(numbers)))


Outcome = Measured | tuple[str, str] | None
"""Of one sample: its counts, the field and reason of its error, or None if the recipe's function leaves it out."""

_CHUNK_SAMPLES = 1024  # read ahead at most this many samples
_CHUNK_BYTES = 16 << 20  # ... or this much text
_RUN_BYTES = 1 << 20  # one read
_GAP_BYTES = 16 << 10  # reading over a gap of this size costs about as much as another call
_GZIP_RATIO = 1032  # the largest possible ratio of gzip

Content = bytes | memoryview | FieldError
"""Of a member, or why it cannot be read."""


@dataclass(slots=True)
class Chunk:
    """Samples of a shard, in order, from the `first`-th on, with what is read of them, by row of the facts."""

    first: int
    samples: list[ShardSample]
    texts: dict[int, Content]

    def __len__(self) -> int:
        return len(self.samples)


def read_chunks(
    samples: Iterable[ShardSample], table: FactsTable, shard: Callable[[], Shard], limits: Limits
) -> Iterator[Chunk]:
    """Yield all samples of a shard, in chunks. `shard` returns the open shard; called if there is something to read."""
    first = 0
    for group in _chunks(samples, limits.text_bytes):
        has_texts = any(sample.wanted for sample in group)
        yield Chunk(first, group, _read_texts(group, table, shard(), limits) if has_texts else {})
        first += len(group)


def _chunks(samples: Iterable[ShardSample], text_bytes: int) -> Iterator[list[ShardSample]]:
    """Group samples into chunks; the texts of a chunk are read together."""
    chunk: list[ShardSample] = []
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


def _read_texts(chunk: Sequence[ShardSample], table: FactsTable, shard: Shard, limits: Limits) -> dict[int, Content]:
    """Read every wanted member of the chunk. Return its content or its error, by row of the facts."""
    offsets, encodings = table.offset, table.encoding
    texts: dict[int, Content] = {}
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

    # Raw members that are neighbours are read with one call; if that fails, one by one.
    extents = [(offsets[row], member.size) for row, member in raw]
    for run in runs_of(extents, gap_bytes=_GAP_BYTES, run_bytes=_RUN_BYTES):
        contents: Sequence[Content] = ()
        if len(run.members) > 1:
            field = raw[run.members[0]][1].field
            try:
                contents = views_of(shard.read(run.start, run.stop - run.start, RAW, field), run, extents)
            except Exception as error:  # noqa: BLE001 - each is then read alone, and gets its own error
                pass_trouble(error)
        contents = contents or [_read(shard, extents[at][0], raw[at][1], RAW) for at in run.members]
        texts |= {raw[at][0]: content for at, content in zip(run.members, contents, strict=True)}
    return texts


def _read(shard: Shard, offset: int, member: Member, encoding: int) -> Content:
    try:
        return shard.read(offset, member.size, encoding, member.field)
    except Exception as error:  # noqa: BLE001 - an exception while reading it fails it
        field_error = as_field_error(error, "measured")
        return FieldError(field_error.field, field_error.reason)  # a copy without the traceback, which refers to it


_TOGETHER = 64
"""Samples that are tokenized together; progress is shown after so many."""


class Result(NamedTuple):
    """What came of a sample: what the index gets, and what to keep of its text and of its parts."""

    outcome: Outcome
    text: Text | None
    sizes: Sizes


class Progress:
    """How much of a shard with so many members is measured, by any of the threads that measure it; `shown` in one."""

    def __init__(self, shown: ThreadProgress, num_members: int) -> None:
        self._shown = shown
        self._num_members = num_members
        self._done = 0
        self._lock = threading.Lock()

    def add(self, num_members: int) -> None:
        with self._lock:
            self._done += num_members
            self._shown.fraction = SCANNING + (1 - SCANNING) * self._done / self._num_members


def measure_chunk(chunk: Chunk, recipe: Recipe, url: str, progress: Progress) -> list[Result]:
    """Return the result of each sample. Errors are without a traceback, which would keep texts in memory.

    Raises MemoryError, and what ends a build.
    """
    current, results = here(), []
    for start in range(0, len(chunk), _TOGETHER):
        samples = chunk.samples[start : start + _TOGETHER]
        results += _measure_together(samples, chunk.first + start, chunk, recipe, url)
        progress.add(sum([len(sample.members) for sample in samples]))
    current.key = None
    return results


def _measure_together(
    samples: Sequence[ShardSample], first: int, chunk: Chunk, recipe: Recipe, url: str
) -> list[Result]:
    # Everything but the texts that are not kept.
    results: list[Result | None] = []
    waiting: list[tuple[int, Prepared]] = []
    known = [dict(sample.sizes) for sample in samples]
    for at, sample in enumerate(samples):
        here().key = sample.key
        try:
            found = _prepared(sample, first + at, chunk, recipe, known[at])
            if isinstance(found, Prepared):
                waiting.append((at, found))
                results.append(None)
            else:
                outcome = _reason(found) if isinstance(found, FieldError) else found
                results.append(Result(outcome, sample.kept, known[at]))
        except LeftOut as left_out:
            results.append(Result(None, sample.kept or left_out.with_traceback(None), known[at]))
        except MemoryError as error:
            raise measured_at(error, url, sample.key, "*") from error
        except Exception as error:  # noqa: BLE001 - an exception while measuring a sample fails that sample
            results.append(Result(_reason(as_field_error(error, "measured")), sample.kept, known[at]))

    # These texts, together.
    for (at, prepared), text in zip(waiting, _outlined(waiting, samples, recipe, url), strict=True):
        sample = samples[at]
        if isinstance(text, FieldError):  # with other sizes, a part may fail before
            results[at] = Result(_reason(text), None if prepared.sizes else text, known[at])
            continue
        try:
            results[at] = Result(counted(text, prepared.sizes, sample.members, recipe), text, known[at])
        except MemoryError as error:
            raise measured_at(error, url, sample.key, "*") from error
        except Exception as error:  # noqa: BLE001 - as above
            results[at] = Result(_reason(as_field_error(error, "measured")), text, known[at])
    return [result for result in results if result is not None]


def _prepared(
    sample: ShardSample, number: int, chunk: Chunk, recipe: Recipe, known: Sizes
) -> Prepared | Measured | FieldError | None:
    """Return a sample whose text is to be tokenized; or the outcome of another, its error without a traceback.

    Sizes are added to `known`. Raises what fails the sample, and LeftOut.
    """
    if sample.error is not None:
        return sample.error
    payloads: dict[int, bytes | memoryview] = {}
    for index in sample.wanted:
        content = chunk.texts[sample.start + index]
        if isinstance(content, FieldError):
            return content
        payloads[index] = content
    text = sample.kept
    if isinstance(text, Outline):
        sizes = part_sizes(text.parts, sample.members, payloads, recipe, known)
        return counted(text, sizes, sample.members, recipe)
    if text is not None:
        return text if isinstance(text, FieldError) else None
    if is_made(sample.members, recipe):
        assert recipe.record is not None
        check_function(recipe.record, number, lambda: record_of(sample.members, payloads, recipe))
    return prepare(sample.members, payloads, recipe, known)


def _outlined(
    waiting: Sequence[tuple[int, Prepared]], samples: Sequence[ShardSample], recipe: Recipe, url: str
) -> list[Outline | FieldError]:
    """Tokenize texts together; one by one if there is too little memory for that."""
    if not waiting:
        return []
    current = here()
    keys = [samples[at].key for at, _ in waiting]

    def note(number: int) -> None:
        current.key = keys[number]

    try:
        return outlines([prepared for _, prepared in waiting], recipe, note)
    except MemoryError:
        results = []
        for key, (_, prepared) in zip(keys, waiting, strict=True):
            current.key = key
            try:
                results += outlines([prepared], recipe)
            except MemoryError as error:
                raise measured_at(error, url, key, "*") from error
        return results


def _reason(error: FieldError) -> tuple[str, str]:
    return error.field, error.reason
