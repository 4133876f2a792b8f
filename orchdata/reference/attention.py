"""Attention over packed sequences, and the transformer block that all three parts of the demo model share.

Everything is packed: x is (num_positions, hidden) and `cu_seqlens` (num_sequences + 1,) says where sequences begin.
Each sequence attends to itself alone, so the time really is `a*l + b*l*l` per sequence, as the cost model has it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


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
