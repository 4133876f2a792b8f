"""The tensors of a batch: text, each modality's encoder inputs, and the merged LLM sequences.

Features -> the positions of their tokens in the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

IGNORE = -100
"""The label of tokens without loss, as in torch."""

_BUILT_IN = ("image", "audio")
"""Modalities whose attributes are None in batches without them."""


@dataclass(frozen=True, kw_only=True)
class _Tensors:
    """Moves all tensor fields together, also those in mappings; its repr shows their shapes."""

    def __repr__(self) -> str:
        values = (f"{each.name}={shown(getattr(self, each.name))}" for each in fields(self))
        return f"{type(self).__name__}({', '.join(values)})"

    def map(self, change: Callable[[Tensor], Tensor]) -> Any:
        """Return the same with every tensor changed."""
        return replace(self, **{each.name: _changed(getattr(self, each.name), change) for each in fields(self)})


def shown(value: Any) -> str:
    """Return a short text of a value: for a tensor its dtype and shape, not its elements."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {shown(each)}" for name, each in value.items()) + "}"
    return repr(value)


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _changed(each, change) for name, each in value.items()}
    return value


@dataclass(frozen=True, kw_only=True, repr=False)
class TextBatch(_Tensors):
    """The text tokens of all samples, without media tokens.

    Attributes:
        input_ids: int64 (num_text_tokens,).
        cu_seqlens: int32 (num_samples + 1,); a sample's spans are joined.
    """

    input_ids: Tensor
    cu_seqlens: Tensor


