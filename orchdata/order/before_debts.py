"""The rule of before, for the translation of old states alone: in each stage virtual times began again.

A sample longer than its weight times a stage never came. A state of version 1 stands where this rule has led; the run
goes on from there by the present rule.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchdata.order.merge import Lap, Place, Reached, Stage, Stretch
from orchdata.order.mixture import MixtureOrder, Resumed
from orchdata.order.stretch import DUE_BITS


class LapBeforeDebts(Lap):
    """A lap in which each stage begins as a run does."""

    def _next_bound(self, stretch: Stretch) -> int | None:
        after = self._stage_number(stretch.begin.amount(self.by)) + 1
        return self._bounds[after] if after < len(self._bounds) else None

    def _following(self, last: Stretch, begin: Place) -> Stretch:
        return Stretch(self._supply, begin, self._stage_at(begin.amount(self.by)).periods)


class OrderBeforeDebts(MixtureOrder):
    """The order that a state of version 1 is of."""

    @staticmethod
    def _staged(stages: Sequence[Stage]) -> tuple[Stage, ...]:
        return tuple(stages)

    def _lap(self, number: int, begun: int) -> Lap:
        return LapBeforeDebts(self.sources, self.stages, self.by, self.stop, number=number, begun=begun)

    @classmethod
    def of(cls, order: MixtureOrder, stages: Sequence[Stage]) -> OrderBeforeDebts:
        """The same mixture by the rule of before."""
        return cls(order.sources, stages, by=order.by, stop=order.stop, epoch_size=order.epoch_size)

    def translated(self, epoch: int, position: int) -> Resumed:
        """Where a run goes on that stands at a position: nothing is owed there."""
        place = self.place(epoch, position)
        resumed = self.resumed_at(epoch, place)
        due = tuple(amount << DUE_BITS for amount in place.amounts(self.by))
        return resumed._replace(reached=Reached(place, due) if place.position else None, is_changed=True)
