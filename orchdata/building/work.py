"""Work: a rank's share of a microbatch, by modality -> which parts it encodes, and which its samples are made of.

Where samples are assigned whole these are the same parts. Where phases are assigned apart they differ, and the features
travel from the one to the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchdata.building.assembler import Share
from orchdata.loaders.index.index import Index
from orchdata.planning.route import Route

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MediaWork:
    """One modality of a microbatch on one rank. Parts are numbers in the index.

    Attributes:
        encoded: int64 (num_encoded,), parts it encodes, in sequence.
        encoded_place: int64 (num_encoded,), the place of each one's sample in the global batch.
        arriving: int64 (num_arriving,), parts of its samples, in the sequence in which their features come.
        owner: int64 (num_arriving,), the place of each one's sample among the rank's.
        route: the way between them; None where they are the same.
    """

    encoded: Ints
    encoded_place: Ints
    arriving: Ints
    owner: Ints
    route: Route | None = None


def own_work(index: Index, rows: Ints, places: Ints, modality: str) -> MediaWork:
    """A rank encodes what its own samples are made of: `rows`, at these places in the global batch."""
    parts, owner = index.parts_of(rows, modality)
    return MediaWork(encoded=parts, encoded_place=places[owner], arriving=parts, owner=owner)


def planned_work(share: Share, modality: str) -> MediaWork:
    """A rank encodes what the plan gives it, of anybody's samples."""
    plan, rank, microbatch = share.plan, share.rank, share.microbatch
    parts = plan.parts[modality]
    encoded, arriving = plan.encoded(modality, rank, microbatch), plan.arriving(modality, rank, microbatch)
    return MediaWork(
        encoded=parts.part[encoded],
        encoded_place=parts.sample[encoded],
        arriving=parts.part[arriving],
        owner=np.searchsorted(plan.places(rank, microbatch), parts.sample[arriving]),
        route=plan.route(modality, rank, microbatch),
    )
