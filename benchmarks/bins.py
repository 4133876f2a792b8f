"""`python -m benchmarks.bins`: steps of fixed length, packed over all ranks at once and as others pack them.

length lists, real and made up --one step's samples--> each method --> bins --> fill, micro-steps, cost, time

The others are written after their descriptions, not their code. First-fit decreasing packs all of a step too. The rest
see each rank's own samples in their order, as loaders that pack after a sampler do:

- buffer: torchtitan's packing of a buffer: a bin takes the largest sample of the buffer that fits, until none does.
- open bins: Grain's best fit: a sample goes into the fullest open bin with room for it, else the fullest of all leaves.
- knapsack: OLMo's (Molmo) packing: the oldest sample of a buffer, and with it those that fill the bin best, by dynamic
  programming over sizes in 128ths of the length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.balance.real_lengths import lengths_folder, real_distributions
from benchmarks.command import run_command
from benchmarks.distributions import DISTRIBUTIONS, LLM_CROSSOVER, Distribution
from orchdata.balancers import bin_bound, pack_bins
from orchdata.balancers.assignment import loads_by_rank_and_microbatch
from orchdata.bench import Result, WideTable
from orchdata.native.fill_bins import martello_toth

Ints = NDArray[np.int64]
Method = Callable[[Ints, int, int], tuple[Ints, Ints]]
"""Sizes, length, ranks -> the rank of each sample, and its bin among that rank's."""

BUFFER, OPEN_BINS, KNAPSACK_BUFFER, PARTS = 256, 64, 48, 128
SCALE = 16  # Costs are in 16ths of a position's.


@dataclass(frozen=True, kw_only=True, slots=True)
class BinsBench:
    """What to measure.

    Attributes:
        length: tokens of a bin; samples above it are left out.
        samples: of a step.
        ranks: that run at the same time.
        seed: of all draws.
        peers: also measure the other methods.
    """

    length: int = 16_384
    samples: int = 4_096
    ranks: int = 64
    seed: int = 0
    peers: bool = False


def captions(generator: np.random.Generator, count: int) -> Ints:
    """Lengths of samples of a caption and an image of one of four sizes."""
    words = np.clip(generator.normal(60, 20, count), 8, 200).astype(np.int64)
    images: Ints = generator.choice([256, 576, 1024, 2304], count, p=[0.3, 0.4, 0.2, 0.1])
    return words + images


def documents(generator: np.random.Generator, count: int) -> Ints:
    return np.clip(generator.lognormal(7.5, 1.2, count), 16, 1 << 20).astype(np.int64)


def conversations(generator: np.random.Generator, count: int) -> Ints:
    lengths = generator.gamma(2, 700, count) + generator.geometric(0.3, count) * 150
    return np.maximum(lengths, 1).astype(np.int64)


def narrow(generator: np.random.Generator, count: int) -> Ints:
    """Nearly equal lengths, of which few sums fill a bin: the hard case."""
    return np.maximum(generator.normal(2000, 150, count), 1).astype(np.int64)


def lists() -> Mapping[str, Distribution]:
    """The real ones that are there, and made-up ones."""
    real = {name: of for name, of in real_distributions(lengths_folder()).items() if not name.endswith("quadratic")}
    made_up = {"captions": captions, "documents": documents, "conversations": conversations, "narrow": narrow}
    return real | {"speech": DISTRIBUTIONS["speech"], "omni": DISTRIBUTIONS["omni"]} | made_up


def ours(sizes: Ints, length: int, num_ranks: int) -> tuple[Ints, Ints]:
    bins = pack_bins(sizes, length, None, extra_costs(sizes), num_ranks=num_ranks).astype(np.int64)
    return bins % num_ranks, bins // num_ranks


def first_fit_decreasing(sizes: Ints, length: int, num_ranks: int) -> tuple[Ints, Ints]:
    """Johnson (1973), over all ranks; bins in the order they were opened."""
    bins, room = np.empty(len(sizes), np.int64), np.full(len(sizes), length)
    for item in np.argsort(-sizes, kind="stable"):
        bins[item] = np.argmax(room >= sizes[item])
        room[bins[item]] -= sizes[item]
    return bins % num_ranks, bins // num_ranks