@dataclass(frozen=True, kw_only=True, repr=False)
class MediaBatch(_Tensors):
    """Parts of one modality; each is a separate sequence.

    Arrays are attributes too: `batch.image.patches` (num_patches, patch_dim), in which `merge * merge` consecutive rows
    form one merged token and the elements of a row are ordered (channel, row, column), and `batch.image.grid_hw`,
    int32 (num_images, 2), patches along height and width; `batch.audio.features` (num_frames, num_mels).

    Attributes:
        arrays: name -> (num_rows, *row_shape) in the dtype of the recipe; padded, (num_parts, max_seqlen, *row_shape)
            with zeros after each part. One row a part if the modality defines it, and for arrays made from sizes.
        cu_seqlens: int32 (num_parts + 1,) over rows without padding; padding to a length of `encoder_lengths` is a
            last part.
        max_seqlen: most rows of one part; under `encoder_lengths` all rows.
        num_tokens: rows of the encoder's output that go into the sequences, one a token. Those of a dummy count too,
            except per phase, where a dummy comes last and does not travel.
        padding_tokens: further rows of the encoder's output, for the zeros that `Packed(encoder_lengths=...)` adds as
            a last part; `merge` leaves them out, `exchange` takes `features[:num_tokens]`.
        mask: padded only: bool (num_parts, max_seqlen), True for rows.
        token_places: padded only: int64 (2, num_tokens), the part of each token and its number there, so that
            `features[token_places[0], token_places[1]]` packs an encoder's (num_parts, max_tokens, hidden).
        valid: per phase only: bool (num_parts,) without a dummy, False for a part that could not be decoded.
        part_axes: `Modality.part_axes` of these parts.
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
            do otherwise. They show where samples begin, which positions under "mrope" do not.
        labels: int64, as input_ids, unshifted; -100 where there is no loss, on padding and on each sample's first
            token. None where a loader cuts sequences.
        shift_labels: under `Teams(cut="loader")` only: int64, as input_ids, the label of the token after each, shifted
            before sequences were cut; -100 where that has no loss. Another shift would train on the wrong tokens.
        cu_seqlens: int32 (num_sequences + 1,): the samples, then the sequence of `dummies`, then the padding of
            `Packed(length=...)`, if any, as a last sequence. Packed: the start of each in T, with the padding of
            `multiple_of`; padded: over the tokens that `attention_mask` marks, as flash-attention's unpadding counts
            them. Under `Teams(cut="loader")` of what is here of each sample, with what pads a team's slice after the
            last; whole sequences are in `Batch.teams`.
        lengths: int32 (num_sequences,): tokens of each of these sequences, without padding.
        max_seqlen: longest sequence, counted as in cu_seqlens; under `Packed(length=...)` always that length.
        attention_mask: padded only: bool (num_samples, L), True for a sample's tokens.
        media_positions: modality -> int64 (num_tokens,), the positions of its tokens in T, or in (num_samples * L), in
            the order in which the encoder, or `exchange`, yields them; of slices those here. `llm.image_positions`
            reads that of images; None where the batch has no such modality.
        dummies: modality that none of the samples has, or slices alone -> tokens of its dummy. They are in a separate
            sequence after the samples, without loss or key, for models that refuse features without a token.
            `media_positions` has their positions, except per phase, where no features arrive for them.
        media_owners: per phase only: modality -> int64 (num_parts,), the sample in this batch of each part that
            arrives, in that order.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor | None
    cu_seqlens: Tensor
    lengths: Tensor
    max_seqlen: int
    attention_mask: Tensor | None = None
    restart_position_ids: Tensor | None = None
    media_positions: Mapping[str, Tensor] = field(default_factory=dict)
    media_owners: Mapping[str, Tensor] = field(default_factory=dict)
    dummies: Mapping[str, int] = field(default_factory=dict)
    shift_labels: Tensor | None = None

    @property
    def any_labels(self) -> Tensor:
        """`labels`, or `shift_labels` in their place: equally many have loss."""
        labels = self.labels if self.shift_labels is None else self.shift_labels
        assert labels is not None
        return labels

    @property
    def next_labels(self) -> Tensor:
        """The label of the token after each, packed (T,): `shift_labels`, or `labels` shifted by one."""
        if self.shift_labels is not None:
            return self.shift_labels
        labels = self.any_labels
        return torch.cat([labels[1:], labels.new_full((1,), IGNORE)])

    def __getattr__(self, name: str) -> Tensor | None:
        modality, _, kind = name.rpartition("_")
        by_modality = vars(self).get(f"media_{kind}")
        if by_modality is None or (modality not in by_modality and modality not in _BUILT_IN):
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        tensor: Tensor | None = by_modality.get(modality)
        return tensor


@dataclass(frozen=True, kw_only=True, repr=False)
class Team(_Tensors):
    """The sequences of one microbatch that this rank shares with the other members of one team.

    A rank is in at most one team of each size. Teams come first in a microbatch, the largest first; whole samples
    follow. Under `Teams(cut="loader")` they are a last team of size 1, and a member has its slice of the team's joined
    sequences; under "trainer" whole samples are in no team, and every member has the whole sequences.

    Attributes:
        size: ranks of the team.
        place: of this rank among them, from 0.
        ranks: their data-parallel ranks, ascending: an aligned run.
        rows: of the tensors of `llm`, those of the team's sequences, or of the slice of them.
        cu_seqlens: int32 (num_sequences + 1,): the start of each whole sequence, from 0. Under "loader" padding is a
            last sequence, and the last entry is the size times the rows of a slice; place p has those from p slices on.
            Under "trainer" they count as `llm.cu_seqlens`.
        samples: of `sample_ids`, those of the team.
        valid: bool (num_samples,), False for a sample that could not be decoded. Such a sample has ids 0 and no
            labels; a DataLoader under on_error="skip" delivers it so to all members, wherever it failed.
        use: of a loader that cuts sequences: whether attention of teams was used.
    """

    size: int
    place: int
    ranks: tuple[int, ...]
    rows: slice
    cu_seqlens: Tensor
    samples: slice
    valid: Tensor
    use: TeamUse | None = field(default=None, compare=False)


@dataclass(eq=False)
class TeamUse:
    """Whether the inputs of a loader's batch with teams were taken, and no attention over teams was used since;
    `is_by_name`: `od.hf.share_attention` was called, without which a model of transformers uses none.
    """

    taken: str = ""
    is_by_name: bool = False

    def __deepcopy__(self, _: Any) -> TeamUse:
        """Return itself: a copied batch is of the same loader."""
        return self

    def take(self, batch: str) -> None:
        """Model inputs of this batch were taken."""
        self.taken = batch

    def mark(self) -> None:
        """Attention over teams was used, or their process groups."""
        self.taken = ""

    def check(self, when: str) -> None:
        """Raise RuntimeError if inputs were taken, and nothing used since."""
        if self.taken:
            raise RuntimeError(
                f"{when}, and no attention over teams was used since the model inputs of {self.taken} were taken: a "
                "model that attends to slices by themselves computes something else, and one such step may have been "
                "applied. Call attend(q, k, v, batch.teams) of od.TeamAttention(loader) in each block, or "
                "od.hf.share_attention(model, loader)"
            )


def counted_labels(llm: LLMBatch, teams: Sequence[Team]) -> int:
    """Count the labels of a microbatch with loss: of whole shared sequences on the first member alone."""
    labels = llm.any_labels
    elsewhere = [team.rows for team in teams if team.place and llm.shift_labels is None]
    return int((labels != IGNORE).sum()) - sum(int((labels[rows] != IGNORE).sum()) for rows in elsewhere)


def whole_lengths(llm: LLMBatch, teams: Sequence[Team]) -> Tensor:
    """Return the tokens of each sequence of a microbatch, also where it has a slice, int64 (num_sequences,): first
    those of the samples, without padding under `Teams(cut="loader")`, else as `llm.cu_seqlens` counts.
    """
    if llm.shift_labels is None:
        return llm.cu_seqlens.diff().long()
    return torch.cat([llm.lengths[:0], *(team.cu_seqlens.diff()[: len(team.valid)] for team in teams)]).long()


def merge_features(embeds: Tensor, features: Tensor, positions: Tensor) -> Tensor:
    """Put rows of `features` (num_rows, hidden) at `positions` (num_tokens,) of `embeds` (..., hidden).

    Positions count through all dimensions of `embeds` but the last. Rows after num_tokens belong to a dummy. Raises
    ValueError for fewer rows than positions.
    """
    num_tokens = positions.shape[0]
    if features.shape[0] < num_tokens:
        raise ValueError(
            f"{num_tokens} tokens are expected by the sequence, the features have {features.shape[0]} rows"
        )
    if features.shape[-1] != embeds.shape[-1]:
        raise ValueError(f"features are {features.shape[-1]} wide, embeddings {embeds.shape[-1]}")
    rows = embeds.reshape(-1, embeds.shape[-1])
    return rows.index_copy(0, positions, features[:num_tokens].to(embeds.dtype)).view(embeds.shape)


def token_rows(name: str, media: MediaBatch, features: Tensor) -> Tensor:
    """Return the rows of an encoder's output that go into the sequence, (num_rows, hidden)."""
    if features.dim() == 2:
        return features
    if media.mask is None or media.token_places is None:
        raise ValueError(f"{name} features have shape {tuple(features.shape)}, expected (num_tokens, hidden)")
    if features.dim() != 3 or features.shape[0] != media.mask.shape[0]:
        raise ValueError(
            f"{name} features have shape {tuple(features.shape)}, expected (num_tokens, hidden) or "
            f"({media.mask.shape[0]}, max_tokens, hidden)"
        )
    item, token = media.token_places
    return features[item, token]
