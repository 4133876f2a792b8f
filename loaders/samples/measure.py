"""Counts of a sample from media headers and tokenized text, without decoding media."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from orchdata.loaders.errors import FieldError
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.headers import MediaHeader, above_limits
from orchdata.loaders.modalities.preprocessors import STORED, image_grid
from orchdata.loaders.modality import AUDIO, IMAGE
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.compose import MediaSlot, compose_with_source
from orchdata.loaders.samples.members import Member

_INT32_MAX: Final = 2**31 - 1
_PIXEL_BYTES: Final = 4
_WAVE_BYTES: Final = 4
_ITEM_BYTES: Final = {name: np.dtype(kind).itemsize for name, kind in STORED.items()}


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
    if len(spans) > recipe.limits.sample_parts:
        num_parts = sum(isinstance(span, MediaSlot) for span in spans)
        if num_parts > recipe.limits.sample_parts:
            raise _above("images and clips", num_parts, "sample_parts", recipe.limits)
    llm_tokens = loss_tokens = 0
    parts: list[MeasuredPart] = []
    used = {*text_used}
    for span in spans:
        if isinstance(span, MediaSlot):
            part = measure_part(span, members[span.member], recipe)
            parts.append(part)
            used.add(span.member)
            llm_tokens += part.tokens
        else:
            num_tokens = len(span.token_ids)
            if span.loss:
                loss_tokens += num_tokens - (llm_tokens == 0)
            llm_tokens += num_tokens
    measured = Measured(llm_tokens, loss_tokens, parts, sorted(used))
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
    member_bytes = limits.member_bytes
    total_bytes = 0
    for index in measured.used_members:
        size = members[index].size
        if size > member_bytes:
            raise FieldError(members[index].field, f"{size} bytes, above Limits.member_bytes={member_bytes}")
        total_bytes += size
    if measured.llm_tokens == 0:
        raise FieldError(members[measured.used_members[0]].field, "no tokens: the sample is an empty text")
    if total_bytes > limits.sample_bytes:
        raise _above("bytes", total_bytes, "sample_bytes", limits)
    if measured.llm_tokens > limits.sample_tokens:
        raise _above("LLM tokens", measured.llm_tokens, "sample_tokens", limits)
    largest = measured.llm_tokens
    if measured.parts:
        decoded = decoded_bytes(measured.parts, members, recipe)
        if decoded > limits.sample_decoded_bytes:
            raise _above("bytes of media once decoded", decoded, "sample_decoded_bytes", limits)
        largest = max(largest, *[max(part[2:]) for part in measured.parts])
    if largest > _INT32_MAX:  # the index counts in int32
        raise FieldError("*", f"the sample has {largest} tokens, positions or audio samples, above {_INT32_MAX}")


def _above(what: str, count: int, limit: str, limits: Limits) -> FieldError:
    most = getattr(limits, limit)
    return FieldError(
        "*", f"the sample has {count} {what}, above Limits.{limit}={most}: raise it in Recipe(limits=...), or split it"
    )


def decoded_bytes(parts: Sequence[MeasuredPart], members: Sequence[Member], recipe: Recipe) -> int:
    """Memory that decoding these parts takes, from their headers.

    Patches, features and waves of all; pixels of the largest image, as images are decoded one after the other.
    """
    image, audio = recipe.image, recipe.audio
    # A position of an image, a frame of audio.
    patch_bytes = 0 if image is None else image.patch_dim * _ITEM_BYTES[image.dtype]
    frame_bytes = 0 if audio is None else audio.num_mels * _ITEM_BYTES[audio.dtype]
    total = largest = 0
    for modality, index, positions, _, extent0, extent1 in parts:
        member = members[index]
        if modality == IMAGE:
            largest = max(largest, member.width * member.height)
            total += positions * patch_bytes
        else:
            total += extent1 * frame_bytes + _WAVE_BYTES * (member.frames + extent0)  # as stored, and resampled
    return total + _PIXEL_BYTES * largest
