"""Samples as the model sees them: text decoded from the token ids, what of it is trained, media as files; `od.show`.

rows --StoredSample--> spans, parts --tokenizer backwards--> {"key": ..., "tokens": ..., "spans": [...], "error": None}
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

import orchdata
from orchdata.building.pages import IndexedShards
from orchdata.dataset.indexed import index_of
from orchdata.dataset.mixture import Mixture
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.dataset.shards import unchosen_rows
from orchdata.html import shown
from orchdata.loaders.errors import DataError, FieldError, OrchdataError, as_field_error
from orchdata.loaders.generators import Pass
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.stored import StoredSample
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.sample import MediaPart
from orchdata.loaders.samples.spans import MediaSlot, TextSpan
from orchdata.loaders.shards.fields import printable
from orchdata.loaders.shards.open import by_identity
from orchdata.loaders.storage.local import write_whole
from orchdata.loaders.storage.storage import basename

_EXAMPLES: Final = 3
_SIDE: Final = 600
_MOST_PICTURES: Final = 4
_MOST_TEXT: Final = 600
_MOST_SPANS: Final = 24
_LONGEST_NAME: Final = 100
"""Limit for a key's or a shard's bytes in a file's name: file systems allow 255 for the whole name."""

Shown = dict[str, Any]
"""A sample: shard, key, row, piece, source ("" without a mixture), tokens, trained_tokens, spans, and error: why it
cannot be loaded, or None.

A span of text has tokens, trained, and text, or token_ids if the tokenizer cannot decode. One of media has modality,
field, tokens, positions, sizes (name -> value), and file if one was made of it.
"""


class MediaFile(NamedTuple):
    """A part of a sample as a file for people: its number in the sample, suffix, and content."""

    sample: StoredSample
    number: int
    suffix: str
    content: bytes


def rows_of_key(dataset: ShardDataset | Mixture, index: Index, key: str) -> list[int]:
    """Return the rows of the chosen samples of a key, in any shard. Raises KeyError if there is none."""
    found = index.find_all(None, printable(key))
    if not found:
        like = ", ".join(repr(index.key(row)) for row in range(min(_EXAMPLES, index.num_rows)))
        raise KeyError(f"no sample in these shards has the key {key!r}; keys here look like {like}")
    rows: list[int] = np.setdiff1d(found, unchosen_rows(dataset, index)).tolist()
    if not rows:
        raise KeyError(f"the sample {key!r} is left out by filter, split, take or select of its data set")
    return rows


def shown_rows(
    dataset: ShardDataset | Mixture,
    index: Index,
    rows: Sequence[int],
    use_file: Callable[[MediaFile], str] | None = None,
    keep_going: bool = False,
) -> list[Shown]:
    """Return rows of an index as the model sees them, decoded as by a loader in its first pass, in this process.

    `use_file` gets each part of media as a file, and returns what `file` of its span says, "" for nothing. Raises
    OrchdataError for trouble that says nothing about a sample, such as a shard that has changed; with `keep_going`
    that, too, is the error of its sample.
    """
    leaves = dataset.leaves
    shards = IndexedShards(
        index=index,
        build_id=index.build_id,
        recipes=tuple(leaf.dataset.recipe for leaf in leaves),
        containers=by_identity(dataset.containers),
        files=dataset.files,
    )
    opened, bad = shards.open(), set(index.bad_rows().tolist())
    samples = []
    with closing(opened):
        for row in rows:
            stored = StoredSample(index, opened, row)
            spans: list[dict[str, Any]] = []
            error = None
            try:
                if row in bad:
                    raise index.failure(row)
                spans += _spans(stored, shards.recipe_of(row), use_file)
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
                    "source": leaves[index.source_of(row)].name,
                    "tokens": int(index.llm_tokens[row]),
                    "trained_tokens": int(index.loss_tokens[row]),
                    "spans": spans,
                    "error": error,
                }
            )
    return samples


