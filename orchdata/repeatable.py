"""Whether modalities decode repeatably: one part of each is decoded twice with equal generators when a loader is made.

first usable part of a modality --decoded twice--> equal, or a warning that names what moved
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from orchdata.building.spec import BuildSpec, IndexedShards, SampleContent, ShardContent
from orchdata.engines.processes.restart_state import RandomStates
from orchdata.loaders.environment import OWN
from orchdata.loaders.generators import Pass
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.stored import StoredSample
from orchdata.loaders.modalities.modality import Modality
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.decode import decode_media
from orchdata.loaders.shards.open import OpenShards
from orchdata.notices import warn_user
from orchdata.order.mixture import MixtureOrder
from orchdata.order.order import Order

_ROWS_AT_ONCE: Final = 1 << 16
_MODULES: Final = {"python": "random", "numpy": "numpy", "torch": "torch"}
_DECODINGS: Final = 8
"""How often a part is decoded if a global generator moved: a flip with probability 1/2 is often the same twice."""


def warn_unless_repeatable(spec: BuildSpec) -> None:
    """Warn for each modality with a part that is decoded differently with equal generators.

    Modalities of this library without functions of the user's are not tried. A part that cannot be read or decoded is
    left to the loader, which reports it. The global random generators are left as they were.
    """
    content, order = spec.content, spec.plan.order
    if not isinstance(content, ShardContent | SampleContent) or not isinstance(order, Order | MixtureOrder):
        return
    shards = content.shards
    recipes = shards.of_sources or (shards.recipe,)
    wanted = [
        (source, name)
        for source, recipe in enumerate(recipes)
        for name, modality in recipe.modalities.items()
        if not _is_ours(modality)
    ]
    if not wanted:
        return
    opened, states = shards.open(), RandomStates()
    states.begin({})
    before = states.all()
    try:
        for source, name in wanted:
            _try_modality(shards, opened, _rows_of(order, source), name)
    finally:
        states.begin(before)
        opened.close()


def _is_ours(modality: Modality) -> bool:
    return type(modality).__module__.partition(".")[0] == OWN and not modality.draws()


def _rows_of(order: Order | MixtureOrder, source: int) -> Iterator[NDArray[np.int64]]:
    """Yield the usable rows of a source, in the sequence of its shards."""
    own, first = order, 0
    if isinstance(order, MixtureOrder):
        own, first = order.sources[source].order, order.sources[source].first_row
    assert isinstance(own, Order)
    for start in range(0, own.num_samples, _ROWS_AT_ONCE):
        yield first + own.located(np.arange(start, min(start + _ROWS_AT_ONCE, own.num_samples)))[1]


def _try_modality(shards: IndexedShards, opened: OpenShards, rows: Iterator[NDArray[np.int64]], name: str) -> None:
    for some in rows:
        parts, owners = shards.index.parts_of(some, name)
        if len(parts):
            break
    else:
        return
    row = int(some[owners[0]])
    stored = StoredSample(shards.index, opened, row)
    try:
        trial = _Trial(shards.index, stored, int(parts[0]), name, shards.recipe_of(row), shards.seed)
        moved = trial.moved_where_results_differ()
    except Exception:  # noqa: BLE001 - the loader reports it when it loads the sample
        return
    if moved is not None:
        kind = type(trial.recipe.modalities[name]).__qualname__
        generators = f"the global generator of {' and of '.join(moved)} moved" if moved else "no global generator moved"
        warn_user(
            f"the modality {name!r} ({kind}) decodes sample {stored.key!r} of {stored.shard} differently each time, "
            f"and {generators}: runs and workers will differ. Draw random numbers only from the generator rng of "
            "decode(data, limits, rng) and augment(pixels, rng)"
        )


@dataclass(frozen=True)
class _Trial:
    """Decodings of one part, each with a new generator in the same state."""

    index: Index
    stored: StoredSample
    part: int
    name: str
    recipe: Recipe
    seed: int

    def moved_where_results_differ(self) -> list[str] | None:
        """Return the global generators that moved if two results differ; None if all are equal. Raises as decoding."""
        data, states = self._read(), RandomStates()
        states.begin({})
        first = self._decode(data)
        moved = set(states.changed())
        for _ in range(_DECODINGS - 1 if moved else 1):
            if self._decode(data) != first:
                moved |= states.changed().keys()
                return [module for name, module in _MODULES.items() if name in moved]
        return None

    def _read(self) -> bytes | memoryview:
        return self.stored.read(self.recipe, text=False, parts=[self.part])[self.stored.member_of(self.part)]

    def _decode(self, data: bytes | memoryview) -> dict[str, bytes]:
        stored, number = self.stored, self.part - self.stored.parts.start
        (size,) = self.index.sizes(range(self.part, self.part + 1), self.recipe)
        field = stored.members[stored.member_of(self.part)].field
        media = decode_media(
            self.name, data, size, self.recipe, field, lambda: stored.generator(Pass(self.seed), number)
        )
        return {array: values.tobytes() for array, values in media.arrays.items()}
