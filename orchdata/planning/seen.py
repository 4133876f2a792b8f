"""What people look at in a plan: the loads of ranks before and after balancing, as a view and as a drawing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.html import axes_of, bar, pairs, table, view

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from orchdata.planning.plan import Plan

_MOST_RANKS = 64
_PERCENTILES = (0, 10, 50, 90, 100)


def plan_view(plan: Plan) -> str:
    """Return the view of a plan in a notebook: each rank's load, or percentiles of them above 64 ranks."""
    about = [("epoch, step", f"{plan.epoch}, {plan.step}"), ("samples", f"{len(plan.row):,}")]
    about += [("microbatches of a rank", f"{plan.num_microbatches}"), ("hash", plan.hash)]
    tables = [
        f"<strong>{name}</strong>{_loads(plan.loads_unbalanced(name), plan.loads(name), plan.num_ranks)}"
        for name in plan.phases
        if plan.costs[name].any()
    ]
    title = f"Plan of {plan.num_ranks:,} ranks: loads over the mean load, dealt out in turn and as planned"
    return view(title, pairs(about), *tables)


def _loads(before: NDArray[np.int64], after: NDArray[np.int64], num_ranks: int) -> str:
    before = np.repeat(before, len(after) // len(before))  # where peers encode, each repeats its rank's parts
    mean, largest = max(float(after.mean()), 1e-9), max(int(before.max()), int(after.max()), 1)
    if len(after) > _MOST_RANKS:
        places = np.array(_PERCENTILES)
        before, after = np.percentile(before, places), np.percentile(after, places)
        names = ["least", *(f"{place} %" for place in _PERCENTILES[1:-1]), "largest"]
    else:
        peers = len(after) // num_ranks
        names = [f"rank {gpu // peers}" + f", peer {gpu % peers}" * (peers > 1) for gpu in range(len(after))]
    rows = [
        (name, *(bar(load / largest, f"{load / mean:.2f}") for load in loads))
        for name, *loads in zip(names, before.tolist(), after.tolist(), strict=True)
    ]
    return table(("", "in turn", "planned"), rows, numbers_from=3)


def plan_plot(plan: Plan, axes: Axes | None) -> Axes:
    """Draw the loads of ranks before and after balancing, summed over phases. Return the axes."""
    axes = axes_of(axes)
    ranks = np.arange(plan.num_ranks)
    scale = {phase: plan.peers_of(phase) for phase in plan.phases}
    before = np.sum([plan.loads_unbalanced(phase) * scale[phase] for phase in plan.phases], axis=0)
    waits = [plan.waits(phase).sum(axis=1).reshape(plan.num_ranks, -1).max(axis=1) for phase in plan.phases]
    after = np.sum(waits, axis=0)
    mean = max(float(after.mean()), 1e-9)
    axes.bar(ranks - 0.2, before / mean, width=0.4, label="in turn", color="#b0b0b0")
    axes.bar(ranks + 0.2, after / mean, width=0.4, label="planned", hatch="//")
    axes.axhline(1.0, linestyle="--", linewidth=1, color="black", label="mean")
    axes.set_xlabel("rank")
    axes.set_ylabel("load over the mean")
    axes.legend()
    return axes
