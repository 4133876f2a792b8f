"""Measuring a chunk of samples of one shard: read ahead, counted, and rows of its costs.

Rows of the costs of one shard: the outcome of each sample -> columns of a table of the index.

Reading of what is measured in a shard, ahead of measuring it: in large sequential reads.

Measuring a chunk of samples of one shard, in any thread: texts of several samples are tokenized together.
"""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from orchdata.loaders.compact import Strings
from orchdata.loaders.errors import FieldError, pass_trouble
from orchdata.loaders.failures import as_field_error
from orchdata.loaders.field_names import VALUE, is_kept_as
from orchdata.loaders.index.kept_texts import Kept
from orchdata.loaders.index.table import MEMBERS, PARTS, Columns, offsets_of
from orchdata.loaders.limits import Limits
from orchdata.loaders.memory import measured_at
from orchdata.loaders.modalities.builtin import OTHER, TEXT
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.records import LEFT_OUT, LeftOut, check_function
from orchdata.loaders.samples.measure import (
    Measured,
    Outline,
    Prepared,
    Sizes,
    counted,
    outlines,
    part_sizes,
    prepare,
    shape_of,
)
from orchdata.loaders.samples.members import Member, has_keys, is_made
from orchdata.loaders.samples.record import record_of
from orchdata.loaders.shards.fields import RAW
from orchdata.loaders.shards.shard import FactsTable, Shard
from orchdata.loaders.storage.storage import Extent, Run, read_run, runs_of
from orchdata.loaders.unread_names import UnreadNames, above, name_of_member
from orchdata.loaders.watch import SCANNING, ThreadProgress, here

Outcome = Measured | tuple[str, str] | None
"""Of one sample: its counts, the field and reason of its error, or None if the recipe's function leaves it out."""


@dataclass(slots=True)
class ShardSample:
    """One sample of the facts.

    Attributes:
        start: its members are the rows of the facts from here on.
        wanted: indices of the members to read.
        layout: digest of the names and kinds of its members.
        names: digest of their names alone.
        error: of the whole sample.
        kept: what is kept of its text, if that can be used.
        sizes: what is kept of its parts.
    """

    key: str
    start: int
    members: Sequence[Member]
    wanted: Sequence[int] = ()
    layout: str = ""
    names: str = ""
    error: FieldError | None = None
    kept: Kept | None = None
    sizes: Sizes = field(default_factory=dict)


_ROW: Final = ("llm_tokens", "loss_tokens", "text_start", "piece", "cut_tokens", "num_parts", "num_members")


class CostRows:
    """Collects the rows of one shard."""

    def __init__(self, table: FactsTable, recipe: Recipe) -> None:
        self._codes = {name: code for code, name in enumerate(recipe.kinds)}
        self._header_width, self._extent_width = recipe.num_facts, recipe.num_extents
        self._offsets = table.offset
        self._encodings = table.encoding
        self.field_numbers: dict[str, int] = {}
        self.ignored: Counter[str] = Counter()
        self.unread = UnreadNames()
        self._asked = recipe.keep
        # Without an object for each row: millions of them would slow the garbage collector.
        self._rows = {name: array("i") for name in _ROW}
        self._appends = [column.append for column in self._rows.values()]
        self._keys = Strings()
        self._errors: dict[int, tuple[str, str]] = {}  # (field, reason): an exception would keep texts in memory
        self._parts = {name: array(np.dtype(dtype).char) for name, dtype in PARTS.items()}
        self._members = {name: array(np.dtype(dtype).char) for name, dtype in MEMBERS.items()}

    def put(self, sample: ShardSample, outcome: Outcome, text: Kept | None = None) -> None:
        """Add the next sample of the shard.

        Args:
            text: what is known of its text, with its unread names.
        """
        if outcome is None:
            self.ignored[LEFT_OUT] += 1
        elif isinstance(outcome, tuple):
            self.add_bad(sample, *outcome)
        else:
            self.add(sample, outcome)
            if text is not None and (text.unread or text.others):
                unread = tuple(self._not_kept(text.unread, sample.members)) if self._asked else text.unread
                self.unread.add(unread, text.others)

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

    def add(self, sample: ShardSample, measured: Measured) -> None:
        header_width, extent_width = self._header_width, self._extent_width
        used, members = measured.used_members, sample.members
        position_of = {index: position for position, index in enumerate(used)}
        numbers, columns = self.field_numbers, self._members
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
        for piece, counts in enumerate(measured.pieces):
            self._put(sample.key, *counts, piece, measured.cut_tokens, len(measured.parts), len(used))

    def add_bad(self, sample: ShardSample, name: str, reason: str) -> None:
        for member in sample.members:
            if member.kind == OTHER and member.error is None and not member.field.endswith(VALUE):
                self.ignored[member.field] += 1
        self._errors[len(self._keys)] = (name, reason)
        self._put(sample.key, 0, 0, 0, 0, 0, 0, 0)

    def _put(self, key: str, *values: int) -> None:
        """Add a row; `values` are as `_ROW`."""
        self._keys.append(key)
        for append, value in zip(self._appends, values, strict=True):
            append(value)

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
    return numbers if len(numbers) == width else (*numbers[:width], *(0,) * (width - len(numbers)))


_CHUNK_SAMPLES = 1024  # read ahead at most this many samples
_CHUNK_BYTES = 16 << 20  # ... or this much text
_RUN_BYTES = 1 << 20  # one read
_GAP_BYTES = 16 << 10  # reading over a gap of this size costs about as much as another call
_GZIP_RATIO = 1032  # the largest possible ratio of gzip

