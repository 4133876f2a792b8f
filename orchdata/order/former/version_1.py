"""The order of version 1, only to translate old states: in each stage virtual times began again.

A sample longer than its weight times a stage never came. A state of version 1 has a position of this order; the run
continues from there in the present order.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchdata.order.merge import SourcePass, SourceProgress, Stage, Stretch, StretchStart
from orchdata.order.mixture import MixtureOrder, ResumePoint
from orchdata.order.stretch import DUE_BITS


class SourcePassV1(SourcePass):
    """A pass in which each stage begins as a run does."""

    def _next_bound(self, stretch: Stretch) -> int | None:
        after = self._stage_number(stretch.begin.amount(self.by)) + 1
        return self._bounds[after] if after < len(self._bounds) else None

    def _following(self, last: Stretch, begin: SourceProgress) -> Stretch:
        return Stretch(self._supply, begin, self._stage_at(begin.amount(self.by)).periods)


class OrderV1(MixtureOrder):
    """The order to which a state of version 1 belongs."""

    @staticmethod
    def _staged(stages: Sequence[Stage]) -> tuple[Stage, ...]:
        return tuple(stages)

    def _source_pass(self, number: int, given_before: int) -> SourcePass:
        return SourcePassV1(self.sources, self.stages, self.by, self.stop, number=number, given_before=given_before)

    @classmethod
    def of(cls, order: MixtureOrder, stages: Sequence[Stage]) -> OrderV1:
        """Return the same mixture in the order of version 1."""
        return cls(order.sources, stages, by=order.by, stop=order.stop, epoch_size=order.epoch_size)

    def translated(self, epoch: int, position: int) -> ResumePoint:
        """Return where a run at this position continues: what each source is due there is what it has given."""
        progress = self.progress_at(epoch, position)
        due = tuple(amount << DUE_BITS for amount in progress.amounts(self.by))
        stretch_start = StretchStart(progress, due) if progress.position else None
        return self.resumed_at(epoch, progress)._replace(stretch_start=stretch_start, is_changed=True)
