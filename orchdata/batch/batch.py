"""Batch: the tensors of one microbatch of one rank, ready for any torch model.

Layout (packed): sequences follow one another without padding; `cu_seqlens` (int32, one more entry than sequences, first
0) has the start of each. The LLM sequence is already merged: it has placeholders for image and audio tokens, and
`merge` replaces them by the encoders' features.

Layout (padded): LLM tensors have one row a sample, (num_samples, L), and an attention mask; encoder inputs stay packed
or become one row an item, with a separate mask. Text alone stays packed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor

import orchdata
from orchdata.batch.tensors import (
    IGNORE,
    LLMBatch,
    MediaBatch,
    Team,
    TextBatch,
    counted_labels,
    merge_features,
    shown,
    token_rows,
    whole_lengths,
)
from orchdata.loaders.amounts import counted
from orchdata.planning.plan import Plan
from orchdata.planning.route import Route

if TYPE_CHECKING:
    from orchdata import Recipe
    from orchdata.planning.balance import Balance, Layout

SampleId = tuple[str, str]
"""The shard of a sample, and its key there."""

_WHERE = "batch.model_inputs() returns the arguments of a model; batch.llm, batch.text and batch.media have the tensors"


@runtime_checkable
class ModelInputs(Protocol):
    """A `collate_fn` that defines the layout of batches, and the argument names of a model's forward."""

    @property
    def layout(self) -> Layout:
        """Layout of the batches."""

    def in_slices(self) -> ModelInputs:
        """Return those of a loader that cuts sequences for teams, which are packed."""

    def check(self, recipe: Recipe, encoders: Collection[str], balance: Balance) -> None:
        """Raise ValueError if the model does not take batches of this recipe, modalities and balance. Called once."""

    def arguments(self, batch: Batch) -> dict[str, Any]:
        """Return the result of `Batch.model_inputs`."""

    def describe(self) -> dict[str, Any]:
        """Return what the ranks of a loader compare in addition to the layout, JSON-safe."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Batch:
    """One microbatch of one rank.

    Under `Balance(assignment="per_phase")`, `media` has the parts that this rank encodes, of any rank's samples; `text`
    and `llm` have its own samples. `exchange(features, batch.route("image"), ...)` returns the features that `merge`
    puts into `llm`.

    Attributes:
        text, llm: their tensors.
        media: modality -> its tensors, in the order of phases; `batch.image` and `batch.audio` read it. A modality is
            missing (and these are None) only if data set and cost model both lack it: a rank without any item gets a
            dummy, so that every rank runs every module.
        sample_ids: (shard, key) of each sample, in the order of `llm.cu_seqlens`. Samples that failed are left out; per
            phase, and in a step that shares samples, they stay, with their labels masked (see `mask_failed`).
        pieces: number of the piece of its sample, from 0, where `TextPreprocessor.overflow` splits samples; else 0. Id
            and piece together identify a row in an epoch.
        token_ranges: of windows, `od.Packed(concatenate=True)`: for each entry of `sample_ids` the tokens
            (first, stop) that the window has of this document. Id, piece and range come once in an epoch. A document
            that failed stays, with ids 0 and without labels. Under `Teams(cut="loader")` those that this rank has of
            each sample, maybe none. Empty where samples are whole.
        plan: the whole step's plan.
        step, microbatch, num_microbatches: position of this batch; `step` counts optimizer steps of the epoch.
        dp_size: data-parallel ranks.
        loss_tokens: labels other than -100 in this batch; where members have whole sequences, a shared one's count on
            its first member alone.
        global_loss_tokens: planned loss tokens of the whole optimizer step, over all ranks and microbatches; where
            sources of a mixture have loss weights, each token counts the weight of its source (see `loss_weights`).
        sources: of a mixture, int32 (num_samples,), index of each sample's source in `plan.sources`; else None.
        routes: per phase only: modality -> the route of its features, see `route`.
        teams: of `Balance(teams=...)`, those of this rank in this microbatch, the largest first. Under
            `Teams(cut="loader")` they have all tokens: whole samples, dummies and padding are a last team of size 1.
            Under "trainer" they have what is shared, and every member has the whole sequences, with all labels.
        fields: name in `Recipe.keep` -> a list with one value for each sample, in the order of `sample_ids`: bytes of a
            member or a binary column, str of a column of text, int, float, bool, list and dict of other columns and of
            keys of records, a list where a sample has numbered fields of that name; None for a sample that lacks the
            field, or that failed.
        peer: of `DataParallel.encoder_dims`: the peer of its rank whose parts `media` has; text, llm and fields are the
            same on all peers. 0 without peers.
        inputs: defines the argument names of the model; None for this library's own names.
        unnamed: modalities of a processor where `inputs` is None: its model does not know our names of their arrays.
    """

    text: TextBatch
    media: Mapping[str, MediaBatch]
    llm: LLMBatch
    sample_ids: tuple[SampleId, ...]
    plan: Plan
    step: int
    microbatch: int
    num_microbatches: int
    dp_size: int
    loss_tokens: int
    global_loss_tokens: float
    pieces: tuple[int, ...] = ()
    token_ranges: tuple[tuple[int, int], ...] = ()
    routes: Mapping[str, Route] = field(default_factory=dict)
    teams: tuple[Team, ...] = ()
    sources: Tensor | None = None
    fields: Mapping[str, list[Any]] = field(default_factory=dict)
    peer: int = 0
    inputs: ModelInputs | None = field(default=None, compare=False)
    unnamed: tuple[str, ...] = field(default=(), compare=False)

    def __repr__(self) -> str:
        """Return one line with counts and shapes, not elements."""
        llm = self.llm.input_ids
        shapes = [f"{len(self.sample_ids):,} samples", f"llm {shown(llm)}, {self.loss_tokens:,} tokens with loss"]
        for name, media in self.media.items():
            what = f"a dummy of {name}" if self._is_dummy(name) else f"{name} of {counted(media.num_tokens, 'token')}"
            shapes.append(f"{what}, {arrays_in_words(media)}")
        where = f"step {self.step}, microbatch {self.microbatch} of {self.num_microbatches}, on {llm.device}"
        return f"Batch({where}: {'; '.join(shapes)})"

    _repr_html_ = orchdata._html

    def _is_dummy(self, modality: str) -> bool:
        """Return whether a modality has no item of any sample, but one that makes every rank run its encoder."""
        media = self.media[modality]
        if media.valid is not None:  # per phase: its flags are those of samples' parts
            return not len(media.valid) and len(media.cu_seqlens) > 1
        return modality in self.llm.dummies

    def _has(self, modality: str) -> bool:
        """Return whether this rank encodes a part of a modality, or gets features of it."""
        is_encoded = len(self.media[modality].cu_seqlens) > 1 and not self._is_dummy(modality)
        return is_encoded or (modality in self.routes and len(self.llm.media_positions[modality]) > 0)

    if not TYPE_CHECKING:  # a type checker reports such a name itself

        def __getattr__(self, name: str) -> NoReturn:
            """Say where to find what other libraries keep here."""
            if name == "keys":
                raise AttributeError("Batch has no 'keys': (shard, key) of each sample are in batch.sample_ids")
            raise AttributeError(f"Batch has no {name!r}: {_WHERE}")

        def __getitem__(self, name: object) -> NoReturn:
            raise TypeError(f"a Batch is not a mapping, and has no [{name!r}]: {_WHERE}")

    @property
    def image(self) -> MediaBatch | None:
        """The tensors of images in `media`."""
        return self.media.get("image")

    @property
    def audio(self) -> MediaBatch | None:
        """The tensors of audio in `media`."""
        return self.media.get("audio")

    @property
    def samples(self) -> tuple[slice | tuple[int, slice], ...]:
        """Where the tokens of each sample are, in the order of `sample_ids`: indices of `llm.input_ids` and of all of
        its shape, as in `token_losses[batch.samples[0]]`. Slices; in a padded batch (row, slice).

        It reads `llm.lengths`, for which a GPU is waited for: read it before `to("cuda")` where that matters.
        """
        if self.token_ranges and not self.has_slices:
            stops = self._piece_lengths.cumsum(0).tolist()
            return tuple(slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False))
        lengths = self.llm.lengths[: len(self.sample_ids)].tolist()
        if self.llm.attention_mask is not None:
            return tuple((row, slice(0, length)) for row, length in enumerate(lengths))
        starts = self.llm.cu_seqlens[: len(lengths)].tolist()
        return tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))

    @property
    def _piece_lengths(self) -> Tensor:
        """Of windows, int64 (num_samples,): the tokens of each document there, one after another."""
        return torch.tensor([stop - first for first, stop in self.token_ranges], dtype=torch.int64)

    @property
    def is_counted(self) -> Tensor:
        """Whether each sample counts on this rank: it is whole, or this rank is the first member of its team. Over all
        ranks each sample counts once; its tokens are slices where `has_slices`. Bool (num_samples,), on the tensors'
        device.
        """
        counted = torch.ones(len(self.sample_ids), dtype=torch.bool, device=self.llm.input_ids.device)
        for team in self.teams:
            counted[team.samples] = not team.place
        return counted

    @property
    def has_end(self) -> Tensor:
        """Whether each sample's last token is in this batch, and counts here, for a loss from its state. Over all ranks
        each sample counts once, as by `is_counted`, except one without tokens. Bool (num_samples,), on the CPU.
        """
        if not self.has_slices:
            return self.is_counted.cpu()
        first, stop = torch.tensor(self.token_ranges, dtype=torch.int64).view(-1, 2).T
        is_end: Tensor = (stop == whole_lengths(self.llm, self.teams).cpu()) & (stop > first)
        return is_end

    @property
    def has_slices(self) -> bool:
        """Whether the loader cuts sequences that ranks share (`Teams(cut="loader")`): labels are `llm.shift_labels`."""
        return self.llm.shift_labels is not None

    @property
    def is_last_microbatch(self) -> bool:
        return self.microbatch == self.num_microbatches - 1

    @property
    def num_step_samples(self) -> int:
        """Samples of the whole optimizer step, over all ranks and microbatches, for a loss per sample: its sum times
        dp_size / num_step_samples. Samples that failed count too; a piece of a long sample counts as a sample.
        """
        return len(self.plan.row)

    @property
    def loss_scale(self) -> float:
        """Factor of the summed loss for the global token mean, for trainers that average gradients over DP ranks.

        Where sources have loss weights, of the sum of all tokens' losses times their `loss_weights`: the weighted mean.
        """
        return self.dp_size / (self.global_loss_tokens or 1)

    @property
    def loss_weights(self) -> Tensor | None:
        """The weight of the loss of each label, float32 of the shape of `llm.labels`, or `llm.shift_labels`, on its
        device: the `loss_weight` of its sample's source. None where every weight is 1.
        """
        if self.sources is None or all(weight == 1 for weight in self.plan.loss_weights):
            return None
        labels, of_source = self.llm.input_ids, torch.tensor([*self.plan.loss_weights, 0.0])
        if self.token_ranges and not self.has_slices:
            weights = torch.repeat_interleave(of_source[self.sources.tolist()], self._piece_lengths)
            return weights.to(labels.device)
        weights = of_source[[*self.sources.tolist(), *[-1] * (len(self.llm.cu_seqlens) - 1 - len(self.sources))]]
        if self.llm.attention_mask is not None:
            return weights[:, None].expand(labels.shape).to(labels.device)
        lengths = self.llm.cu_seqlens.diff().cpu()
        return torch.repeat_interleave(weights, lengths).to(labels.device)

    def by_source(self) -> dict[str, dict[str, int]]:
        """Return the `samples`, `tokens` and `loss_tokens` of each source of a mixture in this batch, of the samples
        that count (`is_counted`). Where `has_slices`, tokens are those of whole samples, loss tokens those here.
        """
        if self.sources is None:
            return {}
        llm, counts, counted = self.llm, {}, self.is_counted.to(self.sources.device)
        is_window = self.token_ranges and not self.has_slices
        lengths = (self._piece_lengths if is_window else whole_lengths(llm, self.teams)).tolist()
        labels: Any = llm.any_labels
        if llm.attention_mask is None:
            labels = labels.split(lengths if is_window else llm.cu_seqlens.diff().tolist())
        for number in self.sources.unique().tolist():
            of_source = self.sources == number
            mine, here = (each.nonzero()[:, 0].tolist() for each in (of_source & counted, of_source))
            counts[self.plan.sources[number]] = {
                "samples": len(mine),
                "tokens": sum(lengths[sample] for sample in mine),
                "loss_tokens": sum(int((labels[at] != IGNORE).sum()) for at in (here if self.has_slices else mine)),
            }
        return counts

    def route(self, modality: str) -> Route:
        """Return the route of a modality's features from the ranks that encode them to the ranks of their samples.

        Raises ValueError where features do not travel (assignment="joint"), and for an unknown modality.
        """
        if modality in self.routes:
            return self.routes[modality]
        if modality not in self.media:
            raise ValueError(f"there is no route for {modality!r}: the batch has no such modality")
        raise ValueError(
            f"there is no route for {modality!r}: each rank encodes its own samples, so features do not travel; use "
            "od.Balance(assignment='per_phase') for routes"
        )

    def mask_failed(self, group: Any = None) -> Batch:
        """Return the same batch, without loss for samples with a part that failed to decode, on any rank.

        Each rank sends the others one byte a part. This is a collective over `group`, as `exchange` takes it, on the
        tensors' device: every rank calls it, or none. Under on_error="skip", a DataLoader with a process group (or with
        torch.distributed initialized) has already called it. The planned denominator of the loss does not change.
        Without routes it does nothing.
        """
        from orchdata.ranks.exchange import exchange  # it imports torch's compiler, which takes a second

        handles = {}
        for name, route in self.routes.items():
            valid = self.media[name].valid
            assert valid is not None  # there are routes
            handles[name] = exchange(
                valid.to(torch.uint8), route.parts, group=group, requires_grad=False, async_op=True
            )
        return self.masked({name: handle.wait() != 0 for name, handle in handles.items()})

    def masked(self, valid: Mapping[str, Tensor]) -> Batch:
        """Return the same batch, without loss and kept fields for samples with a part that is False in `valid`:
        modality -> bool (num_parts,), parts in the order in which they arrive.
        """
        llm, own = self.llm, self.llm.any_labels
        failed = [llm.media_owners[name][~flags.to(own.device)] for name, flags in valid.items()]
        samples = torch.cat([own.new_zeros(0), *failed])
        if not len(samples):
            return self
        if llm.attention_mask is not None:
            sample = torch.arange(len(own), device=samples.device)[:, None]
        else:
            token = torch.arange(len(own), device=samples.device)
            sample = torch.searchsorted(llm.cu_seqlens[1:].long(), token, right=True)
        failed_samples = set(samples.tolist())
        kept = {
            name: [None if number in failed_samples else value for number, value in enumerate(values)]
            for name, values in self.fields.items()
        }
        labels = own.masked_fill(torch.isin(sample, samples), IGNORE)
        labels = labels.pin_memory() if own.is_pinned() else labels
        llm = replace(llm, shift_labels=labels) if self.has_slices else replace(llm, labels=labels)
        return replace(self, llm=llm, loss_tokens=counted_labels(llm, self.teams), fields=kept)

    def merge(self, embeds: Tensor, features: Mapping[str, Tensor]) -> Tensor:
        """Put encoder outputs, or the result of `exchange`, into the embedded sequences.

        Args:
            embeds: (T, hidden) or (1, T, hidden), padded (num_samples, L, hidden): the embedding of `llm.input_ids`.
            features: modality -> (num_tokens, hidden), every modality of this batch, in the encoder's order, or as
                `exchange` returns them. From padded encoders also (num_items, max_tokens, hidden).

        Returns:
            A new tensor like `embeds`. Every given feature tensor takes part in the graph, even without a token.

        Raises:
            ValueError: features of a modality that the batch lacks, missing features, or sizes that disagree.
        """
        for name in features:
            if name not in self.media:
                raise ValueError(f"features of {name!r} were given, but the batch has no such modality")
        if embeds.shape[:-1].numel() != self.llm.input_ids.numel():
            raise ValueError(
                f"embeds of shape {tuple(embeds.shape)} do not embed input_ids of shape "
                f"{tuple(self.llm.input_ids.shape)}: pass embed(batch.llm.input_ids)"
            )
        for name, media in self.media.items():
            if name not in features:
                raise ValueError(f"the batch has {name}, but no features of it were given")
            positions = self.llm.media_positions[name]
            rows = token_rows(name, media, features[name])
            if len(positions) and rows.shape[0] not in (len(positions), len(positions) + media.padding_tokens):
                raise ValueError(
                    f"the batch has {len(positions)} {name} tokens, the features have {rows.shape[0]} rows"
                )
            embeds = merge_features(embeds, rows, positions)
        return embeds

    def model_inputs(self, *, media: bool = True) -> dict[str, Any]:
        """Return keyword arguments for a model: plain tensors and ints, without the modalities that this batch lacks.

        Packed: input_ids, position_ids, labels, cu_seqlens, max_seqlen; for each modality its arrays (image_patches,
        image_grid_hw, audio_features), image_cu_seqlens, image_max_seqlen, image_positions. Padded: attention_mask
        instead of cu_seqlens and max_seqlen. Padded encoders: image_mask and image_token_places instead of theirs. Per
        phase: image_route too. Where `has_slices`, shift_labels instead of labels, and teams, for `od.TeamAttention`,
        instead of cu_seqlens and max_seqlen. With a `collate_fn` of a model's own names (`od.hf.Inputs`), those.

        Args:
            media: False for a loop that encodes `batch.media` by itself: nothing of the modalities is returned.

        Raises:
            ValueError: the batch has media of a recipe of `od.hf.recipe(processor)`, and no names of its model; or,
                under `Teams(cut="trainer")`, a team, each of whose members would train its whole sequences.
        """
        if self.teams and not self.has_slices:
            raise ValueError(
                f"this microbatch has sequences that {self.teams[0].size} ranks share, and model_inputs() would let "
                "each of them train them whole: give od.megatron_packed(batch, cp_group=...) to a trainer that cuts "
                "them, as Megatron-LM does, or leave out Balance(teams=...) or its cut="
            )
        if self.teams and (use := self.teams[0].use) is not None:
            use.take(f"step {self.step}, microbatch {self.microbatch}")
        if not media:
            return replace(self, media={}, routes={}).model_inputs()
        if self.inputs is not None:
            return self.inputs.arguments(self)
        if unnamed := [name for name in self.media if name in self.unnamed and self._has(name)]:
            raise ValueError(
                f"the recipe is of a processor, and its model would not see {', '.join(unnamed)} under the names of "
                "od.Packed and od.Padded: pass DataLoader(collate_fn=od.hf.Inputs(model.config)). A loop that encodes "
                "batch.media by itself calls batch.model_inputs(media=False)"
            )
        llm = self.llm
        inputs: dict[str, Any] = {
            "input_ids": llm.input_ids,
            "position_ids": llm.position_ids,
            "labels": llm.labels,
        }
        if self.has_slices:
            del inputs["labels"]
            inputs |= {"shift_labels": llm.shift_labels, "teams": self.teams}
        elif llm.attention_mask is None:
            inputs |= {"cu_seqlens": llm.cu_seqlens, "max_seqlen": llm.max_seqlen}
        else:
            inputs["attention_mask"] = llm.attention_mask
        for name, held in self.media.items():
            inputs |= {f"{name}_{array}": tensor for array, tensor in held.arrays.items()}
            inputs |= _sequence_inputs(name, held)
            inputs[f"{name}_positions"] = llm.media_positions[name]
        return inputs | {f"{name}_route": route for name, route in self.routes.items()}

    def to(self, device: Any, non_blocking: bool = False) -> Batch:
        """Return the same batch with its tensors on `device`."""
        return self._map(lambda tensor: tensor.to(device=device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return the same batch in page-locked memory."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        media = {name: of_modality.map(change) for name, of_modality in self.media.items()}
        teams = tuple(team.map(change) for team in self.teams)
        return replace(self, text=self.text.map(change), media=media, llm=self.llm.map(change), teams=teams)


def arrays_in_words(media: MediaBatch) -> str:
    """Return names and shapes of the arrays."""
    return ", ".join(f"{array} {shown(tensor)}" for array, tensor in media.arrays.items())


def _sequence_inputs(name: str, media: MediaBatch) -> dict[str, Any]:
    if media.mask is not None:
        return {f"{name}_mask": media.mask, f"{name}_token_places": media.token_places}
    return {f"{name}_cu_seqlens": media.cu_seqlens, f"{name}_max_seqlen": media.max_seqlen}
