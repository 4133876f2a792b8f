"""`python -m benchmarks.teams`: how close teams of ranks come to the best, and to other plans of long sequences.

lengths --seconds of a member at each size--> balance_teams --> largest load over its bound and over the mean of whole
                                          |-> others' plans, by others' costs

The cost is that of an 8B Llama, forward and backward, at 400 TFLOP/s. A member of a team of g computes 1/g and 2 % more
a doubling of g. Inside a node of 8 the query, key, value and output travel all to all; between nodes keys and values go
round, and what attention does not hide is paid. FlexSP's published constants are those of its solver for 64 GPUs.
Megatron-LM's BalancedCPScheduler runs as it is: `make peers-megatron`, then `.venv-peers/megatron/bin/python -m
benchmarks.teams --peers`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from benchmarks.balance.real_lengths import all_lengths
from benchmarks.command import run_command
from benchmarks.distributions import Distribution
from orchdata.balancers import TeamAssignment, balance, balance_teams
from orchdata.bench import Result, WideTable
from orchdata.native.jit import kernel
from orchdata.planning.balance import Balance, Objective, StepTeams, Teams
from orchdata.planning.sharing.shares import StepSamples
from orchdata.planning.sharing.teams import share_in_teams

Ints = NDArray[np.int64]

LONGEST = 524_288
POWERS, OTHERS = (4, 8, 16, 32, 64), (6, 12, 24, 36, 48)  # Ranks of the random cases.
HIDDEN, LAYERS, FFN, VOCABULARY, KV_SHARE = 4096, 32, 14_336, 128_256, 8 / 32
SPEED, NODE, IN_NODE, BETWEEN, STARTED = 400e12, 8, 200e9, 40e9, 20e-6
PER_DOUBLING = 0.02
UNIT = 1e-9  # Seconds of one unit of cost.

# Of FlexSP's solver, 7B, in milliseconds; an all-to-all over d GPUs runs at so many GB/s.
FLEXSP_SQUARED, FLEXSP_LINEAR, FLEXSP_CONSTANT, FLEXSP_LONGEST = 5.128e-6, 0.1839576, 629.3563, 196_608
FLEXSP_SPEED = {2: 119.54, 4: 104.07, 8: 96.5, 16: 10.33, 32: 5.94, 64: 4.87}
MAX_TOKENS = 16_384
MEGATRON_CAPS = (2048, 4096, 8192, 16_384)


@dataclass(frozen=True, kw_only=True, slots=True)
class TeamsBench:
    """What to measure.

    Attributes:
        cases: random ones, and as many with few samples a rank.
        seeds: of each step that is averaged.
        batches: planned by FlexSP's constants.
        seed: of the random cases.
        peers: also run Megatron-LM's scheduler.
    """

    cases: int = 600
    seeds: int = 4
    batches: int = 8
    seed: int = 0
    peers: bool = False


def lists() -> Mapping[str, Distribution]:
    """Lengths in tokens: Wikipedia's where the fixtures are, alone and with 2 % made-up books, and two made up."""
    found: dict[str, Distribution] = {}
    wikipedia = all_lengths("Wikipedia", LONGEST)
    if wikipedia is not None:

        def with_books(generator: np.random.Generator, count: int) -> Ints:
            books = np.rint(generator.lognormal(np.log(120_000), 0.6, count)).clip(1, LONGEST)
            return np.where(generator.random(count) < 0.02, books, generator.choice(wikipedia, count)).astype(np.int64)

        found = {"Wikipedia": lambda generator, count: generator.choice(wikipedia, count), "books": with_books}
    return found | {
        "log-normal": lambda g, count: np.rint(g.lognormal(7, 1.5, count)).clip(1, LONGEST).astype(np.int64),
        "log-uniform": lambda g, count: np.rint(np.exp(g.uniform(np.log(64), np.log(262_144), count))).astype(np.int64),
    }


