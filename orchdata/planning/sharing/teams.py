"""Sharing out a step whose long sequences several ranks share.

whole samples, as without teams ---------------------+
sizes and places of teams --rest next to pinned slices--+-> the cheaper, by Balance.price
"""

from __future__ import annotations

import numpy as np

from orchdata.balancers.teams import balance_teams
from orchdata.native.assign.teams import NEVER
from orchdata.planning.sharing.accumulated import share_out_in
from orchdata.planning.sharing.packed import NO_PADDING
from orchdata.planning.sharing.shares import Shares, StepSamples, one_microbatch
from orchdata.planning.teams import StepTeams, Teams


def share_in_teams(step: StepSamples, teams: Teams, exponent: int, accumulate: int) -> Shares:
    """Return ranks, microbatches and teams."""
    whole = share_out_in(step, NO_PADDING, accumulate) if accumulate > 1 else NO_PADDING.share_out(step)
    sizes = teams.sizes(step.num_ranks)
    table = teams.member_costs(step.costs["llm"], step.positions, sizes, exponent)
    found = balance_teams(np.where(table == NEVER, table[:, :1], table), step.num_ranks, sizes=sizes.tolist())
    if (found.size == 1).all():
        return whole
    shares = one_microbatch(found.rank)
    return Shares(shares.rank, shares.microbatch, 1, StepTeams(found.size, sizes, table))
