"""A mixture of data sets, as a value: the sources, their shares, the unit of shares, and the end of an epoch.

Mixture --flattened--> leaves by name ("outer/inner") --weights quantised once--> stages of integer periods
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from numbers import Real
from typing import TYPE_CHECKING, Any, get_args

import orchdata
from orchdata.balancers.assignment import checked_count
from orchdata.dataset.shard_dataset import Leaf, ShardDataset, Sharded
from orchdata.loaders.shards.container import Container
from orchdata.loaders.shards.open import by_identity
from orchdata.loaders.storage.files import Files, joined_files
from orchdata.order.merge import Stage, Stop
from orchdata.order.order import By

if TYPE_CHECKING:
    from orchdata.dataset.arguments import Arguments, PreparedDataset

Weights = Mapping[str, float]

_UNIT = 1 << 16  # the period of the heaviest source: weights are exact to 1 in 100,000
_FURTHEST = 1 << 32


@dataclass(frozen=True)
class Source:
    """One source of an `od.Mixture`.

    Args:
        dataset: a ShardDataset, or a Mixture, which divides this weight by its own weights.
        weight: its share of tokens or samples, relative to the others; default 1. None if stages give it.
        loss_weight: the weight of each of its loss tokens, in `batch.loss_weights` and in the divisor of losses.
    """

    dataset: ShardDataset | Mixture
    weight: float | None = field(default=None, kw_only=True)
    loss_weight: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.dataset, ShardDataset | Mixture):
            raise TypeError(f"od.Source takes an od.ShardDataset or an od.Mixture, got {type(self.dataset).__name__}")
        for name in ("weight", "loss_weight"):
            value = getattr(self, name)
            if not (value is None and name == "weight") and not _is_weight(value):
                raise ValueError(f"Source.{name} must be a number of at least 0, got {value!r}")


class Mixture(Sharded):
    """Several data sets as one. Each has its share in every stretch of training, independent of ranks and steps.

    The order is a pure function of the seed: there are no buffers, and any position is computed directly. Pass it to
    `od.DataLoader`; `batch.sources` and `stats()["sources"]` distinguish the sources.

    Args:
        sources: name -> `od.Source`. A source that is a Mixture divides its weight by its own weights, and its data
            sets are named "outer/inner".
        by: whether weights are shares of LLM "tokens" or of "samples".
        stop: where an epoch ends. "first": with the last sample of the first source that is exhausted. "all": with that
            of the last one, each sample once; the remaining sources keep their relative weights. "repeat": after
            `epoch_tokens` or `epoch_samples`; each source begins its next pass on its own, shuffled again.
        stages: (training tokens or samples from which it applies, {name: weight}) pairs, from 0 on, in place of the
            sources' weights. A source without a weight in a stage gives nothing there.
        epoch_tokens, epoch_samples: size of an epoch of "repeat". An epoch of tokens ends with the sample that fills
            it.

    Raises:
        TypeError, ValueError: an invalid source, weight or stage; names it.
    """

    leaves: tuple[Leaf, ...] = ()
    orchdata_preloads = ShardDataset.orchdata_preloads

    def __init__(
        self,
        sources: Mapping[str, Source],
        *,
        by: By = "tokens",
        stop: Stop = "first",
        stages: Sequence[tuple[int, Weights]] | None = None,
        epoch_tokens: int | None = None,
        epoch_samples: int | None = None,
    ) -> None:
        if not isinstance(sources, Mapping) or not sources:
            raise ValueError(
                f"od.Mixture takes names and their od.Source, as in {{'web': od.Source(...)}}, got {sources!r}"
            )
        for name, source in sources.items():
            if not isinstance(name, str) or not name or "/" in name:
                raise ValueError(f"the name of a source is a string without '/', which joins names, got {name!r}")
            if not isinstance(source, Source):
                raise TypeError(f"source {name!r} must be an od.Source, got {type(source).__name__}")
        for option, value, known in (("by", by, get_args(By)), ("stop", stop, get_args(Stop))):
            if value not in known:
                raise ValueError(f"Mixture.{option} must be one of {', '.join(map(repr, known))}, got {value!r}")
        self.sources = dict(sources)
        self.by: By = by
        self.stop: Stop = stop
        self.epoch_size = _epoch_size(stop, epoch_tokens, epoch_samples)
        self.stages = None if stages is None else _checked_stages(stages, self.sources)
        self.leaves = tuple(sorted(self._flattened(), key=lambda leaf: leaf.name))
        if self.stages is None and not any(map(self._weight_of, self.sources)):
            raise ValueError("every source of the mixture has weight 0: give one a larger weight")

    def __repr__(self) -> str:
        return f"Mixture({', '.join(leaf.name for leaf in self.leaves)}; by={self.by!r}, stop={self.stop!r})"

    _repr_html_ = orchdata._html

    @property
    def files(self) -> Files:
        """Where the shards of all sources are."""
        parts: list[ShardDataset] = [leaf.dataset for leaf in self.leaves]
        if all(part.files == parts[0].files for part in parts):
            return parts[0].files
        return joined_files([(part.urls, part.files) for part in parts])

    @property
    def containers(self) -> tuple[Container, ...]:
        """The containers of the user's of all sources, each once."""
        return tuple(by_identity(each for leaf in self.leaves for each in leaf.dataset.containers).values())

    def prepare(self, arguments: Arguments) -> PreparedDataset:
        """Return what a loader needs of it. Raises as `DataLoader`."""
        from orchdata.dataset.shards import prepare_shards  # which imports torch

        return prepare_shards(self, arguments)

    def shares(self) -> tuple[tuple[int, tuple[float, ...]], ...]:
        """Return for each stage where it begins, and the share of each leaf: fractions of 1."""
        stages = []
        for bound, weights in self._weights():
            parts = self._parts(weights)
            stages.append((bound, tuple(part / sum(parts) for part in parts)))
        return tuple(stages)

    def quantised(self) -> tuple[Stage, ...]:
        """Return the stages with integer periods of the leaves. Raises ValueError for weights too far apart."""
        return tuple(Stage(bound, self._periods(weights)) for bound, weights in self._weights())

    def _weights(self) -> tuple[tuple[int, Weights], ...]:
        return self.stages or ((0, {name: self._weight_of(name) for name in self.sources}),)

    def _parts(self, weights: Weights) -> list[float]:
        return [weights.get(leaf.top, 0.0) * leaf.share for leaf in self.leaves]

    def _periods(self, weights: Weights) -> tuple[int, ...]:
        shares = self._parts(weights)
        most = max(shares)
        for leaf, share in zip(self.leaves, shares, strict=True):
            if share and most / share > _FURTHEST:
                raise ValueError(
                    f"source {leaf.name!r} has {share / most:.1e} of the weight of the heaviest one: its samples would "
                    "almost never come; leave it out, or raise its weight"
                )
        return tuple(round(_UNIT * (most / share)) if share else 0 for share in shares)

    def _weight_of(self, name: str) -> float:
        weight = self.sources[name].weight
        return 1.0 if weight is None else float(weight)

    def _flattened(self) -> Iterator[Leaf]:
        for name, source in self.sources.items():
            if self.stages is not None and source.weight is not None:
                raise ValueError(f"source {name!r} has a weight, and stages give weights too: leave one out")
            loss_weight = float(source.loss_weight)
            if isinstance(source.dataset, ShardDataset):
                yield Leaf(name, source.dataset, name, 1.0, loss_weight)
                continue
            inner = source.dataset
            self._check_inner(name, inner)
            total = sum(map(inner._weight_of, inner.sources))
            for leaf in inner.leaves:
                share = leaf.share * inner._weight_of(leaf.top) / total
                yield Leaf(f"{name}/{leaf.name}", leaf.dataset, name, share, loss_weight * leaf.loss_weight)

    def _check_inner(self, name: str, inner: Mixture) -> None:
        """Raise ValueError for options of an inner mixture that would have no effect: all except its weights."""
        if inner.stages is not None:
            raise ValueError(f"source {name!r} is a mixture with stages: only the outermost mixture may have stages")
        for option, default in (("by", "tokens"), ("stop", "first")):
            value = getattr(inner, option)
            if value not in (default, getattr(self, option)):
                raise ValueError(
                    f"source {name!r} is a mixture with {option}={value!r}, and the one around it has "
                    f"{option}={getattr(self, option)!r}, which applies to both: pass {option} only to the outermost"
                )