def team_costs(lengths: Ints, sizes: Sequence[int]) -> Ints:
    """What a member pays for each sequence at each size, int64 (num_sequences, num_sizes), in nanoseconds."""
    weights = HIDDEN * (2 * HIDDEN * (1 + KV_SHARE) + 3 * FFN) * LAYERS + HIDDEN * VOCABULARY
    attention = 3 * LAYERS * 2 * HIDDEN * lengths.astype(float) ** 2 / SPEED  # causal: half
    computed = 3 * 2 * weights * lengths / SPEED + attention
    columns = []
    for size in sizes:
        near = min(size, NODE)
        rounds, heads = size // near, max(KV_SHARE, near / 32)  # every member needs a key head
        seconds = computed / size * (1 + PER_DOUBLING * np.log2(size))
        if near > 1:
            sent = 2 * LAYERS * 2 * HIDDEN * (1 + heads) * (lengths / size) * 2
            seconds += sent * (near - 1) / near / IN_NODE + 8 * LAYERS * STARTED
        if rounds > 1:
            passed = 3 * LAYERS * (rounds - 1) * (lengths / rounds) * 2 * HIDDEN * heads / near * 2
            seconds += np.maximum(0, passed / BETWEEN - attention / size) + 3 * LAYERS * rounds * STARTED / 2
        columns.append(seconds)
    costs: Ints = np.maximum(1, np.rint(np.stack(columns, axis=1) / UNIT)).astype(np.int64)
    return costs


def sizes_of(num_ranks: int, largest: int = 64) -> list[int]:
    return [1 << k for k in range(min(num_ranks, largest).bit_length())]


def member_loads(costs: Ints, found: TeamAssignment, num_ranks: int) -> Ints:
    """Loads int64 (num_ranks,), from size and first rank alone."""
    loads = np.zeros(num_ranks, np.int64)
    for row, size, first in zip(costs, found.size.tolist(), found.rank.tolist(), strict=True):
        loads[first : first + size] += row[size.bit_length() - 1]
    return loads


