"""What a loader knows of a data set of shards before it is opened: the base of `ShardDataset` and `Mixture`.

A loader imports this base alone. The data set brings what lists, measures and indexes shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from typing_extensions import TypeIs

if TYPE_CHECKING:
    from orchdata import CostModel, Mixture, Profile, ShardDataset, ShownSamples


class Leaf(NamedTuple):
    """A data set of a mixture: its name with those of the mixtures around it, and its part in the outermost mixture.

    Attributes:
        top: name of the outermost mixture's source that contains it.
        share: its fraction of that source's weight.
    """

    name: str
    dataset: ShardDataset
    top: str
    share: float = 1.0
    loss_weight: float = 1.0


class Sharded:
    """A data set of shards with an index: an `od.ShardDataset`, or an `od.Mixture` of several.

    Attributes:
        preloads: modules that the fork server of worker processes imports.
    """

    preloads: tuple[str, ...] = ()

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The data sets of a mixture; a ShardDataset is the only one of itself, without a name."""
        return (Leaf("", self, ""),)  # type: ignore[arg-type]

    def parts(self, index: Any) -> list[tuple[Leaf, Any, int]]:
        """Return each leaf with its own index, and its first row in `index`, the one of all."""
        return list(zip(self.leaves, index.indexes, index.first_rows.tolist(), strict=False))

    def profile(
        self,
        *,
        cost: CostModel | None = None,
        ranks: Sequence[int] | None = None,
        batch_size: int = 8,
        **others: Any,
    ) -> Profile:
        """Return what the samples are made of, and what numbers of ranks would lose to imbalance.

        The index is built where it is missing. No sample is decoded.

        Args:
            cost: the model's cost; with None every phase costs its positions.
            ranks: numbers of data-parallel ranks to plan for; None for 8 to 2,560, as far as the data suffice.
            batch_size: samples per rank and step.
            others: other arguments of `od.profile`: balance, layout, batch_tokens, group_size, streams, seed, steps,
                encoder_peers.

        Raises as `od.profile`.
        """
        import orchdata

        return orchdata.profile(self, cost=cost, ranks=ranks, batch_size=batch_size, **others)  # type: ignore[arg-type]

    def show(self, samples: int | str | Sequence[int | str]) -> ShownSamples:
        """Return samples as the model sees them, for a notebook: text with what is trained, pictures.

        The samples are read now. See `od.show`.
        """
        import orchdata

        return orchdata.show(self, samples)  # type: ignore[arg-type]


def is_sharded(data: object) -> TypeIs[ShardDataset | Mixture]:
    """Return whether samples are in shards, with an index."""
    return isinstance(data, Sharded)


def is_mixture(data: ShardDataset | Mixture | None) -> TypeIs[Mixture]:
    """Return whether a data set is a mixture of others: they have names."""
    return data is not None and bool(data.leaves[0].name)
