"""A plan in micro-steps is never dearer than simpler ones, on random mixes: sorted, cut and balanced; a grid; by the
backbone alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from global_batches import GlobalBatch, check_counts
from numpy.typing import NDArray

from orchdata.balancers import balance_phases
from orchdata.planning.assign import stream_ranks
from orchdata.planning.balance import Balance
from orchdata.planning.sharing.packed import NO_PADDING

Ints = NDArray[np.int64]
CAP = 4096


def random_mix(seed: int, num_samples: int, num_ranks: int) -> GlobalBatch:
    """Texts short or of a heavy tail, some samples with up to forty images, clips in all streams or in a few."""
    random = np.random.default_rng(seed)
    text = random.lognormal(5, 1, num_samples) if seed % 2 else 60 * (1 + random.pareto(1.2, num_samples))
    images = np.where(random.random(num_samples) < random.uniform(0.05, 0.6), random.integers(1, 41, num_samples), 0)
    patches = images * random.integers(4, 24)
    stream = np.arange(num_samples) % 16
    heard = random.random(num_samples) < (0.6 if seed % 3 else 0.2)
    frames = np.where(heard & ((stream < 4) | (seed % 3 == 0)), random.integers(20, 400, num_samples), 0)
    tokens = np.minimum(text.astype(np.int64) + 8 + patches // 4 + frames // 4, CAP)
    costs = {
        "image": int(random.integers(1, 30)) * patches + patches * patches // 200,
        "audio": 3 * frames,
        "llm": 16 * tokens + tokens * tokens // 1000,
    }
    return GlobalBatch(costs, {"llm": tokens}, stream_ranks(stream, num_ranks), num_ranks)


def sorted_cut_and_balanced(batch: GlobalBatch, by: Ints, num_micro_steps: int) -> int | None:
    """What ranks wait for; None where a micro-step is not brought within the cap."""
    tokens = batch.positions["llm"]
    order = np.lexsort((-tokens, -by))
    before = np.cumsum(tokens[order]) - tokens[order]
    cut, total = before * num_micro_steps // int(tokens.sum()), 0
    for number in range(num_micro_steps):
        mine = order[cut == number]
        part = {phase: column[mine] for phase, column in batch.costs.items()}
        try:
            total += sum(balance_phases(part, batch.num_ranks, sizes=tokens[mine], max_size=CAP).makespans)
        except ValueError:
            return None
    return total


@pytest.mark.parametrize(
    ("seed", "num_samples", "num_ranks"),
    [*((seed, 150 + 90 * seed, 4 + seed % 9) for seed in range(16)), (16, 9000, 64), (17, 18_000, 256)],
)
def test_no_simpler_plan_costs_less(seed: int, num_samples: int, num_ranks: int) -> None:
    batch, balance = random_mix(seed, num_samples, num_ranks), Balance(max_tokens=CAP)
    step = batch.step(balance)
    shares = NO_PADDING.share_out(step)
    price, micro_steps = step.price(shares), shares.num_microbatches
    assert micro_steps > 1
    check_counts(shares, num_ranks, balance)
    for by in (*batch.costs.values(), np.sum(list(batch.costs.values()), axis=0)):
        simple = sorted_cut_and_balanced(batch, by, micro_steps)
        assert simple is None or price <= simple
    for size in (2, 8):
        grid = replace(balance, scope="grid", group_size=size)
        assert price <= step.price(NO_PADDING.share_out(batch.step(grid)))
    assert price <= step.price(NO_PADDING.share_out(batch.step(balance, "llm")))


def test_what_was_planned_before_micro_steps_were_dealt_is_dearer_than_simpler_plans() -> None:
    """So the comparison above can fail: ranks by all phases, each rank's samples split by their sums."""
    dearer, balance = 0, Balance(max_tokens=CAP)
    for seed in range(12):
        num_ranks = 4 + seed % 9
        batch = random_mix(seed, 150 + 90 * seed, num_ranks)
        step = batch.step(balance)
        by_sums = step.split(step.assign())
        keys = (*batch.costs.values(), step.total_costs)
        simple = [sorted_cut_and_balanced(batch, by, by_sums.num_microbatches) for by in keys]
        least = min((each for each in simple if each is not None), default=None)
        dearer += least is not None and least < step.price(by_sums)
    assert dearer >= 3
