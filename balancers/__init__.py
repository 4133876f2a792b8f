"""Balancers: costs in, assignments out. Pure functions of numpy arrays, without torch."""

from __future__ import annotations

from orchdata.balancers.assignment import Assignment, MovedAssignment, lower_bound
from orchdata.balancers.bins import bin_bound, deal_bins, pack_bins
from orchdata.balancers.costs.families import MoE
from orchdata.balancers.costs.model import CostModel, FittedCost, FittedCosts, fit_phase_cost, fit_phase_costs
from orchdata.balancers.costs.phase import PhaseCost, TransformerCost
from orchdata.balancers.microbatches import MicrobatchOrder, order_microbatches, simulate_1f1b, split_microbatches
from orchdata.balancers.moves import (
    GridAssignment,
    GridPhases,
    MovedPhases,
    balance_from,
    balance_grid,
    balance_grouped,
    grid_round,
)
from orchdata.balancers.packed import TeamAssignment, balance, balance_padded, balance_teams
from orchdata.balancers.phases import PhaseAssignment, balance_phases
from orchdata.balancers.placement import NodePlacement, place_on_nodes, traffic_between

__all__ = [
    "Assignment",
    "CostModel",
    "FittedCost",
    "FittedCosts",
    "GridAssignment",
    "GridPhases",
    "MicrobatchOrder",
    "MoE",
    "MovedAssignment",
    "MovedPhases",
    "NodePlacement",
    "PhaseAssignment",
    "PhaseCost",
    "TeamAssignment",
    "TransformerCost",
    "balance",
    "balance_from",
    "balance_grid",
    "balance_grouped",
    "balance_padded",
    "balance_phases",
    "balance_teams",
    "bin_bound",
    "deal_bins",
    "fit_phase_cost",
    "fit_phase_costs",
    "grid_round",
    "lower_bound",
    "order_microbatches",
    "pack_bins",
    "place_on_nodes",
    "simulate_1f1b",
    "split_microbatches",
    "traffic_between",
]
