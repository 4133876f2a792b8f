"""`python -m benchmarks.planned_layouts`: seconds of training steps in four layouts of two ranks, planned and measured.

steps of dp 2, a layer at whole and half width, the link --fit--> Module, Cluster --simulate--> seconds of other steps
the same steps, the four layouts in turn, two gloo ranks of one thread each ---------------measured--> seconds

A small encoder and LLM in real training: forward, backward, exchange, AdamW. All layouts start from equal weights, and
the losses of three first steps must be equal. A tower with tp 2 takes its seconds with tp 1, times a layer's at half
over whole width, and all-reduces of its activations. Both ranks are busy in every measurement that is fitted. Nothing
of tp 2, of two stages, or of the encoder apart is fitted. Run it alone, on two cores of Linux.

Gloo's threads run before all others, if the process may ask for that (SCHED_FIFO, root): as a network card does, they
must not wait for a rank that computes. A kernel with lazy preemption else adds up to a tick, 4 ms, to many an exchange.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import orchdata as od
from benchmarks.command import run_command
from benchmarks.exchange import run_job
from benchmarks.launch import end_with_parent, leave
from orchdata.balancers import fit_phase_cost
from orchdata.bench import Result, WideTable
from orchdata.order.order import Order
from orchdata.order.steps import GlobalBatches, StepTask
from orchdata.planners import Assumed, Cluster, Columns, Layout, Module, Placement, Workload, simulate
from orchdata.planners.layout import Kind
from orchdata.planners.simulation import balance_of
from orchdata.planners.workload import WorkloadCosts
from orchdata.planning.plan import PlanSpec, make_plan

HEAD, MERGED, VOCAB, MAX_TOKENS = 64, 4, 1024, 512  # Width of an attention head; patches of a row of features.
COSTS = {
    "image": od.TransformerCost(hidden=256, layers=4, ffn=1024, heads=4, connector_macs=256 * 256, flash=True),
    "llm": od.TransformerCost(hidden=256, layers=4, ffn=1024, heads=4, vocab=VOCAB, causal=True, flash=True),
}
WIDTH, HALF = COSTS["llm"].hidden, COSTS["llm"].layers // 2
SPLIT = {"qkv": 0, "out": 1, "up": 0, "down": 1, "head": 0}  # The dimension that tensor parallelism splits.
# The kind of each layout, and how it splits encoder and LLM.
LAYOUTS: dict[str, tuple[Kind, dict[str, Any], dict[str, Any]]] = {
    "dp 2": ("one", {"dp": 2}, {"dp": 2}),
    "tp 2": ("one", {"tp": 2}, {"tp": 2}),
    "two stages": ("first_stage", {}, {"pp": 2}),
    "apart": ("own", {}, {}),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutsBench:
    """What to measure.

    Attributes:
        runs: repeats of the whole, each with its own data, weights and fit.
        steps: measured, of each layout. fitted: other steps, of dp 2.
        samples: of a step.
        seed: of the first run.
    """

    runs: int = 10
    steps: int = 6
    fitted: int = 6
    samples: int = 16
    seed: int = 0


def urgent(on: bool) -> None:
    """Run this thread, and those that it starts, before others."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO if on else os.SCHED_OTHER, os.sched_param(int(on)))


def posted(call: Callable[..., Any], x: Tensor, tag: int = 0) -> Any:
    """Start to send or receive. As urgent as gloo's thread, which else spins for a lock that this one holds."""
    urgent(True)
    handle = call(x, 1 - dist.get_rank(), tag=tag)
    urgent(False)
    return handle


def summed(x: Tensor) -> Tensor:
    x = x.contiguous()
    dist.all_reduce(x)
    return x


