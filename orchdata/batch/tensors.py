"""The tensors of a batch: text, each modality's encoder inputs, and the merged LLM sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from orchdata.loaders.modalities.builtin import BUILTINS

IGNORE = -100
"""The label of what has no loss, as torch's losses have it."""


@dataclass(frozen=True, kw_only=True)
class _Tensors:
    """Moves every tensor field at once, and those of mappings; shows their shapes."""

    def __repr__(self) -> str:
        values = (f"{each.name}={shown(getattr(self, each.name))}" for each in fields(self))
        return f"{type(self).__name__}({', '.join(values)})"

    def map(self, change: Callable[[Tensor], Tensor]) -> Any:
        """The same with every tensor changed."""
        return replace(self, **{each.name: _changed(getattr(self, each.name), change) for each in fields(self)})


def shown(value: Any) -> str:
    """What a reader wants to know of a value: of a tensor its type and shape, not its elements."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {shown(held)}" for name, held in value.items()) + "}"
    return repr(value)


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _changed(held, change) for name, held in value.items()}
    return value


@dataclass(frozen=True, kw_only=True, repr=False)
class TextBatch(_Tensors):
    """The text tokens alone, of all samples.

    Attributes:
        input_ids: int64 (num_text_tokens,).
        cu_seqlens: int32 (num_samples + 1,); a sample's spans are joined.
    """

    input_ids: Tensor
    cu_seqlens: Tensor


@dataclass(frozen=True, kw_only=True, repr=False)
class MediaBatch(_Tensors):
    """Parts of one modality; each is a sequence of its own.

    Arrays are attributes too: `batch.image.patches` (num_patches, patch_dim), of which `merge * merge` rows in a row
    form one merged token and the elements of a row are ordered (channel, row, column), and `batch.image.grid_hw`,
    int32 (num_images, 2), patches along height and width; `batch.audio.features` (num_frames, num_mels).

    Attributes:
        arrays: name -> (num_rows, *row_shape) in the dtype of the recipe; padded, (num_parts, max_seqlen, *row_shape)
            with zeros behind each part. One row a part where the modality says so, and for what follows from sizes.
        cu_seqlens: int32 (num_parts + 1,) over rows, padding not counted; that to a length of `encoder_lengths` is a
            last part.
        max_seqlen: most rows of one part; under `encoder_lengths` all rows.
        num_tokens: rows of the encoder's output that go into the sequences, one a token. A dummy's do too, but not
            along a route: per phase it comes last and is not counted.
        padding_tokens: rows of the encoder's output behind these, of the zeros that `Packed(encoder_lengths=...)` puts
            behind the parts as one more; `merge` leaves them out, `exchange` takes `features[:num_tokens]`.
        mask: padded only: bool (num_parts, max_seqlen), True for rows.
        token_places: padded only: int64 (2, num_tokens), the part of each token and its number there, so that
            `features[token_places[0], token_places[1]]` packs an encoder's (num_parts, max_tokens, hidden).
        valid: per phase only: bool (num_parts,) without a dummy, False for a part that could not be decoded.
        part_axes: what `Modality.part_axes` says of these parts.
    """

    arrays: Mapping[str, Tensor]
    cu_seqlens: Tensor
    max_seqlen: int
    num_tokens: int
    padding_tokens: int = 0
    mask: Tensor | None = None
    token_places: Tensor | None = None
    valid: Tensor | None = None
    part_axes: Mapping[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Tensor:
        arrays: Mapping[str, Tensor] = vars(self).get("arrays", {})
        if name not in arrays:
            raise AttributeError(f"{type(self).__name__} has no {name!r}; its arrays are {', '.join(arrays) or 'none'}")
        return arrays[name]


@dataclass(frozen=True, kw_only=True, repr=False)
class LLMBatch(_Tensors):
    """The merged sequences of all samples.

    Tensors are (T,) packed, and (num_samples, L) padded. Padding follows a sample's tokens: input id 0, no loss, and
    positions that count on.

    Attributes:
        input_ids: int64 (T,) or (num_samples, L), placeholder ids where features go.
        position_ids: int64, as input_ids, restarting at each sample; (3, T) or (3, num_samples, L) under "mrope" (time,
            height, width).
        restart_position_ids: under "mrope" only: int64, as input_ids, counting from 0 in each sample, as position_ids
            do otherwise. They tell where samples begin, which positions under "mrope" do not.
        labels: int64, as input_ids, unshifted; -100 where there is no loss, on padding and on each sample's first
            token.
        cu_seqlens: int32 (num_sequences + 1,): the samples, then what `dummies` stand in, then the padding of
            `Packed(length=...)`, where there is any, as a last sequence. Packed, where each begins in T, the padding of
            `multiple_of` included; padded, over the tokens that `attention_mask` marks, as flash-attention's unpadding
            counts them.
        lengths: int32 (num_sequences,): tokens of each of these sequences, no padding counted.
        max_seqlen: longest sequence, counted as in cu_seqlens; under `Packed(length=...)` always that length.
        attention_mask: padded only: bool (num_samples, L), True for a sample's tokens.
        media_positions: modality -> int64 (num_tokens,), the places of its tokens in T, or in (num_samples * L), in the
            order in which the encoder yields them, or `exchange` does. `llm.image_positions` reads that of images;
            None where the batch has no such modality.
        dummies: modality that none of the samples has -> tokens of a dummy of it, which stand in a sequence of their
            own, behind the samples, without loss or key: a model that refuses features without a token finds both.
            `media_positions` has their places, but not per phase, where no features come for them.
        media_owners: per phase only: modality -> int64 (num_parts,), the sample in this batch of each part that
            arrives, in that order.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    cu_seqlens: Tensor
    lengths: Tensor
    max_seqlen: int
    attention_mask: Tensor | None = None
    restart_position_ids: Tensor | None = None
    media_positions: Mapping[str, Tensor] = field(default_factory=dict)
    media_owners: Mapping[str, Tensor] = field(default_factory=dict)
    dummies: Mapping[str, int] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Tensor | None:
        modality, _, kind = name.rpartition("_")
        held = vars(self).get(f"media_{kind}")
        if held is None or (modality not in held and modality not in BUILTINS):
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        found: Tensor | None = held.get(modality)
        return found
