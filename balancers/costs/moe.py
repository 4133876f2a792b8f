"""A mixture of experts, as far as the cost of a position depends on it."""

from __future__ import annotations

from dataclasses import dataclass

from orchdata.balancers.checks import checked_count


@dataclass(frozen=True, slots=True)
class MoE:
    """A mixture of experts in place of the feed-forward: the experts that a position passes count, not all.

    Attributes:
        num_experts: experts that the router scores.
        top_k: experts that a position is sent to.
        ffn: width of one expert.
        shared_ffn: width of the experts that all positions pass, together.
        dense_layers: layers that have a plain feed-forward instead, of `TransformerCost.ffn`.
    """

    num_experts: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0

    def __post_init__(self) -> None:
        for name, least in (("num_experts", 1), ("top_k", 1), ("ffn", 1), ("shared_ffn", 0), ("dense_layers", 0)):
            object.__setattr__(self, name, checked_count(getattr(self, name), f"MoE.{name}", least))
        if self.top_k > self.num_experts:
            raise ValueError(f"MoE.top_k must be at most num_experts={self.num_experts}, got {self.top_k}")
