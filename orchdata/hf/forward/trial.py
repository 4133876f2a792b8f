"""Which kinds of samples a model's forward takes: tried on tiny random models of its configuration.

    made-up batches --Inputs.arguments--> forward of the smallest model --fails--> of a larger one --fails--> refused
                                          its loss against that of each sample alone --differs--> refused

A failure may come from the shrinking itself, so a kind is refused only where one fails in which nothing but layers is
left out, or models of two sizes with the same error (errors of shrunk widths tell other numbers at each size), or
all of several sizes. A loss that differs does not come from it: the same model computes both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orchdata.hf.forward.made_up import Kind, MadeUp, kinds_of, made_up
from orchdata.hf.forward.models import Sized, models_of
from orchdata.hf.forward.token_losses import summed_loss
from orchdata.hf.tiny.model import undisturbed

if TYPE_CHECKING:
    from orchdata.batch.batch import Batch
    from orchdata.hf.inputs import Inputs
    from orchdata.loaders.recipe import Recipe

PartAxes = Mapping[str, tuple[int, tuple[int, ...]]]
"""Of an array of frames its axis and the length of each part, as `MediaBatch.part_axes`."""
_LONGEST_ERROR = 300
TOLERANCE = 1e-4
"""Largest relative difference of summed losses that is taken for rounding, in float32; it is 1e-5 at most elsewhere."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A kind of samples that the forward does not take.

    Attributes:
        kind: its name.
        error: the model's own.
        modalities: on which it fails; if batches without media fail, those of the dummies.
        is_dummy: whether it fails on samples without media, because of their dummies.
        padded: whether the same samples, padded, are taken.
    """

    kind: str
    error: str
    modalities: tuple[str, ...]
    is_dummy: bool
    padded: bool


@dataclass(frozen=True, slots=True)
class Differs:
    """A kind of samples that the model gives another loss together than each alone.

    Attributes:
        kind: its name.
        difference: of the summed losses, relative to that of each alone.
        modalities: of its samples.
    """

    kind: str
    difference: float
    modalities: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a trial.

    Attributes:
        failed: kinds that are to be refused.
        differing: kinds that are to be refused where a microbatch may hold several samples.
        reading: modalities of which the model reads the padding of a sample's shorter parts.
        untried: why nothing was tried; "" where something was.
    """

    failed: tuple[Failed, ...] = ()
    differing: tuple[Differs, ...] = ()
    reading: tuple[str, ...] = ()
    untried: str = ""


def tried(inputs: Inputs, recipe: Recipe, encoders: Sequence[str]) -> Verdict:
    """Run a forward for each kind of samples that the recipe allows.

    Random state, default dtype and device, and modes of autograd of the caller have no influence, and are untouched.

    Args:
        encoders: modalities that batches have.
    """
    kinds = kinds_of(recipe, encoders)
    with undisturbed(), made_up(recipe, kinds) as samples:
        pending = [kind for kind in kinds if samples.has(kind)]
        if not pending:
            return Verdict(untried=f"no sample could be made up that the recipe takes: {samples.why_not()}")
        trial = _Trial(inputs, samples, tuple(encoders))
        smallest: Sized | None = None
        errors_by_kind: dict[str, str] = {}
        errors: dict[str, list[str]] = {}
        certain: list[tuple[Kind, str]] = []
        differing: tuple[Differs, ...] = ()
        reading: tuple[str, ...] = ()
        for model in models_of(inputs.config):
            errors_by_kind = {kind.name: error for kind in pending if (error := trial.error(model, kind))}
            if smallest is None:
                smallest = model
                taken = [kind for kind in pending if kind.name not in errors_by_kind]
                differing = tuple(each for kind in taken if (each := trial.difference(model, kind)) is not None)
                if differing:  # else nothing that padding holds matters
                    reading = tuple(name for kind in taken for name in trial.reads_padding(model, kind))
            pending = [kind for kind in pending if kind.name in errors_by_kind]
            sure = [
                kind for kind in pending if model.is_whole or errors_by_kind[kind.name] in errors.get(kind.name, ())
            ]
            certain += [(kind, errors_by_kind[kind.name]) for kind in sure]
            pending = [kind for kind in pending if kind not in sure]
            for kind in pending:
                errors.setdefault(kind.name, []).append(errors_by_kind[kind.name])
            if not pending:
                break
        if smallest is None:
            return Verdict(untried="no tiny model of its configuration can be built and run on a text")
        certain += [(kind, errors_by_kind[kind.name]) for kind in pending if len(errors[kind.name]) > 1]
        failed = tuple(trial.explained(smallest, kind, error) for kind, error in certain)
        return Verdict(failed=failed, differing=differing, reading=reading, untried=_unsure(pending, errors))


def _unsure(pending: Sequence[Kind], errors: Mapping[str, Sequence[str]]) -> str:
    """Return why kinds that only one model was tried on stay undecided; "" if there are none."""
    for name in (kind.name for kind in pending if len(errors[kind.name]) == 1):
        return f"the one tiny model that can be built fails on {name}, perhaps by its size: {errors[name][0]}"
    return ""