class Leave(torch.autograd.Function):
    """Sums what ranks have of a layer; the gradient is each one's."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return summed(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


class Split(nn.Module):
    """A module that tensor parallelism splits: gradients of what enters are summed, and values that leave."""

    exchanged = False

    def enter(self, x: Tensor) -> Tensor:
        if self.exchanged:
            x = x.view_as(x)
            if x.requires_grad:
                x.register_hook(summed)
        return x

    def leave(self, x: Tensor) -> Tensor:
        return Leave.apply(x) if self.exchanged else x  # type: ignore[no-untyped-call]


class Layer(Split):
    """A transformer layer over packed sequences."""

    def __init__(self, cost: od.TransformerCost) -> None:
        super().__init__()
        width, self.causal = cost.hidden, cost.causal
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, cost.ffn, bias=False), nn.Linear(cost.ffn, width, bias=False)

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        qkv = self.qkv(self.enter(self.norms[0](x))).view(len(x), -1, 3, HEAD).permute(2, 1, 0, 3)
        mixed = []
        for q, k, v in qkv[:, None].split(lengths, 3):
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
            mixed.append(attended[0].transpose(0, 1).flatten(1))
        x = x + self.leave(self.out(torch.cat(mixed)))
        return x + self.leave(self.down(functional.gelu(self.up(self.enter(self.norms[1](x))))))


class Micro(NamedTuple):
    """A microbatch: float32 (patches, width), int64 ids and targets (tokens,), where the features are among the tokens,
    and positions of each sequence, by module.
    """

    patches: Tensor
    ids: Tensor
    targets: Tensor
    where: Tensor
    lengths: dict[str, list[int]]


class Model(Split):
    """An encoder and an LLM."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.llm = (
            nn.ModuleList(Layer(cost) for _ in range(cost.layers)) for cost in (COSTS["image"], COSTS["llm"])
        )
        self.connector = nn.Linear(MERGED * COSTS["image"].hidden, WIDTH, bias=False)
        self.embedding, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def encode(self, micro: Micro) -> Tensor:
        """Return features, (rows, WIDTH)."""
        x = micro.patches
        for layer in self.encoder:
            x = layer(x, micro.lengths["image"])
        features: Tensor = self.connector(x.view(len(micro.where), -1))
        return features

    def early(self, features: Tensor, micro: Micro) -> Tensor:
        """Return the values between the halves of the LLM, (tokens, WIDTH)."""
        x: Tensor = self.embedding(micro.ids).index_copy(0, micro.where, features)
        for layer in self.llm[:HALF]:
            x = layer(x, micro.lengths["llm"])
        return x

    def late(self, x: Tensor, micro: Micro) -> Tensor:
        """Return the summed cross-entropy, in thousands."""
        for layer in self.llm[HALF:]:
            x = layer(x, micro.lengths["llm"])
        logits = self.head(self.enter(self.norm(x)))
        # Split, a rank has a part of the vocabulary.
        count = logits.shape[1]
        entry = micro.targets - (dist.get_rank() * count if self.exchanged else 0)
        chosen = logits.gather(1, entry.clamp(0, count - 1)[:, None])[:, 0] * ((entry >= 0) & (entry < count))
        loss: Tensor = (self.leave(logits.exp().sum(1)).log() - self.leave(chosen)).sum() / 1000
        return loss


