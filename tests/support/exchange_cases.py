"""Parts on ranks, what an exchange of them must give, and checks by name."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from orchdata.planning.route import Route, make_route

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


@dataclass
class Case:
    """Parts on ranks, the same on every rank, and what one process without any exchange would do with them."""

    encoder_rank: np.ndarray
    llm_rank: np.ndarray
    tokens: np.ndarray
    encoder_order: np.ndarray | None = None
    llm_order: np.ndarray | None = None
    label: str = ""

    @classmethod
    def random(cls, seed: int, label: str = "") -> Case:
        """Often with ranks that have nothing; every third with orders."""
        rng, size = np.random.default_rng(seed), dist.get_world_size()
        count = int(rng.integers(1, 16))
        encoders, receivers = (rng.integers(0, rng.integers(1, size + 1), count) for _ in range(2))
        orders = (rng.permutation(count), rng.permutation(count)) if seed % 3 == 2 else (None, None)
        return cls(encoders, receivers, rng.integers(0, 6, count), *orders, label)

    def route(self, rank: int | None = None, num_ranks: int | None = None) -> Route:
        return make_route(
            dist.get_rank() if rank is None else rank,
            num_ranks or dist.get_world_size(),
            encoder_rank=self.encoder_rank,
            llm_rank=self.llm_rank,
            tokens=self.tokens,
            encoder_order=self.encoder_order,
            llm_order=self.llm_order,
            label=self.label,
        )

    def held(self, rank: int | None = None) -> Tensor:
        """Rows of the canonical sequence that a rank's encoder yields, in its sequence."""
        return self._rows(self.encoder_rank, self.encoder_order, rank)

    def wanted(self, rank: int | None = None) -> Tensor:
        return self._rows(self.llm_rank, self.llm_order, rank)

    def _rows(self, ranks: np.ndarray, order: np.ndarray | None, rank: int | None) -> Tensor:
        rank = dist.get_rank() if rank is None else rank
        ends = self.tokens.cumsum()
        spans = [
            np.arange(ends[part] - self.tokens[part], ends[part])
            for part in (range(len(ranks)) if order is None else order)
            if ranks[part] == rank
        ]
        return torch.tensor(np.concatenate([np.zeros(0, np.int64), *spans]))

    def everything(self, *rest: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """All ranks' rows in canonical sequence."""
        generator = torch.Generator().manual_seed(int(self.tokens.sum()))
        return (torch.randn((int(self.tokens.sum()), *rest), generator=generator) * 4).to(dtype)


def swap(label: str = "", tokens: int = 3) -> Case:
    """Each rank encodes one part, which the next one needs."""
    size = dist.get_world_size()
    return Case(np.arange(size), (np.arange(size) + 1) % size, np.full(size, tokens), label=label)


def loss_of(result: Tensor, rank: int) -> Tensor:
    """Another weight for every row, another loss on every rank."""
    weights = torch.arange(1, len(result) + 1, dtype=result.dtype).reshape(-1, *[1] * (result.dim() - 1))
    return ((result**2) * weights).sum() * (rank + 1)


def reference(case: Case, everything: Tensor) -> Tensor:
    """The gradient of all ranks' losses, by one process."""
    leaf = everything.clone().requires_grad_()
    sum(loss_of(leaf[case.wanted(rank)], rank) for rank in range(dist.get_world_size())).backward()
    assert leaf.grad is not None
    return leaf.grad


def run_checks(checks: Mapping[str, Callable[[], None]]) -> dict[str, str]:
    """Of each, "" or its traceback."""
    found = {}
    for name, function in checks.items():
        try:
            function()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
            break  # the other ranks may be elsewhere now
    return found


def raises(kind: type[Exception], pattern: str, function: Callable[[], object]) -> None:
    try:
        function()
    except kind as error:
        assert re.search(pattern, str(error)), f"{pattern!r} is not in {error}"
    else:
        raise AssertionError(f"no {kind.__name__}")
