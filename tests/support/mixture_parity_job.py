"""Run by test_mixture_parity: trains on mixtures and on steps of tokens; how far each ends from one process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import parity_job
import torch
import torch.distributed as dist
from parity_job import (
    WRAPPERS,
    Suite,
    compared,
    cover,
    describe,
    full_parameters,
    make_config,
    make_model,
    pairs_of,
    wrap,
)
from rank_jobs import run_rank
from shard_factory import RECIPE
from torch import Tensor

import orchdata as od
from examples.model import make_cost

SOURCES = ("omni", "chat", "text")
LOSS_WEIGHTS = {"omni": 1.0, "chat": 0.3, "text": 2.5}  # keys begin with the first letter of their source
BUDGET = 900
BATCH_SIZE = 7
CAP = 600  # of all ranks' microbatches
LENGTH = 250
LAYOUTS: dict[str, od.Packed | od.Padded] = {
    "packed": od.Packed(),
    "packed to lengths": od.Packed(length=LENGTH, encoder_lengths={"image": (64, 1024), "audio": (128, 1024)}),
    "padded": od.Padded(),
}


@dataclass(frozen=True)
class Case:
    """One way of training."""

    wrapper: str | None  # None is a single process that has every sample, and counts and weighs its loss by itself
    assignment: str = "joint"
    layout: str = "packed"
    data: str = "mixture"  # "omni" alone, or all in a "mixture" with loss weights
    measure: str = "tokens"  # of steps: "tokens" or "samples"
    capped: bool = False
    # "global", or one that is wrong: "unweighted" sums, "plain" denominators, or means of each "rank".
    loss: str = "global"

    def __str__(self) -> str:
        cap = "capped" if self.capped else "whole"
        return ", ".join([f"{self.wrapper}", self.assignment, self.layout, self.data, self.measure, cap, self.loss])

    @property
    def reference(self) -> Case:
        return Case(None, data=self.data, measure=self.measure)

    @property
    def model(self) -> parity_job.Case:
        return parity_job.Case(self.wrapper, layout="padded" if self.layout == "padded" else "packed")


ALL = [
    Case(*values)
    for values in product(
        WRAPPERS,
        ("joint", "per_phase"),
        ("packed", "packed to lengths", "padded"),
        ("omni", "mixture"),
        ("tokens", "samples"),
        (False, True),
    )
    if not (values[2] == "packed to lengths" and values[5])  # whose length is its cap
]
QUICK = [
    Case("ddp", capped=True),
    Case(WRAPPERS[-1], "per_phase", capped=True),
    Case("ddp", "per_phase", "packed to lengths"),
    Case("ddp", "joint", "packed to lengths", data="omni"),
    Case("ddp", "joint", "padded", measure="samples"),
    *(Case("ddp", capped=True, loss=loss) for loss in ("unweighted", "plain", "rank")),
    Case("ddp", layout="packed to lengths", data="omni", loss="rank"),
]
WRONG = [case for case in QUICK if case.loss != "global"]
PAIRS = cover([case for case in QUICK if case.loss == "global"], ALL, pairs_of)
SUITES = {"3 ranks": Suite(3, QUICK)} | {f"{size} ranks, all pairs": Suite(size, PAIRS + WRONG) for size in (1, 4)}


def make_loader(folder: Path, case: Case) -> od.DataLoader:
    datasets = {name: od.ShardDataset(folder / f"{name}.tar", recipe=RECIPE) for name in SOURCES}
    sources = {name: od.Source(dataset, loss_weight=LOSS_WEIGHTS[name]) for name, dataset in datasets.items()}
    size = {"global_batch_tokens": BUDGET} if case.measure == "tokens" else {"global_batch_size": BATCH_SIZE}
    alone = case.wrapper is None
    return od.DataLoader(
        od.Mixture(sources, stop="all") if case.data == "mixture" else datasets[case.data],
        shuffle=True,
        seed=3,
        collate_fn=LAYOUTS[case.layout],
        cost=make_cost(make_config(case.model)),
        balance=od.Balance(
            scope="none" if alone else "global",
            assignment=case.assignment,  # type: ignore[arg-type]
            max_tokens=CAP // dist.get_world_size() if case.capped else None,
            oversize="own" if case.capped else "error",
        ),
        dp=(0, 1) if alone else None,
        num_threads=0,
        **size,  # type: ignore[arg-type]
    )


def own_weights(batch: od.Batch) -> Tensor:
    """What each label of a packed batch counts, by the keys of its samples."""
    initials = {name[0]: np.float32(weight) for name, weight in LOSS_WEIGHTS.items()}
    weights = torch.zeros(batch.llm.labels.shape, dtype=torch.float64)
    for (_, key), start, stop in zip(batch.sample_ids, batch.llm.cu_seqlens, batch.llm.cu_seqlens[1:], strict=False):
        weights[start:stop] = float(initials[key[0]])
    return weights


def loss_of(model: torch.nn.Module, batch: od.Batch, inputs: dict[str, Any], case: Case) -> Tensor:
    """Of one microbatch, as it is differentiated."""
    if case.wrapper is None:
        weights = own_weights(batch) if case.data == "mixture" else torch.ones(batch.llm.labels.shape).double()
        summed: Tensor = model(**inputs, loss_weights=weights).loss_sum
        return summed / weights[batch.llm.labels != -100].sum()
    summed = model(**inputs, loss_weights=None if case.loss == "unweighted" else batch.loss_weights).loss_sum
    if case.loss == "plain":
        return summed * batch.dp_size / batch.plan.loss_tokens
    return summed / max(1, batch.loss_tokens) if case.loss == "rank" else summed * batch.loss_scale


def train(folder: Path, case: Case) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """An epoch of SGD in float64; returns the parameters, and what this rank had in each microbatch."""
    model = wrap(make_model(case.model), case.wrapper)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    loader = make_loader(folder, case)
    seen = []
    for batch in loader:
        inputs = batch.model_inputs()
        loss_of(model, batch, inputs, case).backward()
        seen.append({"step": batch.step} | describe(batch, inputs))
        if batch.is_last_microbatch:
            optimizer.step()
            optimizer.zero_grad()
    return dict(full_parameters(model)), seen


def main(shards: str, suite: str) -> dict[str, Any] | None:
    cases = SUITES[suite].cases
    _, found = compared(cases, partial(train, Path(shards)), make_model(cases[0].model))
    return found if dist.get_rank() == 0 else None


if __name__ == "__main__":
    run_rank(main)