def random_cases(config: TeamsBench, ranks: Sequence[int], *, few: bool) -> Iterator[tuple[Ints, int]]:
    """Costs and ranks: 8 to 16 samples a rank; or, with `few`, 1 to 8, and lists of equal lengths too."""
    drawn = dict(lists())
    if few:
        drawn["equal"] = lambda generator, count: np.full(count, generator.integers(1_000, 200_000))
    each = max(1, config.cases // len(POWERS + OTHERS) // len(drawn))
    for num_ranks in ranks:
        for at, draw in enumerate(drawn.values()):
            for case in range(each):
                generator = np.random.default_rng([config.seed, num_ranks, at, case, few])
                a_rank = int(generator.integers(1, 9) if few else generator.integers(8, 17))
                yield team_costs(draw(generator, a_rank * num_ranks), sizes_of(num_ranks)), num_ranks


def over_bound(config: TeamsBench, ranks: Sequence[int], *, few: bool = False) -> NDArray[np.float64]:
    """Largest load over the lower bound of each random case."""
    ratios = []
    for costs, num_ranks in random_cases(config, ranks, few=few):
        found = balance_teams(costs, num_ranks)
        ratios.append(member_loads(costs, found, num_ranks).max() / found.lower_bound)
    return np.array(ratios)


def single_size(costs: Ints, num_ranks: int) -> int:
    """Return the largest load of the best plan with teams of one size for all."""
    sizes = [size for size in sizes_of(num_ranks)[1 : costs.shape[1]] if num_ranks % size == 0]
    return min(balance(costs[:, size.bit_length() - 1], num_ranks // size).makespan for size in sizes)


def steps(config: TeamsBench) -> tuple[WideTable, list[Result]]:
    """Whole steps: the largest load over the mean of whole sequences, which has no cost of sharing."""
    demands = {("Wikipedia", 64): 1.02, ("Wikipedia", 512): 1.03, ("books", 64): 1.08, ("books", 512): 1.10}
    rows, results, slowest = [], [], 0.0
    for name, draw in lists().items():
        for num_ranks in (64, 512):
            ratios = []
            for seed in range(config.seeds):
                lengths = draw(np.random.default_rng(seed), num_ranks * 16)
                costs = team_costs(lengths, sizes_of(num_ranks, 32))
                mean, whole = costs[:, 0].sum() / num_ranks, balance(costs[:, 0], num_ranks).makespan
                started = time.thread_time()
                found = balance_teams(costs, num_ranks)
                milliseconds = 1e3 * (time.thread_time() - started)
                peak = member_loads(costs, found, num_ranks).max()
                shared = int((lengths * (found.size > 1)).sum()) / int(lengths.sum())
                single, bound = single_size(costs, num_ranks), found.lower_bound
                ratios.append((whole / mean, single / mean, peak / mean, bound / mean, 100 * shared, milliseconds))
            row = np.mean(ratios, axis=0)
            slowest = max(slowest, float(row[-1]))
            rows.append((f"{name}, {num_ranks} x 16", *row.tolist()))
            if (name, num_ranks) in demands:
                title, demand = f"{name}, {num_ranks} x 16: largest load over the mean", demands[name, num_ranks]
                results.append(Result(name=title, unit="x", values=(float(row[2]),), demand=demand))
    results.append(Result(name="planned, slowest list", unit="ms CPU", values=(slowest,), demand=20))
    columns = ("list", "whole", "single size", "teams", "bound", "shared, %", "CPU ms")
    note = f"mean of {config.seeds} seeds, teams of up to 32; single size: the best one for all; shared: of tokens"
    return WideTable(title="Largest load over the mean", columns=columns, rows=tuple(rows), note=note), results


@kernel
def best_of_every_plan(costs: Ints, num_ranks: int, below: int) -> int:
    """Return the smallest makespan under `below` of every plan, else `below`.

    Args:
        costs: int64 (num_sequences, num_sizes), of teams of 1, 2, 4, ... ranks; quickest with the largest first.
    """
    num_sequences, num_sizes = costs.shape
    loads = np.zeros((num_sequences + 1, num_ranks), np.int64)
    coming = np.zeros(num_sequences + 1, np.int64)  # Least work of the sequences from here on.
    for at in range(num_sequences - 1, -1, -1):
        coming[at] = coming[at + 1] + (costs[at] << np.arange(num_sizes)).min()
    size, first = np.zeros(num_sequences + 1, np.int64), np.full(num_sequences + 1, -1)
    at = 0
    while at >= 0:
        if at == num_sequences:
            below, at = loads[at].max(), at - 1
            continue
        width = 1 << size[at]
        first[at] = 0 if first[at] < 0 else first[at] + width
        if first[at] + width > num_ranks:
            size[at], first[at] = size[at] + 1, -1
            if size[at] == num_sizes:
                size[at], at = 0, at - 1
            continue
        mine, half = loads[at, first[at] : first[at] + width], first[at] ^ width
        if first[at] & width and np.array_equal(loads[at, half : half + width], mine):
            continue  # The other half of the block is the same but for its name.
        loads[at + 1] = loads[at]
        loads[at + 1, first[at] : first[at] + width] += costs[at, size[at]]
        if loads[at + 1].max() < below and loads[at + 1].sum() + coming[at + 1] <= num_ranks * (below - 1):
            at += 1
    return below


def over_best(config: TeamsBench) -> NDArray[np.float64]:
    """Largest load of 6 sequences on 8 ranks, 50 cases a list, over that of the best plan."""
    ratios = []
    for draw in lists().values():
        for case in range(50):
            costs = team_costs(-np.sort(-draw(np.random.default_rng([config.seed, case]), 6)), sizes_of(8))
            found = balance_teams(costs, 8)
            peak = int(member_loads(costs, found, 8).max())
            ratios.append(peak / best_of_every_plan(costs, 8, peak + 1))
    return np.array(ratios)


@kernel
def best_partition(costs: Ints, partitions: Ints) -> int:
    """Return the largest load of the best of some partitions of the ranks into teams, each rank in one team.

    Args:
        costs: int64 (num_sequences, num_sizes), the longest first; each goes to the team that ends it first.
        partitions: int64 (num_partitions, num_sizes), the teams of each size.
    """
    best = 1 << 62
    for teams in partitions:
        size_of = np.repeat(np.arange(len(teams)), teams)
        loads = np.zeros(len(size_of), np.int64)
        for row in costs:
            earliest, at = np.int64(1 << 62), 0
            for team in range(len(loads)):
                if loads[team] + row[size_of[team]] < earliest:
                    earliest, at = loads[team] + row[size_of[team]], team
            loads[at] = earliest
            if earliest >= best:
                break
        best = min(best, int(loads.max()))
    return best


def partitions_of(num_ranks: int, sizes: Sequence[int]) -> list[list[int]]:
    """Every number of teams of each size that take all ranks."""
    if len(sizes) == 1:
        return [[num_ranks]]
    return [
        [*rest, count]
        for count in range(num_ranks // sizes[-1] + 1)
        for rest in partitions_of(num_ranks - count * sizes[-1], sizes[:-1])
    ]


def flexsp_costs(lengths: Ints, sizes: Sequence[int]) -> Ints:
    """FlexSP's own costs without its constant, in nanoseconds: it counts once a rank."""
    computed = FLEXSP_SQUARED * lengths.astype(float) ** 2 + FLEXSP_LINEAR * lengths
    moved = 16 * LAYERS * HIDDEN * lengths / (1 << 20)
    columns = [(computed + (moved / FLEXSP_SPEED[size] if size > 1 else 0)) / size for size in sizes]
    return np.rint(np.stack(columns, axis=1) * 1e6).astype(np.int64)


def against_flexsp(config: TeamsBench, draw: Distribution) -> NDArray[np.float64]:
    """Our time of each batch of 512 sequences on 64 GPUs, over that of FlexSP's best partition."""
    sizes = sizes_of(64)
    partitions, constant = np.array(partitions_of(64, sizes)), FLEXSP_CONSTANT * 1e6
    ratios = []
    for seed in range(config.batches):
        lengths = -np.sort(-draw(np.random.default_rng(seed), 512).clip(max=FLEXSP_LONGEST))
        costs = flexsp_costs(lengths, sizes)
        ours = member_loads(costs, balance_teams(costs, 64), 64).max()
        ratios.append((ours + constant) / (best_partition(costs, partitions) + constant))
    return np.array(ratios)


def megatron_peak(lengths: Ints, num_ranks: int, cap: int) -> int:
    """Largest load of Megatron-LM's plan by its own cost, the square of the length over the size.

    Raises:
        ImportError: without it: `make peers-megatron`, and run `.venv-peers/megatron/bin/python`.
    """
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    scheduler = BalancedCPScheduler(cap, SimpleNamespace(size=lambda: num_ranks))
    _, groups = scheduler.get_groups_and_subsamples(list(enumerate(lengths.tolist())), None)
    loads = np.zeros(num_ranks, np.int64)
    for group in groups:
        size = np.bincount([sample for mine in group for sample in mine], minlength=len(lengths))
        for rank, mine in enumerate(group):
            loads[rank] += sum(-(-(int(lengths[sample]) ** 2) // int(size[sample])) for sample in mine)
    return int(loads.max())


def against_megatron(config: TeamsBench, num_ranks: int = 64) -> list[float]:
    """Our largest load over Megatron-LM's in each list, by its own cost and under its cap on the tokens of a slice."""
    ratios, sizes = [], np.array(sizes_of(num_ranks))
    for draw in lists().values():
        for cap in MEGATRON_CAPS:
            for seed in range(config.seeds):
                lengths = draw(np.random.default_rng(seed), num_ranks * 16).clip(max=cap * num_ranks)
                costs = -(-(lengths**2)[:, None] // sizes)
                found = balance_teams(costs, num_ranks, tokens=lengths, max_tokens=cap)
                peak = member_loads(costs, found, num_ranks).max()
                ratios.append(float(peak / megatron_peak(lengths, num_ranks, cap)))
    return ratios


class Measured(Teams):
    """Teams of up to 32 whose members pay `team_costs`."""

    def member_costs(self, costs: Ints, tokens: Ints, sizes: Ints, exponent: int) -> Ints:
        return team_costs(tokens, sizes.tolist())


TEAMS = Measured(largest=32, cut="trainer")


def step_price(costs: Mapping[str, Ints], lengths: Ints, num_ranks: int, balance: Balance) -> int:
    """Return what ranks wait for in the plan of a step; samples without other phases may be shared."""
    sizes, owner = dict.fromkeys(balance.caps, lengths), np.zeros(len(lengths), np.int32)
    step = StepSamples(costs, sizes, lengths, num_ranks, balance, owner)
    others = [column for phase, column in costs.items() if phase != "llm"]
    is_text = np.broadcast_to(np.all([column == 0 for column in others], axis=0), len(lengths))
    shares = share_in_teams(step, TEAMS, 0, 1, is_text)
    own = None if shares.teams is None else shares.loads(shares.teams.member_costs, num_ranks)
    return step.price(shares, own)


def within_caps(config: TeamsBench) -> Iterator[Result]:
    """Yield the price of steps within `MAX_TOKENS` over the mean load of whole sequences."""
    demands = {("Wikipedia", 64): 1.02, ("Wikipedia", 512): 1.03, ("books", 64): 1.18, ("books", 512): 1.60}
    objectives: tuple[Objective, ...] = ("barrier", "sum")
    for objective, (name, num_ranks) in product(objectives, demands):
        ratios = []
        for seed in range(config.seeds):
            lengths = lists()[name](np.random.default_rng(seed), num_ranks * 16)
            costs = team_costs(lengths, [1])[:, 0]
            balance = Balance(max_tokens=MAX_TOKENS, objective=objective)
            ratios.append(step_price({"llm": costs}, lengths, num_ranks, balance) * num_ranks / costs.sum())
        title = f"{name}, {num_ranks} x 16, max_tokens={MAX_TOKENS:,}, {objective}: price over the mean"
        demand = demands[name, num_ranks] if objective == "barrier" else None
        yield Result(name=title, unit="x", values=(float(np.mean(ratios)),), demand=demand)


def two_phases(config: TeamsBench) -> Iterator[Result]:
    """Yield the sum of largest loads over its bound: 45 % of Wikipedia's short texts have an image."""
    for (num_ranks, each), work in product(((64, 16), (64, 32), (512, 16)), (0.25, 0.6)):
        ratios = []
        for seed in range(config.seeds):
            generator = np.random.default_rng(seed)
            lengths = lists()["Wikipedia"](generator, num_ranks * each)
            table = team_costs(lengths, sizes_of(num_ranks, 32))
            has_image = (lengths < 4096) & (generator.random(len(lengths)) < 0.45)
            image = np.where(has_image, generator.lognormal(0, 0.8, len(lengths)), 0)
            image = np.ceil(image * (work * table[:, 0].sum() / image.sum())).astype(np.int64)
            price = step_price({"image": image, "llm": table[:, 0]}, lengths, num_ranks, Balance())
            table[has_image, 1:] = 1 << 62
            teams = StepTeams(np.ones(len(lengths), np.int32), np.array(sizes_of(num_ranks, 32)), table)
            bound = teams.lower_bound(num_ranks) + max(int(image.max()), -(-int(image.sum()) // num_ranks))
            ratios.append(price / bound)
        title = f"Wikipedia, {num_ranks} x {each}, images of {work:.0%} of the work: price over its bound"
        yield Result(name=title, unit="x", values=(float(np.mean(ratios)),), demand=1.015)


def tables(config: TeamsBench) -> list[Result | WideTable]:
    """Measure."""

    def limit(name: str, value: float, demand: float | None = None, unit: str = "x") -> Result:
        return Result(name=name, unit=unit, values=(float(value),), demand=demand)

    balance_teams([[3, 2], [2, 1], [2, 2]], 2)  # compiles
    powers, others = (over_bound(config, ranks) for ranks in (POWERS, OTHERS))
    few = over_bound(config, POWERS + OTHERS, few=True)
    found: list[Result | WideTable] = [
        limit("powers of two, over the bound: mean", powers.mean(), 1.005),
        limit("powers of two, over the bound: worst", powers.max(), 1.03),
        limit("6, 12, 24, 36, 48 ranks, over the bound: mean", others.mean(), 1.02),
        limit("6, 12, 24, 36, 48 ranks, over the bound: worst", others.max(), 1.25),
        limit("1 to 8 samples a rank, over the bound: mean", few.mean(), 1.03),
        limit("1 to 8 samples a rank: cases above 1.15", 100 * (few > 1.15).mean(), 2, "%"),
        limit("1 to 8 samples a rank, over the bound: worst", few.max()),
    ]
    best = over_best(config)
    found += [
        limit("6 sequences on 8 ranks, over the best of every plan: mean", best.mean(), 1.05),
        limit("6 sequences on 8 ranks, over the best of every plan: worst", best.max(), 1.2),
    ]
    table, results = steps(config)
    found += [*results, table]
    if "Wikipedia" in lists():
        ratios = against_flexsp(config, lists()["Wikipedia"])
        found.append(limit("over FlexSP's best of 1,828 partitions, worst batch", ratios.max(), 1.0))
        found += [*within_caps(config), *two_phases(config)]
    if config.peers:
        wikipedia = next(iter(lists().values()))(np.random.default_rng(0), 512 * 16)
        started = time.thread_time()
        megatron_peak(wikipedia.clip(max=512 * 4096), 512, 4096)
        found.append(limit("planned by Megatron-LM, 512 x 16", 1e3 * (time.thread_time() - started), unit="ms CPU"))
        of_lists = against_megatron(config)
        found.append(limit(f"over Megatron-LM's plan, worst of {len(of_lists)} lists", max(of_lists), 1.0))
        found.append(limit(f"over Megatron-LM's plan, mean of {len(of_lists)} lists", float(np.mean(of_lists))))
    return found


if __name__ == "__main__":
    run_command("benchmarks.teams", TeamsBench, tables)