def halved(model: nn.Module, *, exchanged: bool) -> nn.Module:
    """Return this rank's half of what tensor parallelism splits."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, Split):
            module.exchanged = exchanged
    for name, weight in model.named_parameters():
        if (dim := SPLIT.get(name.split(".")[-2])) is not None:
            weight.data = weight.data.chunk(2, dim)[dist.get_rank()].clone()
    return model


class Lane:
    """A layout: its part of the model on this rank, with gradients in one buffer and AdamW."""

    def __init__(self, name: str, model: nn.Module) -> None:
        self.name, self.rank = name, dist.get_rank()
        made = halved(model, exchanged=True) if name == "tp 2" else copy.deepcopy(model)
        assert isinstance(made, Model)
        self.model, image, text = made, [made.encoder, made.connector], [made.embedding, *made.llm[:HALF]]
        end = [*made.llm[HALF:], made.norm, made.head]
        # The modules of both ranks.
        halves = {"two stages": ([*image, *text], end), "apart": (image, [*text, *end])}
        modules = halves[name][self.rank] if name in halves else [made]
        weights = [each for module in modules for each in module.parameters()]
        self.gradients = torch.zeros(sum(map(Tensor.numel, weights)))
        for weight, part in zip(weights, self.gradients.split([*map(Tensor.numel, weights)]), strict=True):
            weight.grad = part.view_as(weight)
        self.optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
        self.seconds: list[tuple[dict[str, list[int]], dict[str, float]]] = []  # Of each microbatch, if not a pipeline.

    def step(self, micros: Sequence[Micro]) -> float:
        """Train, and return the sum of this rank's losses."""
        loss = (self.pipeline if self.name in ("two stages", "apart") else self.whole)(micros)
        if self.name == "dp 2":
            dist.all_reduce(self.gradients)
        self.update()
        return loss

    def update(self) -> None:
        self.optimizer.step()
        self.gradients.zero_()

    def whole(self, micros: Sequence[Micro]) -> float:
        total = 0.0
        for micro in micros:
            started = time.perf_counter()
            features = self.model.encode(micro)
            received = features.detach().requires_grad_()
            encoded = time.perf_counter()
            loss = self.model.late(self.model.early(received, micro), micro)
            loss.backward()
            total += loss.item()
            back = time.perf_counter()
            features.backward(received.grad)
            image = encoded - started + time.perf_counter() - back
            self.seconds.append((micro.lengths, {"image": image, "llm": back - encoded}))
        return total

    def pipeline(self, micros: Sequence[Micro]) -> float:
        """1F1B of two stages: the first is one microbatch ahead."""
        apart, model = self.name == "apart", self.model
        buffers = [torch.empty(len(each.where if apart else each.ids), WIDTH) for each in micros]
        coming = [posted(dist.irecv, each, at) for at, each in enumerate(buffers)]
        kept: list[Tensor] = []
        sent: list[Any] = []
        total = 0.0
        for at in range(len(micros) + 1 - self.rank):
            if self.rank:
                coming[at].wait()
                x, micro = buffers[at].requires_grad_(), micros[at]
                loss = model.late(model.early(x, micro) if apart else x, micro)
                loss.backward()
                total += loss.item()
                assert x.grad is not None
                sent.append(posted(dist.isend, x.grad, at))
                continue
            if at < len(micros):
                features = model.encode(micros[at])
                kept.append(features if apart else model.early(features, micros[at]))
                sent.append(posted(dist.isend, kept[-1].detach(), at))
            if at:
                coming[at - 1].wait()
                kept[at - 1].backward(buffers[at - 1])
        for each in sent:
            each.wait()
        return total


def drawn(steps: int, samples: int, seed: int) -> Workload:
    """Steps of samples, each of one or two images and a text."""
    rng, count = np.random.default_rng(seed), steps * samples
    offsets = np.concatenate([[0], np.cumsum(rng.integers(1, 3, count))])
    rows = np.clip(rng.lognormal(np.log(7.5), 0.5, offsets[-1]), 1, 64).astype(np.int64)
    text = np.clip(rng.lognormal(np.log(110), 0.6, count), 16, 360).astype(np.int64)
    lengths = text + np.add.reduceat(rows, offsets[:-1])
    phases = {}
    for name, starts, tokens, positions in (
        ("image", offsets, rows, rows * MERGED),
        ("llm", np.arange(count + 1), lengths, lengths),
    ):
        costs = np.rint(Module(name, COSTS[name]).operations(positions) / 1e6).astype(np.int64)
        phases[name] = Columns(offsets=starts, positions=positions, tokens=tokens, costs=costs)
    return Workload(steps=np.arange(0, count + 1, samples), phases=phases, global_batch_size=samples)


def layouts(modules: Iterable[Module]) -> dict[str, Layout]:
    both, found = [*modules], {}
    for name, (kind, *how) in LAYOUTS.items():
        placements = tuple(Placement(module=module, **sizes) for module, sizes in zip(both, how, strict=True))
        found[name] = Layout(placements=placements, kind=kind, microbatch_tokens=MAX_TOKENS)
    return found


