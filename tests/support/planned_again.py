"""The formulas of docs/planning_a_run.md, written again in plain Python, and every layout of small clusters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

import orchdata as od
from orchdata.planners.workload import Columns

SIZES = (1, 2, 4, 8)


def shape(module: Any) -> dict[str, Any]:
    """What the formulas take of a module."""
    cost = module.cost
    return {
        "name": module.name,
        "h": cost.hidden,
        "L": cost.layers,
        "V": cost.vocab or 0,
        "P": module.parameters,
        "t": float(cost.trainable),
        "grads": bool(cost.trainable) or cost.input_gradients,
        "share": module.share,
        "module": module,
    }


class Again:
    """Seconds and bytes of a layout of the mean step. A layout is (kind, splits, tokens); a split is (tp, pp, dp,
    sharding, recompute), the LLM's last.
    """

    def __init__(self, modules: Any, workload: Any, cluster: Any) -> None:
        self.shapes = [shape(module) for module in modules]
        self.cluster, self.workload = cluster, workload
        self.known: dict[Any, float] = {}
        self.steps = len(workload.steps) - 1
        self.columns = workload.phases
        self.tokens = self.columns["llm"].positions.sum() / self.steps

    def mean(self, name: str, what: str = "positions") -> float:
        return float(getattr(self.columns[name], what).sum()) / self.steps

    def link(self, gpus: int) -> float:
        return self.cluster.within if gpus <= self.cluster.gpus_per_node else self.cluster.between

    def work(self, s: Any, tp: int, recompute: str | None) -> float:
        """Seconds of the mean step's work of a module on one replica without a pipeline."""
        key = s["name"], tp, recompute
        if key not in self.known:
            total = 0.0
            speed = tp * self.cluster.operations * s["share"] * (s["h"] / tp) / (s["h"] / tp + 128)
            for positions in self.columns[s["name"]].positions.tolist():
                from dataclasses import replace

                cost = replace(s["module"].cost, recompute="full" if recompute and s["grads"] else False)
                sent = 0.5 * (24 if recompute else 16) * s["L"] * positions * s["h"] * (tp - 1) / tp
                total += cost.phase_cost().at(positions) / speed + sent / self.link(tp)
            self.known[key] = total / self.steps
        return self.known[key]

    def states(self, s: Any, split: Any) -> float:
        tp, pp, dp, sharding, _ = split
        parameters, trained = s["P"] / tp / pp, s["t"]
        if sharding == "full":
            return parameters * (16 * trained + 2 * (1 - trained)) / dp + 2 * 2 * s["P"] / tp / s["L"]
        optimizer = 12 / dp if sharding == "optimizer" else 12
        return parameters * (trained * (4 + optimizer) + 2 * (1 - trained))

    def activations(self, s: Any, split: Any, tokens: float) -> float:
        tp, pp, _, _, recompute = split
        layers = s["L"] / pp
        return (34 * layers if recompute is None else 2 * layers + 34) * tokens * s["h"] / tp

    def bytes(self, kind: str, splits: Any, tokens: int) -> float:
        """Of the fullest GPU of all."""
        *encoders, llm = self.shapes
        *of_encoders, own = splits
        width, trained = llm["h"], any(e["grads"] for e in encoders)
        share = min(1.0, tokens / self.tokens)
        rows = share * sum(self.mean(e["name"], "tokens") for e in encoders)
        features, logits = 2 * (1 + trained) * rows * width, 6 * tokens * llm["V"] / own[0]
        pp = own[1]
        first = last = self.states(llm, own)
        later, used = pp, []
        for e, split in list(zip(encoders, of_encoders, strict=True))[::-1]:
            columns = self.columns[e["name"]]
            most_part = max(columns.positions.tolist(), default=1)
            sums = [columns.positions[a:b].sum() for a, b in itertools.pairwise(columns.offsets)]
            if kind in ("own", "shared"):
                part = 1.0 if kind == "shared" and pp > 1 else min(1.0, own[2] * tokens / self.tokens)
                positions = max(part * self.mean(e["name"]) / split[2], most_part)
            else:
                positions = max(share * self.mean(e["name"]), max(sums))
            held = self.activations(e, split, positions)
            if kind == "own":
                yielded = (
                    2 * (1 + e["grads"]) * width * positions * self.mean(e["name"], "tokens") / self.mean(e["name"])
                )
                later += split[1]
                used.append(self.states(e, split) + (held + yielded) * later)
            elif kind == "first_stage":
                first += self.states(e, split) + held * pp
            else:
                first, last = first + self.states(e, split) + held, last + self.states(e, split) + held
        held = self.activations(llm, own, tokens)
        first, last = first + (held + features) * pp, last + held + logits
        used.append(max(first, last) if pp > 1 else first + logits)
        return max(used)

    def overlapped(self, a: float, b: float) -> float:
        return max(a, b) + 0.1 * min(a, b)

    def seconds(self, kind: str, splits: Any, tokens: int) -> float:
        *encoders, llm = self.shapes
        tp, pp, dp, sharding, _ = splits[-1]
        count = max(1, math.ceil(self.tokens / (dp * tokens)))
        works = [
            self.work(s, split[0], split[4]) / split[1] / split[2] for s, split in zip(self.shapes, splits, strict=True)
        ]
        stages = [each / count for each in works]
        gpus = sum(a * b * c for a, b, c, *_ in splits) if kind == "own" else tp * pp * dp
        travel = [2 * self.mean(e["name"], "tokens") / dp * llm["h"] / self.link(gpus) for e in encoders]
        reduced, optimizer, sent = [], [], []
        for s, (a, b, c, how, _) in zip(self.shapes, splits, strict=True):
            span = a * c if kind == "own" else max(a * c, tp * dp)
            trained = s["P"] * s["t"] / a / b
            reduced.append(4 * trained * (c - 1) / c / self.link(span))
            optimizer.append(28 * trained / (c if how else 1) / self.cluster.memory_bandwidth)
            each = 6 * s["t"] + (4 if s["grads"] else 2) * (1 - s["t"])
            sent.append(each * s["P"] / a * (c - 1) / c / self.link(span))
        if kind == "own":
            way = sum((1 + e["grads"]) * each / count for e, each in zip(encoders, travel, strict=True))
            fill = sum(split[1] * each for split, each in zip(splits, stages, strict=True)) + way
            late = max(self.overlapped(a, b) - a for a, b in zip(stages, reduced, strict=True))
            return fill + (count - 1) * max(stages) + late + max(optimizer)
        exchanged = sum(travel) * (1 + any(e["grads"] for e in encoders)) if kind == "shared" else 0.0
        if pp == 1:
            step = (sum(works) + exchanged) / count
            if sharding == "full":
                return count * self.overlapped(step, sum(sent)) + sum(optimizer)
            return (count - 1) * step + self.overlapped(step, sum(reduced)) + sum(optimizer)
        before = sum(works[:-1]) + exchanged if kind == "shared" else 0.0
        first = stages[-1] + (sum(stages[:-1]) if kind == "first_stage" else 0.0)
        pipeline = first * count + (pp - 1) * stages[-1]
        return before + pipeline + self.overlapped(first, sum(reduced)) - first + sum(optimizer)

    def layouts(self, tokens: Any, most_stages: int = 20) -> Iterator[tuple[str, Any, int]]:
        """Every layout of the cluster."""
        gpus, fewest = self.cluster.gpus, int(np.diff(self.workload.steps).min())
        *encoders, llm = [s["module"] for s in self.shapes]

        def splits(module: Any, stages: int) -> list[tuple[int, int]]:
            return [
                (tp, pp)
                for tp in SIZES
                for pp in range(1, stages + 1)
                if (module.cost.heads or tp) % tp == 0 and module.cost.layers % pp == 0 and tp * pp <= gpus
            ]

        how = (None, "full")
        of_all = [e.cost.heads or 8 for e in encoders]
        for (tp, pp), size in itertools.product(splits(llm, most_stages), tokens):
            for dp, again in itertools.product(
                range(1, min(gpus // (tp * pp), fewest) + 1), itertools.product(how, repeat=len(self.shapes))
            ):
                for sharding in (None, "optimizer", "full") if pp == 1 else (None, "optimizer"):
                    own = (tp, pp, dp, sharding, again[-1])
                    kinds = {"one": (tp, dp)} if pp == 1 else {"first_stage": (tp, dp)}
                    if encoders and tp > 1 and pp == 1:
                        kinds["repeated"] = (1, dp)
                    if encoders and tp * pp > 1:
                        kinds["shared"] = (1, dp * tp * pp)
                    for kind, (t, d) in kinds.items():
                        if all(heads % t == 0 for heads in of_all):
                            yield kind, [*((t, 1, d, sharding, r) for r in again[:-1]), own], size

    def apart(self, tokens: Any, most_stages: int = 20) -> Iterator[tuple[str, Any, int]]:
        """Every layout with modules on GPUs of their own, without states that are not sharded: they gain nothing."""
        gpus, fewest = self.cluster.gpus, int(np.diff(self.workload.steps).min())
        smooth = [n for n in range(1, gpus + 1) if not any(n % p == 0 for p in (11, 13, 17, 19, 23, 29, 31))]
        settings = []
        for s in self.shapes:
            cost, name = s["module"].cost, s["name"]
            settings.append(
                [
                    (tp, pp, dp, "optimizer", again)
                    for tp in SIZES
                    for pp in range(1, (most_stages if name == "llm" else 4) + 1)
                    for dp in smooth
                    for again in (None, "full")
                    if (cost.heads or tp) % tp == 0
                    and cost.layers % pp == 0
                    and tp * pp * dp <= gpus
                    and (name != "llm" or dp <= fewest)
                ]
            )
        for splits in itertools.product(*settings):
            if sum(a * b * c for a, b, c, *_ in splits) <= gpus:
                for size in tokens:
                    yield "own", splits, size


def made_up(seed: int, *, modules: int = 2, gpus: int | None = None) -> tuple[Any, Any, Any]:
    """Modules, a workload and a cluster, at random."""
    rng = np.random.default_rng(seed)
    names = ["image", "audio"][: modules - 1]
    towers = []
    for name in names:
        hidden = int(rng.choice([256, 1024, 2048]))
        cost = od.TransformerCost(
            hidden=hidden, layers=int(rng.choice([2, 3, 24])), ffn=4 * hidden, heads=int(rng.choice([1, 2]))
        )
        towers.append(od.planners.Module(name, cost, trained=bool(rng.random() < 0.8)))
    hidden = int(rng.choice([1024, 2048, 4096]))
    llm = od.TransformerCost(
        hidden=hidden,
        layers=int(rng.choice([2, 4, 16])),
        ffn=3 * hidden,
        heads=int(rng.choice([1, 2, 4])),
        vocab=32_000,
        causal=True,
    )
    towers.append(od.planners.Module("llm", llm, trained=True))
    steps, samples = 2, int(rng.integers(24, 64))
    phases = {}
    total = steps * samples
    for name in names:
        counts = rng.integers(0, 3, total)
        positions = rng.integers(1, 12, counts.sum()) * 64
        phases[name] = Columns(
            offsets=np.concatenate([[0], np.cumsum(counts)]),
            positions=positions,
            tokens=np.maximum(positions // 4, 1),
            costs=positions,
        )
    lengths = rng.integers(200, 4000, total)
    phases["llm"] = Columns(offsets=np.arange(total + 1), positions=lengths, tokens=lengths, costs=lengths)
    workload = od.planners.Workload(steps=np.arange(steps + 1) * samples, phases=phases, global_batch_size=samples)
    memory = float(rng.choice([6e9, 12e9, 24e9, 80e9]))
    cluster = od.planners.Cluster.named(f"h100x{gpus or int(rng.integers(8, 33))}", memory=memory)
    return towers, workload, cluster
