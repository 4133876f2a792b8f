"""A small but real multimodal LLM in pure torch, run by `model(**batch.model_inputs())`, and what its phases cost.

    image patches -> ViT           -> merge m x m patches -> one row per image token --+
    mel frames    -> audio encoder -> pool positions      -> one row per audio token --+-> into the embedded text
    input ids     -> embeddings ------------------------------------------------------+      -> causal LM -> loss

Everything is packed: x is (num_positions, hidden) and `cu_seqlens` (num_sequences + 1,) says where sequences begin.
Each sequence attends to itself alone, so the time really is `a*l + b*l*l` per sequence, as the cost model has it. What
a rank has none of arrives as a dummy item whose rows go nowhere, yet stay in the graph with a gradient of zero: every
parameter takes part on every rank and step, so DDP needs no `find_unused_parameters` and FSDP2 never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from orchdata.balancers import CostModel, PhaseCost, TransformerCost
from orchdata.batch.tensors import IGNORE, merge_features
from orchdata.loaders.recipe import Recipe
from orchdata.planning.route import Route
from orchdata.ranks.exchange import exchange


def lengths_of(cu_seqlens: Tensor) -> list[int]:
    """Lengths of the sequences that `cu_seqlens` delimits."""
    return cu_seqlens.diff().tolist()


def packed_attention(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], *, causal: bool) -> Tensor:
    """Attend within each sequence.

    Args:
        query, key, value: (num_positions, num_heads, head_dim).
        lengths: positions of each sequence; they sum to num_positions.
        causal: whether a position sees only those before it.

    Returns:
        (num_positions, num_heads, head_dim).
    """
    # split, not slices: the gradient of n slices would be n zero-filled tensors of full size.
    # As one-element batches, (1, num_heads, length, head_dim): with three axes torch takes no fused kernel.
    heads_first = (x.transpose(0, 1)[None].split(lengths, dim=2) for x in (query, key, value))
    pieces = zip(*heads_first, strict=True)
    out = [F.scaled_dot_product_attention(q, k, v, is_causal=causal) for q, k, v in pieces]
    return torch.cat(out, dim=2)[0].transpose(0, 1)


def rotary(positions: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rotary angles of positions with one or more axes, the frequencies dealt to the axes in turn.

    Args:
        positions: (num_axes, num_positions); one axis for text, two for patches (row, column), three for M-RoPE.
        head_dim: even.
        dtype: of the result; angles are computed in float64, so that float64 training is exact.

    Returns:
        cos and sin, each (num_positions, 1, head_dim / 2).
    """
    num_axes = positions.shape[0]
    half = torch.arange(head_dim // 2, device=positions.device)
    # Each axis gets frequencies from 1 down to 1/10,000.
    frequency = 10_000.0 ** -((half // num_axes).double() * num_axes / (head_dim // 2))
    angles = positions[half % num_axes].T.double() * frequency
    return angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each half-pair of x (num_positions, num_heads, head_dim) by its angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Block(nn.Module):
    """Pre-norm attention and a two-matrix feed-forward layer.

    Checkpointing happens inside `forward`, so that hooks around the block (FSDP's) run outside the recomputation.
    """

    def __init__(self, hidden: int, ffn: int, num_heads: int, *, causal: bool, checkpointed: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.causal = causal
        self.checkpointed = checkpointed
        self.norm_attention = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.proj = nn.Linear(hidden, hidden, bias=False)
        self.norm_ffn = nn.RMSNorm(hidden)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor, lengths: Sequence[int], cos: Tensor, sin: Tensor) -> Tensor:
        if self.checkpointed and torch.is_grad_enabled():
            out: Tensor = checkpoint(self._forward, x, lengths, cos, sin, use_reentrant=False)
            return out
        return self._forward(x, lengths, cos, sin)

    def _forward(self, x: Tensor, lengths: Sequence[int], cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        mixed = packed_attention(rotate(query, cos, sin), rotate(key, cos, sin), value, lengths, causal=self.causal)
        x = x + self.proj(mixed.flatten(1))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_ffn(x))))
        return out


class Stack(nn.Module):
    """Several blocks over the same sequences."""

    def __init__(self, hidden: int, layers: int, ffn: int, num_heads: int, *, causal: bool, checkpointed: bool) -> None:
        super().__init__()
        self.head_dim = hidden // num_heads
        self.blocks = nn.ModuleList(
            Block(hidden, ffn, num_heads, causal=causal, checkpointed=checkpointed) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(hidden)

    def forward(self, x: Tensor, lengths: Sequence[int], positions: Tensor) -> Tensor:
        """x (num_positions, hidden), positions (num_axes, num_positions) -> (num_positions, hidden)."""
        cos, sin = rotary(positions, self.head_dim, x.dtype)
        for block in self.blocks:
            x = block(x, lengths, cos, sin)
        out: Tensor = self.norm(x)
        return out


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Width, depth and feed-forward width of one transformer."""

    hidden: int
    layers: int
    ffn: int
    num_heads: int = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Sizes of the three parts, and what ties them to the recipe. A part that is None does not exist.

    `patch_dim` and `merge` follow the image recipe (3 * patch_size**2 and merge); `num_mels`, `conv_stride` and
    `pool` (encoder positions per audio token) follow the audio recipe.
    """

    llm: Sizes
    image: Sizes | None = None
    audio: Sizes | None = None
    vocab_size: int = 260
    patch_dim: int = 588
    merge: int = 2
    num_mels: int = 128
    conv_stride: int = 2
    pool: int = 2
    freeze_encoders: bool = False
    checkpoint: bool = False


class ModelOutput(NamedTuple):
    """`loss_sum`: cross-entropy summed over the `num_targets` predicted labels, each times its weight.

    A tuple, because FSDP looks for tensors in what a module returns.
    """

    loss_sum: Tensor
    num_targets: int


class Encoder(nn.Module):
    """Rows in, one row per token out: embed, transform each item alone, then join `group` neighbours into a token.

    With `frozen`, embedding and transformer are fixed and run without a graph; the projector always learns.
    """

    def __init__(
        self, sizes: Sizes, in_dim: int, group: int, out_dim: int, *, frozen: bool, checkpointed: bool
    ) -> None:
        super().__init__()
        self.group = group
        self.frozen = frozen
        self.embed = nn.Linear(in_dim, sizes.hidden)
        self.stack = Stack(
            sizes.hidden, sizes.layers, sizes.ffn, sizes.num_heads, causal=False, checkpointed=checkpointed
        )
        self.projector = nn.Sequential(
            nn.Linear(group * sizes.hidden, group * sizes.hidden), nn.GELU(), nn.Linear(group * sizes.hidden, out_dim)
        )
        for module in (self.embed, self.stack):
            module.requires_grad_(not frozen)

    def forward(self, rows: Tensor, cu_seqlens: Tensor, positions: Tensor) -> Tensor:
        """rows (num_positions, in_dim), positions (num_axes, num_positions) -> (num_positions / group, out_dim)."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            x = self.stack(self.embed(rows), lengths_of(cu_seqlens), positions)
        tokens: Tensor = self.projector(x.unflatten(0, (-1, self.group)).flatten(1))
        return tokens


def patch_positions(grid_hw: Tensor, merge: int) -> Tensor:
    """Row and column of every patch, in merge-block order.

    Args:
        grid_hw: (num_images, 2): patches down and across, multiples of `merge`.
        merge: side of a block; merge * merge consecutive patches become one token.

    Returns:
        (2, num_patches) int64.
    """
    grids = []
    for height, width in grid_hw.tolist():
        rows = torch.arange(height, device=grid_hw.device)[:, None].expand(height, width)
        columns = torch.arange(width, device=grid_hw.device)[None].expand(height, width)
        blocks = torch.stack((rows, columns)).reshape(2, height // merge, merge, width // merge, merge)
        grids.append(blocks.transpose(2, 3).reshape(2, -1))
    return torch.cat(grids, dim=1)


def strided_frames(features: Tensor, cu_seqlens: Tensor, stride: int) -> tuple[Tensor, Tensor, Tensor]:
    """Windows of a convolution with this stride and kernel stride + 1, inside each clip.

    The window of position j holds frames j * stride - 1 to j * stride + stride - 1 of its clip. Only the first of these
    can lie outside, before the clip; there it is zero, never the last frame of the clip before.

    Args:
        features: (num_frames, num_mels); each clip's frames are a multiple of `stride`.
        cu_seqlens: (num_clips + 1,) over frames.
        stride: frames per position.

    Returns:
        Windows (num_positions, (stride + 1) * num_mels), `cu_seqlens` over positions, and each position's number
        inside its clip, (1, num_positions).
    """
    own = features.unflatten(0, (-1, stride)).flatten(1)
    starts = (cu_seqlens // stride).long()
    before = torch.cat((features.new_zeros(1, features.shape[1]), features[stride - 1 : -1 : stride]))
    index = torch.arange(own.shape[0], device=features.device)
    clip = torch.searchsorted(starts, index, right=True) - 1
    position = index - starts[clip]
    before = before.masked_fill((position == 0)[:, None], 0)
    return torch.cat((before, own), dim=1), starts, position[None]


class MultimodalLM(nn.Module):
    """ViT, audio encoder and causal LM; see the module's picture.

    Args:
        group: process group of the data-parallel ranks, for batches whose parts other ranks encode; default: all.
    """

    def __init__(self, config: ModelConfig, group: Any = None) -> None:
        super().__init__()
        self.config = config
        self.group = group
        options = {"frozen": config.freeze_encoders, "checkpointed": config.checkpoint}
        hidden = config.llm.hidden
        self.image = self.audio = None
        if config.image is not None:
            self.image = Encoder(config.image, config.patch_dim, config.merge**2, hidden, **options)
        if config.audio is not None:
            window = (config.conv_stride + 1) * config.num_mels
            self.audio = Encoder(config.audio, window, config.pool, hidden, **options)
        self.embed = nn.Embedding(config.vocab_size, hidden)
        self.llm = Stack(
            hidden, config.llm.layers, config.llm.ffn, config.llm.num_heads, causal=True, checkpointed=config.checkpoint
        )
        self.head = nn.Linear(hidden, config.vocab_size, bias=False)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        *,
        image_patches: Tensor | None = None,
        image_grid_hw: Tensor | None = None,
        image_cu_seqlens: Tensor | None = None,
        image_max_seqlen: int = 0,
        image_positions: Tensor | None = None,
        image_route: Route | None = None,
        audio_features: Tensor | None = None,
        audio_cu_seqlens: Tensor | None = None,
        audio_max_seqlen: int = 0,
        audio_positions: Tensor | None = None,
        audio_route: Route | None = None,
        loss_weights: Tensor | None = None,
    ) -> ModelOutput:
        """One microbatch, as `Batch.model_inputs()` gives it, to its summed loss.

        Args:
            input_ids, labels: (num_tokens,); labels are unshifted, -100 where there is no loss and on first tokens.
            position_ids: (num_tokens,), or (3, num_tokens) for M-RoPE.
            cu_seqlens: (num_sequences + 1,); max_seqlen: the longest of them, for kernels that ask for it (also below).
            image_patches: (num_patches, patch_dim), with `image_grid_hw` (num_images, 2) and `image_cu_seqlens`.
            audio_features: (num_frames, num_mels), with `audio_cu_seqlens` over frames.
            image_positions, audio_positions: where the leading rows of an encoder's output go in the sequence.
            image_route, audio_route: the way of those rows to the ranks that have their samples; without one, they
                stay.
            loss_weights: what each label counts, of the shape of `labels`; None for 1.
        """
        x = self.embed(input_ids)
        travelling = []
        if self.image is not None:
            if image_patches is None or image_grid_hw is None or image_cu_seqlens is None or image_positions is None:
                raise ValueError(
                    "the model encodes images but the batch has no image phase: name `image` in the cost model"
                )
            grid_positions = patch_positions(image_grid_hw, self.config.merge)
            tokens = self.image(image_patches.to(x.dtype), image_cu_seqlens, grid_positions)
            travelling.append((self.depart(tokens, image_route), image_positions))
        if self.audio is not None:
            if audio_features is None or audio_cu_seqlens is None or audio_positions is None:
                raise ValueError(
                    "the model encodes audio but the batch has no audio phase: name `audio` in the cost model"
                )
            frames = strided_frames(audio_features.to(x.dtype), audio_cu_seqlens, self.config.conv_stride)
            travelling.append((self.depart(self.audio(*frames), audio_route), audio_positions))
        for arrive, positions in travelling:
            x = merge_features(x, arrive(), positions)
        x = self.llm(x, lengths_of(cu_seqlens), position_ids.reshape(-1, position_ids.shape[-1]))
        return self._loss(x, labels, loss_weights)

    def depart(self, tokens: Tensor, route: Route | None) -> Callable[[], Tensor]:
        """Send an encoder's output on its way while others are encoded; returns what waits for what arrives."""
        if route is None:
            return lambda: tokens
        # What padding to a length yields has no way; a dummy's rows, where nothing has one, stay too.
        tokens = tokens[: route.num_rows_in] if route.num_rows_in else tokens
        return exchange(tokens, route, group=self.group, requires_grad=True, async_op=True).wait

    def _loss(self, x: Tensor, labels: Tensor, weights: Tensor | None) -> ModelOutput:
        # A sample's first label is -100, so no position is asked to predict the next sample.
        targets = labels[1:]
        asked = (targets != IGNORE).nonzero()[:, 0]
        logits = self.head(x[:-1][asked])
        return ModelOutput(weighted_loss(logits, targets[asked], weights, asked), asked.shape[0])


def weighted_loss(logits: Tensor, targets: Tensor, weights: Tensor | None, asked: Tensor) -> Tensor:
    """The sum of cross-entropies (num_targets, vocabulary) of `targets`, each times the weight of its label.

    Args:
        weights: of all labels, the first of a row too, or None.
        asked: which of the labels after the first `targets` are: a mask, or indices.
    """
    if weights is None:
        return F.cross_entropy(logits, targets, reduction="sum")
    losses = F.cross_entropy(logits, targets, reduction="none")
    return (losses * weights[..., 1:][asked]).sum()


def fit_to_recipe(config: ModelConfig, recipe: Recipe) -> ModelConfig:
    """The same sizes, for the patches and frames that the recipe makes; a modality it lacks gets no encoder."""
    image, audio = recipe.image, recipe.audio
    if image is not None:
        config = replace(config, patch_dim=3 * image.patch_size**2, merge=image.merge)
    if audio is not None:
        frames_per_token = audio.sample_rate // (audio.tokens_per_second * audio.hop_length)
        config = replace(
            config,
            num_mels=audio.num_mels,
            conv_stride=audio.conv_stride,
            pool=frames_per_token // audio.conv_stride,
        )
    return replace(config, image=config.image if image else None, audio=config.audio if audio else None)


def make_cost(config: ModelConfig) -> CostModel:
    """Floating-point operations of each phase, from the model's sizes."""
    llm = config.llm
    return CostModel(
        image=_encoder_cost(config, config.image, config.patch_dim, config.merge**2),
        audio=_encoder_cost(config, config.audio, (config.conv_stride + 1) * config.num_mels, config.pool),
        llm=TransformerCost(
            hidden=llm.hidden,
            layers=llm.layers,
            ffn=llm.ffn,
            vocab=config.vocab_size,
            causal=True,
            recompute=config.checkpoint,
        ),
    )


def _encoder_cost(config: ModelConfig, sizes: Sizes | None, in_dim: int, group: int) -> PhaseCost | None:
    """The transformer, and around it the embedding and the projector, which matter in a model this small."""
    if sizes is None:
        return None
    hidden, trainable = sizes.hidden, not config.freeze_encoders
    transformer = TransformerCost(
        hidden=hidden,
        layers=sizes.layers,
        ffn=sizes.ffn,
        trainable=trainable,
        recompute=config.checkpoint,
        stem_macs=in_dim * hidden,
    ).phase_cost()
    # As `connector_macs`, but for the gradient of the first layer's input, which a frozen encoder does not need.
    projector = 2 * group * hidden**2 * (3 if trainable else 2) + 2 * hidden * config.llm.hidden * 3
    return PhaseCost(transformer.linear + projector, transformer.quadratic)
