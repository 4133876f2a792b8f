"""Batches as the arguments of a Hugging Face model's forward; per phase its features; the scaled loss of its outputs.

    od.DataLoader(..., collate_fn=od.hf.Inputs(model.config))        batch.model_inputs() -> model(**...)
    model, batch --encode--> features, which travel to their samples      outputs, batch --loss--> the scaled loss

Packed, samples follow one another in one row, separated by positions that restart: `attention_mask` and the cache are
left out, because with either transformers stops looking for restarts and lets samples attend to each other. For flash
attention their bounds are given too. Padded, each sample is a row, with a mask.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from orchdata.batch.batch import Batch
from orchdata.batch.rounds import UNUSED
from orchdata.batch.rounds import rounds as rounds_of
from orchdata.batch.tensors import IGNORE, LLMBatch, MediaBatch
from orchdata.hf.models import (
    FAMILIES,
    READ_PADDING,
    TOWERS,
    Family,
    family_of,
    model_class,
    takes,
    thinker,
    undisturbed,
)
from orchdata.hf.trials import (
    Arguments,
    Sharing,
    SwitchingRope,
    Unshared,
    Verdict,
    attention_of,
    sharing_of,
    switching_rope,
    verdict_of,
)
from orchdata.notices import warn_once
from orchdata.planning.balance import Attention, Empty, Layout, Packed, Padded, Positions
from orchdata.ranks.exchange import exchange

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from orchdata.loaders.recipe import Recipe
    from orchdata.planning.balance import Balance

_UNKNOWN: Final = Family(packs=False, part_features=())
_ASKED: Final = "padded=True"
_ENCODER_DECODER: Final = "is an encoder-decoder"
_ARRAYS: Final = {"patches": "pixel_values"}
"""What arrays of images of plain recipes are called by models."""

_MEDIA_TYPES: Final = {"image": 1, "video": 2, "audio": 3}


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """Names and shapes that a model wants, for `DataLoader(collate_fn=...)`.

    `batch.model_inputs()` then has `input_ids` and `position_ids` (1, T) or (rows, L), under mrope positions (4, ...);
    media under the model's own names; and `labels` with `num_items_in_batch`, so that `model(...).loss` is already
    scaled by `batch.loss_scale`. Where a model's own loss does not follow `num_items_in_batch` there are no labels, and
    `od.hf.loss(outputs, batch)` gives the same. Nor where sources of a mixture have loss weights. With slices of
    sequences that ranks share there are `teams` and no masks, and `labels`, already shifted, are `shift_labels` too.

    Args:
        config: the model's configuration; what of it is asked is asked here.
        padded: one row a sample. Default: packed where the model keeps packed samples apart, else padded.
        multiple_of: as `od.Packed` and `od.Padded` have it.
        length: as `od.Packed` has it: rows are (1, length), and padding is a last sequence whose positions restart.
        concatenate, attention: as `od.Packed` has them, with `length`: windows of concatenated documents.
        empty: as there.
        probe: try on a tiny random model of this configuration whether it keeps packed samples apart (`verdict`): 5
            seconds at most, and milliseconds once the verdict is in the cache folder. With False nothing is tried:
            batches are padded, unless `padded=False` says that the model keeps samples apart.

    Attributes:
        layout: of the batches.
        scales_loss, scales_shifted: whether the model's own loss is the scaled one, and takes `shift_labels`.
        verdict: whether the model keeps packed samples apart, and the reason.

    Raises:
        TypeError: `config` is no configuration, but for example the model itself.
        ValueError: a model that does not keep packed samples apart, with `padded=False` or `length`, or that keeps
            padded ones apart no better; a configuration without a model.

    Warns if batches are padded because samples would see each other in one row, or because that could not be tried;
    and if another attention implementation than the configuration's was tried.
    """

    config: Any = field(kw_only=False)
    padded: bool | None = None
    multiple_of: int = 1
    empty: Empty = "dummy"
    length: int | None = None
    concatenate: bool = False
    attention: Attention = "document"
    probe: bool = True
    verdict: Verdict = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not hasattr(self.config, "model_type"):
            kind = type(self.config).__name__
            name = repr(self.config) if isinstance(self.config, str) else "name"
            raise TypeError(
                f"od.hf.Inputs takes the configuration of a model, and {kind} is none: pass model.config, or "
                f"transformers.AutoConfig.from_pretrained({name})"
            )
        object.__setattr__(self, "config", thinker(self.config))
        if self.padded and self.length is not None:
            raise ValueError(
                f"od.hf.Inputs(length={self.length}) is of packed rows, and padded=True asks for others: "
                "Balance(max_tokens=...) caps rows times the longest"
            )
        if self.length is None and (self.concatenate or self.attention != "document"):
            raise ValueError("od.hf.Inputs(concatenate=True) cuts documents into windows: pass length=, their tokens")
        object.__setattr__(self, "verdict", self._decide())
        if self.padded is None:
            object.__setattr__(self, "padded", not self.verdict.packs)
        _ = self.scales_loss, self._takes  # computed once, here

    def _decide(self) -> Verdict:
        """Return the verdict on the configuration. Raises ValueError if it contradicts the arguments."""
        if self.padded:
            return Verdict(packs=False, why=_ASKED)
        untried = Verdict(packs=self.padded is False, why="was not tried on packed samples (probe=False)")
        verdict = self._known() or (self._tried() if self.probe else untried)
        is_chosen_here = self.padded is None and self.length is None
        if is_chosen_here and not verdict.packs and not verdict.pads:
            raise ValueError(
                f"neither packed nor padded batches give samples of {self.config.model_type} what each gets alone: it "
                f"{verdict.why}. Give each rank one sample a step, by batch_size=1, od.Balance(max_samples=1) and "
                "od.hf.Inputs(config, padded=True); or accept the difference by padded=True and probe=False"
            )
        # No warning for an encoder-decoder, which never takes packed rows, nor for probe=False, which documents this.
        if is_chosen_here and not verdict.packs and self.probe and verdict.why != _ENCODER_DECODER:
            warnings.warn(
                f"batches of {self.config.model_type} are padded, a sample a row: it {verdict.why}. "
                "od.hf.Inputs(config, padded=True) asks for that, without this warning",
                stacklevel=4,
            )
        if not verdict.packs and (self.padded is False or self.length is not None):
            asked = "padded=False" if self.padded is False else f"length={self.length}"
            raise ValueError(
                f"od.hf.Inputs({asked}) asks for packed rows, and {self.config.model_type} {verdict.why}: "
                "use od.hf.Inputs(config, padded=True), with Balance(max_tokens=...) to cap rows times the longest"
            )
        return verdict

    def _known(self) -> Verdict | None:
        """Return a verdict that needs no trial, or None."""
        if self.family.decoder or getattr(self.config, "is_encoder_decoder", False):
            return Verdict(packs=False, why=_ENCODER_DECODER)
        if self.family is _UNKNOWN:
            return Verdict(packs=False, why="has media, and how their positions are packed is not known here")
        if self.family.sees_ahead and self._attention not in ("sdpa", "eager"):
            raise ValueError(
                f"{self.config.model_type} sees ahead, which packed takes a mask of all pairs, and {self._attention} "
                'takes none: load the model with attn_implementation="sdpa", or use od.hf.Inputs(config, padded=True)'
            )
        return None

    def _tried(self) -> Verdict:
        verdict = verdict_of(self.config, self.family, _arguments_of)
        asked, kind = attention_of(self.config), self.config.model_type
        if verdict.attention and asked not in ("", verdict.attention):
            warnings.warn(
                f"{asked} does not run here, so {verdict.attention} attention was tried in its place: that {kind} "
                f"{verdict.why} is the verdict of {verdict.attention}. Compare the loss of a packed batch with that of "
                "its samples alone before a long run, or use od.hf.Inputs(config, padded=True)",
                stacklevel=5,
            )
        return verdict

    @cached_property
    def family(self) -> Family:
        return family_of(self.config) or _UNKNOWN

    @cached_property
    def layout(self) -> Layout:
        positions: Positions = "mrope" if self.family.mrope else "restart"
        if self.padded:
            return Padded(positions=positions, multiple_of=self.multiple_of, empty=self.empty)
        return Packed(
            positions=positions,
            multiple_of=self.multiple_of,
            empty=self.empty,
            length=self.length,
            concatenate=self.concatenate,
            attention=self.attention,
        )

    @cached_property
    def scales_loss(self) -> bool:
        return not self.family.decoder and _loss_follows(self.config)

    @cached_property
    def scales_shifted(self) -> bool:
        return not self.family.decoder and _loss_follows(self.config, shifted=True)

    @cached_property
    def _takes(self) -> frozenset[str]:
        return takes(self.config)

    @cached_property
    def _attention(self) -> str:
        """Name of the implementation that computes attention."""
        return attention_of(self.config) or "sdpa"

    @cached_property
    def _rope(self) -> SwitchingRope | None:
        return switching_rope(self.config)

    @cached_property
    def sharing(self) -> Sharing:
        """Whether ranks can share its sequences, and the reason."""
        return sharing_of(self.config, self.family, _arguments_of)

    def in_slices(self) -> Inputs:
        """Return those of a loader that cuts sequences for teams: packed, as its attention keeps samples apart."""
        is_asked = self.verdict.why == _ASKED
        return replace(self, padded=False, probe=False) if self.padded and not is_asked else self

    def describe(self) -> dict[str, Any]:
        """Return what must be equal on all ranks of a loader."""
        return {"model": self.config.model_type, "packs": self.verdict.packs, "tried with": self.verdict.attention}

    def check(self, recipe: Recipe, encoders: Collection[str], balance: Balance) -> None:
        """Raise ValueError if the model would not see media as the recipe makes them, or not per phase; of those that
        are known to read the padding of other samples; and with teams if its attention cannot be shared.
        """
        kind = self.config.model_type
        if balance.teams is not None and not self.sharing.shares:
            raise ValueError(f"{kind} cannot share sequences, it {self.sharing.why}: leave Balance(teams=...) out")
        for name in encoders:
            modality, slot = recipe.modalities[name], recipe.slots[name]
            advice = "make it of the model's processor, od.hf.recipe(processor)"
            if name in recipe.of_processor:
                advice = "take processor and configuration from one checkpoint"
            named = {_ARRAYS.get(array, array) if name == "image" else array for array in modality.arrays()}
            if unknown := sorted(named - self._takes):
                raise ValueError(
                    f"{kind} takes no {', '.join(unknown)}, which the recipe makes of {name}: {advice}; or leave it "
                    f"out, dataclasses.replace(recipe, {name}=None)"
                )
            token_ids = [getattr(self.config, f"{name}_token_{end}", None) for end in ("id", "index")]
            expected = next((token_id for token_id in token_ids if token_id is not None), slot.token_id)
            if modality.places and slot.token_id != expected:
                raise ValueError(
                    f"{kind} looks for {name} where the token {expected} stands, and the recipe writes "
                    f"{slot.token_id}: {advice}"
                )
            # Positions in time of videos are those that the model computes.
            in_model = getattr(getattr(self.config, "vision_config", None), "tokens_per_second", None)
            in_recipe = getattr(modality, "tokens_per_second", None)
            if name == "video" and in_model != in_recipe and "second_per_grid_ts" in self._takes:
                raise ValueError(
                    f"{kind} has vision_config.tokens_per_second={in_model}, and the recipe's videos {in_recipe}: "
                    f"od.hf.recipe(processor, video=True, tokens_per_second={in_model})"
                )
        missing = [name for name in encoders if name not in self.family.part_features]
        if balance.assignment == "per_phase" and missing:
            raise ValueError(
                f"Balance.assignment='per_phase' carries features, and {kind} takes none of {', '.join(missing)} ready "
                "made (mm_encoder_outputs): use assignment='joint'"
            )
        if self.probe and self._rope is not None and balance.max_samples != 1:
            warn_once(f"rope of {kind}", f"{self._rope.warning(kind)}. A microbatch with such a mixture is an error")
        read = READ_PADDING.get(kind, "")
        if self.probe and read in ("text", *encoders):
            raise ValueError(
                f"{kind} reads the padding of {read}, so that samples of a batch change each other: leave it out of "
                f"the recipe ({read}=None), or give each rank one sample a step, of one part of {read} at most, by "
                "batch_size=1, od.Balance(max_samples=1) and od.hf.Inputs(config, probe=False)"
            )

    def arguments(self, batch: Batch) -> dict[str, Any]:
        """Keyword arguments of the model's forward, on the batch's device.

        Per phase there are no media: `od.hf.encode(model, batch)` gives their features.
        """
        llm, family = batch.llm, self.family
        if family.decoder:
            return self._decoded(batch)
        arguments: dict[str, Any] = {"input_ids": as_rows(llm.input_ids), "use_cache": False}
        if self.padded:
            assert llm.attention_mask is not None
            arguments["attention_mask"] = llm.attention_mask.long()
        if not self.padded or family in FAMILIES.values():  # padded, a model of text counts by itself
            arguments["position_ids"] = _positions(llm, family)
        if batch.has_slices:
            use = batch.teams[0].use
            if use is not None and not use.is_by_name:
                raise ValueError("this loader shares sequences: call od.hf.share_attention(model, loader) first")
            arguments |= {"teams": batch.teams, "past_key_values": Unshared()}
        elif family.sees_ahead and not self.padded:
            arguments["attention_mask"] = _packed_masks(batch, self.config, family.sees_ahead, self._attention)
        elif not self.padded and "flash" in self._attention:
            bounds = llm.cu_seqlens
            arguments |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
            arguments |= {"max_length_q": llm.max_seqlen, "max_length_k": llm.max_seqlen}
        if family is _UNKNOWN and "mm_token_type_ids" in self._takes:
            arguments["mm_token_type_ids"] = _media_types(llm)
        elif family.sees_ahead:
            sees = llm.any_labels != IGNORE if family.sees_ahead == "prefix" else _media_types(llm) != 0
            arguments["token_type_ids"] = sees.long()
        if family.expects_runs:
            for name, places in llm.media_positions.items():
                if len(places) and not bool((places.sort().values.diff() == 1).any()):
                    raise ValueError(
                        f"{self.config.model_type} takes parts of {name} of one token each for marks of an older "
                        "processor, and this microbatch has no others: leave clips of less than 80 ms out"
                    )
        if self._rope is not None and self.probe:
            # A long sample would change the rotary positions of the others in its microbatch.
            positions = arguments.get("position_ids")
            counted = positions if positions is None or positions.dim() < 3 else positions[0]
            longest = arguments["input_ids"].shape[1] if counted is None else int(counted.max()) + 1
            if self._rope.changes(longest, llm.lengths):
                warning = self._rope.warning(self.config.model_type)
                raise ValueError(f"{warning}. od.hf.Inputs(config, probe=False) accepts the difference")
        if batch.loss_weights is None and (self.scales_shifted if batch.has_slices else self.scales_loss):
            labels = as_rows(llm.any_labels)
            arguments |= {"labels": labels, "num_items_in_batch": 1 / batch.loss_scale}
            arguments |= {"shift_labels": labels} if batch.has_slices else {}
        return arguments if batch.routes else arguments | self.media_arguments(batch)

    def tower_arguments(self, media: MediaBatch, name: str) -> dict[str, Any]:
        """Return the arguments of the method that encodes a modality, per phase."""
        method = inspect.signature(getattr(model_class(self.config), TOWERS[name])).parameters
        arguments = self._media(media, is_dummy=media.num_tokens == 0)
        return {argument: value for argument, value in arguments.items() if argument in method}

    def media_arguments(self, batch: Batch) -> dict[str, Any]:
        """Return the arguments that towers take, of all media."""
        arguments: dict[str, Any] = {}
        for name, media in batch.media.items():
            arguments |= self._media(media, is_dummy=name in batch.llm.dummies)
        return arguments

    def _media(self, media: MediaBatch, *, is_dummy: bool) -> dict[str, Any]:
        arrays = dict(media.arrays)
        if "audio_feature_lengths" in arrays:  # all clips' frames follow one another; the model wants one clip a row
            lengths = arrays.pop("audio_feature_lengths")
            clips = arrays["input_features"].split(lengths.tolist())
            padded = torch.nn.utils.rnn.pad_sequence(list(clips), batch_first=True)
            frames = torch.arange(padded.shape[1], device=lengths.device)
            arrays["input_features"] = padded.transpose(1, 2)
            arrays["feature_attention_mask"] = (frames < lengths[:, None]).long()
        if self.family is _UNKNOWN:
            arrays |= _by_part(media, self._takes)
        arrays = {_ARRAYS.get(array, array): tensor for array, tensor in arrays.items()}
        if "grid_hw" in arrays:  # of a plain od.ImagePreprocessor
            grid = arrays.pop("grid_hw").long()
            arrays["image_grid_thw"] = torch.cat([torch.ones_like(grid[:, :1]), grid], dim=1)
        if "batch_num_images" in arrays:
            arrays["batch_num_images"] = _by_sample(arrays["batch_num_images"])
        if self.family.nested:
            if is_dummy:  # tiles of zeros are taken for padding
                arrays["pixel_values"] = torch.ones_like(arrays["pixel_values"])
            arrays = {array: tensor[None] for array, tensor in arrays.items()}
        return {array: tensor for array, tensor in arrays.items() if array in self._takes}

    def _decoded(self, batch: Batch) -> dict[str, Any]:
        """Return the arguments of an encoder-decoder, which predicts each token from those before it."""
        llm = batch.llm
        assert llm.attention_mask is not None
        for name, media in batch.media.items():
            clips = len(media.cu_seqlens) - 1
            if clips != len(llm.input_ids):
                raise ValueError(
                    f"{self.config.model_type} hears one clip a sample, and {len(batch.sample_ids)} samples have "
                    f"{clips} parts of {name}: leave out those without, as with DataLoader(quarantine=...)"
                )
        length = max(1, llm.input_ids.shape[1] - 1)  # a dummy's row is one token, and stays
        decoder_inputs = {"decoder_input_ids": llm.input_ids, "decoder_attention_mask": llm.attention_mask.long()}
        arguments: dict[str, Any] = {name: tensor[:, :length] for name, tensor in decoder_inputs.items()}
        # Features in the dtype of half-precision weights; other families cast them themselves.
        features, dtype = self.media_arguments(batch), getattr(self.config, "dtype", None)
        if dtype in (torch.bfloat16, torch.float16):
            features |= {name: tensor.to(dtype) for name, tensor in features.items() if tensor.is_floating_point()}
        return arguments | {"use_cache": False} | features


def _arguments_of(config: Any) -> tuple[Arguments, Arguments]:
    """Return the arguments of the forward of a configuration's model, for packed and padded batches."""
    return (
        Inputs(config, padded=False, probe=False).arguments,
        Inputs(config, padded=True, probe=False).arguments,
    )


