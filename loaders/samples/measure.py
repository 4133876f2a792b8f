"""Counts of a sample from headers and tokenized text, without decoding media."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index as as_int
from typing import Final, NamedTuple

from orchdata.loaders.errors import DecodeError, FieldError, as_field_error
from orchdata.loaders.limits import Limits
from orchdata.loaders.memory import pass_shortage
from orchdata.loaders.modalities.builtin import BUILTINS
from orchdata.loaders.modalities.modality import Header, Modality, PartSize, counts_from_header
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.compose import MediaSlot, Span, text_members, written
from orchdata.loaders.samples.members import Member, uses_of
from orchdata.loaders.samples.overflow import divided, is_same, num_tokens, packed, windows
from orchdata.loaders.samples.spans import SpanWriter, WholeWriter

_INT32_MAX: Final = 2**31 - 1
_OURS: Final = frozenset(BUILTINS.values())
"""Counts of these are not checked."""


class Counts(NamedTuple):
    """Counts of a row.

    Attributes:
        llm_tokens: its length, tokens of media included.
        loss_tokens: number of tokens with loss.
        text_start: start of a piece in the text, as `overflow.packed` encodes it; negative if the piece cannot be
            tokenized without the rest of its sample. 0 if the sample is not split.
    """

    llm_tokens: int
    loss_tokens: int
    text_start: int = 0


class MeasuredPart(NamedTuple):
    """One part of a sample: its modality, its index in the sample's members, and its size."""

    modality: str
    member: int
    size: PartSize


@dataclass(slots=True)
class Measured:
    """Counts of one sample.

    Attributes:
        pieces: counts of each row of the sample: one row, or several if it is split.
        parts: in the order of their slots.
        used_members: members that the sample uses or keeps, ascending; others are ignored.
        cut_tokens: number of tokens lost by truncation.
    """

    pieces: list[Counts]
    parts: list[MeasuredPart] = field(default_factory=list)
    used_members: list[int] = field(default_factory=list)
    cut_tokens: int = 0

    @property
    def llm_tokens(self) -> int:
        """Length of the merged sequence: text and merged media tokens."""
        return sum([piece.llm_tokens for piece in self.pieces])

    @property
    def loss_tokens(self) -> int:
        """Labels other than -100."""
        return sum([piece.loss_tokens for piece in self.pieces])


def members_to_read(members: Sequence[Member], recipe: Recipe) -> list[int]:
    """Indices of the members with bytes that `measure` needs: text, and media with a size that no header contains."""
    wanted = text_members(members, recipe)
    for name, modality in recipe.modalities.items():
        if not counts_from_header(modality):
            wanted = sorted({*wanted, *uses_of(members, recipe).media[name]})
    return wanted


def measure(members: Sequence[Member], payloads: Mapping[int, bytes | memoryview], recipe: Recipe) -> Measured:
    """Count the tokens and parts of a sample, without decoding media.

    Args:
        payloads: of `members_to_read`.

    Raises:
        FieldError: as `compose` and `divided`, or a limit is exceeded.
    """
    # Compose the spans; each part is measured on the way.
    parts: list[MeasuredPart] = []
    media = uses_of(members, recipe).media

    def size_of(modality: str, member: int) -> PartSize:
        size = measure_part(modality, members[member], payloads.get(member), recipe)
        count = len(media[modality])
        if count > 1:
            try:
                size = recipe.modalities[modality].among(size, count)
            except DecodeError as error:
                raise error.at(members[member].field) from error.__cause__
        parts.append(MeasuredPart(modality, member, size))
        return size

    writer, text_used = written(members, payloads, recipe, size_of)
    spans = writer.close()
    if len(parts) > recipe.limits.sample_parts:
        raise _above("parts of media", len(parts), "sample_parts", recipe.limits)
    pieces = divided(spans, recipe)
    cut_tokens = 0 if pieces[0] is spans or len(pieces) > 1 else num_tokens(spans) - num_tokens(pieces[0])
    used = {*text_used}
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
                llm_tokens += len(span.token_ids)
                loss_tokens += span.num_loss_tokens
        counts.append(Counts(llm_tokens, loss_tokens))
    if len(pieces) > 1:
        counts = [each._replace(text_start=at) for each, at in zip(counts, _text_starts(writer, pieces), strict=True)]
    measured = Measured(counts, parts, sorted(used), cut_tokens)
    _check_sample(measured, members, recipe)
    return measured


def _text_starts(writer: SpanWriter, pieces: Sequence[Sequence[Span]]) -> list[int]:
    """Return `Counts.text_start` of pieces. Each is tokenized alone once, to see whether the result is the same."""
    ranges = windows(pieces) if isinstance(writer, WholeWriter) else []
    if not isinstance(writer, WholeWriter) or not ranges or packed(ranges[-1], alone=True) > _INT32_MAX:
        return [-1] * len(pieces)
    return [packed(each, alone=is_same(writer.window(each), piece)) for each, piece in zip(ranges, pieces, strict=True)]


def measure_part(name: str, member: Member, payload: bytes | memoryview | None, recipe: Recipe) -> PartSize:
    """Return the size of one part. Raises FieldError for a bad header, bad bytes or an exceeded limit."""
    if member.error is not None:
        raise FieldError(member.field, member.error)
    modality = recipe.modalities[name]
    try:
        if payload is None or counts_from_header(modality):
            size = modality.count_header(member.header[: modality.num_facts], recipe.limits)
        else:
            size = _counted(modality, payload, recipe)
        return size if type(modality) in _OURS else _checked(size, name, modality)
    except DecodeError as error:
        raise error.at(member.field) from error.__cause__
    except Exception as error:  # any exception of a modality is a failure of its part
        raise as_field_error(error, "measured", member.field) from error


def _counted(modality: Modality, payload: bytes | memoryview, recipe: Recipe) -> PartSize:
    try:
        return modality.count(payload, recipe.limits)
    except Exception as error:
        pass_shortage(error)
        raise


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
    llm_tokens = max(piece.llm_tokens for piece in measured.pieces)
    if llm_tokens == 0:
        raise FieldError(members[measured.used_members[0]].field, "no tokens: the sample is an empty text")
    if total_bytes > limits.sample_bytes:
        raise _above("bytes", total_bytes, "sample_bytes", limits)
    if llm_tokens > limits.sample_tokens:
        raise _above("LLM tokens", llm_tokens, "sample_tokens", limits)
    # Check the decoded size, and that all counts fit the index.
    largest = llm_tokens
    if measured.parts:
        decoded = decoded_bytes(measured.parts, members, recipe)
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


def decoded_bytes(parts: Sequence[MeasuredPart], members: Sequence[Member], recipe: Recipe) -> int:
    """Return the memory that decoding these parts takes: their arrays, and the working memory of their modalities."""
    headers: dict[str, list[tuple[Header, PartSize]]] = {}
    row_bytes, total = recipe.row_bytes, 0
    for name, index, size in parts:
        total += row_bytes[name] * size.rows
        headers.setdefault(name, []).append((members[index].header[: recipe.modalities[name].num_facts], size))
    return total + sum([recipe.modalities[name].decoding_bytes(sizes) for name, sizes in headers.items()])
