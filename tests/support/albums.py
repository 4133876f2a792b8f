"""Samples of several images, held in arrays: what an index is to a plan."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from orchdata.planning.parts import Parts
from orchdata.planning.sharing.packed import NO_PADDING
from orchdata.planning.sharing.shares import Padding


class Album:
    """Samples of 0 to 6 images, held in arrays."""

    phases = ("image", "llm")

    def __init__(
        self,
        num_samples: int,
        seed: int,
        *,
        balanced: tuple[str, ...] = ("image", "llm"),
        padded: Padding = NO_PADDING,
    ) -> None:
        self.balanced, self.padded, self.exponent = balanced, padded, 0
        random = np.random.default_rng(seed)
        self.counts = random.choice([0, 0, 0, 1, 2, 6], num_samples)
        self.starts = np.concatenate([[0], np.cumsum(self.counts)])
        self.image = random.integers(4, 200, int(self.starts[-1]))
        self.text = random.integers(1, 300, num_samples)

    def costs(self, phase: str, row: NDArray[np.int64]) -> NDArray[np.int64]:
        sums = np.array([self.image[self.starts[r] : self.starts[r + 1]].sum() for r in row], np.int64)
        return sums if phase == "image" else sums // 4 + self.text[row]

    positions = costs

    def loss_tokens(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.text[row]

    def parts(self, phase: str, row: NDArray[np.int64]) -> Parts:
        spans = [np.arange(self.starts[r], self.starts[r + 1]) for r in row]
        part = np.concatenate([np.zeros(0, np.int64), *spans])
        sizes = self.image[part]
        return Parts(
            sample=np.repeat(np.arange(len(row)), self.counts[row]),
            part=part,
            positions=sizes,
            tokens=sizes // 4,
            costs=sizes,
            rank=np.full(len(part), -1, np.int32),
        )
