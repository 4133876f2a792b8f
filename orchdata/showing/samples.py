"""Samples as the model sees them, JSON-safe: text decoded from the token ids, what of it is trained, media as files.

rows --StoredSample--> spans, parts --tokenizer backwards--> {"key": ..., "tokens": ..., "spans": [...], "error": None}
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.balancers import CostModel
from orchdata.building.assembler import pass_of
from orchdata.building.spec import BuildSpec, IndexedShards, SampleContent, ShardContent
from orchdata.dataset.mixture import Mixture
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.loaders.errors import DataError, FieldError, OrchdataError, as_field_error
from orchdata.loaders.generators import Pass
from orchdata.loaders.index.index import Index, absolute, basename
from orchdata.loaders.index.joined import JoinedIndex
from orchdata.loaders.index.stored import StoredSample
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.sample import MediaPart
from orchdata.loaders.samples.spans import MediaSlot, TextSpan
from orchdata.loaders.shards.fields import printable
from orchdata.loaders.shards.open import by_identity
from orchdata.loaders.storage.atomic import write_whole
from orchdata.planning.costs import IndexCosts
from orchdata.planning.plan import Plan
from orchdata.planning.windows import WindowBatches

_EXAMPLES: Final = 3
_LONGEST_NAME: Final = 100
"""Limit for a key's or a shard's bytes in a file's name: file systems allow 255 for the whole name."""

Shown = dict[str, Any]
"""A sample: shard, key, row, piece, source ("" without a mixture), tokens, trained_tokens, costs (phase -> cost),
spans, and error: why it cannot be loaded, or None.

A span of text has tokens, trained, and text, or token_ids if the tokenizer cannot decode. One of media has modality,
field, tokens, positions, sizes (name -> value), and file if one was made of it.
"""


class MediaFile(NamedTuple):
    """A part of a sample as a file for people: its number in the sample, suffix, and content."""

    sample: StoredSample
    number: int
    suffix: str
    content: bytes


def rows_of_key(index: Index, unchosen: NDArray[np.int64], key: str, shard: str | None = None) -> list[int]:
    """Return the rows of the samples of a key.

    Args:
        unchosen: rows that the data set leaves out.
        shard: url, path or name of their shard; None for any.

    Raises:
        KeyError: no sample has this key, or the data set leaves it out.
        ValueError: several shards with that name have the key.
    """
    if shard is not None and os.sep in shard:
        shard = absolute(shard)
    found = index.find_all(shard, printable(key))
    if not found:
        where = "in these shards" if shard is None else f"in shard {shard!r}"
        like = ", ".join(repr(index.key(row)) for row in range(min(_EXAMPLES, index.num_rows)))
        raise KeyError(f"no sample {where} has the key {key!r}; keys here look like {like}")
    rows: list[int] = np.setdiff1d(found, unchosen).tolist()
    if not rows:
        raise KeyError(f"the sample {key!r} is left out by filter, split, take or select of its data set")
    return rows


def shards_of(dataset: ShardDataset | Mixture, index: Index) -> IndexedShards:
    """Return the shards of a data set, to read rows of its index."""
    leaves = [leaf.dataset for leaf in dataset.leaves] if isinstance(dataset, Mixture) else [dataset]
    recipes = tuple(leaf.recipe for leaf in leaves)
    return IndexedShards(
        index=index,
        build_id=index.build_id,
        recipe=recipes[0],
        of_sources=recipes if isinstance(dataset, Mixture) else (),
        containers=by_identity(dataset.containers),
        files=dataset.files,
    )


def shards_and_model(spec: BuildSpec) -> tuple[IndexedShards, CostModel | None]:
    """Return the shards of a loader, and its cost model. Raises ValueError if it has no whole samples of shards."""
    if not isinstance(spec.content, ShardContent | SampleContent):
        raise ValueError("orchdata show reads shards, and this DataLoader reads none: call its step_at for any step")
    if isinstance(spec.plan.batches, WindowBatches):
        raise ValueError(
            "orchdata show shows whole samples, and this loader has windows of concatenated documents, "
            "od.Packed(concatenate=True): its step_at gives any step, and batch.token_ranges says what each window has"
        )
    model = spec.plan.costs.model if isinstance(spec.plan.costs, IndexCosts) else None
    return spec.content.shards, model


def source_names(dataset: ShardDataset | Mixture, index: Index, rows: Sequence[int]) -> list[str]:
    """Return the name of each row's source in a mixture; "" without a mixture."""
    if not (isinstance(dataset, Mixture) and isinstance(index, JoinedIndex)):
        return [""] * len(rows)
    return [dataset.leaves[index.source_of(row)].name for row in rows]


def shown_step(
    shards: IndexedShards,
    plan: Plan,
    rank: int,
    model: CostModel | None = None,
    use_file: Callable[[MediaFile], str] | None = None,
) -> list[dict[str, Any]]:
    """Return what a rank gets in a step, by microbatch: samples, and for each phase its cost and the largest cost."""
    groups = []
    for microbatch in range(plan.num_microbatches):
        indices = plan.places(rank, microbatch)
        cells = {phase: plan.cells(phase)[:, microbatch] for phase in plan.phases}
        sources = [plan.sources[number] if plan.sources else "" for number in plan.source[indices].tolist()]
        passes = [pass_of(plan, at, shards.seed) for at in indices.tolist()]
        groups.append(
            {
                "epoch": plan.epoch,
                "step": plan.step,
                "rank": rank,
                "ranks": plan.num_ranks,
                "microbatch": microbatch,
                "microbatches": plan.num_microbatches,
                "cost": {phase: int(costs[rank]) for phase, costs in cells.items()},
                "largest_cost": {phase: int(costs.max()) for phase, costs in cells.items()},
                "samples": shown_rows(shards, plan.row[indices].tolist(), model, sources, passes, use_file),
            }
        )
    return groups


