"""Segments: rows of parts -> the members of a team that may have their tokens, where ranks share samples with media.

    sample:  text, media, text                          members:  |  slice 0  |  slice 1  |
    row r of a modality, before its place is known:     r <= token of it <= r + all other tokens of the sample

A plan knows how long samples and parts are, not where text stands between them. So a member is sent the rows that may
be in its slice, and drops those that are not (`Route.receive_order`): at most the sample's other tokens at each border.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchdata.planning.parts import Parts
from orchdata.planning.teams import StepTeams

Ints = NDArray[np.int64]
Ranks = NDArray[np.int32]


@dataclass(frozen=True, eq=False, slots=True)
class JoinedPlaces:
    """Where whole sequences begin among those of their teams, joined, and the tokens of a slice: int64 (n,) each."""

    start: Ints
    slice_tokens: Ints


def joined_places(teams: StepTeams, rank: Ranks, microbatch: Ranks, lengths: Ints, multiple_of: int) -> JoinedPlaces:
    """Return the places of shared samples, those of `joined_sequences`; whole samples have slices of their length."""
    start, tokens = np.zeros_like(lengths), lengths.copy()
    shared = np.flatnonzero(teams.size > 1)
    keys = np.stack([microbatch, rank, teams.size])[:, shared]
    shared = shared[np.lexsort(keys)]  # stable: samples of a team stay in their order
    if len(shared):
        keys = np.stack([microbatch, rank, teams.size])[:, shared]
        begins = np.flatnonzero(np.diff(keys, axis=1, prepend=-1).any(axis=0))
        team = np.repeat(np.arange(len(begins)), np.diff(np.append(begins, len(shared))))
        before = np.cumsum(lengths[shared]) - lengths[shared]
        start[shared] = before - before[begins][team]
        pieces = teams.size[shared[begins]].astype(np.int64) * multiple_of
        tokens[shared] = (-(-np.add.reduceat(lengths[shared], begins) // pieces) * multiple_of)[team]
    return JoinedPlaces(start, tokens)


def rows_held(
    parts: Parts, part: Ints, member: NDArray[np.int64], places: JoinedPlaces, lengths: Ints
) -> tuple[Ints, Ints]:
    """Return the first row, and the number of rows, that a member of the team of a part's sample may have in its slice.

    Args:
        part: int64 (n,), indices of parts.
        member: int64 (n,), the place of a member in the team of the part's sample.
        lengths: int64, the tokens of each sample.
    """
    sample, tokens = parts.sample[part], parts.tokens[part]
    # Rows of the modality before each part in its sample, and the sample's tokens that are not of the modality.
    ends = np.cumsum(parts.tokens)
    of_sample = np.searchsorted(parts.sample, sample), np.searchsorted(parts.sample, sample, "right")
    first, stop = (np.append(0, ends)[at] for at in of_sample)
    before, others = ends[part] - tokens - first, lengths[sample] - (stop - first)
    # Its slice of the sample, from a token to before another.
    begin = member * places.slice_tokens[sample] - places.start[sample]
    end = np.clip(begin + places.slice_tokens[sample], 0, lengths[sample])
    begin = np.clip(begin, 0, lengths[sample])
    low, high = np.clip(begin - others - before, 0, tokens), np.clip(end - before, 0, tokens)
    return low, np.where(end > begin, np.maximum(high - low, 0), 0)
