"""Figures of `stats()`: measured when a step is built, added when it is delivered, shown. docs/stats.md has each.

    step_figures: name -> numbers --added--> name -> sum --shown--> stats()[name]

Worker processes send the numbers unchanged.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.assignment import MAX_TOTAL
from orchdata.planning.make_plan import PlanSpec
from orchdata.planning.plan import Plan

STAGES = ("planning", "reading", "decoding", "packing", "handing_over")
"""Of `BuiltStep.seconds`: what `stats()["milliseconds"]` shows per step."""


def step_figures(spec: PlanSpec, plan: Plan, rank: int, num_failures: int) -> dict[str, Any]:
    """Return the numbers of every figure in a step: a number, a tuple, or a mapping of those by name; None adds
    nothing. Takes milliseconds at thousands of ranks.
    """
    balance, price, lengths, number = spec.balance, spec.balance.price, plan.llm_positions, plan.num_microbatches
    # Where one rank has everything in one microbatch, all loads are sums.
    is_alone = plan.num_ranks == number == 1 and plan.padded.adds_up and not plan.parts and price.num_stages is None
    mine = slice(None) if is_alone else plan.places(rank)
    # A shared sample counts on the first of its ranks alone. One that failed stays where others wait for it.
    counted = mine if plan.teams is None else np.flatnonzero(plan.rank == rank)
    num_samples = len(plan.row[counted]) - (0 if plan.keeps_shapes else num_failures)

    # Of each phase six loads of ranks, and the price of the step: as planned, dealt out in turn, and even.
    totals = {phase: int(costs.sum()) for phase, costs in plan.costs.items()}
    balanced = spec.costs.balanced
    even = price.of_even([totals[phase] / plan.num_ranks for phase in balanced], number)
    planned = in_turn = even
    phases = {phase: (float(total),) * 6 for phase, total in totals.items()}
    if not is_alone:
        cells = {phase: plan.cells(phase) for phase in plan.phases}
        dealt = {phase: plan.cells_unbalanced(phase) for phase in plan.phases}
        planned, in_turn = (
            float(price.of([of[phase] * plan.peers_of(phase) for phase in balanced])) for of in (cells, dealt)
        )
        for phase, own in cells.items():
            phases[phase] = (
                float(dealt[phase].sum(axis=1).max()),
                float(own.sum(axis=1).max()),
                float(plan.lower_bound(phase)),
                totals[phase] / plan.gpus(phase),
                float(own.max(axis=0).sum()),
                float(dealt[phase].max(axis=0).sum()),
            )

    # Tokens, and those of microbatches as long as their longest sample.
    own_lengths = lengths[mine]
    groups, microbatch = [own_lengths], plan.microbatch[mine]
    if number > 1:
        groups = [own_lengths[microbatch == each] for each in range(number)]
    padded = sum(int(inside.max(initial=0)) * len(inside) for inside in groups)

    # Tokens in teams by size, and samples of which a rank has more than its cap.
    teams, size = {}, plan.team_size
    if balance.teams is not None:
        above = -(-lengths // size) > balance.caps.get("llm", MAX_TOTAL)
        teams = {"all": int(lengths.sum()), "above_cap": int(above.sum())}
        teams |= {str(each): int(lengths[size == each].sum()) for each in np.unique(size[size > 1]).tolist()}

    # Samples, tokens, loss tokens and started passes of each source of a mixture.
    sources: dict[str, dict[str, int]] = {}
    if plan.passes is not None and plan.source_loss_tokens is not None:
        counts = np.zeros((len(plan.sources), 4), np.int64)
        np.add.at(counts[:, 0], plan.source, 1)
        np.add.at(counts[:, 1], plan.source, lengths)
        counts[:, 2] = plan.source_loss_tokens
        np.maximum.at(counts[:, 3], plan.source, plan.passes + 1)
        keys = "samples", "tokens", "loss_tokens", "passes"
        sources = {
            name: dict(zip(keys, of, strict=True)) for name, of in zip(plan.sources, counts.tolist(), strict=True)
        }
    return {
        "samples": num_samples,
        "loss_tokens": plan.loss_tokens,
        "overflow": _overflow(spec, plan, counted),
        "phases": phases,
        "microbatches": number,
        "step_imbalance": (planned, even),
        "step_imbalance_unbalanced": (in_turn, even),
        "saved": (planned, in_turn),
        "padding_if_padded": (int(own_lengths.sum()), padded),
        "fill": plan.filled,
        "own_streams": plan.own_streams(rank),
        "teams": teams,
        "features": {phase: tuple(plan.feature_rows(phase).tolist()) for phase in plan.parts},
        "sources": sources,
    }


def _overflow(spec: PlanSpec, plan: Plan, counted: NDArray[np.int64] | slice) -> dict[str, int]:
    """Return of these samples those that were truncated, the tokens that they lost, those that were split (which count
    with their first piece), and their pieces.
    """
    index = getattr(spec.costs, "index", None)
    if index is None or not any(index.totals["overflow"].values()):
        return {}
    rows = plan.row[counted]
    if plan.ranges is not None:  # a document counts where it begins
        rows = rows[plan.ranges.first[counted] == 0]
    cut, piece = index.cut_tokens[rows], index.piece[rows]
    following = rows + 1
    continued = np.zeros(len(rows), np.bool_)
    inside = following < index.num_rows
    continued[inside] = index.piece[following[inside]] > 0
    split, pieces = (piece == 0) & continued, (piece > 0) | continued
    found = {"truncated": cut != 0, "cut_tokens": cut, "split": split, "pieces": pieces}
    return {name: int(each.sum()) for name, each in found.items()}


START: dict[str, Any] = {
    "samples": 0,
    "loss_tokens": 0,
    "overflow": dict.fromkeys(("truncated", "cut_tokens", "split", "pieces"), 0),
    "phases": {},
    "microbatches": 0,
    "step_imbalance": (0.0, 0.0),
    "step_imbalance_unbalanced": (0.0, 0.0),
    "saved": (0.0, 0.0),
    "padding_if_padded": (0, 0),
    "fill": None,
    "own_streams": None,
    "teams": {},
    "features": {},
    "sources": {},
}
"""The sums of no step, in the order of `stats()`."""


def plain_figures(num_steps: int, num_samples: int) -> dict[str, Any]:
    """The sums over steps of one rank that no plan is made for: all samples cost the same."""
    even = float(num_samples), float(num_samples)
    return START | {
        "samples": num_samples,
        "phases": {"llm": (float(num_samples),) * 6},
        "microbatches": num_steps,
        "step_imbalance": even,
        "step_imbalance_unbalanced": even,
        "saved": even,
        "padding_if_padded": (num_samples, num_samples),
    }


def added(total: Any, numbers: Any, name: str = "") -> Any:
    """Return sums with the numbers of one more step."""
    if numbers is None or total is None:
        return total if numbers is None else numbers
    if isinstance(numbers, dict):
        return total | {key: added(total.get(key), each, key) for key, each in numbers.items()}
    if isinstance(numbers, tuple):
        return tuple(map(operator.add, total, numbers))
    return max(total, numbers) if name == "passes" else total + numbers


def shown(sums: dict[str, Any], num_steps: int) -> dict[str, Any]:
    """Return plain values of sums over steps."""

    def ratio(name: str, empty: float = 1.0) -> float:
        return sums[name][0] / sums[name][1] if sums[name][1] else empty

    phases = {}
    for phase, (unbalanced, balanced, bound, mean, in_micro_steps, unbalanced_in_micro_steps) in sums["phases"].items():
        loads = {
            "imbalance_unbalanced": unbalanced,
            "imbalance": balanced,
            "imbalance_unbalanced_in_micro_steps": unbalanced_in_micro_steps,
            "imbalance_in_micro_steps": in_micro_steps,
            "lower_bound_over_mean": bound,
        }
        phases[phase] = {name: load / (mean or 1.0) or 1.0 for name, load in loads.items()}
    features = {}
    for phase, rows in sums["features"].items():
        shares = [moved / max(1, sum(rows)) for moved in rows]
        features[phase] = {"rows": sum(rows) / num_steps, "within_nodes": shares[1], "between_nodes": shares[2]}
    teams, own_streams = dict(sums["teams"]), sums["own_streams"]
    if teams:
        tokens, above = max(1, teams.pop("all")), teams.pop("above_cap")
        share = {size: teams[size] / tokens for size in sorted(teams, key=int)}
        teams = {"share": share, "above_cap": above}
    return sums | {
        "overflow": {**sums["overflow"]},
        "phases": phases,
        "microbatches": sums["microbatches"] / num_steps,
        "step_imbalance": ratio("step_imbalance"),
        "step_imbalance_unbalanced": ratio("step_imbalance_unbalanced"),
        "saved": 1 - ratio("saved"),
        "padding_if_padded": 1 - ratio("padding_if_padded"),
        "fill": sums["fill"] and ratio("fill"),
        "own_streams": None if own_streams is None else own_streams / num_steps,
        "teams": teams,
        "features": features,
        "sources": {name: {**of} for name, of in sums["sources"].items()},
    }
