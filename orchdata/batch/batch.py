"""Batch: what one rank gets for one microbatch, ready for any torch model.

Layout (packed): sequences lie behind one another without padding, `cu_seqlens` (int32, one more entry than
sequences, first 0) says where each begins. The LLM sequence is already merged: placeholders stand where image and
audio tokens go, and `merge` puts the encoders' features there.

Layout (padded): LLM tensors have one row a sample, (num_samples, L), and an attention mask; encoder inputs stay packed
or become one row an item, with a mask of their own. Text alone stays packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from orchdata.loaders.modality import ENCODERS
from orchdata.planning.plan import Plan
from orchdata.planning.route import Route
from orchdata.ranks.exchange import exchange

Key = tuple[str, str]

IGNORE = -100


@dataclass(frozen=True, kw_only=True)
class _Tensors:
    """Moves every tensor field at once."""

    def _map(self, change: Callable[[Tensor], Tensor]) -> Any:
        changed = {
            each.name: change(value) for each in fields(self) if isinstance(value := getattr(self, each.name), Tensor)
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
        patches: (num_patches, patch_dim) in the recipe's dtype; padded, (num_images, max_seqlen, patch_dim) with zeros
            behind each image. `merge * merge` rows in a row form one merged token; the elements of a row are ordered
            (channel, row, column).
        grid_hw: int32 (num_images, 2), patches along height and width.
        cu_seqlens: int32 (num_images + 1,) over patches, padding not counted.
        max_seqlen: most patches in one image.
        num_tokens: merged tokens that belong to samples. A dummy image comes last and is not counted.
        mask: padded only: bool (num_images, max_seqlen), True for patches.
        token_places: padded only: int64 (2, num_tokens), the image of each token and its number there, so that
            `features[token_places[0], token_places[1]]` packs an encoder's (num_images, max_tokens, hidden).
        valid: per phase only: bool (num_images,) without a dummy, False for an image that could not be decoded.
    """

    patches: Tensor
    grid_hw: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    num_tokens: int
    mask: Tensor | None = None
    token_places: Tensor | None = None
    valid: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class AudioBatch(_Tensors):
    """Audio clips as log-mel frames; each clip is a sequence of its own.

    Attributes:
        features: (num_frames, num_mels) in the recipe's dtype; padded, (num_clips, max_seqlen, num_mels) with zeros
            behind each clip.
        cu_seqlens: int32 (num_clips + 1,) over mel frames, padding not counted.
        max_seqlen: most mel frames in one clip.
        num_tokens: tokens that belong to samples. A dummy clip comes last and is not counted.
        mask: padded only: bool (num_clips, max_seqlen), True for frames.
        token_places: padded only: int64 (2, num_tokens), the clip of each token and its number there, so that
            `features[token_places[0], token_places[1]]` packs an encoder's (num_clips, max_tokens, hidden).
        valid: per phase only: bool (num_clips,) without a dummy, False for a clip that could not be decoded.
    """

    features: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    num_tokens: int
    mask: Tensor | None = None
    token_places: Tensor | None = None
    valid: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
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
        cu_seqlens: int32 (num_samples + 1,). Packed, where each sequence begins in T, the padding of `multiple_of`
            included; padded, over the tokens that `attention_mask` marks, as flash-attention's unpadding counts them.
        max_seqlen: longest sequence, counted as in cu_seqlens.
        attention_mask: padded only: bool (num_samples, L), True for a sample's tokens, and for a dummy's first
            place.
        image_positions, audio_positions: int64 (num_tokens,), the places of each modality's tokens in T, or in
            (num_samples * L), in the order in which the encoder yields them, or `exchange` does; None where the batch
            has no such modality.
        image_owners, audio_owners: per phase only: int64 (num_parts,), the sample in this batch of each part that
            arrives, in that order.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    attention_mask: Tensor | None = None
    restart_position_ids: Tensor | None = None
    image_positions: Tensor | None = None
    audio_positions: Tensor | None = None
    image_owners: Tensor | None = None
    audio_owners: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One microbatch of one rank.

    Under `Balance(assignment="per_phase")`, `image` and `audio` hold what this rank encodes, of any rank's samples, and
    `text` and `llm` its own samples. `exchange(features, batch.route("image"), ...)` gives the features that `merge`
    puts into the latter.

    Attributes:
        text, image, audio, llm: the tensors. `image` and `audio` are None only where data set and cost model both
            lack them: a rank that drew none gets a dummy, so that every rank runs every module.
        keys: (shard, key) of each sample, in the order of `llm.cu_seqlens`. What failed to decode is not there; per
            phase it is, with its labels masked (see `mask_failed`).
        plan: the whole step's plan.
        step, microbatch, num_microbatches: where this batch stands; `step` counts optimizer steps of the epoch.
        dp_size: data-parallel ranks.
        loss_tokens: labels other than -100 in this batch.
        global_loss_tokens: planned loss tokens of the whole optimizer step, over all ranks and microbatches.
        routes: per phase only: modality -> the way of its features, see `route`.
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
    routes: Mapping[str, Route] = field(default_factory=dict)

    @property
    def is_last_microbatch(self) -> bool:
        return self.microbatch == self.num_microbatches - 1

    @property
    def loss_scale(self) -> float:
        """Times the summed loss: the global token mean, for trainers that average gradients over DP ranks."""
        return self.dp_size / max(1, self.global_loss_tokens)

    def route(self, modality: str) -> Route:
        """The way of a modality's features from the ranks that encode them to those that have their samples.

        Raises ValueError where features stay where they are (assignment="joint"), and for an unknown modality.
        """
        if modality in self.routes:
            return self.routes[modality]
        if modality not in ENCODERS or getattr(self, modality) is None:
            raise ValueError(f"there is no route for {modality!r}: the batch has no such modality")
        raise ValueError(
            f"there is no route for {modality!r}: each rank encodes its own samples, so that features stay where they "
            "are; od.Balance(assignment='per_phase') makes routes"
        )

    def mask_failed(self, group: Any = None) -> Batch:
        """The same batch, without loss for samples with a part that failed to decode, on whatever rank.

        Each rank knows what failed there; one byte a part tells the others. A collective over `group`, the ranks of
        the routes, on the tensors' device: every rank calls it, or none. Under on_error="skip" a DataLoader that was
        given a process group (or finds torch.distributed initialized) has done so. The planned denominator of the loss
        stays. Without routes nothing is to be done.
        """
        handles = {}
        for name, route in self.routes.items():
            valid = getattr(self, name).valid.to(torch.uint8)
            handles[name] = exchange(valid, route.parts, group=group, requires_grad=False, async_op=True)
        return self.masked({name: handle.wait() != 0 for name, handle in handles.items()})

    def masked(self, valid: Mapping[str, Tensor]) -> Batch:
        """The same batch, without loss for samples that have a part marked False in `valid`: modality -> bool
        (num_parts,), parts in the sequence in which they arrive.
        """
        llm = self.llm
        failed = [getattr(llm, f"{name}_owners")[~flags.to(llm.labels.device)] for name, flags in valid.items()]
        samples = torch.cat([llm.labels.new_zeros(0), *failed])
        if not len(samples):
            return self
        if llm.attention_mask is not None:
            sample = torch.arange(len(llm.labels), device=samples.device)[:, None]
        else:
            place = torch.arange(len(llm.labels), device=samples.device)
            sample = torch.searchsorted(llm.cu_seqlens[1:].long(), place, right=True)
        labels = llm.labels.masked_fill(torch.isin(sample, samples), IGNORE)
        labels = labels.pin_memory() if llm.labels.is_pinned() else labels
        return replace(self, llm=replace(llm, labels=labels), loss_tokens=int((labels != IGNORE).sum()))

    def merge(self, embeds: Tensor, features: Mapping[str, Tensor]) -> Tensor:
        """Put encoder outputs, or what `exchange` made of them, into the embedded sequences.

        Args:
            embeds: (T, hidden) or (1, T, hidden), padded (num_samples, L, hidden): the embedding of `llm.input_ids`.
            features: modality -> (num_tokens, hidden), every modality this batch has, in the encoder's order; rows
                past `num_tokens` are a dummy's: they reach no position, but stay joined to the graph. From padded
                encoders also (num_items, max_tokens, hidden).

        Returns:
            A new tensor like `embeds`. Every given feature tensor takes part in the graph, even without a token.

        Raises:
            ValueError: features of a modality the batch lacks, or none of one it has; sizes that disagree.
        """
        for name in features:
            if name not in ENCODERS or getattr(self, name) is None:
                raise ValueError(f"features of {name!r} were given, but the batch has no such modality")
        if embeds.shape[:-1].numel() != self.llm.input_ids.numel():
            raise ValueError(
                f"embeds of shape {tuple(embeds.shape)} do not embed input_ids of shape "
                f"{tuple(self.llm.input_ids.shape)}: pass embed(batch.llm.input_ids)"
            )
        for name in ENCODERS:
            held = getattr(self, name)
            if held is None:
                continue
            if name not in features:
                raise ValueError(f"the batch has {name}, but no features of it were given")
            positions = getattr(self.llm, f"{name}_positions")
            rows = _token_rows(name, held, features[name])
            if len(positions) and rows.shape[0] != len(positions):
                raise ValueError(
                    f"the batch has {len(positions)} {name} tokens, the features have {rows.shape[0]} rows"
                )
            embeds = merge_features(embeds, rows, positions)
        return embeds

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments for a model: plain tensors and ints, without the modalities this batch lacks.

        Packed: input_ids, position_ids, labels, cu_seqlens, max_seqlen; for images image_patches, image_grid_hw,
        image_cu_seqlens, image_max_seqlen, image_positions; for audio audio_features, audio_cu_seqlens,
        audio_max_seqlen, audio_positions. Padded: attention_mask in place of cu_seqlens and max_seqlen. Padded
        encoders: image_mask and image_token_places, audio_mask and audio_token_places in place of theirs. Per phase:
        image_route and audio_route too.
        """
        llm = self.llm
        inputs: dict[str, Any] = {
            "input_ids": llm.input_ids,
            "position_ids": llm.position_ids,
            "labels": llm.labels,
        }
        if llm.attention_mask is None:
            inputs |= {"cu_seqlens": llm.cu_seqlens, "max_seqlen": llm.max_seqlen}
        else:
            inputs["attention_mask"] = llm.attention_mask
        if self.image is not None:
            inputs |= {"image_patches": self.image.patches, "image_grid_hw": self.image.grid_hw}
            inputs |= _sequence_inputs("image", self.image)
            inputs["image_positions"] = llm.image_positions
        if self.audio is not None:
            inputs["audio_features"] = self.audio.features
            inputs |= _sequence_inputs("audio", self.audio)
            inputs["audio_positions"] = llm.audio_positions
        return inputs | {f"{name}_route": route for name, route in self.routes.items()}

    def to(self, device: Any, non_blocking: bool = False) -> Batch:
        """The same batch with its tensors on `device`."""
        return self._map(lambda tensor: tensor.to(device=device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        held = {name: part for name in ("text", *ENCODERS, "llm") if (part := getattr(self, name)) is not None}
        return replace(self, **{name: part._map(change) for name, part in held.items()})


def merge_features(embeds: Tensor, features: Tensor, positions: Tensor) -> Tensor:
    """Put rows of `features` (num_rows, hidden) at `positions` (num_tokens,) of `embeds` (..., hidden).

    Positions count through all dimensions of `embeds` but the last. Rows past num_tokens belong to a dummy. Raises
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


def _token_rows(name: str, held: ImageBatch | AudioBatch, features: Tensor) -> Tensor:
    """The rows of an encoder's output that go into the sequence, (num_rows, hidden)."""
    if features.dim() == 2:
        return features
    if held.mask is None or held.token_places is None:
        raise ValueError(f"{name} features have shape {tuple(features.shape)}, expected (num_tokens, hidden)")
    if features.dim() != 3 or features.shape[0] != held.mask.shape[0]:
        raise ValueError(
            f"{name} features have shape {tuple(features.shape)}, expected (num_tokens, hidden) or "
            f"({held.mask.shape[0]}, max_tokens, hidden)"
        )
    item, place = held.token_places
    return features[item, place]


def _sequence_inputs(name: str, held: ImageBatch | AudioBatch) -> dict[str, Any]:
    if held.mask is not None:
        return {f"{name}_mask": held.mask, f"{name}_token_places": held.token_places}
    return {f"{name}_cu_seqlens": held.cu_seqlens, f"{name}_max_seqlen": held.max_seqlen}
