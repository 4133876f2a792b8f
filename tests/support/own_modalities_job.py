"""Run by test_own_modalities: trains a tiny model on a user's modalities in many ways, as several ranks and as one.

Each rank tells how far its weights end from those of one process that has every sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from own_modalities import Bad, Tracks
from rank_jobs import run_rank
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import orchdata as od

HIDDEN, VOCABULARY = 6, 260
RECIPE = od.Recipe(image=None, audio=None, points=Bad(kind="raises"), tracks=Tracks())
COST = od.CostModel(points=od.PhaseCost(2.0), tracks=od.PhaseCost(1.0), llm=od.PhaseCost(1.0))


@dataclass(frozen=True)
class Case:
    """One way of training; `one` is a single process that has every sample."""

    one: bool = False
    assignment: Any = "joint"
    padded: bool = False
    microbatched: bool = False
    scaled: bool = True

    @property
    def balance(self) -> od.Balance:
        if self.one:
            return od.Balance(scope="none")
        caps = {"llm": 110} | ({} if self.padded else {"points": 90})
        return od.Balance(assignment=self.assignment, max_tokens=caps if self.microbatched else None, oversize="own")


CASES = {
    "joint": Case(),
    "joint, padded, microbatches": Case(padded=True, microbatched=True),
    "per phase": Case(assignment="per_phase"),
    "per phase, microbatches": Case(assignment="per_phase", microbatched=True),
    "per phase, padded": Case(assignment="per_phase", padded=True),
    "without loss_scale": Case(scaled=False),
}


class Encoder(nn.Module):
    """Rows of a part -> a feature for each `per_token` of them."""

    def __init__(self, width: int, per_token: int) -> None:
        super().__init__()
        self.per_token = per_token
        self.rows = nn.Linear(width, HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, parts: list[Tensor]) -> Tensor:
        tokens = []
        for part in parts:
            seen = torch.tanh(self.rows(part)) + part.mean()  # a part is a sequence of its own
            tokens += [piece.mean(0) for piece in seen.split(self.per_token)]
        features: Tensor = self.out(torch.stack(tokens))
        return features


class Model(nn.Module):
    """Each token sees the mean of what came before it in its sample."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.encoders = nn.ModuleDict({"points": Encoder(3, 4), "tracks": Encoder(3, 2)})
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, batch: od.Batch) -> Tensor:
        features = {}
        for name, encoder in self.encoders.items():
            rows = encoder(parts_of(batch.media[name], name))
            features[name] = od.exchange(rows, batch.route(name), requires_grad=True) if batch.routes else rows
        merged = batch.merge(self.embed(batch.llm.input_ids), features)
        loss = merged.sum() * 0  # a batch without a sample, or labels, has a graph too
        for x, labels in sequences(batch, merged):
            seen = x.cumsum(0) / torch.arange(1, len(x) + 1)[:, None]
            loss = loss + F.cross_entropy(self.head(seen[:-1]), labels[1:], ignore_index=-100, reduction="sum")
        return loss + self.head.weight.sum() * 0 + self.head.bias.sum() * 0


def parts_of(held: Any, name: str) -> list[Tensor]:
    rows = held.points.double() if name == "points" else None
    if rows is None:
        rows = torch.cat([held.values.double(), held.times[..., None].double() / 100], dim=-1)
    if held.mask is not None:
        return [row[mask] for row, mask in zip(rows, held.mask, strict=True)]
    return list(rows.split(held.cu_seqlens.diff().tolist()))


def sequences(batch: od.Batch, merged: Tensor) -> list[tuple[Tensor, Tensor]]:
    llm = batch.llm
    if llm.attention_mask is not None:
        rows = zip(merged, llm.labels, llm.attention_mask, strict=True)
        return [(x[mask], labels[mask]) for x, labels, mask in rows]
    lengths = llm.cu_seqlens.diff().tolist()
    return list(zip(merged.split(lengths), llm.labels.split(lengths), strict=True))


def train(shard: str, case: Case) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """One epoch of SGD in float64: the weights, and what this rank had."""
    torch.manual_seed(0)
    model: nn.Module = Model().double()
    loader = od.DataLoader(
        od.ShardDataset(shard, recipe=RECIPE),
        global_batch_size=6,
        collate_fn=od.Padded(encoders="padded") if case.padded else od.Packed(),
        cost=COST,
        balance=case.balance,
        dp=(0, 1) if case.one else None,
        on_error=od.ErrorPolicy("skip", max_failures=None),
        num_threads=0,
    )
    if not case.one:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen: dict[str, Any] = {"microbatches": 0, "rows_away": 0, "points": [], "tracks": [], "samples": []}
    for batch in loader:
        scale = batch.loss_scale if case.scaled else 1 / max(1, batch.loss_tokens)
        (model(batch) * scale).backward()
        if batch.is_last_microbatch:
            optimizer.step()
            optimizer.zero_grad()
        seen["microbatches"] = max(seen["microbatches"], batch.num_microbatches)
        seen["rows_away"] += sum(int(r.send_rows.sum() - r.send_rows[r.rank]) for r in batch.routes.values())
        seen["samples"].append(len(batch.sample_ids))
        for name in ("points", "tracks"):
            encodes_dummy = name in batch.llm.dummies and not batch.routes
            seen[name].append(0 if encodes_dummy else batch.media[name].num_tokens)
    seen["failures"] = [[row["key"], row["field"]] for row in loader.stats()["failures"]["samples"]]
    weights = {name.removeprefix("module."): value.detach().clone() for name, value in model.named_parameters()}
    return weights, seen


def work(shard: str) -> dict[str, Any]:
    reference, _ = train(shard, Case(one=True))
    torch.manual_seed(0)
    initial = dict(Model().double().named_parameters())
    found = {"moved": min(float((reference[name] - value).norm()) for name, value in initial.items())}
    for name, case in CASES.items():
        weights, seen = train(shard, case)
        apart = max(float((weights[key] - value).norm() / value.norm()) for key, value in reference.items())
        found[name] = {"apart": apart, **seen}  # type: ignore[assignment]
        dist.barrier()
    return found


if __name__ == "__main__":
    run_rank(work)
