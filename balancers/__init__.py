"""Balancers: costs in, assignments out. Pure functions of numpy arrays, without torch."""

from __future__ import annotations

from orchdata.balancers.assignment import Assignment, lower_bound
from orchdata.balancers.costs import CostModel, PhaseCost, TransformerCost
from orchdata.balancers.microbatches import split_microbatches
from orchdata.balancers.packed import balance
from orchdata.balancers.phases import PhaseAssignment, balance_phases

__all__ = [
    "Assignment",
    "CostModel",
    "PhaseAssignment",
    "PhaseCost",
    "TransformerCost",
    "balance",
    "balance_phases",
    "lower_bound",
    "split_microbatches",
]
