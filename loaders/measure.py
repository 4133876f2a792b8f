"""Counts of a sample from media headers and tokenized text, without decoding media."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from orchdata.loaders.compose import MediaSlot, compose_with_source
from orchdata.loaders.errors import FieldError
from orchdata.loaders.headers import MediaHeader, above_limits
from orchdata.loaders.members import Member
from orchdata.loaders.modality import AUDIO, IMAGE
from orchdata.loaders.preprocessors import image_grid
from orchdata.loaders.recipe import Recipe

_INT32_MAX: Final = 2**31 - 1


class MeasuredPart(NamedTuple):
    """Size of one image (extent = patch grid) or clip (extent = samples, mel frames)."""

    modality: int
    member: int
    positions: int
    tokens: int
    extent0: int
    extent1: int


@dataclass(slots=True)
class Measured:
    """Counts of one sample.

    Attributes:
        llm_tokens: length of the merged sequence: text and merged media tokens.
        loss_tokens: labels other than -100.
        parts: images and clips, in the order of their slots.
        used_members: those the sample is made of, ascending; others are ignored.
    """

    llm_tokens: int
    loss_tokens: int
    parts: list[MeasuredPart] = field(default_factory=list)
    used_members: list[int] = field(default_factory=list)


def measure(members: Sequence[Member], texts: Mapping[int, bytes | memoryview], recipe: Recipe) -> Measured:
    """Counts of a sample, without decoding media. Raises FieldError as `compose`, and where a limit is exceeded."""
    spans, text_used = compose_with_source(members, texts, recipe)
    measured = Measured(0, 0)
    for span in spans:
        if isinstance(span, MediaSlot):
            part = measure_part(span, members[span.member], recipe)
            measured.parts.append(part)
            measured.llm_tokens += part.tokens
        else:
            num_tokens = len(span.token_ids)
            measured.loss_tokens += num_tokens - (measured.llm_tokens == 0) if span.loss else 0
            measured.llm_tokens += num_tokens
    measured.used_members = sorted({*text_used, *(part.member for part in measured.parts)})
    _check_sample(measured, members, recipe)
    return measured


def measure_part(slot: MediaSlot, member: Member, recipe: Recipe) -> MeasuredPart:
    """Size of one image or clip. Raises FieldError where its header or a limit forbids it."""
    header = MediaHeader(member.width, member.height, member.frames, member.rate)
    reason = member.error or above_limits(header, recipe.limits)
    if reason is not None:
        raise FieldError(member.field, reason)
    if slot.modality == IMAGE:
        assert recipe.image is not None
        width, height = member.width, member.height
        if width < 1 or height < 1:
            raise FieldError(member.field, f"not a readable image: its header says {width} x {height} pixels")
        grid = image_grid(width, height, recipe.image)
        return MeasuredPart(IMAGE, slot.member, grid[0] * grid[1], recipe.image.num_tokens(grid), *grid)
    pre = recipe.audio
    assert pre is not None
    if member.frames < 1 or member.rate < 1:
        raise FieldError(member.field, f"no audio: its header says {member.frames} frames at {member.rate} Hz")
    num_samples = pre.num_samples(member.frames, member.rate)
    tokens, mel_frames = pre.num_tokens(num_samples), pre.mel_frames(num_samples)
    return MeasuredPart(AUDIO, slot.member, mel_frames // pre.conv_stride, tokens, num_samples, mel_frames)


def _check_sample(measured: Measured, members: Sequence[Member], recipe: Recipe) -> None:
    limits = recipe.limits
    total_bytes = 0
    for index in measured.used_members:
        name, size = members[index].field, members[index].size
        if size > limits.member_bytes:
            raise FieldError(name, f"{size} bytes, above the limit member_bytes={limits.member_bytes}")
        total_bytes += size
    if total_bytes > limits.sample_bytes:
        raise FieldError("*", f"the sample has {total_bytes} bytes, above the limit sample_bytes={limits.sample_bytes}")
    if measured.llm_tokens == 0:
        raise FieldError(members[measured.used_members[0]].field, "no tokens: the sample is an empty text")
    largest = max(measured.llm_tokens, *(part.extent0 for part in measured.parts), 0)
    if largest > _INT32_MAX:  # the index counts in int32
        raise FieldError("*", f"the sample has {largest} tokens or audio samples, above {_INT32_MAX}")
