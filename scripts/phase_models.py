"""Models of one phase each, timed on sequences of given lengths."""

from __future__ import annotations

import inspect
import itertools
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from examples.model import Sizes, packed_attention, rotary, rotate

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None
HAS_VARLEN = varlen_attn is not None and "window_size" in inspect.signature(varlen_attn).parameters
PATCH_DIM = 588


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pack:
    """Concatenated sequences of random rows.

    Attributes:
        rows: int64 token ids (n,), or patches (n, PATCH_DIM).
        positions: (1, n), of each row in its sequence.
        wanted: int64 labels (n,), or the gradient (n, hidden) that an encoder gets from the LLM.
    """

    rows: Tensor
    lengths: list[int]
    cu_seqlens: Tensor
    positions: Tensor
    wanted: Tensor


class Layer(nn.Module):
    """The demo's block, with attention over all sequences in one kernel where `varlen`."""

    def __init__(self, sizes: Sizes, *, causal: bool, varlen: bool) -> None:
        super().__init__()
        self.num_heads, self.causal, self.varlen = sizes.num_heads, causal, varlen
        self.norm_attention = nn.RMSNorm(sizes.hidden)
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden, bias=False)
        self.proj = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.norm_ffn = nn.RMSNorm(sizes.hidden)
        self.up = nn.Linear(sizes.hidden, sizes.ffn, bias=False)
        self.down = nn.Linear(sizes.ffn, sizes.hidden, bias=False)

    def forward(self, x: Tensor, pack: Pack, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        mixed = self._attend(rotate(query, cos, sin), rotate(key, cos, sin), value, pack)
        x = x + self.proj(mixed.flatten(1))
        return x + self.down(F.gelu(self.up(self.norm_ffn(x))))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, pack: Pack) -> Tensor:
        if not self.varlen:
            return packed_attention(query, key, value, pack.lengths, causal=self.causal)
        ends, longest = pack.cu_seqlens, max(pack.lengths)
        window = (-1, 0) if self.causal else (-1, -1)
        return varlen_attn(query, key, value.contiguous(), ends, ends, longest, longest, window_size=window)


class PhaseModel(nn.Module):
    """The model of one phase: with a vocabulary a causal LM, else an encoder of patches."""

    def __init__(self, sizes: Sizes, vocab: int | None, *, checkpointed: bool, varlen: bool) -> None:
        super().__init__()
        self.sizes, self.vocab, self.checkpointed = sizes, vocab, checkpointed
        self.embed = nn.Embedding(vocab, sizes.hidden) if vocab else nn.Linear(PATCH_DIM, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes, causal=bool(vocab), varlen=varlen) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, vocab, bias=False) if vocab else None

    def pack(self, lengths: list[int]) -> Pack:
        weight, total = self.norm.weight, sum(lengths)
        if self.vocab:
            rows, wanted = torch.randint(self.vocab, (2, total), device=weight.device)
        else:
            sizes = (PATCH_DIM, self.sizes.hidden)
            rows, wanted = (torch.randn(total, size, device=weight.device, dtype=weight.dtype) for size in sizes)
        return Pack(
            rows=rows,
            lengths=lengths,
            cu_seqlens=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=weight.device),
            positions=torch.cat([torch.arange(length) for length in lengths])[None].to(weight.device),
            wanted=wanted,
        )

    def train_pass(self, pack: Pack) -> None:
        """Forward and backward."""
        x = self.embed(pack.rows)
        cos, sin = rotary(pack.positions, self.sizes.hidden // self.sizes.num_heads, x.dtype)
        for layer in self.layers:
            if self.checkpointed:
                x = checkpoint(layer, x, pack, cos, sin, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, pack, cos, sin)
        x = self.norm(x)
        if self.head is None:
            x.backward(pack.wanted)
        else:
            F.cross_entropy(self.head(x), pack.wanted, reduction="sum").backward()

    def seconds(self, lengths: list[int]) -> float:
        """What `train_pass` of these sequences takes, by CUDA events on a GPU; 0 without any."""
        if not lengths:
            return 0.0
        pack = self.pack(lengths)
        if pack.rows.is_cuda:
            torch.cuda.synchronize()
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            self.train_pass(pack)
            last.record()
            torch.cuda.synchronize()
            took = first.elapsed_time(last) / 1e3
        else:
            start = time.perf_counter()
            self.train_pass(pack)
            took = time.perf_counter() - start
        self.zero_grad(set_to_none=True)
        return took
