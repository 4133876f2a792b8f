"""Reading of what is measured in a shard, ahead of measuring it: in large sequential reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from orchdata.loaders.errors import FieldError, pass_trouble
from orchdata.loaders.failures import as_field_error
from orchdata.loaders.index.measuring.rows import ShardSample
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.builtin import TEXT
from orchdata.loaders.samples.members import Member
from orchdata.loaders.shards.facts_table import FactsTable
from orchdata.loaders.shards.fields import RAW
from orchdata.loaders.shards.shard import Shard
from orchdata.loaders.storage.coalesce import Extent, Run, read_run, runs_of

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
