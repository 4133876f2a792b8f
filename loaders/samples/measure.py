"""Counts of a sample from headers and tokenized text, without decoding media; decoding uses the same functions.

    members --prepare--> text and media in order --outlines--> counts of text --counted, with sizes of media--> counts

The counts of text are the costly part. They are kept by themselves, so that other sizes of media need no tokenizer.
Samples above `TextPreprocessor.max_tokens` fail, are truncated, or are split into rows (`spans.divided`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from operator import index as as_int
from typing import Any, Final, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DecodeError, FieldError, as_field_error
from orchdata.loaders.field_names import NAMES_EDGE, bare_name, is_edge, why_not_whole
from orchdata.loaders.limits import Limits
from orchdata.loaders.memory import pass_shortage
from orchdata.loaders.modalities.builtin import BUILTINS, TEXT
from orchdata.loaders.modalities.modality import Header, Modality, PartSize, counts_from_header
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.compose import (
    Composition,
    composition_of,
    has_length,
    text_members,
    unread_in,
    value_of,
)
from orchdata.loaders.samples.members import Member, uses_of
from orchdata.loaders.samples.spans import (
    MediaSlot,
    SizesInTurn,
    Span,
    TextRun,
    TextSpan,
    WholeWriter,
    Window,
    divided,
    expansion_of,
    num_tokens,
    packed,
)

Sizes = dict[tuple[str, int], PartSize]
"""Sizes of parts that were counted from their bytes, by modality and index in the sample's members."""

T = TypeVar("T")
_INT32_MAX: Final = 2**31 - 1
_OURS: Final = frozenset(BUILTINS.values())
"""Counts of these are not checked."""


class Counts(NamedTuple):
    """Tokens of a row, those of media included, and those with loss."""

    llm_tokens: int
    loss_tokens: int
    # Start of a piece in the text, as `packed` encodes it; negative if the piece cannot be tokenized without the rest
    # of its sample; 0 if the sample is not split.
    text_start: int = 0


class MeasuredPart(NamedTuple):
    """One part of a sample."""

    modality: str
    member: int  # index in the sample's members
    size: PartSize


@dataclass(slots=True)
class Measured:
    """Counts of one sample: of each of its rows, and of its parts in the order of their slots."""

    pieces: list[Counts]
    parts: list[MeasuredPart] = field(default_factory=list)
    used_members: list[int] = field(default_factory=list)  # those that it uses or keeps, ascending
    cut_tokens: int = 0  # lost by truncation

    @property
    def llm_tokens(self) -> int:
        return sum([piece.llm_tokens for piece in self.pieces])

    @property
    def loss_tokens(self) -> int:
        return sum([piece.loss_tokens for piece in self.pieces])


def texts_to_read(members: Sequence[Member], recipe: Recipe) -> list[int]:
    """Return the indices of the members with text that `measure` needs."""
    return sorted({*text_members(members, recipe), *edges_of(members, recipe)})


def parts_to_read(members: Sequence[Member], recipe: Recipe) -> list[tuple[str, int]]:
    """Return modality and index of the members with media that `measure` needs: no header contains their size."""
    return [(name, member) for name in recipe.counted_from_bytes for member in uses_of(members, recipe).media[name]]


@dataclass(frozen=True, slots=True)
class Outline:
    """The text of a sample, counted, and where its media go. It does not depend on the sizes of media, but for the text
    that `Modality.expand` puts between their tokens.
    """

    parts: tuple[tuple[str, int], ...]  # modality and index in the sample's members of each part, in order
    texts: tuple[int, ...]  # indices of the members that the text comes from
    is_chat: bool
    spans: tuple[TextRun | int, ...]  # a number stands for the next run of tokens of the part with this number
    starts: tuple[int, ...] = ()  # `Counts.text_start` of the pieces of a split text
    cut_at: int = 0  # the `TextPreprocessor.max_tokens` of these pieces
    shape: int = 0  # as `shape_of`, of the expansions that were tokenized with the text
    unread: tuple[str, ...] = ()  # names of the sample that are not read, see `unread_names`
    others: int = 0  # number of further names

    def is_of_pieces(self, recipe: Recipe) -> bool:
        """Whether the text has the pieces that the recipe splits it into, so that it need not be tokenized again."""
        limit = recipe.text.max_tokens
        if recipe.text.overflow != "split" or limit is None or self.cut_at == limit:
            return True
        tokens = sum([span.num_tokens for span in self.spans if isinstance(span, TextRun)])
        return tokens <= limit or any(isinstance(span, int) for span in self.spans)


