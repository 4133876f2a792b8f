"""Run by test_parity: trains a model in many ways; how far each ends from one process, from rank 0."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass, fields
from functools import partial
from itertools import combinations, product
from typing import Any

import torch
import torch.distributed as dist
from padded_model import PaddedLM
from rank_jobs import FSDP2_RUNS, run_rank
from shard_factory import RECIPE
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import orchdata as od
from examples.model import Block, ModelConfig, MultimodalLM, Sizes, fit_to_recipe, make_cost

GLOBAL_BATCH_SIZE = 6
MAX_TOKENS = 480  # of all ranks' microbatches
NUM_EPOCHS = 1
SMALL = Sizes(hidden=24, layers=2, ffn=48, num_heads=2)

WRAPPERS = ("ddp", "fsdp2") if FSDP2_RUNS else ("ddp",)
ASSIGNMENTS = ("joint", "per_phase")
LAYOUTS: dict[str, od.Packed | od.Padded] = {
    "packed": od.Packed(),
    "packed by 8": od.Packed(multiple_of=8),
    "packed to lengths": od.Packed(length=MAX_TOKENS // 2, encoder_lengths={"image": (64, 512), "audio": (128, 512)}),
    "packed mrope": od.Packed(positions="mrope"),
    "padded": od.Padded(),
    "padded encoders": od.Padded(encoders="padded"),
    "padded mrope": od.Padded(positions="mrope"),
}


@dataclass(frozen=True)
class Case:
    """One way of training. `wrapper` None is a single process that has every sample: a reference."""

    wrapper: str | None
    assignment: str = "joint"
    layout: str = "packed"
    microbatched: bool = False
    frozen: bool = False
    checkpoint: bool = False
    scope: str = "global"
    loss: str = "global"

    def __str__(self) -> str:
        flags = [field.name for field in fields(self) if getattr(self, field.name) is True]
        return ", ".join([f"{self.wrapper}", self.assignment, self.layout, *flags, self.scope, f"{self.loss} loss"])

    @property
    def reference(self) -> Case:
        return Case(None, layout=self.layout, frozen=self.frozen, scope="none")


def values_of(case: Case) -> set[Any]:
    """The values that make the case, each with its field."""
    return set(enumerate(astuple(case)))


def pairs_of(case: Case) -> set[Any]:
    """Every two of the values that make the case."""
    return set(combinations(enumerate(astuple(case)), 2))


def cover(chosen: list[Case], cases: Iterable[Case], of: Callable[[Case], set[Any]]) -> list[Case]:
    """`chosen`, and of `cases` those that bring the most of what is still missing, until nothing is."""
    left = list(cases)
    missing = set[Any]().union(*map(of, left)) - set[Any]().union(*map(of, chosen))
    chosen = list(chosen)
    while missing:
        chosen.append(max(left, key=lambda case: len(missing & of(case))))
        missing -= of(chosen[-1])
    return chosen


@dataclass(frozen=True)
class Suite:
    """What one job trains."""

    num_ranks: int
    cases: list[Case]
    slow: bool = False


BOTH = (False, True)
ALL = [Case(*values) for values in product(WRAPPERS, ASSIGNMENTS, LAYOUTS, BOTH, BOTH, BOTH)]
EVERY_DAY = cover([Case(*values) for values in product(WRAPPERS, ASSIGNMENTS)], ALL, values_of)
GUARDS = [
    Case("ddp", scope="none"),
    Case("ddp", loss="rank mean"),
    Case("ddp", layout="packed to lengths", loss="padding too"),
]
SHAPES = (
    ("packed", True),
    ("packed to lengths", True),
    ("padded", False),
    ("packed mrope", True),
    ("padded encoders", True),
)
MORE_RANKS = cover([], [Case(*each, *shape) for each in product(WRAPPERS, ASSIGNMENTS) for shape in SHAPES], pairs_of)
EVERY_CASE = bool(os.environ.get("ORCHDATA_EVERY_CASE"))


def of_wrapper(wrapper: str) -> list[Case]:
    """Cases with every two of the values that go with a wrapper; or all cases."""
    cases = [case for case in ALL if case.wrapper == wrapper]
    return cases if EVERY_CASE else cover([], cases, pairs_of)


SUITES = {
    "2 ranks": Suite(2, EVERY_DAY + GUARDS),
    "3 ranks, more": Suite(3, MORE_RANKS, slow=True),
    "4 ranks, more": Suite(4, MORE_RANKS, slow=True),
} | {f"2 ranks, {wrapper} with all pairs": Suite(2, of_wrapper(wrapper), slow=True) for wrapper in WRAPPERS}


def make_config(case: Case) -> ModelConfig:
    config = ModelConfig(llm=SMALL, image=SMALL, audio=SMALL, freeze_encoders=case.frozen, checkpoint=case.checkpoint)
    return fit_to_recipe(config, RECIPE)


def make_model(case: Case) -> MultimodalLM:
    """In float64; the same parameters for every case."""
    torch.manual_seed(0)
    padded = isinstance(LAYOUTS[case.layout], od.Padded)
    return (PaddedLM if padded else MultimodalLM)(make_config(case)).double()


def is_fixed(case: Case) -> bool:
    """Whether all microbatches have one length, which is the cap."""
    layout = LAYOUTS[case.layout]
    return isinstance(layout, od.Packed) and layout.length is not None


def make_loader(shards: str, case: Case) -> od.DataLoader:
    return od.DataLoader(
        od.ShardDataset(shards, recipe=RECIPE),
        global_batch_size=GLOBAL_BATCH_SIZE,
        collate_fn=LAYOUTS[case.layout],
        cost=make_cost(make_config(case)),
        balance=od.Balance(
            scope=case.scope,  # type: ignore[arg-type]
            assignment=case.assignment,  # type: ignore[arg-type]
            max_tokens=MAX_TOKENS // dist.get_world_size() if case.microbatched and not is_fixed(case) else None,
            oversize="error" if is_fixed(case) else "own",
        ),
        dp=(0, 1) if case.wrapper is None else None,
        num_threads=0,
    )


def wrap(model: MultimodalLM, wrapper: str | None) -> torch.nn.Module:
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    if wrapper == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        for module in [module for module in model.modules() if isinstance(module, Block)]:
            fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def train(shards: str, case: Case) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Two epochs of SGD in float64; returns the parameters, and what this rank had in each microbatch."""
    model = wrap(make_model(case), case.wrapper)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    loader = make_loader(shards, case)
    seen = []
    for epoch in range(NUM_EPOCHS):
        loader.set_epoch(epoch)
        for batch in loader:
            inputs = batch.model_inputs()
            if case.loss == "padding too":
                inputs["labels"] = inputs["labels"].clone()
                inputs["labels"][int(batch.llm.cu_seqlens[len(batch.sample_ids)]) + 1 :] = 0
            out = model(**inputs)
            scale = 1 / max(1, batch.loss_tokens) if case.loss == "rank mean" else batch.loss_scale
            (out.loss_sum * scale).backward()
            seen.append({"step": epoch * len(loader) + batch.step} | describe(batch, inputs))
            if batch.is_last_microbatch:
                optimizer.step()
                optimizer.zero_grad()
    return dict(full_parameters(model)), seen


