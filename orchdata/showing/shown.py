"""Samples as the model sees them, JSON-safe: their text decoded from the token ids, what is trained, their media.

rows --StoredSample--> spans, sizes --tokenizer backwards--> ShownSample
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers import CostModel
from orchdata.building.spec import IndexedShards
from orchdata.loaders.errors import DataError, FieldError
from orchdata.loaders.generators import Pass
from orchdata.loaders.index.stored import StoredSample
from orchdata.loaders.modalities.modality import PartSize
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.spans import MediaSlot, TextSpan
from orchdata.loaders.shards.open import OpenShards
from orchdata.planning.costs import IndexCosts


@dataclass(frozen=True, kw_only=True)
class ShownText:
    """Neighbouring text tokens, all with loss or all without.

    Attributes:
        text: the ids decoded by the tokenizer; None if it cannot decode.
        token_ids: () if there is text.
        tokens: number of tokens.
    """

    text: str | None
    token_ids: tuple[int, ...]
    tokens: int
    trained: bool


@dataclass(frozen=True, kw_only=True)
class ShownMedia:
    """Tokens of one part.

    Attributes:
        field: the sample's field from which it is read.
        tokens: its tokens in this span; text may cut a part into several.
        positions: positions that enter its encoder.
        sizes: arrays that follow from its size, by name, such as `grid_hw` of an image.
    """

    modality: str
    field: str
    tokens: int
    positions: int
    sizes: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ShownSample:
    """A row of an index.

    Attributes:
        source: its source in a mixture; "" without a mixture.
        costs: phase -> cost, in units of the model; empty without a model.
        error: why it cannot be loaded; then it has no spans.
    """

    shard: str
    key: str
    row: int
    piece: int
    source: str
    tokens: int
    trained_tokens: int
    costs: dict[str, int]
    spans: tuple[ShownText | ShownMedia, ...]
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-safe values; a span of text has `text`, one of media `modality`."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class ShownGroup:
    """Samples of one microbatch, or those that were requested.

    Attributes:
        about: description of the group, by name, JSON-safe.
    """

    about: Mapping[str, Any]
    samples: Sequence[ShownSample]

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-safe values."""
        return {**self.about, "samples": [sample.as_dict() for sample in self.samples]}


def shown_rows(
    shards: IndexedShards,
    rows: Sequence[int],
    model: CostModel | None = None,
    sources: Sequence[str] = (),
    passes: Sequence[Pass] = (),
) -> list[ShownSample]:
    """Return rows of an index as the model sees them, decoded as by a loader; a row that cannot be loaded has an error.

    Args:
        sources: source of each row, for a mixture.
        passes: pass in which each row is decoded; default: pass 0, with seed 0.
    """
    opened = shards.open()
    try:
        costs = _costs(shards, np.array(rows, np.int64), model)
        return [
            _shown(shards, opened, row, {name: int(values[number]) for name, values in costs.items()}, source, of)
            for number, (row, source, of) in enumerate(
                zip(rows, sources or [""] * len(rows), passes or [Pass()] * len(rows), strict=True)
            )
        ]
    finally:
        opened.close()


def _costs(shards: IndexedShards, rows: NDArray[np.int64], model: CostModel | None) -> dict[str, NDArray[np.int64]]:
    if model is None:
        return {}
    costs = IndexCosts(shards.index, model)
    return {phase: costs.costs(phase, rows) for phase in costs.phases}


def _shown(
    shards: IndexedShards, opened: OpenShards, row: int, costs: dict[str, int], source: str, of: Pass
) -> ShownSample:
    index, recipe = shards.index, shards.recipe_of(row)
    stored = StoredSample(index, opened, row)
    spans: tuple[ShownText | ShownMedia, ...] = ()
    error = None
    try:
        if row in index.bad_rows():
            raise index.failure(row)
        stored.decode(recipe, of)  # a sample that fails to decode is in no batch
        spans = tuple(_spans(stored, recipe))
    except FieldError as failure:
        error = str(failure.at(stored.shard, stored.key))
    except DataError as failure:
        error = str(failure)
    return ShownSample(
        shard=stored.shard,
        key=stored.key,
        row=row,
        piece=stored.piece,
        source=source,
        tokens=int(index.llm_tokens[row]),
        trained_tokens=int(index.loss_tokens[row]),
        costs=costs,
        spans=spans,
        error=error,
    )


def _spans(stored: StoredSample, recipe: Recipe) -> Iterator[ShownText | ShownMedia]:
    spans, sizes = stored.look(recipe)
    for span in spans:
        if isinstance(span, MediaSlot):
            yield _media(span, stored.members[span.member].field, sizes[span.member], recipe)
        else:
            yield from _text(span, recipe)


def _media(slot: MediaSlot, field: str, size: PartSize, recipe: Recipe) -> ShownMedia:
    extras = recipe.modalities[slot.modality].extras([size])
    return ShownMedia(
        modality=slot.modality,
        field=field,
        tokens=slot.tokens,
        positions=size.positions,
        sizes={name: _plain(values) for name, values in extras.items()},
    )


def _plain(values: NDArray[Any]) -> Any:
    """Return lists, with None for infinite and NaN values, which JSON does not have."""
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        strange = ~np.isfinite(values)
        values = values.astype(object)
        values[strange] = None
    rows = values.tolist()
    return rows[0] if len(rows) == 1 else rows


def _text(span: TextSpan, recipe: Recipe) -> list[ShownText]:
    """Return a span of text, cut after the sample's first token, which is never trained, if the others are."""
    cuts = [slice(0, 1), slice(1, None)] if span.leads and span.loss else [slice(0, None)]
    trained = span.loss_mask()
    return [_stretch(span.token_ids[cut], bool(trained[cut][0]), recipe) for cut in cuts if len(span.token_ids[cut])]


def _stretch(token_ids: NDArray[np.int32], trained: bool, recipe: Recipe) -> ShownText:
    text = recipe.text.decode(token_ids)
    return ShownText(
        text=text,
        token_ids=tuple(token_ids.tolist()) if text is None else (),
        tokens=len(token_ids),
        trained=trained,
    )
