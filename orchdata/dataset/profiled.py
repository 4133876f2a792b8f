"""What data sets of shards have in common: they can be profiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchdata import CostModel, Profile


class Profiled:
    """A data set that `od.profile` takes."""

    def profile(
        self,
        *,
        cost: CostModel | None = None,
        ranks: Sequence[int] = (8, 64, 512, 2560),
        batch_size: int = 8,
        **others: Any,
    ) -> Profile:
        """Return what the samples are made of, and what numbers of ranks would lose to imbalance.

        The index is built where it is missing. No sample is decoded.

        Args:
            cost: the model's cost; with None every phase costs its positions.
            ranks: numbers of data-parallel ranks to plan for.
            batch_size: samples per rank and step.
            others: other arguments of `od.profile`: balance, layout, model_parallel, batch_tokens, group_size, streams,
                seed, steps, cache_bytes.

        Raises as `od.profile`.
        """
        import orchdata

        return orchdata.profile(self, cost=cost, ranks=ranks, batch_size=batch_size, **others)  # type: ignore[arg-type]
