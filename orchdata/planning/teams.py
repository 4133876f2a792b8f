"""Teams of ranks that share long sequences: the option `Balance(teams=)`, what a member pays, and the teams of a step.

costs of whole sequences --Teams.member_costs--> costs of a member at each size --sharing--> StepTeams of a Plan
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers.assignment import checked_count, lower_bound
from orchdata.balancers.costs.model import coefficients_of
from orchdata.balancers.costs.phase import PhaseCost, checked_coefficient
from orchdata.native.assign.teams import NEVER, least_works, teams_bound
from orchdata.native.costs import COST_SHIFT, sequence_costs

Ints = NDArray[np.int64]
Ranks = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Teams:
    """Ranks share long sequences: a team of 2, 4, 8, ... ranks attends to a sequence together, chosen in each step.

    A member of a team of g pays the sequence's `llm` cost / g, rounded up, and `per_token` for each of its tokens / g;
    or what `cost` says. Samples with media are shared under `assignment="per_phase"` alone.

    Attributes:
        largest: the most ranks of a team, a power of two. Which samples are usable depends on it, as it does on
            `Balance.max_tokens`.
        cut: who cuts sequences into slices. "loader": a member gets its slice of the team's sequences, which
            `od.TeamAttention` computes with. "trainer": every member gets the whole sequences.
        gain: a step shares only if its `Balance.price` falls by this part.
        per_token: cost of a shared token for the exchange between members, in the unit of the cost model's `llm`; one
            number, or one for each size. With 0 sharing costs nothing but the rounding.
        cost: of a member, by the tokens of the whole sequence, as measured for each size; in place of the above. A size
            that it lacks is not taken.
        mixed: whether one microbatch may have teams of several sizes, and whole samples next to teams.
    """

    largest: int
    cut: Literal["loader", "trainer"] = "loader"
    gain: float = 0.02
    per_token: float | Mapping[int, float] = 0.0
    cost: Mapping[int, PhaseCost] | None = None
    mixed: bool = True

    def __post_init__(self) -> None:
        if self.cut not in ("loader", "trainer"):
            raise ValueError(f"Teams.cut must be 'loader' or 'trainer', who cuts shared sequences, got {self.cut!r}")
        largest = checked_count(self.largest, "Teams.largest", 2)
        if largest & (largest - 1):
            raise ValueError(f"Teams.largest must be a power of two, got {largest}")
        gain = checked_coefficient(self.gain, "Teams.gain")
        if gain >= 1:
            raise ValueError(f"Teams.gain is a part of the price of a step, below 1, got {gain}")
        object.__setattr__(self, "gain", gain)
        if not isinstance(self.mixed, bool):
            raise ValueError(f"Teams.mixed must be True or False, got {self.mixed!r}")
        if isinstance(self.per_token, Mapping):
            values = {size: checked_coefficient(v, f"Teams.per_token[{size}]") for size, v in self.per_token.items()}
            object.__setattr__(self, "per_token", values)
        else:
            object.__setattr__(self, "per_token", checked_coefficient(self.per_token, "Teams.per_token"))
        allowed = {1 << power for power in range(1, largest.bit_length())}
        if isinstance(self.per_token, Mapping) and set(self.per_token) != allowed:
            raise ValueError(
                f"Teams.per_token must name each of the sizes {sorted(allowed)}, got {sorted(self.per_token)}"
            )
        cost = {largest: None} if self.cost is None else self.cost
        if not set(cost) <= allowed or largest not in cost:
            raise ValueError(
                f"Teams.cost must name sizes among {sorted(allowed)}, also largest={largest}, on which usable samples "
                f"depend, got {sorted(cost)}; or lower largest"
            )
        if self.cost is not None and not all(isinstance(each, PhaseCost) for each in self.cost.values()):
            raise ValueError(f"Teams.cost must map sizes of teams to od.PhaseCost, got {self.cost!r}")

    def sizes(self, num_ranks: int) -> Ints:
        """Return the sizes of teams on so many ranks, ascending from 1: int64 (num_sizes,)."""
        sizes = [1 << power for power in range(min(self.largest, num_ranks).bit_length())]
        return np.array([size for size in sizes if self.cost is None or size in (1, *self.cost)], np.int64)

    def member_costs(self, costs: Ints, tokens: Ints, sizes: Ints, exponent: int) -> Ints:
        """Return what a member pays for each sequence at each size, int64 (n, num_sizes), in the unit of `costs`: that
        of the model times 2**exponent.
        """
        table = np.empty((len(costs), len(sizes)), np.int64)
        for column, size in enumerate(sizes.tolist()):
            if size == 1:
                table[:, 0] = costs
            elif self.cost is None:
                rate = self.per_token[size] if isinstance(self.per_token, Mapping) else self.per_token
                table[:, column] = -(-costs // size)
                if rate:
                    fixed = round(math.ldexp(rate, exponent + COST_SHIFT))
                    table[:, column] += sequence_costs(-(-tokens // size), fixed, 0, 0, np.empty((0, 2), np.int64))
            else:
                table[:, column] = sequence_costs(tokens, *coefficients_of(self.cost[size], exponent))
        return table


@dataclass(frozen=True, eq=False)
class StepTeams:
    """The teams of one step: `size`, int32 (n,), the ranks that share each sample, from `Plan.rank` on; the possible
    `sizes`; and `table`, int64 (n, num_sizes), the cost of a member in `llm` at each; `NEVER` where a sample cannot
    take it.
    """

    size: Ranks
    sizes: Ints
    table: Ints

    @cached_property
    def member_costs(self) -> Ints:
        """What each member of a sample's team pays in `llm`, int64 (n,)."""
        return self.own(self.table)

    def own(self, table: Ints) -> Ints:
        """Return the entry of each sample at its size, int64 (n,), of a table like `table`."""
        found: Ints = table[np.arange(len(self.size)), np.searchsorted(self.sizes, self.size)]
        return found

    def members(self, rank: Ranks) -> tuple[NDArray[np.intp], Ranks]:
        """Return the sample and the rank of each member, by their first members: (num_members,) each."""
        sample = np.repeat(np.arange(len(self.size)), self.size)
        place = np.arange(len(sample)) - np.repeat(np.cumsum(self.size) - self.size, self.size)
        return sample, (rank[sample] + place).astype(np.int32)

    def lower_bound(self, num_ranks: int, encoders: Sequence[Ints] = ()) -> int:
        """Return a bound: no choice of teams has a smaller largest load. Costs of `encoders` add up with `llm` on whole
        samples.
        """
        table = self.table
        if encoders:
            others = np.sum(encoders, axis=0)
            table = np.where(table == NEVER, NEVER, table + np.where(self.sizes == 1, others[:, None], 0))
            table[others > 0, 1:] = NEVER
        return int(teams_bound(table, self.sizes, num_ranks, least_works(table, self.sizes)))

    def cost_bound(self, num_ranks: int, encoders: Sequence[Ints], *, meets: bool) -> int:
        """Return a bound of what a step costs, `encoders` as above; `meets`: ranks do so after each phase."""
        if not meets:
            return self.lower_bound(num_ranks, encoders)
        return self.lower_bound(num_ranks) + sum(int(lower_bound(costs, num_ranks)) for costs in encoders)


