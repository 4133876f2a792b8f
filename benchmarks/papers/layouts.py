"""DistTrain's shapes on 1,296 GPUs: modules apart, encoders on every GPU, one layout, and Megatron-LM's, all simulated.

The shapes are the paper's in kind (ViT, a backbone of 7B, 13B or 70B, a diffusion model); every number is ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from benchmarks.papers.mixes import Lengths
from orchdata.balancers import TransformerCost
from orchdata.bench import WideTable
from orchdata.planners import Cluster, Columns, Module, Workload, simulate
from orchdata.planners.cluster import Many, Means, closed_form, gpu_bytes, mean_memory
from orchdata.planners.run import Candidate, candidates

SEQUENCE, PART = 8_192, 1_024
IMAGE_TOKENS = Lengths(median=1_500, sigma=1.0, least=64, most=SEQUENCE)
_SIMULATED = 3
_ENCODER = TransformerCost(hidden=1280, layers=32, ffn=5_120, heads=16)
_GENERATOR = TransformerCost(hidden=1536, layers=28, ffn=6_144, heads=16)
_SHAPE: dict[str, Any] = {"vocab": 32_000, "causal": True, "gated": True}
BACKBONES = {
    "7B": TransformerCost(hidden=4096, layers=32, ffn=11_008, heads=32, **_SHAPE),
    "13B": TransformerCost(hidden=5120, layers=40, ffn=13_824, heads=40, **_SHAPE),
    "70B": TransformerCost(hidden=8192, layers=80, ffn=28_672, heads=64, kv_heads=8, **_SHAPE),
}
COLUMNS = ("backbone", "Megatron-LM's", "one", "apart", "everywhere", "Megatron-LM's / apart", "apart / everywhere")


def table(seed: int, steps: int, *, small: bool = False) -> WideTable:
    """Seconds of a step in each layout: the fastest of the three best by closed form."""
    cluster = Cluster.named("a800x48" if small else "a800x1296")
    workload = _workload(seed, steps, 64 if small else 1_920)
    rows = []
    for name, cost in list(BACKBONES.items())[: 1 if small else None]:
        encoder, generator = Module("image", _ENCODER), Module("picture", _GENERATOR, after=True)
        modules = [encoder, generator, Module("llm", cost)]
        means = Means(workload, cluster)
        found, _ = candidates(modules, means, (SEQUENCE,), {}, _SIMULATED)
        one = _fastest([*found["one"][:_SIMULATED], *found["first_stage"][:_SIMULATED]], means)
        apart, everywhere = (_fastest(found[kind][:_SIMULATED], means) for kind in ("own", "shared"))
        megatron = _fastest(_tp_8_for_all(modules, means)[:_SIMULATED], means)
        rows.append((name, megatron, one, apart, everywhere, megatron / apart, apart / everywhere))
    title = "Like DistTrain: seconds of a step by layout of modules, simulated"
    note = (
        f"{cluster.gpus:,} {cluster.name}, {steps} steps, {workload.num_samples // steps:,} sequences of {SEQUENCE:,} "
        f"tokens, all replicas, a sequence a microbatch. Ours, not the paper's: image tokens {IMAGE_TOKENS}, images of "
        f"at most {PART:,} positions, each also generated at {PART:,}; encoder {encoder.parameters / 1e9:.2f}B, "
        f"generator {generator.parameters / 1e9:.2f}B, all trained. Megatron-LM's: tp 8 and one dp for all, encoder "
        "and generator a stage each; one: the same tp and dp for all modules together; everywhere: encoder and "
        "generator data-parallel on all GPUs. Kernels reach 42 % of peak in encoder and generator, 50 % in the LLM; "
        f"links {cluster.within / 1e9:.0f} and {cluster.between / 1e9:.0f} GB/s; formulas of docs/planning_a_run.md"
    )
    return WideTable(title=title, columns=COLUMNS, rows=tuple(rows), note=note)


def _workload(seed: int, steps: int, sequences: int) -> Workload:
    count = steps * sequences
    tokens = IMAGE_TOKENS.draw(np.random.default_rng(seed), count)
    parts = -(-tokens // PART)
    offsets = np.concatenate([[0], np.cumsum(parts)])
    positions = np.full(offsets[-1], PART)
    positions[offsets[1:] - 1] = tokens - (parts - 1) * PART
    made = np.full_like(positions, PART)
    whole = np.full(count, SEQUENCE)
    image = Columns(offsets=offsets, positions=positions, tokens=positions, costs=positions)
    picture = Columns(offsets=offsets, positions=made, tokens=made, costs=made)
    llm = Columns(offsets=np.arange(count + 1), positions=whole, tokens=whole, costs=whole)
    phases = {"image": image, "picture": picture, "llm": llm}
    return Workload(steps=np.arange(steps + 1) * sequences, phases=phases, global_batch_size=sequences)


def _fastest(tried: Iterable[Candidate], means: Means) -> float:
    """The mean step of the fastest; infinite where none fits."""
    layouts = (each.layout() for each in tried)
    return min(
        (float(simulate(each, means.workload, means.cluster).seconds.mean()) for each in layouts), default=np.inf
    )


def _tp_8_for_all(modules: list[Module], means: Means) -> list[Candidate]:
    """As Megatron-LM: one tp and dp, encoder and generator a stage each."""
    found = []
    layers, gpus = modules[-1].cost.layers, means.cluster.gpus
    for pp, again in itertools.product(range(1, 21), (False, True)):
        for dp in range(1, gpus // (8 * (pp + 2)) + 1) if not layers % pp else ():
            settings = tuple(
                Many(each, 8, pp if each is modules[-1] else 1, dp, "optimizer", again) for each in modules
            )
            memory = mean_memory("own", settings, SEQUENCE, means)
            used = gpu_bytes("own", settings, SEQUENCE, memory, means)
            if max(map(float, used.values())) <= means.cluster.usable:
                seconds = float(closed_form("own", settings, SEQUENCE, means))
                found.append(Candidate(seconds, 8 * (pp + 2) * dp, "own", settings, SEQUENCE))
    return sorted(found, key=lambda each: each[:2])