class Prepared(NamedTuple):
    """A sample before its text is tokenized."""

    composition: Composition
    sizes: list[PartSize]  # of its parts
    unread: tuple[str, ...]  # names of what is not read


def prepare(
    members: Sequence[Member], payloads: Mapping[int, bytes | memoryview], recipe: Recipe, known: Sizes | None = None
) -> Prepared:
    """Compose a sample, and measure its parts. Raises FieldError as `composition_of`, or for a bad part; LeftOut."""
    composition = composition_of(members, payloads, recipe)
    sizes = part_sizes(composition.parts, members, payloads, recipe, known)
    if composition.parts:
        check_whole(composition.parts, composition.items, composition.record, members, payloads, recipe)
    unread = unread_in(composition, members, payloads, recipe)
    composition.records.clear()  # many objects at a time would slow the garbage collector
    return Prepared(composition, sizes, unread)


def part_sizes(
    parts: Sequence[tuple[str, int]],
    members: Sequence[Member],
    payloads: Mapping[int, bytes | memoryview],
    recipe: Recipe,
    known: Sizes | None = None,
) -> list[PartSize]:
    """Return the size of each part of a sample; those in `known` were counted before, others are added to it. Raises
    FieldError for the first that is bad.
    """
    known = {} if known is None else known
    sizes: list[PartSize] = []
    for name, at in parts:
        counts_bytes = name in recipe.counted_from_bytes
        size = known.get((name, at)) if counts_bytes and members[at].error is None else None
        if size is None:
            size = measure_part(name, members[at], payloads.get(at), recipe)
            if counts_bytes:
                known[name, at] = size
        sizes.append(size)
    counts = Counter(name for name, _ in parts) if len(parts) > 1 else {}
    for number, (name, at) in enumerate(parts if counts else ()):
        if counts[name] > 1:
            try:
                sizes[number] = recipe.modalities[name].among(sizes[number], counts[name])
            except DecodeError as error:
                raise error.at(members[at].field) from error.__cause__
    return sizes


def outlines(
    samples: Sequence[Prepared], recipe: Recipe, at: Callable[[int], None] = lambda number: None
) -> list[Outline | FieldError]:
    """Tokenize the texts of samples, together if the tokenizer can. Return an outline of each, or its error. `at` is
    called with the number of a sample before each piece of work on its text alone.
    """
    whole: dict[int, WholeWriter] = {}
    errors: dict[int, FieldError] = {}
    for number, sample in enumerate(samples if recipe.text.whole else ()):
        at(number)
        writer = _or_error(partial(sample.composition.whole, recipe, SizesInTurn(sample.sizes)))
        if isinstance(writer, FieldError):
            errors[number] = writer
        else:
            whole[number] = writer

    # Trained texts are counted; all others, and those that cannot be counted, are tokenized with offsets.
    texts = {number: text for number, writer in whole.items() if (text := writer.wanted()) is not None}
    counts: dict[int, int] = {}
    if recipe.text.overflow != "split":  # whose pieces begin at offsets
        trained = [number for number in texts if whole[number].is_trained_text]
        end = recipe.text.eos_token_id  # one of the text's or the tokenizer's own takes its place
        without = [*recipe.mark_tokens.values(), *([] if end is None else [end])]
        found = recipe.text.count_all([texts[number] for number in trained], without) if trained else ()
        counts = {number: count for number, count in zip(trained, found, strict=True) if count is not None}
    others = [number for number in texts if number not in counts]
    tokens = recipe.text.encode_all([texts[number] for number in others]) if others else ()
    encoded = dict(zip(others, tokens, strict=True))

    def outline(number: int) -> Outline:
        sample = samples[number]
        spans: Sequence[Span | TextRun]
        if number in counts:
            spans = whole[number].close_counted(counts[number])
        elif number in whole:
            spans = whole[number].close_with(encoded.get(number))
        else:
            spans = sample.composition.spans(recipe, SizesInTurn(sample.sizes))
        return _outline(sample, whole.get(number), spans, recipe)

    results: list[Outline | FieldError] = []
    for number in range(len(samples)):
        at(number)
        results.append(errors[number] if number in errors else _or_error(partial(outline, number)))
    return results


def _or_error(call: Callable[[], T]) -> T | FieldError:
    """Return what a call returns; an exception of a tokenizer or modality fails its sample."""
    try:
        return call()
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001
        return as_field_error(error, "measured")


