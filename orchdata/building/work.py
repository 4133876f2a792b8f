"""Work: a rank's share of a microbatch, by modality -> the parts that it encodes, and the parts of its samples.

They are the same where samples are assigned whole. They differ where phases are assigned separately, and features
travel between ranks.
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
        encoded: int64 (num_encoded,), parts that it encodes, in that order.
        encoded_sample: int64 (num_encoded,), index in the global batch of the sample of each.
        arriving: int64 (num_arriving,), parts of its samples, in the order in which their features arrive.
        owner: int64 (num_arriving,), number of the sample of each among the rank's samples.
        route: the route between them; None where they are the same.
    """

    encoded: Ints
    encoded_sample: Ints
    arriving: Ints
    owner: Ints
    route: Route | None = None


def own_work(index: Index, rows: Ints, samples: Ints, modality: str) -> MediaWork:
    """Return the work of a rank that encodes its own samples: `rows`, with these indices in the global batch."""
    parts, owner = index.parts_of(rows, modality)
    return MediaWork(encoded=parts, encoded_sample=samples[owner], arriving=parts, owner=owner)


def planned_work(share: Share, modality: str) -> MediaWork:
    """Return the work that the plan gives a rank: it encodes parts of any rank's samples."""
    plan, rank, microbatch = share.plan, share.rank, share.microbatch
    parts = plan.parts[modality]
    encoded, arriving = plan.encoded(modality, rank, microbatch), plan.arriving(modality, rank, microbatch)
    return MediaWork(
        encoded=parts.part[encoded],
        encoded_sample=parts.sample[encoded],
        arriving=parts.part[arriving],
        owner=np.searchsorted(plan.places(rank, microbatch), parts.sample[arriving]),
        route=plan.route(modality, rank, microbatch),
    )