@dataclass(frozen=True)
class _Trial:
    """One loader's inputs and made-up samples."""

    inputs: Inputs
    samples: MadeUp
    encoders: tuple[str, ...]

    def error(
        self, model: Sized, kind: Kind, *, encoders: tuple[str, ...] | None = None, padded: bool | None = None
    ) -> str:
        """Return what the model raises for a kind; "" if it takes the kind."""
        try:
            own = self._own(model, self.inputs.padded if padded is None else padded)
            batch = self.samples.batch(kind, self.encoders if encoders is None else encoders, own.layout)
            if batch is not None:
                _run(model, own, batch)
        except Exception as error:  # noqa: BLE001 - any error of a model is the answer
            return _shown(error)
        return ""

    def difference(self, model: Sized, kind: Kind) -> Differs | None:
        """Between the loss of a kind's samples in one microbatch and of each alone; None for what rounding explains,
        and where outputs have no logits for every token, of which a loss could be computed here.
        """
        try:
            together = self._loss(model, kind)
            alone = sum(self._loss(model, kind, number) for number in range(len(kind.samples)))
        except Exception:  # noqa: BLE001 - the forward itself has run
            return None
        difference = _relative(together, alone)
        if difference <= TOLERANCE or not math.isfinite(alone):
            return None
        present = {name for parts in kind.samples for name in parts}
        encoded = tuple(name for name in self.encoders if name in present)
        return Differs(kind.name, difference, encoded)

    def reads_padding(self, model: Sized, kind: Kind) -> tuple[str, ...]:
        """Modalities with several parts in a sample, of which the loss is another one if the shorter parts are followed
        by other values than zeros.
        """
        several = {name for parts in kind.samples for name, count in parts.items() if count > 1}
        if not several:
            return ()
        try:
            zeros = self._loss(model, kind)
            losses = {name: self._loss(model, kind, filled=name) for name in several}
        except Exception:  # noqa: BLE001 - the forward itself has run
            return ()
        return tuple(name for name, loss in losses.items() if _relative(loss, zeros) > TOLERANCE)

    def _loss(self, model: Sized, kind: Kind, only: int | None = None, *, filled: str = "") -> float:
        """Summed over the tokens of a kind's samples, or of one of them.

        Args:
            filled: modality of which the shorter parts are padded with ones instead of zeros.
        """
        own = self._own(model, self.inputs.padded)
        batch = self.samples.batch(kind, self.encoders, own.layout, only=only)
        assert batch is not None
        outputs = _run(model, own, batch, part_axes=batch.media[filled].part_axes if filled else {})
        return float(summed_loss(outputs, torch.atleast_2d(batch.llm.labels), None, of_decoder=own.family.decoder))

    def _own(self, model: Sized, padded: bool | None) -> Inputs:
        """Inputs of a tiny model's configuration."""
        whole: dict[str, Any] = {"length": None, "concatenate": False, "attention": "document"}
        return replace(self.inputs, config=model.config, probe=False, padded=padded, **whole)

    def explained(self, model: Sized, kind: Kind, error: str) -> Failed:
        """Return a kind that fails, and what would help."""
        present = {name for parts in kind.samples for name in parts}
        absent = [name for name in self.encoders if name not in present]
        # If the model takes the kind without the absent modalities, it fails on their dummies.
        is_dummy = bool(absent) and not self.error(model, kind, encoders=tuple(present))
        if is_dummy:
            guilty = [name for name in absent if self.error(model, kind, encoders=(*present, name))] or absent
        else:
            guilty = [name for name in self.encoders if name in present]
        padded = not self.inputs.padded and not self.error(model, kind, padded=True)
        return Failed(kind.name, error, tuple(guilty), is_dummy, padded)


def _run(model: Sized, own: Inputs, batch: Batch, *, part_axes: PartAxes = MappingProxyType({})) -> Any:
    """Run the forward without labels. Parts with `part_axes` are padded with ones."""
    with torch.no_grad():
        arguments = as_float32(own.arguments(batch))
        arguments.pop("labels", None)
        _fill_with_ones(arguments, part_axes)
        return model.forward(**arguments)


def _relative(value: float, expected: float) -> float:
    return abs(value - expected) / max(abs(expected), 1e-30)


def _fill_with_ones(arguments: Mapping[str, Any], part_axes: PartAxes) -> None:
    """Change the padding of floats (num_parts, ...) in place; `part_axes` is a batch's."""
    for name, (axis, lengths) in part_axes.items():
        values = arguments.get(name)
        if isinstance(values, Tensor) and values.is_floating_point():
            for part, length in zip(values, lengths, strict=True):
                part.narrow(axis - 1, length, part.shape[axis - 1] - length).fill_(1.0)


def as_float32(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for a model in float32: media in the dtype of weights of half precision, and bytes that are to be made
    values on the device.
    """

    def cast(value: Any) -> Any:
        is_values = isinstance(value, Tensor) and (value.is_floating_point() or value.dtype == torch.uint8)
        return value.float() if is_values else value

    return {name: cast(value) for name, value in arguments.items()}


def _shown(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {' '.join(line.strip() for line in lines)}".rstrip(". ")
    if len(text) <= _LONGEST_ERROR:
        return text
    return f"{text[: _LONGEST_ERROR // 3]} ... {text[-_LONGEST_ERROR // 2 :]}"  # what went wrong may stand at the end
