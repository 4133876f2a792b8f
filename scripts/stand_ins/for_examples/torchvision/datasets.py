"""Data sets of torchvision's names, made of random numbers; each item is the same whenever it is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset

MOST_ITEMS = int(os.environ["STAND_IN_ITEMS"])


class FakeData(Dataset[tuple[Any, int]]):
    """As torchvision's, cut to a few items."""

    def __init__(
        self,
        size: int,
        image_size: tuple[int, ...],
        num_classes: int,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self._size = min(size, MOST_ITEMS)
        self._image_size = image_size
        self._num_classes = num_classes
        self._transform = transform

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if index >= self._size:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        image: Any = torch.randn(self._image_size, generator=generator)
        label = int(torch.randint(0, self._num_classes, (1,), generator=generator))
        return (image if self._transform is None else self._transform(image)), label


class MNIST(FakeData):
    """60,000 or 10,000 such images, cut."""

    def __init__(
        self, root: str, *, train: bool = True, download: bool = False, transform: Callable[[Any], Any] | None = None
    ) -> None:
        del root, download
        super().__init__(60_000 if train else 10_000, (1, 28, 28), 10, transform)