def micros_of(layout: Layout, workload: Workload, seed: int) -> list[list[Micro]]:
    """Return this rank's microbatches of each step, by the plan that `simulate` prices; their content is drawn."""
    spec = PlanSpec(
        costs=WorkloadCosts(workload, ("llm",) if layout.kind == "own" else ("image", "llm")),
        order=Order(workload.num_samples, shuffle=None, seed=0),
        batches=GlobalBatches(size=workload.num_samples),
        balance=balance_of(layout),
        num_ranks=layout.llm.dp,
    )
    image, llm, steps = workload.phases["image"], workload.phases["llm"], []
    for number in range(workload.num_steps):
        plan = make_plan(spec, StepTask(0, number, rows=np.arange(*workload.steps[number : number + 2])))
        mine, micros = plan.rank == dist.get_rank() % layout.llm.dp, []
        for micro in range(plan.num_microbatches):
            samples, before, where, lengths = plan.row[mine & (plan.microbatch == micro)].tolist(), 0, [], []
            content = []
            for sample in samples:
                parts, tokens = slice(*image.offsets[sample : sample + 2]), int(llm.positions[sample])
                draw = torch.Generator().manual_seed(seed * 100_003 + sample)
                patches = torch.randn(int(image.positions[parts].sum()), COSTS["image"].hidden, generator=draw)
                content.append((patches, *torch.randint(VOCAB, (2, tokens), generator=draw)))
                where.append(torch.arange(before, before + len(patches) // MERGED))
                lengths += image.positions[parts].tolist()
                before += tokens
            patches, ids, targets = (torch.cat(each) for each in zip(*content, strict=True))
            of = {"image": lengths, "llm": llm.positions[samples].tolist()}
            micros.append(Micro(patches, ids, targets, torch.cat(where), of))
        steps.append(micros)
    return steps


def timed(run: Callable[[], object]) -> float:
    """Seconds from a barrier until the slowest rank is done."""
    dist.barrier()
    started = time.perf_counter()
    run()
    elapsed = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return elapsed.item()


def medians(runs: Sequence[Callable[[], object]], repeats: int = 9) -> list[float]:
    """Median seconds of each, in turn, after a round that does not count."""
    found = [[timed(run) for run in runs] for _ in range(repeats + 1)]
    return [statistics.median(values) for values in zip(*found[1:], strict=True)]


def half_over_whole(cost: od.TransformerCost, lengths: list[int]) -> float:
    """Seconds of a layer at half width over those at whole width."""
    whole = Layer(cost)
    x = torch.randn(sum(lengths), cost.hidden, requires_grad=True)
    layers = (whole, halved(whole, exchanged=False))
    wide, half = medians([lambda layer=layer: layer(x, lengths).backward(x.detach()) for layer in layers])  # type: ignore[misc]
    return half / wide


def fitted(lane: Lane, micro: Micro) -> tuple[list[Module], Cluster, dict[str, float]]:
    """Return modules and cluster: of microbatches of dp 2 that `lane` has run, of a layer, and of the link.

    Args:
        micro: of tp 2, for layers and all-reduces. Their seconds are taken as linear in its positions.
    """
    ranks: list[Any] = [None, None]
    dist.all_gather_object(ranks, lane.seconds)
    said: dict[str, float] = {}
    modules = []
    for name, cost in COSTS.items():
        fit = fit_phase_cost(*([of[at][name] for rank in ranks for of in rank] for at in (0, 1)))
        lengths, of = micro.lengths[name], fit.cost
        half, positions = half_over_whole(cost, lengths), sum(lengths)
        # Four all-reduces a layer, and one of the head.
        x = torch.randn(positions, cost.hidden)
        sent = (4 * cost.layers + (name == "llm")) * medians([lambda x=x: dist.all_reduce(x)], 30)[0] / positions  # type: ignore[misc]
        two = od.PhaseCost(half * of.linear + sent, half * of.quadratic, half * of.constant)
        parts = lane.model.named_parameters()
        count = sum(w.numel() for path, w in parts if path.startswith(("encoder", "connector")) == (name == "image"))
        modules.append(Module(name, cost, parameters=count, seconds={1: of, 2: two}, error=fit.residual))
        computing = float(of.at(np.asarray(lengths, np.float64)).sum()) / positions
        said |= {f"{name}: error of the fit": fit.residual, f"{name}: half over whole width": half}
        said[f"{name}: all-reduces over computing"] = sent / computing
    x = torch.randn(len(micro.ids), WIDTH)

    def there_and_back() -> None:
        for receives in (lane.rank, 1 - lane.rank):
            posted(dist.irecv if receives else dist.isend, x).wait()

    twice, reduce, update = medians([there_and_back, lambda: dist.all_reduce(lane.gradients), lane.update])
    link, count = 2 * x.nbytes / twice, len(lane.gradients)
    # Float32; nothing is hidden, as gradients are reduced after the last microbatch.
    assumed = Assumed(feature_bytes=4.0, reduced_bytes=2 * reduce * link / count, not_hidden=1.0)
    memory = assumed.optimizer_traffic * count / update
    said |= {"link, GB/s": link / 1e9, "all-reduce of gradients, s": reduce, "optimizer, s": update}
    cluster = Cluster(
        gpus=2, operations=1e11, memory=1e12, memory_bandwidth=memory, within=link, between=link, assumed=assumed
    )
    return modules, cluster, said


def one_run(config: LayoutsBench, seed: int) -> dict[str, Any]:
    """Warm up, fit, simulate, measure."""
    fit = drawn(config.fitted, config.samples, seed)
    rest = drawn(config.steps, config.samples, seed + 1000)
    torch.manual_seed(seed)
    model = Model()
    lanes = {name: Lane(name, model) for name in LAYOUTS}
    shapes = layouts(Module(name, cost) for name, cost in COSTS.items())
    first, other = ({name: micros_of(of, each, seed) for name, of in shapes.items()} for each in (fit, rest))
    # Equal weights and samples have equal losses, also after updates: a wrong gradient shows by 2e-3.
    losses = [[lanes[name].step(first[name][number]) for number in (0, 0, 0)] for name in LAYOUTS]
    ranks: list[Any] = [None, None]
    dist.all_gather_object(ranks, losses)
    all_losses = np.concatenate([[np.sum([of[0] for of in ranks], axis=0)], ranks[1][1:]])
    if not np.allclose(all_losses, all_losses[0], rtol=1e-5):
        raise RuntimeError(f"the layouts do not train the same: losses {all_losses.tolist()}")
    lane = lanes["dp 2"]
    lane.seconds.clear()
    for micros in first["dp 2"]:
        dist.barrier()
        lane.step(micros)
    modules, cluster, said = fitted(lane, first["tp 2"][0][0])
    planned = {name: simulate(of, rest, cluster).seconds.tolist() for name, of in layouts(modules).items()}
    measured: Mapping[str, list[float]] = {name: [] for name in LAYOUTS}
    for number in range(config.steps):
        for name in np.roll([*LAYOUTS], number).tolist():
            measured[name].append(timed(lambda name=name, at=number: lanes[name].step(other[name][at])))  # type: ignore[misc]
    return {"planned": planned, "measured": measured, "fitted": said}


def main(settings: str, result: str) -> None:
    """One rank: all runs."""
    end_with_parent()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(os.environ["LOCAL_RANK"])]})
    urgent(True)  # Gloo's threads take it over.
    dist.init_process_group("gloo")
    dist.barrier()
    urgent(False)
    config, runs = LayoutsBench(**json.loads(settings)), []
    gc.disable()
    for number in range(config.runs):
        runs.append(one_run(config, config.seed + number))
        gc.collect()
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps({"runs": runs}))
    leave()


