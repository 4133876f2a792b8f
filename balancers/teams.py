"""Teams of ranks: costs at each size of team, (num_sequences, num_sizes) -> size and first rank of each sequence.

A sequence that costs more than a rank's fair share sets the pace of a step, however whole sequences are assigned. Here
2, 4, 8, ... ranks may share it, and each member pays what one of so many pays. Ranks are in teams of several sizes, one
after another, and have whole sequences besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from orchdata.balancers.assignment import Assignment
from orchdata.balancers.checks import MAX_TOTAL, checked_costs, checked_count, checked_phases, checked_ranks_count
from orchdata.native.assign.packed import solve
from orchdata.native.assign.teams import NEVER, solve_teams

_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class TeamAssignment(Assignment):
    """Sequences assigned to teams of ranks; `rank` is the first member of each, and `loads` count every member.

    Attributes:
        size: int32 (num_sequences,), the number of ranks that share each: `rank` to `rank + size - 1`.
    """

    size: NDArray[np.int32]


def balance_teams(
    costs: ArrayLike,
    num_ranks: int,
    *,
    sizes: Sequence[int] | None = None,
    tokens: ArrayLike | None = None,
    max_tokens: int | None = None,
) -> TeamAssignment:
    """Choose how many ranks share each sequence, and which, so that the largest load is as small as is found quickly.

    A team of s ranks begins at a multiple of s and ends at the last rank or before: 6 ranks have one team of 4 (0 to 3)
    and three of 2. Ranks that no large team has get more of the rest. Where whole sequences come within 0.1 % of the
    lower bound, or as low as teams, nothing is shared, and the result is that of `balance`.

    For a target of the largest load, each sequence gets the size of least work at which it keeps the target (Turek,
    Wolf and Yu 1992). Sizes are placed from the largest, so that a team's ranks are level when it comes; each sequence
    goes into the fullest team in which it keeps the target (as in MULTIFIT; Coffman, Garey and Johnson 1978), and one
    that finds none gets a larger team in the next trial. Targets rise from the lower bound until all sequences fit.
    Deterministic to the bit.

    The lower bound is the smallest T at which, for every size s, the sequences that keep T only at s ranks or more fit
    into floor(num_ranks / s) teams of s, each at the size of its least work that keeps T.

    Args:
        costs: integers (num_sequences, num_sizes), at least 0, what one member pays for each sequence in a team of each
            size, in any unit. A size that costs no less than a smaller one is not taken, so a sequence whose costs are
            all equal stays whole, within `max_tokens`. The largest cost of each, times the largest size, sum to at most
            2**62. A sequence that stays whole and costs 0 gets rank -1.
        num_ranks: at least 1. Sizes above it are not taken.
        sizes: of the columns of `costs`, ascending powers of two from 1; by default 1, 2, 4, ....
        tokens: integers (num_sequences,), the length of each sequence, with
        max_tokens: the most tokens of a slice, which is tokens / size rounded up. It does not cap what a rank gets in
            several sequences: `split_microbatches` does that.

    Raises:
        ValueError: costs that are not non-negative integers, wrong shapes or sizes, or a sequence that no team holds.
    """
    if np.ndim(costs) != 2:
        raise ValueError(f"costs must have a row for each sequence and a column for each size, got {np.shape(costs)}")
    table = checked_phases(costs)
    num_ranks = checked_ranks_count(num_ranks)
    widths = _checked_sizes(sizes, table.shape[1])
    if int(table.max(axis=1).sum()) * int(widths[-1]) > MAX_TOTAL:
        raise ValueError(f"costs sum to more than 2**62 in teams of {widths[-1]}: scale them down")
    if (tokens is None) != (max_tokens is None):
        raise ValueError("tokens and max_tokens go together: give both, or neither")
    widths = widths[widths <= num_ranks]
    table = np.ascontiguousarray(table[:, : len(widths)])
    if tokens is not None and max_tokens is not None:
        _forbid_long_slices(table, widths, checked_costs(tokens, "tokens"), checked_count(max_tokens, "max_tokens"))
    size, rank, loads, bound = solve_teams(table, widths, num_ranks)
    whole = np.ascontiguousarray(table[:, 0])
    if whole.max(initial=0) <= loads.max():
        whole_rank, whole_loads, _ = solve(whole, num_ranks, max(1, len(whole)), 0, False, _TOLERANCE)
        if (size == 1).all() or whole_loads.max() <= max(loads.max(), bound + int(bound * _TOLERANCE)):
            size, rank, loads = np.ones_like(size), whole_rank, whole_loads
    rank[(size == 1) & (whole == 0)] = -1
    return TeamAssignment(rank, loads, int(loads.max()), int(bound), size)


def _checked_sizes(sizes: Sequence[int] | None, num_sizes: int) -> NDArray[np.int64]:
    given = (
        [1 << column for column in range(num_sizes)] if sizes is None else [checked_count(s, "sizes") for s in sizes]
    )
    powers = sorted({s for s in given if s & (s - 1) == 0 and s <= MAX_TOTAL})
    if len(given) != num_sizes or given[0] != 1 or given != powers:
        raise ValueError(
            f"sizes must be ascending powers of two from 1, one for each of {num_sizes} columns of costs, got {given}"
        )
    return np.array(given, np.int64)


def _forbid_long_slices(
    table: NDArray[np.int64], sizes: NDArray[np.int64], tokens: NDArray[np.int64], max_tokens: int
) -> None:
    """Write NEVER where a slice is above the cap."""
    if len(tokens) != len(table):
        raise ValueError(f"tokens must have one entry for each of the {len(table)} sequences, got {len(tokens)}")
    longest = int(tokens.max(initial=0))
    if longest > int(sizes[-1]) * max_tokens:
        raise ValueError(
            f"sequence {int(tokens.argmax())} has {longest} tokens, but the largest team of {sizes[-1]} ranks holds"
            f" {int(sizes[-1]) * max_tokens} with max_tokens={max_tokens}: raise it, or take larger teams or more ranks"
        )
    table[-(-tokens[:, None] // sizes) > max_tokens] = NEVER