def shown_rows(
    shards: IndexedShards,
    rows: Sequence[int],
    model: CostModel | None = None,
    sources: Sequence[str] = (),
    passes: Sequence[Pass] = (),
    use_file: Callable[[MediaFile], str] | None = None,
    keep_going: bool = False,
) -> list[Shown]:
    """Return rows of an index as the model sees them, decoded as by a loader, in this process.

    Raises OrchdataError for trouble that says nothing about a sample, such as a shard that has changed.

    Args:
        sources: source of each row, for a mixture.
        passes: pass in which each row is decoded; default: pass 0, with seed 0.
        use_file: gets each part of media as a file, and returns what `file` of its span says; "" for nothing.
        keep_going: trouble, too, is the error of the sample that has it.
    """
    index, opened = shards.index, shards.open()
    costs: dict[str, NDArray[np.int64]] = {}
    if model is not None:
        of_model = IndexCosts(index, model)
        costs = {phase: of_model.costs(phase, np.array(rows, np.int64)) for phase in of_model.phases}
    samples = []
    try:
        for number, row in enumerate(rows):
            stored = StoredSample(index, opened, row)
            spans: list[dict[str, Any]] = []
            error = None
            try:
                if row in index.bad_rows():
                    raise index.failure(row)
                spans += _spans(stored, shards.recipe_of(row), passes[number] if passes else Pass(), use_file)
            except FieldError as failure:
                error, spans = str(failure.at(stored.shard, stored.key)), []
            except OrchdataError as failure:
                if not (keep_going or isinstance(failure, DataError)):
                    raise
                error, spans = str(failure), []
            samples.append(
                {
                    "shard": stored.shard,
                    "key": stored.key,
                    "row": row,
                    "piece": stored.piece,
                    "source": sources[number] if sources else "",
                    "tokens": int(index.llm_tokens[row]),
                    "trained_tokens": int(index.loss_tokens[row]),
                    "costs": {phase: int(values[number]) for phase, values in costs.items()},
                    "spans": spans,
                    "error": error,
                }
            )
    finally:
        opened.close()
    return samples


def _spans(
    stored: StoredSample, recipe: Recipe, of: Pass, use_file: Callable[[MediaFile], str] | None
) -> Iterator[dict[str, Any]]:
    # A sample that fails to decode is in no batch. Parts of media come in the order of their first tokens.
    media = [part for part in stored.decode(recipe, of).parts if isinstance(part, MediaPart)]
    spans, sizes = stored.look(recipe)
    payloads = stored.read(recipe, text=False) if media and use_file is not None else {}
    number = 0
    for span in spans:
        if not isinstance(span, MediaSlot):
            yield from _text(span, recipe)
            continue
        modality, size = recipe.modalities[span.modality], sizes[span.member]
        extras = {name: _plain(values) for name, values in modality.extras([size]).items()}
        field = stored.members[span.member].field
        shown = {
            "modality": span.modality,
            "field": field,
            "tokens": span.tokens,
            "positions": size.positions,
            "sizes": extras,
        }
        if span.first == 0:
            if use_file is not None:
                try:
                    file = modality.to_file(payloads[span.member], size, media[number].arrays, recipe.limits)
                except Exception as error:  # a user's modality may raise anything
                    raise as_field_error(error, "written", field) from error
                shown["file"] = use_file(MediaFile(stored, number, *file))
            number += 1
        yield shown


def _text(span: TextSpan, recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Yield a span of text, cut after the sample's first token, which is never trained, if the others are."""
    trained = span.loss_mask()
    for cut in [slice(0, 1), slice(1, None)] if span.leads and span.loss else [slice(0, None)]:
        ids = span.token_ids[cut]
        if len(ids):
            text = recipe.text.decode(ids)
            yield {
                "text": text,
                "token_ids": ids.tolist() if text is None else [],
                "tokens": len(ids),
                "trained": bool(trained[cut][0]),
            }


def _plain(values: NDArray[Any]) -> Any:
    """Return lists, with None for infinite and NaN values, which JSON does not have."""
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        strange = ~np.isfinite(values)
        values = values.astype(object)
        values[strange] = None
    rows = values.tolist()
    return rows[0] if len(rows) == 1 else rows


def save_in(folder: str | Path) -> Callable[[MediaFile], str]:
    """Return a `use_file` that writes media into `folder`: a subfolder per shard, as `row-key.part.suffix`."""

    def save(media: MediaFile) -> str:
        sample = media.sample
        name = f"{sample.row}-{_file_name(sample.key)}.{media.number}.{media.suffix}"
        file = Path(folder) / _file_name(basename(sample.shard)) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, media.content)
        return str(file)

    return save


def _file_name(name: str) -> str:
    """Return a name that is valid for a file on any system, and not a path; the end of a long name."""
    plain = re.sub(r"[^\w.=+-]", "_", name)
    return plain.encode()[-_LONGEST_NAME:].decode(errors="ignore").lstrip(".") or "_"