class _OfBase(nn.Module):
    """A base model that gives hidden states, and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.last_hidden_state = hidden

    def forward(self, *_: Any, **__: Any) -> _OfBase:
        return self

    def __getattr__(self, name: str) -> Any:
        return None

    def __getitem__(self, at: int) -> Tensor:
        return (self.last_hidden_state,)[at]


def _loss_follows(config: Any, *, shifted: bool = False) -> bool:
    """Whether the loss of the configuration's class is the summed cross entropy of the next token, divided by the
    `num_items_in_batch` that its forward is given: tried by that forward, around a base model of fixed hidden states.
    With `shifted` it is given `shift_labels` too, which say what follows the last token.
    """
    from transformers import PreTrainedModel

    # A class that is built otherwise raises, and has no labels then.
    with suppress(Exception), undisturbed(), torch.no_grad():
        kind, vocab = model_class(config), config.get_text_config().vocab_size
        model, own = object.__new__(kind), copy.deepcopy(config)
        own._attn_implementation = "eager"  # none is computed, and others may not be installed here
        PreTrainedModel.__init__(model, own)
        setattr(model, kind.base_model_prefix, _OfBase(torch.randn(1, 5, 4)))
        model.lm_head, model.vocab_size = nn.Linear(4, vocab), vocab
        ids = torch.randint(0, vocab, (1, 5))
        labels = torch.where(torch.arange(5) < 2, IGNORE, ids)
        given: dict[str, Any] = {"input_ids": ids, "position_ids": torch.arange(5)[None], "labels": labels}
        given |= {"shift_labels": labels} if shifted else {}
        runs = {items: model(**given, num_items_in_batch=items, use_cache=False) for items in (0.5, 4)}
        # With `shifted` each label is that of its own position.
        logits, wanted = runs[4].logits[0].float(), labels[0]
        logits, wanted = (logits, wanted) if shifted else (logits[:-1], wanted[1:])
        expected = torch.nn.functional.cross_entropy(logits, wanted, ignore_index=IGNORE, reduction="sum")
        return all(torch.allclose(outputs.loss, expected / items, rtol=1e-5) for items, outputs in runs.items())
    return False


def _by_part(media: MediaBatch, takes: Collection[str]) -> dict[str, Tensor]:
    """Return arrays that models take as one tensor a part, (num_parts, ...), padded with zeros; if no array says which
    rows are a part's own, also the mask that the forward takes.
    """
    arrays: dict[str, Tensor] = {}
    for name, (axis, lengths) in media.part_axes.items():
        padded = torch.nn.utils.rnn.pad_sequence(list(media.arrays[name].split(list(lengths))), batch_first=True)
        arrays[name] = padded.movedim(1, axis)
    for name, (_, lengths) in media.part_axes.items():
        # The names that models have for the mask of an array of frames.
        prefix = name.removesuffix("input_features")
        names = () if prefix == name else (f"{name}_mask", f"{prefix or 'feature_'}attention_mask")
        mask = next((each for each in names if each in takes), None)
        if mask is not None and len(media.part_axes) == 1:
            counts = torch.tensor(lengths, device=arrays[name].device)
            arrays[mask] = torch.arange(max(lengths), device=counts.device) < counts[:, None]
    return arrays


def _by_sample(sharing: Tensor) -> Tensor:
    """Return the number of images of each sample, from that number for each image: it only matters whether it is one.

    Raises ValueError if an image of a sample with several is alone, which happens if parts are encoded on any rank.
    """
    counts: list[int] = []
    for are_several, images in groupby(sharing.flatten().tolist(), lambda count: count > 1):
        together = len(list(images))
        if are_several and together == 1:
            raise ValueError(
                "an image of a sample that has several came without the others, which this family takes for another "
                "kind of image: use assignment='joint' for samples of several images"
            )
        counts += [together] if are_several else [1] * together
    return torch.tensor(counts, device=sharing.device)


def as_rows(tensor: Tensor) -> Tensor:
    """(T,) as one row, (1, T); rows as they are."""
    return tensor[None] if tensor.dim() == 1 else tensor


def _positions(llm: LLMBatch, family: Family) -> Tensor:
    """(rows, L), or (4, rows, L): positions that restart, then time, height and width."""
    if not family.mrope:
        return as_rows(llm.position_ids) + family.first_position
    assert llm.restart_position_ids is not None
    counting, turned = as_rows(llm.restart_position_ids), llm.position_ids
    return torch.cat([counting[None], turned[:, None] if turned.dim() == 2 else turned])


def _media_types(llm: LLMBatch) -> Tensor:
    """1 on the places of images, 2 on those of videos, 3 on those of audio, as processors number them."""
    types = torch.zeros_like(llm.input_ids).flatten()
    for name, number in _MEDIA_TYPES.items():
        if name in llm.media_positions:
            types = types.index_fill(0, llm.media_positions[name], number)
    return as_rows(types.view(llm.input_ids.shape))


def _packed_masks(batch: Batch, config: Any, sees_ahead: str, attention: str) -> Tensor | dict[str, Tensor]:
    """Who attends to whom in one row of T packed tokens, (1, 1, T, T); for Gemma-3 by the type of its layers.

    Raises ValueError for a sample longer than the sliding window of a model that takes one mask for all layers.
    """
    llm = batch.llm
    positions = torch.arange(len(llm.input_ids), device=llm.input_ids.device)
    sample = torch.searchsorted(llm.cu_seqlens[1:].long(), positions, right=True)
    if sees_ahead == "media":  # the number of each token's media part, from 1; consecutive tokens are one part
        media = torch.zeros_like(llm.input_ids)
        for places in llm.media_positions.values():
            media = media.index_fill(0, places, 1)
        group = media * (media * (1 - torch.nn.functional.pad(media, (1, 0))[:-1])).cumsum(0)
    else:  # 1 for tokens before the first loss token of their sample; padding counts as after it
        seen = (llm.any_labels != IGNORE).long().cumsum(0)
        before = torch.nn.functional.pad(seen, (1, 0))[llm.cu_seqlens[:-1].long()]
        group = (seen == before[sample]).long()
    together = (group[:, None] == group) & (group > 0)
    sees_before = positions[:, None] >= positions
    full = (sample[:, None] == sample) & (sees_before | together)
    window = getattr(config.get_text_config(), "sliding_window", None)
    if sees_ahead != "media":
        longest = max(llm.cu_seqlens[: len(batch.sample_ids) + 1].diff().tolist(), default=0)
        if window is not None and longest > window:
            raise ValueError(
                f"a sample of {longest} tokens is longer than the sliding window of {window}, which packed "
                f"masks of {config.model_type} do not know: use od.hf.Inputs(config, padded=True)"
            )
        return _as_taken(full, attention)
    sliding = full if window is None else full & (positions[:, None] - positions < window)
    return {"full_attention": _as_taken(full, attention), "sliding_attention": _as_taken(sliding, attention)}


def _as_taken(allowed: Tensor, attention: str) -> Tensor:
    if attention == "eager":
        lowest = torch.finfo(torch.float32).min
        allowed = torch.zeros(allowed.shape, device=allowed.device).masked_fill(~allowed, lowest)
    return allowed[None, None]


def encode(model: Any, batch: Batch, group: Any = None) -> dict[str, Any]:
    """The features of a batch's parts, for `model(**batch.model_inputs(), mm_encoder_outputs=...)`.

    Every rank encodes what the plan gives it, in `model.get_image_features`, and gets the features of its own samples;
    all feature tensors of a part travel, such as the deepstack layers of Qwen3-VL, in one exchange. Gradients come back
    along the routes, so every rank runs the backward too.

    Args:
        model: a Hugging Face model, or that in DistributedDataParallel. Under FSDP2 its method is registered as one
            that gathers parameters.
        batch: of a loader with `collate_fn=od.hf.Inputs(config)`, on the model's device.
        group: the ranks of the routes, as `od.exchange` takes it.

    Raises:
        ValueError: a batch of another `collate_fn`, or of assignment="joint", whose `model_inputs()` have the media
            themselves; features in other numbers than the plan has.
    """
    towers = _Towers(model, batch, "od.hf.encode")
    return {name: towers.arrived(name, towers(name, media), batch, group) for name, media in batch.media.items()}


def rounds(
    model: Any, step: Sequence[Batch], group: Any = None, *, recompute: bool = False
) -> Iterator[tuple[Batch, dict[str, Any]]]:
    """Go through a step of `od.Balance(assignment="per_phase", encode=...)`: each batch, on the model's device, and its
    features, for `model(**batch.model_inputs(), mm_encoder_outputs=features).loss.backward()`.

    Towers run once a round, forward before its first batch and backward when the batch after its last one, or the end
    of the step, is asked for: go through all of the step. The other arguments are those of `encode` and `od.rounds`. Of
    a model in DistributedDataParallel, only the LLM's last micro-step is outside of `no_sync()`, as always.

    Raises what `encode` and `od.rounds` raise, and RuntimeError where no loss of a round was run backward.
    """
    if getattr(model, "find_unused_parameters", False):
        raise ValueError(UNUSED)
    towers = _Towers(model, step[0], "od.hf.rounds")
    for each in rounds_of(step, towers, recompute=recompute):
        for batch in each:
            rows = each.features(batch)
            yield batch, {name: towers.arrived(name, rows[name], batch, group) for name in rows}
        each.backward()


class _Towers:
    """(modality, media) -> rows of all feature tensors, (num_rows, sum of their widths): what `od.rounds` calls."""

    def __init__(self, model: Any, batch: Batch, caller: str) -> None:
        inputs = batch.inputs
        if not isinstance(inputs, Inputs):
            raise ValueError(f"{caller} reads batches of a DataLoader with collate_fn=od.hf.Inputs(config)")
        if not batch.routes:
            raise ValueError(
                f"{caller} is for od.Balance(assignment='per_phase'): without it batch.model_inputs() has the media, "
                "and the model encodes them"
            )
        if others := [name for name in batch.media if name not in inputs.family.part_features]:
            raise ValueError(
                f"{inputs.config.model_type} takes no features of {others[0]} ready made: give them as "
                "batch.model_inputs() does, under assignment='joint'"
            )
        self._model, self._inputs = getattr(model, "module", model), inputs
        self._made: dict[str, Callable[[Tensor, bool], Any]] = {}  # rows -> outputs, as the tower made them

    def __call__(self, name: str, media: MediaBatch) -> Tensor:
        from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

        method = TOWERS[name]
        if isinstance(self._model, FSDPModule):  # a method other than forward gathers parameters only if registered
            assert isinstance(self._model, torch.nn.Module)
            register_fsdp_forward_method(self._model, method)
        outputs = getattr(self._model, method)(**self._inputs.tower_arguments(media, name), return_dict=True)
        tensors = [outputs.pooler_output, *(getattr(outputs, "deepstack_features", None) or ())]
        rows = [
            each.reshape(-1, each.shape[-1])
            if isinstance(each, Tensor)
            else torch.cat([piece.reshape(-1, piece.shape[-1]) for piece in each])
            for each in tensors
        ]
        shapes = [each.shape[1:] if isinstance(each, Tensor) else None for each in tensors]
        self._made[name] = partial(_made, type(outputs), shapes, [each.shape[-1] for each in rows])
        return torch.cat([each.to(rows[0].dtype) for each in rows], dim=-1)

    def arrived(self, name: str, rows: Tensor, batch: Batch, group: Any) -> Any:
        """Return the tower's outputs for the samples of this rank, from the rows that it has encoded."""
        rows = exchange(rows, batch.route(name), group=group, requires_grad=rows.requires_grad)
        # transformers fills places in the order of the sequence; a dummy's features stayed where they were made.
        rows = rows[batch.llm.media_positions[name].argsort()]
        rows = torch.cat([rows, rows.new_zeros(batch.llm.dummies.get(name, 0), rows.shape[-1])])
        return self._made[name](rows, batch.has_slices)


