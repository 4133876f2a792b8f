"""The small model on padded batches: the same parameters, rectangles with masks in place of packed sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from examples.model import (
    Block,
    Encoder,
    ModelConfig,
    ModelOutput,
    MultimodalLM,
    Stack,
    patch_positions,
    rotary,
    rotate,
    strided_frames,
    weighted_loss,
)
from orchdata.batch.tensors import merge_features


class PaddedBlock(Block):
    """`Block`, which also takes rows (num_rows, length, hidden), with a mask of the keys seen in place of lengths."""

    def _forward(self, x: Tensor, lengths: Sequence[int] | Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if not isinstance(lengths, Tensor):
            return super()._forward(x, lengths, cos, sin)
        query, key, value = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in (rotate(query, cos, sin), rotate(key, cos, sin), value))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=lengths)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_ffn(x))))
        return out


class PaddedLM(MultimodalLM):
    """Takes `Batch.model_inputs()` of od.Padded, encoders packed or padded."""

    def __init__(self, config: ModelConfig, group: Any = None) -> None:
        super().__init__(config, group)
        for module in self.modules():
            if isinstance(module, Block):
                # As fully_shard does: the parameters stay those of MultimodalLM, drawn in the same sequence.
                module.__class__ = PaddedBlock

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor,
        loss_weights: Tensor | None = None,
        **media: Any,
    ) -> ModelOutput:
        x = self.embed(input_ids)
        if self.image is not None:
            arrive = self.depart(self._image_tokens(x.dtype, media), media.get("image_route"))
            x = merge_features(x, arrive(), media["image_positions"])
        if self.audio is not None:
            arrive = self.depart(self._audio_tokens(x.dtype, media), media.get("audio_route"))
            x = merge_features(x, arrive(), media["audio_positions"])
        x = padded_stack(self.llm, x, position_ids.reshape(-1, *x.shape[:2]), attention_mask)
        targets = labels[:, 1:]
        asked = targets != -100
        loss = weighted_loss(self.head(x[:, :-1][asked]), targets[asked], loss_weights, asked)
        return ModelOutput(loss, int(asked.sum()))

    def _image_tokens(self, dtype: torch.dtype, media: dict[str, Any]) -> Tensor:
        assert self.image is not None
        patches, places = media["image_patches"].to(dtype), patch_positions(media["image_grid_hw"], self.config.merge)
        if "image_mask" not in media:
            packed: Tensor = self.image(patches, media["image_cu_seqlens"], places)
            return packed
        mask = media["image_mask"]
        positions = torch.zeros(2, *mask.shape, dtype=torch.int64)
        positions[:, mask] = places
        return padded_tokens(self.image, patches, positions, mask)[tuple(media["image_token_places"])]

    def _audio_tokens(self, dtype: torch.dtype, media: dict[str, Any]) -> Tensor:
        assert self.audio is not None
        frames, stride = media["audio_features"].to(dtype), self.config.conv_stride
        if "audio_mask" not in media:
            packed: Tensor = self.audio(*strided_frames(frames, media["audio_cu_seqlens"], stride))
            return packed
        before = F.pad(frames[:, stride - 1 : -1 : stride], (0, 0, 1, 0))
        windows = torch.cat((before, frames.unflatten(1, (-1, stride)).flatten(2)), dim=2)
        positions = torch.arange(windows.shape[1]).expand(1, *windows.shape[:2])
        tokens = padded_tokens(self.audio, windows, positions, media["audio_mask"][:, ::stride])
        return tokens[tuple(media["audio_token_places"])]


def padded_tokens(encoder: Encoder, rows: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    """rows (num_items, num_positions, in_dim) -> (num_items, num_positions / group, out_dim)."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and not encoder.frozen):
        x = padded_stack(encoder.stack, encoder.embed(rows), positions, mask, causal=False)
    tokens: Tensor = encoder.projector(x.unflatten(1, (-1, encoder.group)).flatten(2))
    return tokens


def padded_stack(stack: Stack, x: Tensor, positions: Tensor, mask: Tensor, *, causal: bool = True) -> Tensor:
    """`Stack` on x (num_rows, length, hidden), positions (num_axes, num_rows, length), keys where mask is True."""
    cos, sin = (angle.unflatten(0, x.shape[:2]) for angle in rotary(positions.flatten(1), stack.head_dim, x.dtype))
    seen = mask[:, None, None, :]
    if causal:
        seen = seen & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    for block in stack.blocks:
        x = block(x, seen, cos, sin)
    out: Tensor = stack.norm(x)
    return out