@dataclass(frozen=True, slots=True, eq=False)
class JoinedSequences:
    """The sequences of one team of `size` ranks in a microbatch, joined and padded once: `at`, consecutive, which they
    are in it; `borders`, int64 (num_sequences + 1,), of whole sequences, before padding; `tokens` of each member's
    slice.
    """

    size: int
    at: NDArray[np.intp]
    borders: Ints
    tokens: int

    def held(self, place: int) -> tuple[Ints, Ints]:
        """Return the first token, and the one after the last, that a member has of each sequence: (num_sequences,)."""
        first, lengths = place * self.tokens - self.borders[:-1], np.diff(self.borders)
        return np.clip(first, 0, lengths), np.clip(first + self.tokens, 0, lengths)


def joined_sequences(sizes: Ranks, lengths: Ints, multiple_of: int) -> list[JoinedSequences]:
    """Return the sequences of one rank's microbatch by their teams, the largest first. `sizes` are those of their
    teams, descending; the length of a slice is a multiple of `multiple_of`.
    """
    joined = []
    for size in np.unique(sizes)[::-1].tolist():
        at = np.flatnonzero(sizes == size)
        borders = np.concatenate([[0], np.cumsum(lengths[at])])
        tokens = -(-int(borders[-1]) // (size * multiple_of)) * multiple_of
        joined.append(JoinedSequences(size, at, borders, tokens))
    return joined