def _outline(sample: Prepared, writer: WholeWriter | None, spans: Sequence[Span | TextRun], recipe: Recipe) -> Outline:
    """Return the outline of a sample's spans: runs of text of equal loss, and numbers of parts."""
    parts = sample.composition.parts
    numbers: dict[tuple[str, int], list[int]] = {}
    for number, part in enumerate(parts):
        numbers.setdefault(part, []).append(number)
    current: dict[tuple[str, int], int] = {}
    outline: list[TextRun | int] = []
    for span in spans:
        if isinstance(span, MediaSlot):
            part = (span.modality, span.member)
            if span.first == 0:
                current[part] = numbers[part].pop(0)
            outline.append(current[part])
            continue
        last = outline[-1] if outline else None
        if isinstance(last, TextRun) and last.loss == span.loss:
            outline[-1] = last._replace(num_tokens=last.num_tokens + span.num_tokens)
        else:
            outline.append(TextRun(span.num_tokens, span.loss, span.leads, span.first_id))
    limit = recipe.text.max_tokens
    starts: tuple[int, ...] = ()
    is_split = recipe.text.overflow == "split" and limit is not None and num_tokens(spans) > limit and not parts
    if is_split:
        starts = tuple(_text_starts(writer, divided([*cast("Sequence[Span]", spans)], recipe)))
        if max(map(abs, starts)) > _INT32_MAX:  # the index keeps starts in int32
            raise FieldError("*", 'the text is too long for overflow="split" (134 million characters): divide it')
    composition = sample.composition
    return Outline(
        tuple(parts),
        tuple(composition.texts),
        composition.is_chat,
        tuple(outline),
        starts,
        limit if is_split and limit is not None else 0,
        shape_of(parts, sample.sizes, recipe),
        sample.unread,
    )


def measure(members: Sequence[Member], payloads: Mapping[int, bytes | memoryview], recipe: Recipe) -> Measured:
    """Count the tokens and parts of a sample, without decoding media. `payloads` are of `texts_to_read` and
    `parts_to_read`. Raises FieldError, also above a limit.
    """
    sample = prepare(members, payloads, recipe)
    (outline,) = outlines([sample], recipe)
    if isinstance(outline, FieldError):
        raise outline
    return counted(outline, sample.sizes, members, recipe)


def counted(outline: Outline, sizes: Sequence[PartSize], members: Sequence[Member], recipe: Recipe) -> Measured:
    """Return the counts of a sample, from its text and the sizes of its parts. Raises FieldError as `measure`."""
    if len(sizes) > recipe.limits.sample_parts:
        raise _above("parts of media", len(sizes), "sample_parts", recipe.limits)
    # The spans of the outline, with the tokens of parts of these sizes.
    runs = [
        iter([piece for piece in expansion_of(recipe, name, size)[0] if isinstance(piece, int)])
        for (name, _), size in zip(outline.parts, sizes, strict=True)
    ]
    first = [0] * len(sizes)
    spans: list[TextRun | MediaSlot] = []
    for number in outline.spans:
        if isinstance(number, TextRun):
            spans.append(number)
            continue
        tokens = next(runs[number])
        spans.append(MediaSlot(*outline.parts[number], first[number], tokens))
        first[number] += tokens
    pieces = divided(spans, recipe)
    cut_tokens = 0 if pieces[0] is spans or len(pieces) > 1 else num_tokens(spans) - num_tokens(pieces[0])
    used = {*outline.texts}
    if recipe.keep:
        uses = uses_of(members, recipe)
        used.update(uses.kept, uses.records)
    # Count the tokens of each row.
    counts: list[Counts] = []
    for piece in pieces:
        llm_tokens = loss_tokens = 0
        for span in piece:
            if isinstance(span, MediaSlot):
                used.add(span.member)
                llm_tokens += span.tokens
            else:
                llm_tokens += span.num_tokens
                loss_tokens += span.num_loss_tokens
        counts.append(Counts(llm_tokens, loss_tokens))
    if len(pieces) > 1:
        counts = [each._replace(text_start=at) for each, at in zip(counts, outline.starts, strict=True)]
    parts = [MeasuredPart(name, member, size) for (name, member), size in zip(outline.parts, sizes, strict=True)]
    measured = Measured(counts, parts, sorted(used), cut_tokens)
    _check_sample(measured, members, recipe)
    return measured


def writes_between(modality: Modality) -> bool:
    """Whether a modality may put text between the tokens of a part, which depends on the part's size."""
    return type(modality).expand is not Modality.expand