def describe(batch: od.Batch, inputs: dict[str, Any]) -> dict[str, Any]:
    """What one microbatch had: `rows_away` are encoded here for samples of other ranks."""
    assert batch.image is not None and batch.audio is not None
    routes = [value for value in inputs.values() if isinstance(value, od.Route)]
    dummies = {} if routes else batch.llm.dummies
    return {
        "samples": [key for _, key in batch.sample_ids],
        "image": 0 if "image" in dummies else batch.image.num_tokens,
        "audio": 0 if "audio" in dummies else batch.audio.num_tokens,
        "rows_away": sum(route.num_rows_in - int(route.send_rows[route.rank]) for route in routes),
        "microbatches": batch.num_microbatches,
    }


def full_parameters(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        value = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        yield name.removeprefix("module."), value.detach().clone()


def distance(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Largest relative difference by norm of any parameter."""
    return max(float((first[name] - second[name]).norm() / second[name].norm()) for name in second)


def compared(cases: list[Any], train: Callable[[Any], Any], initial: MultimodalLM) -> tuple[dict[Any, Any], Any]:
    """The parameters of references, each of one process with all samples; and how far from them each case ends."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    wanted = sorted({case.reference for case in cases}, key=str)
    trained: list[Any] = [None] * num_ranks
    dist.all_gather_object(trained, {case: train(case) for case in wanted[rank::num_ranks]})
    references = {case: found for some in trained for case, found in some.items()}
    results = {}
    for case in cases:
        parameters, seen_here = train(case)
        seen: list[Any] = [None] * num_ranks
        dist.all_gather_object(seen, seen_here)
        expected, alone = references[case.reference]
        apart = {"from_reference": distance(parameters, expected)}
        apart["moved"] = distance(parameters, dict(full_parameters(initial)))
        results[str(case)] = apart | {"seen": seen, "alone": alone}
    return {case: parameters for case, (parameters, _) in references.items()}, results


def main(shards: str, suite: str) -> dict[str, Any] | None:
    references, results = compared(SUITES[suite].cases, partial(train, shards), make_model(Case(None)))
    if dist.get_rank() != 0:
        return None
    between = [
        (first.layout, second.layout, distance(references[first], references[second]))
        for first, second in combinations(references, 2)
        if first.frozen == second.frozen
    ]
    return {"cases": results, "between_references": between}


if __name__ == "__main__":
    run_rank(main)