def _is_weight(value: Any) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and isfinite(value) and float(value) >= 0
    except OverflowError:  # an integer beyond floats
        return False


def _epoch_size(stop: Stop, epoch_tokens: int | None, epoch_samples: int | None) -> tuple[By, int] | None:
    given = {"tokens": epoch_tokens, "samples": epoch_samples}
    sizes: list[tuple[Any, int]] = [
        (unit, checked_count(size, f"epoch_{unit}")) for unit, size in given.items() if size is not None
    ]
    if stop != "repeat":
        if sizes:
            raise ValueError(
                f"epoch_{sizes[0][0]} is for stop='repeat': with stop={stop!r} an epoch ends with its sources"
            )
        return None
    if len(sizes) != 1:
        raise ValueError("stop='repeat' never ends by itself: pass one of epoch_tokens and epoch_samples")
    return sizes[0]


def _checked_stages(stages: Any, sources: Mapping[str, Source]) -> tuple[tuple[int, dict[str, float]], ...]:
    how = "(training tokens or samples from which it applies, {name: weight}) pairs, ascending from 0"
    if not isinstance(stages, list | tuple) or not stages:
        raise ValueError(f"stages are {how}, got {stages!r}")
    checked: list[tuple[int, dict[str, float]]] = []
    for stage in stages:
        if not isinstance(stage, list | tuple) or len(stage) != 2 or not isinstance(stage[1], Mapping):
            raise ValueError(f"stages are {how}, got {stage!r}")
        bound, weights = checked_count(stage[0], "the bound of a stage", 0), dict(stage[1])
        if bound != 0 if not checked else bound <= checked[-1][0]:
            raise ValueError(f"stages are {how}; one begins at {bound}")
        for name, weight in weights.items():
            if name not in sources:
                raise ValueError(f"the stage from {bound} names {name!r}; the sources are {', '.join(sources)}")
            if not _is_weight(weight):
                raise ValueError(f"the weight of {name!r} from {bound} on must be a number of at least 0: {weight!r}")
        if not any(weights.values()):
            raise ValueError(f"no source has a weight in the stage from {bound}")
        checked.append((bound, {name: float(weight) for name, weight in weights.items()}))
    return tuple(checked)
