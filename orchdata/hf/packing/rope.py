"""Rotary positions that depend on the longest sample of a microbatch: "longrope" and "dynamic" of transformers.

Their frequencies are chosen once for a forward, by its largest position (`modeling_rope_utils.dynamic_rope_update`). A
sample beyond the length that the model was first trained on changes the positions of all samples in its microbatch,
packed or padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from orchdata.hf.tiny.shrink import text_part


@dataclass(frozen=True)
class SwitchingRope:
    """Frequencies that change where a sample is long.

    Attributes:
        kind: "longrope", whose long samples share one set of frequencies, or "dynamic", with one for each length.
        tokens: the longest sample that changes nothing.
    """

    kind: str
    tokens: int

    def changes(self, longest: int, lengths: Tensor) -> bool:
        """Return whether samples of a microbatch would have other positions than alone.

        Args:
            longest: positions of its longest row or sequence, padding included.
            lengths: of its samples, in tokens.
        """
        if longest <= self.tokens:
            return False
        shortest = int(lengths.min())
        return shortest <= self.tokens or (self.kind == "dynamic" and shortest < longest)

    def warning(self, model: str) -> str:
        return (
            f"the rotary positions of {model} ({self.kind}) are chosen once for a microbatch: a sample of more than "
            f"{self.tokens} tokens changes those of the other samples. Leave longer samples out "
            f"(dataset.filter('tokens <= {self.tokens}')) or cut them (od.TextPreprocessor(max_tokens={self.tokens}, "
            "overflow='truncate')), or give each rank one sample a step: batch_size=1, od.Balance(max_samples=1)"
        )


def switching_rope(config: Any) -> SwitchingRope | None:
    """Return that of a configuration's language model; None if its positions do not depend on lengths."""
    text = text_part(config)
    for rope in _ropes(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)):
        kind = rope.get("rope_type") or rope.get("type")
        if kind in ("longrope", "dynamic"):
            settings = (rope, vars(text))
            names = ("original_max_position_embeddings", "max_position_embeddings")
            tokens = next((each[name] for name in names for each in settings if each.get(name)), None)
            if tokens is not None:
                return SwitchingRope(str(kind), int(tokens))
    return None


def _ropes(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the rope settings of a model, or of each type of its layers."""
    if isinstance(value, Mapping):
        yield value
        for each in value.values():
            yield from _ropes(each)
