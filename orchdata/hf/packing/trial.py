"""The comparison: three samples in one row against each alone, by the arguments that the real model would be given.

Alone, a sample is a padded row without padding, which is exact for every model. What floats alone make different is
measured on the same model: the samples as padded rows of one batch, against each alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from orchdata.batch.batch import Batch
from orchdata.batch.tensors import IGNORE
from orchdata.hf.families import Family
from orchdata.hf.packing.samples import packed, padded, tried_samples
from orchdata.hf.tiny.model import undisturbed

TOLERANCE: Final = 2e-5
"""Largest relative difference that is taken for rounding, in float32."""
_NOISE_FACTOR: Final = 16
_LARGEST: Final = 3e-3
"""If rounding alone may exceed this, a leak cannot be distinguished from it."""

Arguments = Callable[[Batch], dict[str, Any]]


@dataclass(frozen=True)
class Outputs:
    """Of a model, for some samples.

    Attributes:
        logits: of each sample, (T, vocabulary).
        gradients: of each parameter, of the summed loss of all.
    """

    logits: list[Tensor]
    gradients: list[Tensor]


@dataclass(frozen=True)
class Difference:
    """Largest differences, relative to the largest value: of logits, and of any parameter's gradient."""

    logits: float
    gradients: float

    @property
    def largest(self) -> float:
        return max(self.logits, self.gradients)


@dataclass(frozen=True)
class Found:
    """The result of a trial.

    Attributes:
        packs: whether samples in one row get what each gets alone.
        pads: whether samples in padded rows do.
        why: in words.
    """

    packs: bool
    pads: bool
    why: str


def keeps_apart(model: Any, family: Family, in_one_row: Arguments, in_rows: Arguments) -> Found:
    """Try whether a tiny model gives packed samples, and padded ones, what it gives each alone.

    Args:
        in_one_row, in_rows: of the model's forward, for batches packed and padded.

    Raises what its forward raises on a sample alone.
    """
    with undisturbed():
        samples = tried_samples(model.config, family)
        mrope = family.mrope
        alone = _outputs(model, in_rows, [padded([sample], mrope=mrope) for sample in samples])
        if not all(bool(each.isfinite().all()) for each in (*alone.logits, *alone.gradients)):
            return Found(False, True, "has logits or gradients that are not finite on random weights")
        noise = _noise(model, in_rows, padded(samples, mrope=mrope, multiple_of=16), alone)
        try:
            together = _outputs(model, in_one_row, [packed(samples, mrope=mrope)])
        except Exception as error:  # noqa: BLE001 - a forward may raise anything on a packed row
            said = f"takes no packed rows ({type(error).__name__}: {str(error)[:200]})"
            return Found(False, noise <= _LARGEST, said)
        packs, why = _judged(_difference(together, alone), noise)
    return Found(packs, packs or noise <= _LARGEST, why)


def _judged(difference: Difference, noise: float) -> tuple[bool, str]:
    tolerance = max(TOLERANCE, _NOISE_FACTOR * noise)
    said = f"logits {difference.logits:.1e} and gradients {difference.gradients:.1e} off"
    if difference.largest <= tolerance <= _LARGEST:
        return True, f"keeps packed samples apart ({said})"
    if tolerance > _LARGEST and difference.largest <= tolerance:
        return False, f"gives a sample other results in another batch ({noise:.1e} off in padded rows)"
    return False, f"lets packed samples see each other ({said})"


def _outputs(model: Any, arguments: Arguments, batches: list[Batch]) -> Outputs:
    """Return outputs for a batch of each sample, or for one with all of them."""
    model.zero_grad(set_to_none=True)
    logits: list[Tensor] = []
    for batch in batches:
        labels = batch.llm.labels.view(-1, batch.llm.labels.shape[-1])
        predicted = model(**arguments(batch)).logits.float()
        loss = torch.nn.functional.cross_entropy(
            predicted[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="sum"
        )
        loss.backward()
        logits += _by_sample(predicted.detach(), batch.llm.lengths.tolist())
    zeros = (torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters())
    return Outputs(logits, [each.clone() for each in zeros])


def _by_sample(logits: Tensor, lengths: list[int]) -> list[Tensor]:
    if len(logits) == len(lengths):
        return [row[:length] for row, length in zip(logits, lengths, strict=True)]
    return list(logits[0].split(lengths))


def _noise(model: Any, arguments: Arguments, rows: Batch, alone: Outputs) -> float:
    """Return how much samples in padded rows differ from each alone; 0 if the model takes no such batch."""
    try:
        return _difference(_outputs(model, arguments, [rows]), alone).largest
    except Exception:  # noqa: BLE001 - then the bound for float32 stands
        return 0.0


def _difference(outputs: Outputs, expected: Outputs) -> Difference:
    logits = max(
        float((one - other).abs().max() / other.abs().max())
        for one, other in zip(outputs.logits, expected.logits, strict=True)
    )
    largest = max((float(each.abs().max()) for each in expected.gradients if each.numel()), default=0.0)
    gradients = max(
        # Of gradients that are zero but for rounding, such as those of a key's bias, nothing can be said.
        (
            float((one - other).abs().max()) / max(float(other.abs().max()), 1e-3 * largest, 1e-30)
            for one, other in zip(outputs.gradients, expected.gradients, strict=True)
            if other.numel()
        ),
        default=0.0,
    )
    return Difference(_finite(logits), _finite(gradients))


def _finite(value: float) -> float:
    return value if value == value else float("inf")  # NaN is larger than nothing
