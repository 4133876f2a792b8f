"""Small towers for `python -m benchmarks.planners --together`: each name makes one, and returns what runs a step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def _tower(width: int, layers: int, rows: int) -> Callable[[], object]:
    """A step forward and backward, on the CPU."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.GELU())))
    given = torch.randn(rows, width)

    def step() -> None:
        model.zero_grad()
        model(given).square().mean().backward()

    return step


def wide() -> Callable[[], object]:
    return _tower(1024, 2, 512)


def narrow() -> Callable[[], object]:
    return _tower(64, 120, 32)


def few_rows() -> Callable[[], object]:
    return _tower(768, 24, 4)


def many_rows() -> Callable[[], object]:
    return _tower(128, 6, 8192)


def attention() -> Callable[[], object]:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True, dropout=0.0)
    given = torch.randn(2, 384, 256)

    def step() -> None:
        model.zero_grad()
        model(given).square().mean().backward()

    return step
