"""Measuring a chunk of samples of one shard, in any thread: texts of several samples are tokenized together."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from orchdata.loaders.errors import FieldError
from orchdata.loaders.failures import as_field_error
from orchdata.loaders.index.measuring.kept_texts import Kept
from orchdata.loaders.index.measuring.reading import Chunk
from orchdata.loaders.index.measuring.rows import Outcome, ShardSample
from orchdata.loaders.memory import measured_at
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.records import LeftOut, check_function
from orchdata.loaders.samples.measure import Outline, Prepared, Sizes, counted, outlines, part_sizes, prepare, shape_of
from orchdata.loaders.samples.members import is_made
from orchdata.loaders.samples.record import record_of
from orchdata.loaders.slow import SCANNING, ThreadProgress, here

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
