"""Samples to look at in a notebook and on the page of a profile: `od.show`."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from orchdata.dataset.mixed import index_of
from orchdata.dataset.mixture import Mixture
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.dataset.shards import unchosen_rows
from orchdata.loaders.html import never_raises, shown, view
from orchdata.loaders.index.index import Index, basename
from orchdata.showing.samples import MediaFile, Shown, rows_of_key, shards_of, shown_rows, source_names

_SIDE: Final = 600
_MOST_PICTURES: Final = 4
_MOST_TEXT: Final = 600
_MOST_SPANS: Final = 24


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

    @never_raises
    def _repr_html_(self) -> str:
        return view(f"{len(self.samples)} samples", *(sample_html(each, basename) for each in self.samples))


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
    unchosen = unchosen_rows(dataset, index)
    rows: list[int] = []
    for one in [samples] if isinstance(samples, int | str) else samples:
        if isinstance(one, str):
            rows += rows_of_key(index, unchosen, one)
        elif -index.num_rows <= one < index.num_rows:
            rows.append(one % index.num_rows)
        else:
            raise IndexError(f"row {one} is none of the {index.num_rows:,} rows of the index")
    return ShownSamples(tuple(with_pictures(dataset, index, rows)))


def with_pictures(dataset: ShardDataset | Mixture, index: Index, rows: Sequence[int]) -> list[Shown]:
    """Return rows to show, with small pictures of their first images as data URLs."""
    sources = source_names(dataset, index, rows)
    return shown_rows(shards_of(dataset, index), rows, None, sources, use_file=_picture, keep_going=True)


def _picture(media: MediaFile) -> str:
    if media.suffix not in ("png", "jpg", "jpeg", "webp") or media.number >= _MOST_PICTURES:
        return ""
    from PIL import Image

    picture, out = Image.open(io.BytesIO(media.content)), io.BytesIO()  # of a moving one the first frame
    picture.thumbnail((_SIDE, _SIDE))
    picture.convert("RGB").save(out, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()


def sample_html(sample: Shown, name: Callable[[str], str], in_text: Callable[[str], str] = str) -> str:
    """Return a sample as HTML.

    Args:
        name: url of a shard -> a short name.
        in_text: shortens the names of shards in a message.
    """
    where = f"{shown(name(sample['shard']), 120)} · {shown(sample['key'], 120)}"
    counts = f"{sample['tokens']:,} LLM tokens, {sample['trained_tokens']:,} trained"
    if sample["source"]:
        counts += f", source {shown(sample['source'], 60)}"
    head = f"<h3>{where}</h3><span class='note'>{counts}</span>"
    if sample["error"] is not None:
        return f'<article class="sample">{head}<p>unreadable: {shown(in_text(sample["error"]))}</p></article>'
    spans = "".join(map(_span, sample["spans"][:_MOST_SPANS]))
    more = len(sample["spans"]) - _MOST_SPANS
    rest = f'<p class="note">and {more:,} more spans</p>' if more > 0 else ""
    return f'<article class="sample">{head}{spans}{rest}</article>'


def _span(span: dict[str, Any]) -> str:
    if "text" in span:
        text = span["text"] if span["text"] is not None else " ".join(map(str, span["token_ids"][:100]))
        kind = ' class="trained"' if span["trained"] else ""
        return f"<p><span{kind}>{shown(text, _MOST_TEXT)}</span></p>"
    note = f"{escape(span['modality'])}, {span['tokens']:,} tokens, {span['positions']:,} positions"
    if not span.get("file"):
        return f'<p class="note">[{note}]</p>'
    return f'<div class="picture"><img alt="{note}" src="{span["file"]}"></div><p class="note">{note}</p>'