def of_a_buffer(sizes: list[int], length: int) -> list[int]:
    bins, buffer, coming, number = [-1] * len(sizes), list[int](), 0, 0
    while coming < len(sizes) or buffer:
        room = length
        while True:
            more = min(len(sizes), coming + BUFFER - len(buffer))
            buffer = sorted([*buffer, *range(coming, more)], key=lambda item: -sizes[item])
            coming = more
            item = next((item for item in buffer if sizes[item] <= room), None)
            if item is None:
                break
            buffer.remove(item)
            bins[item], room = number, room - sizes[item]
        number += 1
    return bins


def of_open_bins(sizes: list[int], length: int) -> list[int]:
    bins, rooms, opened = [-1] * len(sizes), dict[int, int](), 0
    for item, size in enumerate(sizes):
        fitting = [(room, number) for number, room in rooms.items() if room >= size]
        if not fitting:
            if len(rooms) == OPEN_BINS:
                del rooms[min(rooms, key=lambda number: rooms[number])]
            fitting, opened = [(length, opened)], opened + 1
        room, number = min(fitting)
        bins[item], rooms[number] = number, room - size
    return bins


def of_a_knapsack(sizes: list[int], length: int) -> list[int]:
    bins, buffer, coming, number = [-1] * len(sizes), list[int](), 0, 0
    unit = -(-length // PARTS)
    while coming < len(sizes) or buffer:
        more = min(len(sizes), coming + KNAPSACK_BUFFER - len(buffer))
        buffer, coming = [*buffer, *range(coming, more)], more
        oldest, *others = buffer
        free = (length - sizes[oldest]) // unit
        reached: dict[int, tuple[int, ...]] = {0: ()}
        for item in others:
            parts = -(-sizes[item] // unit)
            for filled in sorted(reached, reverse=True):
                if filled + parts <= free and filled + parts not in reached:
                    reached[filled + parts] = (*reached[filled], item)
        for item in (oldest, *reached[max(reached)]):
            bins[item] = number
            buffer.remove(item)
        number += 1
    return bins


def by_rank(pack: Callable[[list[int], int], list[int]]) -> Method:
    """Each rank packs its own samples, dealt out in turn."""

    def method(sizes: Ints, length: int, num_ranks: int) -> tuple[Ints, Ints]:
        rank, bins = np.arange(len(sizes)) % num_ranks, np.empty(len(sizes), np.int64)
        for r in range(num_ranks):
            bins[r::num_ranks] = pack(sizes[r::num_ranks].tolist(), length)
        return rank, bins

    return method


PEERS: Mapping[str, Method] = {
    "first fit": first_fit_decreasing,
    "buffer": by_rank(of_a_buffer),
    "open bins": by_rank(of_open_bins),
    "knapsack": by_rank(of_a_knapsack),
}


def extra_costs(sizes: Ints) -> Ints:
    """What samples cost beyond their share of a bin's length."""
    costs: Ints = SCALE * sizes * sizes // LLM_CROSSOVER
    return costs


def priced(sizes: Ints, rank: Ints, bins: Ints, length: int, num_ranks: int) -> tuple[float, float]:
    """Sum over micro-steps of the largest cost over its lower bound, and the bound over the mean.

    The bound of a micro-step is its mean, or what its most costly sample alone takes in a bin.
    """
    costs, count = extra_costs(sizes), int(bins.max()) + 1
    cells = (
        loads_by_rank_and_microbatch(costs, rank.astype(np.int32), bins.astype(np.int32), num_ranks, count)
        + SCALE * length
    )
    largest = np.zeros(count, np.int64)
    np.maximum.at(largest, bins, costs)
    means = cells.mean(axis=0)
    bound = np.maximum(means, largest + SCALE * length).sum()
    return float(cells.max(axis=0).sum() / bound), float(bound / means.sum())


def tables(config: BinsBench) -> list[Result | WideTable]:
    """Measure."""
    if config.samples < config.ranks:
        raise ValueError(f"samples={config.samples} do not give each of {config.ranks} ranks one: raise it")
    rows, peer_rows = [], []
    demanded: list[tuple[float, float, float, float]] = []
    for name, draw in lists().items():
        sizes = draw(np.random.default_rng(config.seed), 2 * config.samples)
        sizes = sizes[(sizes > 0) & (sizes <= config.length)][: config.samples]
        descending = np.sort(sizes)[::-1].copy()
        l2, bound = int(martello_toth(descending, config.length)), bin_bound(sizes, config.length)
        opened = int(pack_bins(sizes, config.length, None, extra_costs(sizes)).max()) + 1
        fill = int(sizes.sum()) / (opened * config.length)
        milliseconds = []
        for _ in range(3):
            started = time.thread_time()
            rank, bins = ours(sizes, config.length, config.ranks)
            milliseconds.append(1e3 * (time.thread_time() - started))
        micro_steps = int(bins.max()) + 1
        ratio, over_mean = priced(sizes, rank, bins, config.length, config.ranks)
        waited = 1e-3 * round(1e3 * ratio * over_mean * cost_of_mean(sizes, micro_steps, config))
        least = -(-bound // config.ranks)
        above = 100 * (ratio - 1)
        rows.append((name, fill, l2, bound, opened, least, micro_steps, above, over_mean, min(milliseconds)))
        if name != "narrow":
            allowed = int(sizes.sum()) / (l2 * config.length) >= 0.985
            demanded.append((fill if allowed else 1.0, (opened - 1) / l2, micro_steps - least, ratio))
        if config.peers:
            row: list[str | float | None] = [name, micro_steps, waited]
            for method in PEERS.values():
                rank, bins = method(sizes, config.length, config.ranks)
                count = int(bins.max()) + 1
                ratio, over_mean = priced(sizes, rank, bins, config.length, config.ranks)
                row += [count, 1e-3 * round(1e3 * ratio * over_mean * cost_of_mean(sizes, count, config))]
            peer_rows.append(tuple(row))
    size = f"{config.samples:,} samples, {config.ranks:,} ranks, bins of {config.length:,}"
    found: list[Result | WideTable] = [
        WideTable(
            title=f"pack_bins: {size}",
            columns=(
                "list",
                "fill",
                "L2",
                "bound",
                "bins",
                "least",
                "micro-steps",
                "over LB, %",
                "LB / mean",
                "CPU ms",
            ),
            rows=tuple(rows),
            note="fill: tokens over bins opened; bound: L2 and dual feasible functions; least: bound over ranks; cost: "
            "sum over micro-steps of the largest, LB: the mean or the costliest sample of each; ms: with num_ranks",
        ),
        *demands(demanded),
    ]
    if config.peers:
        columns = ("list", "ours", "cost", *(each for name in PEERS for each in (name, "cost")))
        note = "micro-steps of each method, and what ranks wait for in them over what even full bins would take"
        found.append(WideTable(title=f"Compared to others: {size}", columns=columns, rows=tuple(peer_rows), note=note))
    return found


def demands(found: list[tuple[float, float, float, float]]) -> list[Result]:
    """The worst list of each figure, but for nearly equal lengths, which fill no bin."""
    fill, bins, micro_steps, ratio = zip(*found, strict=True)
    return [
        Result(name="fill, where L2 allows 0.985", unit="", values=(min(fill),), demand=0.985, better="high"),
        Result(name="bins but one, over L2", unit="x", values=(max(bins),), demand=1.01),
        Result(name="micro-steps above the least", unit="", values=(max(micro_steps),), demand=1.0),
        Result(name="largest costs over their lower bound", unit="x", values=(max(ratio),), demand=1.02),
    ]


def cost_of_mean(sizes: Ints, micro_steps: int, config: BinsBench) -> float:
    """The mean cost of a rank in so many micro-steps, over that with neither padding nor waiting."""
    extra = int(extra_costs(sizes).sum())
    taken = micro_steps * config.ranks * SCALE * config.length + extra
    return taken / (SCALE * int(sizes.sum()) + extra)


if __name__ == "__main__":
    run_command("benchmarks.bins", BinsBench, tables)
