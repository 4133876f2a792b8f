"""What is planned: declared mixes from gentle to hard, one of real lengths, and the models they train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.balance.real_lengths import lengths_folder, real_lengths
from benchmarks.papers.mixes import Lengths, Media, Mix
from orchdata.balancers import CostModel, TransformerCost

LLM_7B = TransformerCost(hidden=4096, layers=32, ffn=11_008, heads=32, vocab=32_000, causal=True, gated=True)
ENCODER_630M = TransformerCost(hidden=1280, layers=32, ffn=5_120)
VISION_6B = TransformerCost(hidden=3200, layers=45, ffn=12_800)

MODELS: Mapping[str, CostModel] = {
    "0.6B encoders": CostModel(image=ENCODER_630M, audio=ENCODER_630M, llm=LLM_7B),
    "6B vision": CostModel(image=VISION_6B, audio=ENCODER_630M, llm=LLM_7B),
}

_SPEECH = Media(positions=Lengths(median=600, sigma=0.5, least=50, most=1_750, multiple_of=2), positions_a_token=2)
_KINDS = {(): 0.3, ("image",): 0.35, ("audio",): 0.25, ("image", "audio"): 0.1}
_MADE_UP: Mapping[str, Mix] = {
    "captions": Mix(
        text=Lengths(median=60, sigma=0.6, least=8, most=512),
        media={
            "image": Media(
                positions=Lengths(median=1_024, sigma=0.3, least=256, most=4_096, multiple_of=4), positions_a_token=4
            ),
            "audio": _SPEECH,
        },
        kinds={("image",): 0.6, ("audio",): 0.4},
    ),
    "instructions": Mix(
        text=Lengths(median=450, sigma=1.0, least=8, most=8_192),
        media={
            "image": Media(
                positions=Lengths(median=1_024, sigma=0.8, least=64, most=6_400, multiple_of=4),
                positions_a_token=4,
                most=4,
            ),
            "audio": _SPEECH,
        },
        kinds=_KINDS,
    ),
    "albums": Mix(
        text=Lengths(median=450, sigma=1.0, least=8, most=8_192),
        media={
            "image": Media(
                positions=Lengths(median=1_024, sigma=0.8, least=64, most=6_400, multiple_of=4),
                positions_a_token=4,
                most=24,
                another=0.9,
            ),
            "audio": _SPEECH,
        },
        kinds={(): 0.6, ("image",): 0.15, ("audio",): 0.25},
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tail:
    """Pareto lengths of at least `least`, cut off at `most`."""

    least: int
    exponent: float
    most: int

    def draw(self, generator: np.random.Generator, count: int) -> NDArray[np.int64]:
        drawn = self.least * (1 + generator.pareto(self.exponent, count))
        return np.clip(drawn, self.least, self.most).astype(np.int64)

    def __str__(self) -> str:
        return f"Pareto, exponent {self.exponent:g}, {self.least:,} to {self.most:,}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """Lengths drawn from a real list, with replacement, and rounded down to multiples."""

    name: str
    multiple_of: int = 1

    def draw(self, generator: np.random.Generator, count: int) -> NDArray[np.int64]:
        drawn: NDArray[np.int64] = generator.choice(real_lengths(self.name), count)
        return np.maximum(drawn // self.multiple_of, 1) * self.multiple_of

    def __str__(self) -> str:
        return f"of {self.name}"


def large_mixes() -> dict[str, Mix]:
    """Mixes of large global batches: two of all mixes, and texts of a long tail together with images and speech."""
    found = {name: _MADE_UP[name] for name in ("instructions", "albums")}
    found["long tails"] = replace(
        found["instructions"],
        text=Tail(least=256, exponent=1.3, most=16_384),
        kinds={(): 0.5, ("image",): 0.3, ("audio",): 0.2},
    )
    return found


def mixes() -> dict[str, Mix]:
    """All mixes; that of real lengths where the fixtures are."""
    found = dict(_MADE_UP)
    if lengths_folder().is_dir():
        found["real lengths"] = Mix(
            text=Listed(name="Azure chat"),
            media={
                "image": Media(positions=Listed(name="ADE20K", multiple_of=4), positions_a_token=4, most=4),
                "audio": Media(positions=Listed(name="LibriSpeech other", multiple_of=2), positions_a_token=2),
            },
            kinds=_KINDS,
        )
    return found