def shape_of(parts: Sequence[tuple[str, int]], sizes: Sequence[PartSize], recipe: Recipe) -> int:
    """Return a digest, int64, of the text that stands between the tokens of parts; 0 if there is none. Raises
    FieldError as `expansion_of`.
    """
    if not any(writes_between(recipe.modalities[name]) for name, _ in parts):
        return 0
    expansions = [expansion_of(recipe, name, size) for (name, _), size in zip(parts, sizes, strict=True)]
    if all(is_bare for _, is_bare in expansions):
        return 0
    shape = [
        None if is_bare else [min(piece, 1) if isinstance(piece, int) else piece for piece in pieces]
        for pieces, is_bare in expansions
    ]
    digest = hashlib.blake2b(json.dumps(shape).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1


def _text_starts(writer: WholeWriter | None, pieces: Sequence[Sequence[Span]]) -> list[int]:
    """Return `Counts.text_start` of pieces. Each is tokenized alone once, to see whether the result is the same."""
    unknown = [-1] * len(pieces)
    if writer is None:
        return unknown
    # Where each piece begins in the text, and how many tokens of that character belong to the piece before it.
    begins = [(0, 0)]
    for before, piece in pairwise(pieces):
        first, last = piece[0], before[-1]
        if not isinstance(first, TextSpan) or first.starts is None:
            return unknown
        start = int(first.starts[0])
        shared = last.starts if isinstance(last, TextSpan) and last.starts is not None else np.zeros(0, np.int64)
        begins.append((start, int(np.count_nonzero(shared == start))))
    stops = [*(start for start, _ in begins[1:]), None]
    windows = [
        Window(start, stop, skipped, num_tokens(piece))
        for (start, skipped), stop, piece in zip(begins, stops, pieces, strict=True)
    ]
    if packed(windows[-1], alone=True) > _INT32_MAX:
        return unknown
    return [
        packed(each, alone=all(map(np.array_equal, _ids_and_loss(writer.window(each)), _ids_and_loss(piece))))
        for each, piece in zip(windows, pieces, strict=True)
    ]


def _ids_and_loss(spans: Sequence[Span]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    texts = [span for span in spans if isinstance(span, TextSpan)]
    return np.concatenate([span.token_ids for span in texts]), np.concatenate([span.loss_mask() for span in texts])


def measure_part(name: str, member: Member, payload: bytes | memoryview | None, recipe: Recipe) -> PartSize:
    """Return the size of one part. Raises FieldError for a bad header, bad bytes or an exceeded limit."""
    if member.error is not None:
        raise FieldError(member.field, member.error)
    modality = recipe.modalities[name]
    try:
        if payload is None or counts_from_header(modality):
            size = modality.count_header(member.header[: modality.num_facts], recipe.limits)
        else:
            try:
                size = modality.count(payload, recipe.limits)
            except Exception as error:
                pass_shortage(error)
                raise
        return size if type(modality) in _OURS else _checked(size, name, modality)
    except DecodeError as error:
        raise error.at(member.field) from error.__cause__
    except Exception as error:  # any exception of a modality is a failure of its part
        raise as_field_error(error, "measured", member.field) from error


def _checked(size: PartSize, name: str, modality: Modality) -> PartSize:
    """Return the size as integers, as the index stores them. Raises DecodeError."""
    positions, tokens, rows = as_int(size.positions), as_int(size.tokens), as_int(size.num_rows)
    extent = tuple(map(as_int, size.extent))
    has_tokens = tokens >= 1 if modality.places else tokens == 0
    if positions < 1 or not has_tokens or min(rows, *extent, 0) < 0 or len(extent) > modality.num_extents:
        wanted = "positions and tokens are" if modality.places else "tokens are 0, as places=False says, positions"
        raise DecodeError(
            f"{name} counted it as {size}: {wanted} at least 1, other numbers at least 0, and an "
            f"extent has up to num_extents={modality.num_extents} of them"
        )
    return PartSize(positions, tokens, rows, extent)


def _check_sample(measured: Measured, members: Sequence[Member], recipe: Recipe) -> None:
    # Check the bytes of members and the tokens of rows.
    limits = recipe.limits
    member_bytes = limits.member_bytes
    total_bytes = 0
    for index in measured.used_members:
        size = members[index].size
        if size > member_bytes:
            raise FieldError(members[index].field, f"{size} bytes, above Limits.member_bytes={member_bytes}")
        total_bytes += size
    llm_tokens = max([piece.llm_tokens for piece in measured.pieces])
    if llm_tokens == 0:
        raise FieldError(members[measured.used_members[0]].field, "no tokens: the sample is an empty text")
    if total_bytes > limits.sample_bytes:
        raise _above("bytes", total_bytes, "sample_bytes", limits)
    if llm_tokens > limits.sample_tokens:
        raise _above("LLM tokens", llm_tokens, "sample_tokens", limits)
    # Check the decoded size, and that all counts fit the index.
    largest = llm_tokens
    if measured.parts:
        decoded = decoded_bytes(measured.parts, members, recipe, recipe.largest_row_bytes)
        if decoded > limits.sample_decoded_bytes:
            raise _above("bytes of media once decoded", decoded, "sample_decoded_bytes", limits)
        for _, _, (positions, tokens, rows, extent) in measured.parts:
            largest = max(largest, positions, tokens, rows, *extent)
    if largest > _INT32_MAX:  # the index counts in int32
        raise FieldError(
            "*", f"the sample has {largest} tokens, positions, rows or the like of one part, above {_INT32_MAX}"
        )


def _above(what: str, count: int, limit: str, limits: Limits) -> FieldError:
    most = getattr(limits, limit)
    return FieldError(
        "*", f"the sample has {count} {what}, above Limits.{limit}={most}: raise it in Recipe(limits=...), or split it"
    )


def decoded_bytes(
    parts: Sequence[MeasuredPart],
    members: Sequence[Member],
    recipe: Recipe,
    row_bytes: Mapping[str, int] | None = None,
) -> int:
    """Return the memory that decoding these parts takes: their arrays, and the working memory of their modalities."""
    row_bytes = recipe.row_bytes if row_bytes is None else row_bytes
    headers: dict[str, list[tuple[Header, PartSize]]] = {}
    total = 0
    for name, index, size in parts:
        total += row_bytes[name] * size.rows
        headers.setdefault(name, []).append((members[index].header[: recipe.modalities[name].num_facts], size))
    return total + sum([recipe.modalities[name].decoding_bytes(sizes) for name, sizes in headers.items()])


def edges_of(members: Sequence[Member], recipe: Recipe) -> list[int]:
    """Return the indices of columns, and of fields of containers, that may name a stretch of the sample's clip."""
    if not any(has_length(name, recipe) for name, media in uses_of(members, recipe).media.items() if media):
        return []
    return [index for index, member in enumerate(members) if is_edge(bare_name(member.field), or_length=True)]


def check_whole(
    parts: Iterable[tuple[str, int]],
    items: Mapping[int, Mapping[str, Any]],
    record: Mapping[str, Any] | None,
    members: Sequence[Member],
    texts: Mapping[int, bytes | memoryview],
    recipe: Recipe,
) -> None:
    """Raise FieldError for a clip that is longer than the stretch of it that an item of a turn, the user's record, or
    else the row names.
    """
    has_clips = any(has_length(name, recipe) for name, _ in parts)
    if not has_clips and not any(items.values()):
        return
    media: dict[str, list[int]] = {}
    for name, index in parts:
        media.setdefault(name, []).append(index)
    records = [] if not has_clips else [record] if record is not None else [*_records(members, texts)]
    for name, indices in media.items():
        modality, others = recipe.modalities[name], media.keys() - {name}
        keys = [key for key, its_modality in recipe.rules.words.records.items() if its_modality == name]
        for number, index in enumerate(indices):
            member = members[index]
            seconds = modality.seconds(member.header[: modality.num_facts] or (0,) * 5)
            reasons = [why_not_whole(items.get(index, {}), seconds, others, strict=True)]
            for value in records if seconds < math.inf else ():
                named = next((value[key] for key in keys if value.get(key)), None)
                named = named if isinstance(named, list) else [named]
                own = named[number] if number < len(named) and isinstance(named[number], dict) else {}
                reasons.append(why_not_whole(own, seconds))
                # A list of frames is what it is.
                is_listed = (
                    "frames" in own
                    or any(isinstance(each, list) for each in named)
                    or member.field.endswith("frames.json")
                )
                if len(indices) == 1 and not is_listed:
                    reasons.append(why_not_whole(value, seconds, others))
            for reason in filter(None, reasons):
                raise FieldError(member.field, reason)


def _records(members: Sequence[Member], texts: Mapping[int, bytes | memoryview]) -> Iterator[Mapping[str, Any]]:
    """Yield the JSON objects of a sample that may name a stretch, and its row."""
    row: dict[str, Any] = {}
    for index, payload in texts.items():
        is_field = is_edge(name := bare_name(members[index].field), or_length=True)
        if is_field or (members[index].kind == TEXT and NAMES_EDGE.search(payload)):
            value = value_of(payload)
            if is_field:
                row[name] = value
            elif isinstance(value, dict):
                yield value
    yield row
