"""Batch: what one rank gets for one microbatch, ready for any torch model.

Layout (packed): sequences lie behind one another without padding, `cu_seqlens` (int32, one more entry than
sequences, first 0) says where each begins. The LLM sequence is already merged: placeholders stand where image and
audio tokens go, and `merge` puts the encoders' features there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from orchdata.plan import Plan

Key = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class _Tensors:
    """Moves every tensor field at once."""

    def _map(self, change: Callable[[Tensor], Tensor]) -> Any:
        changed = {
            field.name: change(value)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **changed)


@dataclass(frozen=True, kw_only=True)
class TextBatch(_Tensors):
    """The text tokens alone, of all samples.

    Attributes:
        input_ids: int64 (num_text_tokens,).
        cu_seqlens: int32 (num_samples + 1,); a sample's spans are joined.
    """

    input_ids: Tensor
    cu_seqlens: Tensor


@dataclass(frozen=True, kw_only=True)
class ImageBatch(_Tensors):
    """Images as patches; each image is a sequence of its own.

    Attributes:
        patches: (num_patches, patch_dim) in the recipe's dtype. `merge * merge` rows in a row form one merged
            token; the elements of a row are ordered (channel, row, column).
        grid_hw: int32 (num_images, 2), patches along height and width.
        cu_seqlens: int32 (num_images + 1,) over patches.
        max_seqlen: most patches in one image.
        num_tokens: merged tokens that belong to samples. A dummy image comes last and is not counted.
    """

    patches: Tensor
    grid_hw: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class AudioBatch(_Tensors):
    """Audio clips as log-mel frames; each clip is a sequence of its own.

    Attributes:
        features: (num_frames, num_mels) in the recipe's dtype.
        cu_seqlens: int32 (num_clips + 1,) over mel frames.
        max_seqlen: most mel frames in one clip.
        num_tokens: tokens that belong to samples. A dummy clip comes last and is not counted.
    """

    features: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class LLMBatch(_Tensors):
    """The merged sequence of all samples.

    Attributes:
        input_ids: int64 (T,), placeholder ids where features go.
        position_ids: int64 (T,), restarting at each sample; (3, T) under "mrope" (time, height, width).
        labels: int64 (T,), unshifted; -100 where there is no loss and on each sample's first token.
        cu_seqlens: int32 (num_samples + 1,).
        max_seqlen: longest sequence.
        image_positions, audio_positions: int64 (num_tokens,), the places in T of each modality's tokens, in the
            order in which the encoder yields them; None where the batch has no such modality.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    image_positions: Tensor | None = None
    audio_positions: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One microbatch of one rank.

    Attributes:
        text, image, audio, llm: the tensors. `image` and `audio` are None only where data set and cost model both
            lack them: a rank that drew none gets a dummy, so that every rank runs every module.
        keys: (shard, key) of each sample, in the order of `llm.cu_seqlens`. What failed to decode is not there.
        plan: the whole step's plan.
        step, microbatch, num_microbatches: where this batch stands; `step` counts optimizer steps of the epoch.
        dp_size: data-parallel ranks.
        loss_tokens: labels other than -100 in this batch.
        global_loss_tokens: planned loss tokens of the whole optimizer step, over all ranks and microbatches.
    """

    text: TextBatch
    image: ImageBatch | None
    audio: AudioBatch | None
    llm: LLMBatch
    keys: tuple[Key, ...]
    plan: Plan
    step: int
    microbatch: int
    num_microbatches: int
    dp_size: int
    loss_tokens: int
    global_loss_tokens: int

    @property
    def is_last_microbatch(self) -> bool:
        return self.microbatch == self.num_microbatches - 1

    @property
    def loss_scale(self) -> float:
        """Times the summed loss: the global token mean, for trainers that average gradients over DP ranks."""
        return self.dp_size / max(1, self.global_loss_tokens)

    def merge(self, embeds: Tensor, features: Mapping[str, Tensor]) -> Tensor:
        """Put encoder outputs into the embedded sequence.

        Args:
            embeds: (T, hidden) or (1, T, hidden), the embedding of `llm.input_ids`.
            features: modality -> (num_tokens, hidden), every modality this batch has, in the encoder's order; rows
                past `num_tokens` are a dummy's: they reach no position, but stay joined to the graph.

        Returns:
            A new tensor like `embeds`. Every given feature tensor takes part in the graph, even without a token.
        """
        for name in features:
            if name not in ("image", "audio") or getattr(self, name) is None:
                raise ValueError(f"features of {name!r} were given, but the batch has no such modality")
        for name in ("image", "audio"):
            held = getattr(self, name)
            if held is None:
                continue
            if name not in features:
                raise ValueError(f"the batch has {name}, but no features of it were given")
            if held.num_tokens and features[name].shape[0] != held.num_tokens:
                raise ValueError(
                    f"the batch has {held.num_tokens} {name} tokens, the features have {features[name].shape[0]} rows"
                )
            embeds = merge_features(embeds, features[name], getattr(self.llm, f"{name}_positions"))
        return embeds

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments for a model: plain tensors and ints, without the modalities this batch lacks."""
        llm = self.llm
        inputs: dict[str, Any] = {
            "input_ids": llm.input_ids,
            "position_ids": llm.position_ids,
            "labels": llm.labels,
            "cu_seqlens": llm.cu_seqlens,
            "max_seqlen": llm.max_seqlen,
        }
        if self.image is not None:
            inputs |= {
                "image_patches": self.image.patches,
                "image_grid_hw": self.image.grid_hw,
                "image_cu_seqlens": self.image.cu_seqlens,
                "image_max_seqlen": self.image.max_seqlen,
                "image_positions": llm.image_positions,
            }
        if self.audio is not None:
            inputs |= {
                "audio_features": self.audio.features,
                "audio_cu_seqlens": self.audio.cu_seqlens,
                "audio_max_seqlen": self.audio.max_seqlen,
                "audio_positions": llm.audio_positions,
            }
        return inputs

    def to(self, device: Any, non_blocking: bool = False) -> Batch:
        """The same batch with its tensors on `device`."""
        return self._map(lambda tensor: tensor.to(device=device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        held = {name: part for name in ("text", "image", "audio", "llm") if (part := getattr(self, name)) is not None}
        return replace(self, **{name: part._map(change) for name, part in held.items()})


def merge_features(embeds: Tensor, features: Tensor, positions: Tensor) -> Tensor:
    """Put rows of `features` (num_rows, hidden) at `positions` (num_tokens,) of `embeds` (..., T, hidden).

    Rows past num_tokens belong to a dummy. Raises ValueError for fewer rows than positions.
    """
    num_tokens = positions.shape[0]
    if features.shape[0] < num_tokens:
        raise ValueError(
            f"{num_tokens} tokens are expected by the sequence, the features have {features.shape[0]} rows"
        )
    if features.shape[-1] != embeds.shape[-1]:
        raise ValueError(f"features are {features.shape[-1]} wide, embeddings {embeds.shape[-1]}")
    return embeds.index_copy(embeds.dim() - 2, positions, _like(embeds, features[:num_tokens]))


def _like(embeds: Tensor, features: Tensor) -> Tensor:
    features = features.to(embeds.dtype)
    return features if embeds.dim() == 2 else features.expand(*embeds.shape[:-2], *features.shape)
