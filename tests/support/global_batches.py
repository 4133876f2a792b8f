"""Global batches as planning sees them, made up, and what holds of every way to share one out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.papers.disttrain import order_after_disttrain
from orchdata.balancers import simulate_1f1b
from orchdata.planning.balance import Balance
from orchdata.planning.sharing.shares import Shares, StepSamples, counted_groups, stream_ranks

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class GlobalBatch:
    """Samples of one step: some have large images, some clips of sound, all text."""

    costs: dict[str, Ints]
    positions: dict[str, Ints]
    stream_rank: NDArray[np.int32]
    num_ranks: int

    def sizes(self, balance: Balance) -> dict[str, Ints]:
        return {phase: self.positions[phase] for phase in balance.caps}

    def step(self, balance: Balance, *phases: str) -> StepSamples:
        """As plans see it, with the costs of these phases, by default of all."""
        costs = {phase: self.costs[phase] for phase in phases or self.costs}
        return StepSamples(costs, self.sizes(balance), self.positions["llm"], self.num_ranks, balance, self.stream_rank)


def global_batch(
    seed: int, num_samples: int, num_ranks: int, phases: tuple[str, ...] = ("image", "audio", "llm"), streams: int = 6
) -> GlobalBatch:
    random = np.random.default_rng(seed)
    positions = {
        "image": np.where(random.random(num_samples) < 0.3, random.integers(1, 30, num_samples) ** 2, 0),
        "audio": np.where(random.random(num_samples) < 0.3, random.integers(1, 300, num_samples), 0),
    }
    positions["llm"] = random.lognormal(4, 1, num_samples).astype(np.int64) + 1 + positions["image"] // 4
    costs = {
        "image": 3 * positions["image"] + positions["image"] ** 2 // 300,
        "audio": 2 * positions["audio"],
        "llm": 4 * positions["llm"] + positions["llm"] ** 2 // 1000,
    }
    return GlobalBatch(
        {phase: costs[phase] for phase in phases},
        positions,
        stream_ranks((seed + np.arange(num_samples)) % streams, num_ranks),
        num_ranks,
    )


def waits(cells: Ints, balance: Balance) -> int:
    """What ranks wait for, by the definition; cells are int64 (num_phases, num_ranks, num_microbatches)."""
    num_ranks = cells.shape[1]
    if balance.num_stages is not None and balance.assignment == "joint":
        longest = 0.0
        for of_rank in range(num_ranks):
            forward = np.tile(cells[-1, of_rank].astype(float), (balance.num_stages, 1))
            forward[0] += balance.num_stages * cells[:-1, of_rank].sum(axis=0)
            order = order_after_disttrain(forward, 2 * forward)
            longest = max(longest, simulate_1f1b(forward, 2 * forward, order))
        return int(longest)
    if balance.assignment == "per_phase" or balance.objective == "barrier":
        return int(cells.max(axis=1).sum())
    return int(cells.sum(axis=(0, 2)).max())


def check_step(batch: GlobalBatch, shares: Shares, balance: Balance, *, padded: bool = False) -> None:
    """Each sample once, caps kept in each cell (a sample above one is alone), counts of ranks and groups kept."""
    assert shares.rank.dtype == shares.microbatch.dtype == np.int32
    assert shares.rank.shape == shares.microbatch.shape == batch.stream_rank.shape
    assert ((shares.rank >= 0) & (shares.rank < batch.num_ranks)).all()
    assert ((shares.microbatch >= 0) & (shares.microbatch < shares.num_microbatches)).all()
    for rank, microbatch in np.ndindex(batch.num_ranks, shares.num_microbatches):
        mine = (shares.rank == rank) & (shares.microbatch == microbatch)
        for phase, cap in balance.caps.items():
            held = batch.positions[phase][mine]
            filled = mine.sum() * held.max(initial=0) if padded and phase == "llm" else held.sum()
            assert mine.sum() <= 1 or filled <= cap
    check_counts(shares, batch.num_ranks, balance)
    if balance.scope == "grouped":
        assert balance.group_size is not None
        assert (shares.rank // balance.group_size == batch.stream_rank // balance.group_size).all()


def check_counts(shares: Shares, num_ranks: int, balance: Balance) -> None:
    counts = np.bincount(shares.rank, minlength=num_ranks)
    assert balance.max_samples is None or counts.max() <= balance.max_samples
    if balance.equal_count:
        assert all(np.ptp(counts[group.start : group.stop]) <= 1 for group in counted_groups(balance, num_ranks))


@st.composite
def balances(draw: Any, num_samples: int, num_ranks: int) -> Balance:
    scope, group_size = draw(st.sampled_from([("global", None)] * 3 + [("grouped", 2), ("grouped", 3), ("grid", 2)]))
    named = draw(st.sampled_from(["llm", "llm", "encoders", "all"]))
    caps = {"llm": draw(st.integers(300, 3000))} if named != "encoders" else {}
    if named != "llm":
        caps |= {"image": draw(st.integers(200, 2000)), "audio": draw(st.integers(100, 900))}
    kind = draw(st.sampled_from(["barrier", "barrier", "barrier", "sum", "per phase", "1f1b"]))
    options: dict[str, Any] = {"objective": "sum"} if kind == "sum" else {}
    options |= {"assignment": "per_phase"} if kind == "per phase" else {}
    options |= {"order": "1f1b", "num_stages": draw(st.integers(1, 4))} if kind == "1f1b" else {}
    counted = draw(st.sampled_from(["", "", "equal", "most"])) if scope != "grid" else ""
    if counted == "most":
        options["max_samples"] = -(-num_samples // num_ranks) + draw(st.integers(1, 3))
    return Balance(
        scope=scope,
        group_size=group_size,
        max_tokens=caps if draw(st.integers(0, 9)) else None,
        oversize="own",
        equal_count=counted == "equal",
        effort=draw(st.sampled_from([0.0, 1.0])),
        **options,
    )


@st.composite
def steps(draw: Any) -> tuple[GlobalBatch, Balance]:
    num_samples, num_ranks = draw(st.integers(1, 60)), draw(st.integers(1, 6))
    phases = draw(st.sampled_from([("llm",), ("image", "llm"), ("image", "audio", "llm"), ("image", "audio", "llm")]))
    batch = global_batch(draw(st.integers(0, 10_000)), num_samples, num_ranks, phases)
    return batch, draw(balances(num_samples, num_ranks))