def _made(kind: Any, shapes: Sequence[torch.Size | None], widths: list[int], rows: Tensor, has_slices: bool) -> Any:
    """Return outputs of a tower with other rows, in pieces of the shapes of its own (None: a tuple of pieces), or in
    one, as slices may have part of a piece.
    """
    pooled, *others = (
        (each,) if shape is None else each if len(shape) == 1 else each[None] if has_slices else each.view(-1, *shape)
        for each, shape in zip(rows.split(widths, dim=-1), shapes, strict=True)
    )
    return kind(pooler_output=pooled, **({"deepstack_features": others} if others else {}))


def loss(outputs: Any, batch: Batch) -> Tensor:
    """The batch's part of the mean over the loss tokens of the global batch, as `batch.loss_scale` says: what to call
    `backward` on.

    Args:
        outputs: of `model(**batch.model_inputs())`: logits (rows, L, vocab) are read.
        batch: of a loader with `collate_fn=od.hf.Inputs(config)`.

    Returns:
        A scalar, summed in float32, or in the logits' dtype where that is more precise. Without any loss token it is
        zero and joined to the graph.

    Raises:
        ValueError: outputs without logits for every position of the batch, or a batch of another `collate_fn`.
    """
    if not isinstance(batch.inputs, Inputs):
        raise ValueError("od.hf.loss reads batches of a DataLoader with collate_fn=od.hf.Inputs(config)")
    labels, weights = as_rows(batch.llm.any_labels), batch.loss_weights
    first = 0 if batch.has_slices else 1  # labels of slices were shifted before the cut
    wanted, logits = labels[:, first:], getattr(outputs, "logits", None)
    # Of an encoder-decoder, a dummy has logits of one position for labels of one.
    whole = 1 if batch.inputs.family.decoder else labels.shape[1]
    if logits is not None and logits.shape[1] == whole:
        logits = logits[:, : wanted.shape[1]]  # the logits of the last position predict no label
    if logits is None or logits.shape[:-1] != wanted.shape:
        shape = "none" if logits is None else f"{tuple(logits.shape)}"
        raise ValueError(
            f"the loss needs logits of every position of the batch {tuple(labels.shape)}, the outputs have {shape}: "
            "leave logits_to_keep out, and let the model return them"
        )
    if torch.finfo(logits.dtype).bits < 32:
        logits = logits.float()
    reduction = "sum" if weights is None else "none"
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORE, reduction=reduction
    )
    if weights is not None:
        losses = (losses * weights.view(labels.shape)[:, first:].flatten()).sum()
    return losses * batch.loss_scale