Text = bytes | memoryview | FieldError
"""Content of a member, or why it cannot be read."""


@dataclass(slots=True)
class Chunk:
    """Samples of a shard, in order, with what is measured of them.

    Attributes:
        first: number of its first sample in the shard.
        texts: by row of the facts.
    """

    first: int
    samples: list[ShardSample]
    texts: dict[int, Text]

    def __len__(self) -> int:
        return len(self.samples)


def read_chunks(
    samples: Iterable[ShardSample], table: FactsTable, shard: Callable[[], Shard], limits: Limits
) -> Iterator[Chunk]:
    """Yield all samples of a shard, in chunks.

    Args:
        shard: returns the open shard; called if there is something to read.
    """
    first = 0
    for group in _chunks(samples, limits.text_bytes):
        texts: dict[int, Text] = {}
        if any(sample.wanted for sample in group):
            texts = _read_texts(group, table, shard(), limits)
        yield Chunk(first, group, texts)
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


def _read_texts(chunk: Sequence[ShardSample], table: FactsTable, shard: Shard, limits: Limits) -> dict[int, Text]:
    """Read every wanted member of the chunk. Return its content or its error, by row of the facts."""
    offsets, encodings = table.offset, table.encoding
    texts: dict[int, Text] = {}
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
    shard: Shard, run: Run, extents: Sequence[Extent], raw: Sequence[tuple[int, Member]], texts: dict[int, Text]
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


def _read(shard: Shard, offset: int, member: Member, encoding: int) -> Text:
    try:
        return shard.read(offset, member.size, encoding, member.field)
    except Exception as error:  # noqa: BLE001 - an exception while reading it fails it
        field_error = as_field_error(error, "measured")
        return FieldError(field_error.field, field_error.reason)  # a copy without the traceback, which refers to it


_TOGETHER = 64
"""Samples that are tokenized together; progress is shown after so many."""


class Result(NamedTuple):
    """What came of a sample.

    Attributes:
        outcome: what the index gets.
        text, sizes: what to keep of its text, and of its parts.
    """

    outcome: Outcome
    text: Kept | None
    sizes: Sizes


class Progress:
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
    for number, sample in enumerate(samples, first):
        here().key = sample.key
        prepared = _prepared(sample, number, chunk, recipe, url, known[len(results)])
        if isinstance(prepared, Prepared):
            waiting.append((len(results), prepared))
            results.append(None)
        else:
            results.append(Result(*prepared, known[len(results)]))
    # These texts, together.
    for (at, prepared), outline in zip(waiting, _outlined(waiting, samples, recipe, url), strict=True):
        results[at] = Result(*_result(samples[at], outline, prepared, recipe, url), known[at])
    return [result for result in results if result is not None]


def _prepared(
    sample: ShardSample, number: int, chunk: Chunk, recipe: Recipe, url: str, known: Sizes
) -> Prepared | tuple[Outcome, Kept | None]:
    """Return a sample whose text is to be tokenized, or outcome and text of another. Sizes are added to `known`."""
    if sample.error is not None:
        return _reason(sample.error), None
    payloads: dict[int, bytes | memoryview] = {}
    for index in sample.wanted:
        payload = chunk.texts[sample.start + index]
        if isinstance(payload, FieldError):
            return _reason(payload), None
        payloads[index] = payload
    try:
        if sample.kept is not None:
            return _counted(sample, payloads, recipe, known), sample.kept
        if is_made(sample.members, recipe):
            assert recipe.record is not None
            check_function(recipe.record, number, lambda: record_of(sample.members, payloads, recipe))
        return prepare(sample.members, payloads, recipe, known)
    except LeftOut:
        return None, sample.kept or Kept(LeftOut(), 0)
    except MemoryError as error:
        raise measured_at(error, url, sample.key, "*") from error
    except Exception as error:  # noqa: BLE001 - an exception while measuring a sample fails that sample
        return _reason(as_field_error(error, "measured")), sample.kept


def _counted(sample: ShardSample, payloads: dict[int, bytes | memoryview], recipe: Recipe, known: Sizes) -> Outcome:
    """Return the outcome of a sample with a text that is kept. Raises LeftOut, and FieldError."""
    assert sample.kept is not None
    kept = sample.kept.counted
    if not isinstance(kept, Outline):
        assert kept is not None
        raise kept
    sizes = part_sizes(kept.parts, sample.members, payloads, recipe, known)
    return counted(kept, sizes, sample.members, recipe)


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
        for at, prepared in waiting:
            here().key = samples[at].key
            try:
                results += outlines([prepared], recipe)
            except MemoryError as error:
                raise measured_at(error, url, samples[at].key, "*") from error
        return results


def _result(
    sample: ShardSample, outline: Outline | FieldError, prepared: Prepared, recipe: Recipe, url: str
) -> tuple[Outcome, Kept | None]:
    """Return outcome and text of a sample from its outline, or from the error of its tokenizer."""
    sizes = prepared.sizes
    if isinstance(outline, FieldError):  # with other sizes, a part may fail before
        return _reason(outline), None if sizes else Kept(outline, 0)
    kept = None
    try:
        kept = Kept(outline, shape_of(outline.parts, sizes, recipe), prepared.unread)
        return counted(outline, sizes, sample.members, recipe), kept
    except MemoryError as error:
        raise measured_at(error, url, sample.key, "*") from error
    except Exception as error:  # noqa: BLE001 - as in `_prepared`
        return _reason(as_field_error(error, "measured")), kept


def _reason(error: FieldError) -> tuple[str, str]:
    return error.field, error.reason
