"""How a batch is laid out: the frozen values behind `DataLoader(collate_fn=...)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from orchdata.balancers.checks import checked_count


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """Sequences behind one another, without padding.

    Attributes:
        positions: "restart" counts from 0 in each sample; "mrope" gives (time, height, width) positions, after
            Qwen2-VL's multimodal rotary embedding: text and audio advance all three, an image's merged grid spans
            height and width and advances by its longer side.
        empty: what a rank without any item of a modality gets: one minimal "dummy" item, excluded from loss and
            costs, or tensors of "zero" length.
        multiple_of: each sample's LLM sequence is padded to a multiple of this.
    """

    positions: Literal["restart", "mrope"] = "restart"
    empty: Literal["dummy", "zero"] = "dummy"
    multiple_of: int = 1

    def __post_init__(self) -> None:
        if self.positions not in ("restart", "mrope"):
            raise ValueError(f"Packed.positions must be 'restart' or 'mrope', got {self.positions!r}")
        if self.empty not in ("dummy", "zero"):
            raise ValueError(f"Packed.empty must be 'dummy' or 'zero', got {self.empty!r}")
        checked_count(self.multiple_of, "Packed.multiple_of")
