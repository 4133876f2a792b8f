"""Declared mixes: distributions of text, images and clips -> made-up samples that `make_plan` can plan.

A sample's text and its media enter the LLM as one sequence; each image or clip is a sequence of its own in its encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers import CostModel
from orchdata.planning.parts import Parts
from orchdata.planning.sharing.packed import NO_PADDING
from orchdata.planning.sharing.shares import Padding

Ints = NDArray[np.int64]


class Drawn(Protocol):
    """A distribution of lengths, in words too."""

    def draw(self, generator: np.random.Generator, count: int) -> Ints: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Log-normal lengths, clipped to [least, most] and rounded, then down to multiples."""

    median: float
    sigma: float
    least: int
    most: int
    multiple_of: int = 1

    def draw(self, generator: np.random.Generator, count: int) -> Ints:
        drawn = generator.lognormal(np.log(self.median), self.sigma, count).clip(self.least, self.most)
        lengths: Ints = np.rint(drawn).astype(np.int64) // self.multiple_of * self.multiple_of
        return lengths

    def __str__(self) -> str:
        return f"log-normal, median {self.median:,g}, sigma {self.sigma:g}, {self.least:,} to {self.most:,}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Media:
    """Images or clips: positions of each in the encoder, and how many of them make a token of the LLM.

    Attributes:
        most: in a sample, from 1, each next one with probability
        another: of it.
    """

    positions: Drawn
    positions_a_token: int
    most: int = 1
    another: float = 0.4

    def __str__(self) -> str:
        several = f"1 to {self.most} a sample (geometric, {self.another:g}), " if self.most > 1 else ""
        return f"{several}positions {self.positions}; {self.positions_a_token} make an LLM token"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """What samples are made of.

    Attributes:
        kinds: the media of a kind of sample -> its share of all samples; they sum to 1.
    """

    text: Drawn
    media: Mapping[str, Media]
    kinds: Mapping[tuple[str, ...], float]

    @property
    def samples(self) -> str:
        """Kinds in words."""
        return ", ".join(f"{share:.0%} {' + '.join(('text', *kind))}" for kind, share in self.kinds.items())

    @property
    def lengths(self) -> str:
        """Distributions in words."""
        media = "; ".join(f"{name}: {found}" for name, found in self.media.items())
        return f"text tokens {self.text}; {media}"

    def draw(self, seed: int, count: int, model: CostModel) -> Samples:
        """`count` samples; the same for a seed."""
        generator = np.random.default_rng(seed)
        shares = np.array(list(self.kinds.values()))
        kind = generator.choice(len(shares), count, p=shares / shares.sum())
        llm = self.text.draw(generator, count)
        media = {}
        for name, of in self.media.items():
            has = np.array([name in kind for kind in self.kinds])[kind]
            counts = np.where(has, generator.geometric(1 - of.another, count).clip(max=of.most), 0)
            positions = of.positions.draw(generator, int(counts.sum()))
            tokens = positions // of.positions_a_token
            sample = np.repeat(np.arange(count), counts)
            np.add.at(llm, sample, tokens)
            media[name] = MediaColumns(np.concatenate([[0], np.cumsum(counts)]), positions, tokens)
        return Samples(model=model, llm=llm, media=media, balanced=model.phases)


@dataclass(frozen=True, slots=True)
class MediaColumns:
    """Parts of one modality: those of sample s lie in [offsets[s], offsets[s + 1])."""

    offsets: Ints
    positions: Ints
    tokens: Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """Made-up samples as `orchdata.planning.parts.SampleCosts`.

    Attributes:
        llm: int64 (num_samples,), tokens.
        balanced: phases that are balanced.
    """

    model: CostModel
    llm: Ints
    media: Mapping[str, MediaColumns]
    balanced: tuple[str, ...]
    padded: Padding = NO_PADDING
    exponent: ClassVar[int] = 0

    @property
    def phases(self) -> tuple[str, ...]:
        return self.model.phases

    def costs(self, phase: str, row: Ints) -> Ints:
        if phase == "llm":
            return self.model.sequence_costs("llm", self.llm[row])
        parts = self.parts(phase, row)
        costs = np.zeros(len(row), np.int64)
        np.add.at(costs, parts.sample, parts.costs)
        return costs

    def positions(self, phase: str, row: Ints) -> Ints:
        if phase == "llm":
            return self.llm[row]
        parts = self.parts(phase, row)
        positions = np.zeros(len(row), np.int64)
        np.add.at(positions, parts.sample, parts.positions)
        return positions

    def loss_tokens(self, row: Ints) -> Ints:
        return self.llm[row]

    def parts(self, phase: str, row: Ints) -> Parts:
        columns = self.media[phase]
        counts = columns.offsets[row + 1] - columns.offsets[row]
        sample = np.repeat(np.arange(len(row)), counts)
        before = np.cumsum(counts) - counts
        part = np.arange(len(sample)) + np.repeat(columns.offsets[row] - before, counts)
        positions = columns.positions[part]
        return Parts(
            sample=sample,
            part=part,
            positions=positions,
            tokens=columns.tokens[part],
            costs=self.model.sequence_costs(phase, positions),
            rank=np.full(len(part), -1, np.int32),
        )
