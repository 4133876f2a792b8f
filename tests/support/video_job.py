"""Run by test_video: trains a tiny model that sees videos, images and text, as several ranks and as one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rank_jobs import run_rank
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import orchdata as od

HIDDEN, VOCABULARY, MERGED = 6, 260, 4
RECIPE = od.Recipe(
    image=od.ImagePreprocessor(patch_size=8, merge=2, min_tokens=1, max_tokens=12, dtype="float32"),
    audio=None,
    video=od.VideoPreprocessor(patch_size=8, merge=2, fps=4, min_tokens=1, max_tokens=12, dtype="float32"),
)
COST = od.CostModel(image=od.PhaseCost(1.0), video=od.PhaseCost(2.0, 0.01), llm=od.PhaseCost(1.0))
CASES = {
    "joint": od.Balance(),
    "joint, microbatches": od.Balance(max_tokens=140, oversize="own"),
    "per phase": od.Balance(assignment="per_phase"),
    "per phase, microbatches": od.Balance(assignment="per_phase", max_tokens=140, oversize="own"),
}


class Model(nn.Module):
    """Each token sees the mean of what came before it in its sample; features are means of a token's patches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        widths = {"image": RECIPE.image.patch_dim, "video": RECIPE.video.patch_dim}
        self.encoders = nn.ModuleDict({name: nn.Linear(width, HIDDEN) for name, width in widths.items()})
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, batch: od.Batch) -> Tensor:
        features = {}
        for name, encoder in self.encoders.items():
            patches = batch.media[name].patches.double()
            rows = torch.tanh(encoder(patches)).unflatten(0, (-1, MERGED)).mean(1)
            features[name] = od.exchange(rows, batch.route(name), requires_grad=True) if batch.routes else rows
        merged = batch.merge(self.embed(batch.llm.input_ids), features)
        loss = merged.sum() * 0
        lengths = batch.llm.cu_seqlens.diff().tolist()
        for x, labels in zip(merged.split(lengths), batch.llm.labels.split(lengths), strict=True):
            seen = x.cumsum(0) / torch.arange(1, len(x) + 1)[:, None]
            loss = loss + F.cross_entropy(self.head(seen[:-1]), labels[1:], ignore_index=-100, reduction="sum")
        return loss + self.head.weight.sum() * 0 + self.head.bias.sum() * 0


def train(shard: str, balance: od.Balance, *, one: bool = False, noise: float = 0) -> tuple[dict[str, Tensor], Any]:
    """One epoch of SGD in float64: the weights, and what this rank had."""
    torch.manual_seed(0)
    model: nn.Module = Model().double()
    loader = od.DataLoader(
        od.ShardDataset(shard, recipe=RECIPE),
        global_batch_size=6,
        cost=COST,
        balance=od.Balance(scope="none") if one else balance,
        dp=(0, 1) if one else None,
        num_threads=0,
    )
    if not one:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen = {"rows_away": 0, "microbatches": 0}
    for batch in loader:
        if noise:
            batch.media["video"].patches.add_(noise * torch.randn_like(batch.media["video"].patches))
        (model(batch) * batch.loss_scale).backward()
        if batch.is_last_microbatch:
            optimizer.step()
            optimizer.zero_grad()
        seen["microbatches"] = max(seen["microbatches"], batch.num_microbatches)
        seen["rows_away"] += sum(int(r.send_rows.sum() - r.send_rows[r.rank]) for r in batch.routes.values())
    return {name.removeprefix("module."): value.detach().clone() for name, value in model.named_parameters()}, seen


def work(shard: str) -> dict[str, Any]:
    reference, _ = train(shard, od.Balance(), one=True)
    noisy, _ = train(shard, od.Balance(), one=True, noise=0.1)
    found: dict[str, Any] = {"control": apart(noisy, reference)}
    for name, balance in CASES.items():
        weights, seen = train(shard, balance)
        found[name] = {"apart": apart(weights, reference), **seen}
        dist.barrier()
    return found


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[name] - value).norm() / value.norm()) for name, value in expected.items())


if __name__ == "__main__":
    run_rank(work)
