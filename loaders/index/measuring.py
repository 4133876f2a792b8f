"""Measuring a chunk of samples of one shard, in any thread or process: read ahead, then tokenized together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from orchdata.loaders.errors import FieldError, as_field_error, pass_trouble
from orchdata.loaders.index.kept import ShardSample, Text
from orchdata.loaders.limits import Limits
from orchdata.loaders.memory import measured_at
from orchdata.loaders.modalities.builtin import TEXT
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.records import LeftOut, check_function
from orchdata.loaders.samples.measure import (
    Measured,
    Outline,
    Prepared,
    Sizes,
    counted,
    outlines,
    part_sizes,
    prepare,
)
from orchdata.loaders.samples.members import Member, is_made
from orchdata.loaders.samples.record import record_of
from orchdata.loaders.shards.fields import RAW
from orchdata.loaders.shards.shard import FactsTable, Shard
from orchdata.loaders.storage.storage import read_run, runs_of
from orchdata.loaders.watch import SCANNING, ThreadProgress, here

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
            read = partial(shard.read, encoding=RAW, field=raw[run.members[0]][1].field)
            try:
                contents = read_run(read, run, extents)
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
    contents = {index: chunk.texts[sample.start + index] for index in sample.wanted} if sample.error is None else {}
    error = sample.error or next((each for each in contents.values() if isinstance(each, FieldError)), None)
    if error is not None:
        return error
    payloads = {index: each for index, each in contents.items() if not isinstance(each, FieldError)}
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
