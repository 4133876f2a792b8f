"""The evaluation loop of docs/training.md gives the mean over all tokens, however samples are distributed."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shard_factory import write_shard
from torch import Tensor

import orchdata as od

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"
WHOLE_BATCH = 100


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = torch.nn.Embedding(260, 8), torch.nn.Linear(8, 260)
        self.double()

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> SimpleNamespace:
        logits = self.head(self.embed(input_ids)).reshape(-1, 260)
        return SimpleNamespace(loss_sum=F.cross_entropy(logits[:-1], labels.flatten()[1:], reduction="sum"))


def evaluate(model: Model, loader: od.DataLoader, other_ranks: list[Tensor]) -> float:
    """Call the page's function as one of several ranks; appends this rank's sums to those of the others."""
    (block,) = re.findall(r"^```python\n([^`]*?def evaluate[^`]*?)^```", PAGE.read_text(), re.MULTILINE)

    def all_reduce(sums: Tensor) -> None:
        mine = sums.clone()
        for each in other_ranks:
            sums += each
        other_ranks.append(mine)

    names: dict[str, Any] = {}
    exec(block, names)
    names["dist"] = SimpleNamespace(is_initialized=lambda: True, all_reduce=all_reduce)
    return float(names["evaluate"](model, loader))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_loop_gives_the_mean_over_all_tokens(tmp_path: Path, num_ranks: int) -> None:
    samples = [{"__key__": f"s{n}", "txt": bytes(range(65, 68 + 7 * (n % 5)))} for n in range(13)]
    data = od.ShardDataset(write_shard(tmp_path / "a.tar", samples), recipe=od.Recipe(image=None, audio=None))
    model = Model()
    (whole,) = od.DataLoader(data, batch_size=WHOLE_BATCH)
    expected = model(**whole.model_inputs()).loss_sum.item() / whole.loss_tokens

    loaders = [
        od.DataLoader(data, batch_size=2, dp=(rank, num_ranks), balance=od.Balance(max_tokens=40))
        for rank in range(num_ranks)
    ]
    for _ in range(2):  # the second time from the first sample again
        sums: list[Tensor] = []
        found = [evaluate(model, loader, sums) for loader in loaders][-1]
        assert found == pytest.approx(expected, rel=1e-12)
        assert sum(int(each[1]) for each in sums) == whole.loss_tokens