def _spans(
    stored: StoredSample, recipe: Recipe, use_file: Callable[[MediaFile], str] | None
) -> Iterator[dict[str, Any]]:
    # A sample that fails to decode is in no batch. Parts of media come in the order of their first tokens.
    media = [part for part in stored.decode(recipe, Pass()).parts if isinstance(part, MediaPart)]
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
        described = {
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
                described["file"] = use_file(MediaFile(stored, number, *file))
            number += 1
        yield described


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
    if values.dtype.kind == "f":
        values = np.where(np.isfinite(values), values.astype(object), None)  # type: ignore[call-overload]
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


@dataclass(frozen=True, repr=False)
class ShownSamples:
    """Samples as the model sees them. A notebook shows text, with what is trained, and small pictures of images.

    Attributes:
        samples: the samples, as `orchdata show --json` has them.
    """

    samples: tuple[Shown, ...]

    def __repr__(self) -> str:
        lines = [
            f"{each['key']}: {each['error'] or format(each['tokens'], ',') + ' LLM tokens'}" for each in self.samples
        ]
        return "\n".join([f"{len(self.samples)} samples", *lines])

    _repr_html_ = orchdata._html


def show(dataset: ShardDataset | Mixture, samples: int | str | Sequence[int | str]) -> ShownSamples:
    """Return samples as the model sees them: as `orchdata show`, for a notebook.

    They are read and decoded now, in this process. A sample that cannot be loaded says why.

    Args:
        dataset: its index is built where it is missing.
        samples: keys (str) and rows of the index (int), or one of them.

    Raises:
        KeyError: the data set has no sample of this key, or leaves it out.
        IndexError: there is no such row.
    """
    index = index_of(dataset)
    rows: list[int] = []
    for one in [samples] if isinstance(samples, int | str) else samples:
        if isinstance(one, str):
            rows += rows_of_key(dataset, index, one)
        elif -index.num_rows <= one < index.num_rows:
            rows.append(one % index.num_rows)
        else:
            raise IndexError(f"row {one} is none of the {index.num_rows:,} rows of the index")
    return ShownSamples(tuple(with_pictures(dataset, index, rows)))


def with_pictures(dataset: ShardDataset | Mixture, index: Index, rows: Sequence[int]) -> list[Shown]:
    """Return rows to show, with small pictures of their first images as data URLs."""
    return shown_rows(dataset, index, rows, _picture, keep_going=True)


def _picture(media: MediaFile) -> str:
    if media.suffix not in ("png", "jpg", "jpeg", "webp") or media.number >= _MOST_PICTURES:
        return ""
    from PIL import Image

    picture, out = Image.open(io.BytesIO(media.content)), io.BytesIO()  # of a moving one the first frame
    picture.thumbnail((_SIDE, _SIDE))
    picture.convert("RGB").save(out, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()


def sample_html(sample: Shown, name: Callable[[str], str], in_text: Callable[[str], str] = str) -> str:
    """Return a sample as HTML. `name`: url of a shard -> a short name; `in_text` shortens such names in a message."""
    where = f"{shown(name(sample['shard']), 120)} · {shown(sample['key'], 120)}"
    counts = f"{sample['tokens']:,} LLM tokens, {sample['trained_tokens']:,} trained"
    if sample["source"]:
        counts += f", source {shown(sample['source'], 60)}"
    head = f"<h3>{where}</h3><span class='note'>{counts}</span>"
    if sample["error"] is not None:
        return f'<article class="sample">{head}<p>unreadable: {shown(in_text(sample["error"]))}</p></article>'
    spans = "".join(map(_span_html, sample["spans"][:_MOST_SPANS]))
    more = len(sample["spans"]) - _MOST_SPANS
    rest = f'<p class="note">and {more:,} more spans</p>' if more > 0 else ""
    return f'<article class="sample">{head}{spans}{rest}</article>'


def _span_html(span: dict[str, Any]) -> str:
    if "text" in span:
        text = span["text"] if span["text"] is not None else " ".join(map(str, span["token_ids"][:100]))
        kind = ' class="trained"' if span["trained"] else ""
        return f"<p><span{kind}>{shown(text, _MOST_TEXT)}</span></p>"
    note = f"{escape(span['modality'])}, {span['tokens']:,} tokens, {span['positions']:,} positions"
    if not span.get("file"):
        return f'<p class="note">[{note}]</p>'
    return f'<div class="picture"><img alt="{note}" src="{span["file"]}"></div><p class="note">{note}</p>'
