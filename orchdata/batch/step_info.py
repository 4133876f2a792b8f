"""What a user's `collate_fn` may use: the step of its samples, and the scale of their loss."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInfo:
    """The step of a microbatch, passed to a `collate_fn` that has a parameter named `step`.

    Attributes:
        epoch, step: number of the optimizer step.
        microbatch, num_microbatches: its number among the rank's microbatches of the step, and their count.
        dp_size: data-parallel ranks.
        num_step_samples: of the whole step, over all ranks and microbatches, those that fail included; a piece of a
            long sample counts as a sample.
        loss_tokens: planned loss tokens of the whole step, over all ranks and microbatches; 0 for map-style data,
            with unknown tokens. In a mixture each counts the loss weight of its source.
        loss_scale: factor of a summed loss where gradients are averaged over the data-parallel ranks, as
            `Batch.loss_scale`: dp_size / loss_tokens (1 where there are none), for a sum over loss tokens. For
            map-style data dp_size / num_step_samples, for a sum over samples.
        sources: of a mixture, the name of each sample's source; else empty.
    """

    epoch: int
    step: int
    microbatch: int
    num_microbatches: int
    dp_size: int
    num_step_samples: int
    loss_tokens: float
    loss_scale: float
    sources: tuple[str, ...] = ()