def run(config: LayoutsBench) -> list[Result | WideTable]:
    """Measure; raises LaunchError where a rank fails."""
    runs = run_job("benchmarks.planned_layouts", config, 2)["runs"]
    seconds = np.array(
        [[[np.median(one[how][of]) for of in LAYOUTS] for how in ("planned", "measured")] for one in runs]
    )
    ratios = seconds[:, 0] / seconds[:, 1]
    right = (seconds.argsort(axis=2)[:, 0] == seconds.argsort(axis=2)[:, 1]).all(axis=1).sum()
    within = (abs(ratios - 1) <= 0.15).all(axis=1).sum()
    numbers = np.stack([*np.median(seconds, axis=0), np.median(ratios, axis=0), ratios.min(axis=0), ratios.max(axis=0)])
    columns = ("layout", "planned", "measured", "planned / measured", "least", "most")
    rows = tuple((name, *numbers[:, at].tolist()) for at, name in enumerate(LAYOUTS))
    asked: dict[str, Any] = {"unit": "", "demand": 0.8 * len(runs), "better": "high"}
    found: list[Result | WideTable] = [
        WideTable(title="A step on two ranks, seconds: medians of all runs", columns=columns, rows=rows),
        Result(name=f"order of the four right, runs of {len(runs)}", values=(float(right),), **asked),
        Result(name=f"all four within 15 %, runs of {len(runs)}", values=(float(within),), **asked),
    ]
    for at, name in enumerate(LAYOUTS):
        found.append(Result(name=f"{name}: planned / measured", unit="x", values=tuple(ratios[:, at].tolist())))
    found += [
        Result(name=name, unit="", values=tuple(one["fitted"][name] for one in runs)) for name in runs[0]["fitted"]
    ]
    return found


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        main(*sys.argv[1:])
    else:
        run_command("benchmarks.planned_layouts", LayoutsBench, run)
