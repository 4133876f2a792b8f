"""Some samples of a data set, as `orchdata show` shows them, with small pictures of their media.

    rows --a child process of limited memory: read, decode, encode again--> SampleView --> HTML

A sample that crashes, hangs or fills the child is shown as unreadable, and the next ones get a new child.
"""

from __future__ import annotations

import base64
import io
import multiprocessing
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from orchdata.building.spec import IndexedShards
from orchdata.engines.processes.engine import start_server
from orchdata.loaders.errors import DataError, FieldError
from orchdata.loaders.html.words import shown
from orchdata.loaders.index.stored import StoredSample
from orchdata.loaders.limited_process import lower_limit, taken_bytes
from orchdata.showing.saving import decoded_part
from orchdata.showing.shown import ShownMedia, ShownSample, ShownText, shown_rows
from orchdata.verifying.checked import FREE_BYTES, begin_checking

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext


_SECONDS: Final = 120.0
_SECONDS_TO_START: Final = 600.0
_GUARD: Final = "A script that starts processes needs `if __name__ == '__main__':` around what it does"
_SIDE: Final = 300
_MOST_PICTURES: Final = 4
_MOST_FRAMES: Final = 4
_MOST_TEXT: Final = 600
_MOST_SPANS: Final = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleView:
    """A sample to show.

    Attributes:
        pictures: one for each of its first spans of media: a JPEG, or None if there is no picture of it.
    """

    sample: ShownSample
    pictures: tuple[bytes | None, ...] = ()


def views_of(shards: IndexedShards, rows: Sequence[int], sources: Sequence[str]) -> list[SampleView]:
    """Return rows to show, each read in a child process of limited memory and time."""
    context = multiprocessing.get_context("forkserver")
    start_server(context)  # with the imports of workers: a loader of this process forks them off the same server
    views: list[SampleView] = []
    while len(views) < len(rows):
        views += _of_one_child(context, shards, rows[len(views) :], sources[len(views) :])
    return views


def _of_one_child(
    context: ForkServerContext, shards: IndexedShards, rows: Sequence[int], sources: Sequence[str]
) -> list[SampleView]:
    """Return the rows that one child could show, and the one at which it ended."""
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_show, args=(theirs, shards, list(rows), list(sources)), daemon=True)
    views: list[SampleView] = []
    try:
        try:
            child.start()
            theirs.close()
            if not ours.poll(_SECONDS_TO_START):
                raise TimeoutError(f"it did not begin in {_SECONDS_TO_START:.0f} seconds")
            ours.recv()  # it begins: what a user's program does at its import is not the time of a sample
        except Exception as error:  # noqa: BLE001 - what does not pickle may raise anything
            said = "it ended before it began" if isinstance(error, EOFError) else f"{type(error).__name__}: {error}"
            reason = f"the process that reads samples cannot be started: {said}. {_GUARD}"
            return [_unreadable(shards, row, reason) for row in rows]
        for row in rows:
            reason = ""
            try:
                if ours.poll(_SECONDS):
                    views.append(ours.recv())
                    continue
                reason = f"reading it took more than {_SECONDS:.0f} seconds"
            except EOFError:
                child.join(_SECONDS)
                reason = f"the process that read it ended ({child.exitcode})"
            views.append(_unreadable(shards, row, reason))
            break
    finally:
        ours.close()
        if child.pid is not None:
            child.kill()
            child.join()
    return views


def _show(results: Connection, shards: IndexedShards, rows: Sequence[int], sources: Sequence[str]) -> None:
    begin_checking(0)
    results.send(None)
    for row, source in zip(rows, sources, strict=True):
        lower_limit(resource.RLIMIT_DATA, taken_bytes() + FREE_BYTES)
        try:
            (sample,) = shown_rows(shards, [row], sources=[source])
            view = SampleView(sample=sample, pictures=() if sample.error else _pictures(shards, row))
        except Exception as error:  # noqa: BLE001 - a page is written in any case
            view = _unreadable(shards, row, f"{type(error).__name__}: {error}")
        results.send(view)


def _unreadable(shards: IndexedShards, row: int, reason: str) -> SampleView:
    index = shards.index
    return SampleView(
        sample=ShownSample(
            shard=index.shard_of(row).url,
            key=index.key(row),
            row=row,
            piece=int(index.piece[row]),
            source="",
            tokens=int(index.llm_tokens[row]),
            trained_tokens=int(index.loss_tokens[row]),
            costs={},
            spans=(),
            error=reason,
        )
    )


def _pictures(shards: IndexedShards, row: int) -> tuple[bytes | None, ...]:
    opened = shards.open()
    try:
        stored = StoredSample(shards.index, opened, row)
        return tuple(_picture(shards, stored, number) for number in range(min(len(stored.parts), _MOST_PICTURES)))
    finally:
        opened.close()


def _picture(shards: IndexedShards, stored: StoredSample, number: int) -> bytes | None:
    """Return a part as a small JPEG: an image, the first frames of a clip, or the features of sound."""
    from PIL import Image

    try:
        part = decoded_part(shards, stored, number)
        suffix, content = part.to_file()
        if suffix == "wav":
            picture = _features(part.arrays)
        elif suffix in ("png", "jpg", "jpeg", "webp"):
            picture = _frames(content)
        else:
            return None
    except (DataError, FieldError):
        return None
    if picture is None:
        return None
    picture.thumbnail((2 * _SIDE, 2 * _SIDE), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    picture.convert("RGB").save(out, "JPEG", quality=80)
    return out.getvalue()


def _frames(content: bytes) -> Any:
    """Return a picture, or the first frames of a moving one side by side."""
    from PIL import Image, ImageSequence

    frames = []
    for frame in ImageSequence.Iterator(Image.open(io.BytesIO(content))):
        frames.append(frame.convert("RGB").copy())
        if len(frames) == _MOST_FRAMES:
            break
    if len(frames) == 1:
        return frames[0]
    wide, high = frames[0].size
    strip = Image.new("RGB", (wide * len(frames), high))
    for place, frame in enumerate(frames):
        strip.paste(frame, (place * wide, 0))
    return strip


def _features(arrays: Mapping[str, NDArray[Any]]) -> Any:
    """Return the features of sound as a picture: time to the right, low frequencies at the bottom."""
    from PIL import Image

    found = [values for values in arrays.values() if values.ndim == 2 and values.dtype.kind == "f" and values.size]
    if not found:
        return None
    values = found[0].astype(np.float32)
    if values.shape[0] > values.shape[1]:
        values = values.T
    low, high = np.nanpercentile(values, (1, 99))
    grey = np.clip((np.nan_to_num(values) - low) / max(float(high - low), 1e-9), 0, 1)
    return Image.fromarray((255 * grey[::-1]).astype(np.uint8)).resize((2 * _SIDE, _SIDE // 2))


def sample_html(view: SampleView, name: Callable[[str], str], in_text: Callable[[str], str] = str) -> str:
    """Return a sample as HTML.

    Args:
        name: url of a shard -> a short name.
        in_text: shortens the names of shards in a message.
    """
    sample = view.sample
    where = f"{shown(name(sample.shard), 120)} · {shown(sample.key, 120)}"
    counts = f"{sample.tokens:,} LLM tokens, {sample.trained_tokens:,} trained"
    if sample.source:
        counts += f", source {shown(sample.source, 60)}"
    head = f"<h3>{where}</h3><span class='note'>{counts}</span>"
    if sample.error is not None:
        return f'<article class="sample">{head}<p>unreadable: {shown(in_text(sample.error))}</p></article>'
    pictures = iter(view.pictures)
    spans = [_span(span, pictures) for span in sample.spans[:_MOST_SPANS]]
    more = len(sample.spans) - _MOST_SPANS
    rest = f'<p class="note">and {more:,} more spans</p>' if more > 0 else ""
    return f'<article class="sample">{head}{"".join(spans)}{rest}</article>'


def _span(span: ShownText | ShownMedia, pictures: Any) -> str:
    if isinstance(span, ShownText):
        text = span.text if span.text is not None else " ".join(str(one) for one in span.token_ids[:100])
        kind = ' class="trained"' if span.trained else ""
        return f"<p><span{kind}>{shown(text, _MOST_TEXT)}</span></p>"
    picture = next(pictures, None)
    note = f"{escape(span.modality)}, {span.tokens:,} tokens, {span.positions:,} positions"
    if picture is None:
        return f'<p class="note">[{note}]</p>'
    data = base64.b64encode(picture).decode()
    grid = _grid(span)
    return (
        f'<div class="picture"><img alt="{note}" src="data:image/jpeg;base64,{data}">{grid}</div>'
        f'<p class="note">{note}</p>'
    )


def _grid(span: ShownMedia) -> str:
    """Return lines between the tokens of an image; nothing for other media, or where tokens are in no grid."""
    grid = span.sizes.get("grid_hw")
    if not (isinstance(grid, list) and len(grid) == 2 and all(isinstance(side, int) and side > 0 for side in grid)):
        return ""
    high, wide = grid
    merge = round((high * wide / max(1, span.tokens)) ** 0.5) or 1
    rows, columns = high // merge, wide // merge
    if rows * columns != span.tokens:
        return ""
    lines = "".join(f"M0 {row}H{columns}" for row in range(1, rows))
    lines += "".join(f"M{column} 0V{rows}" for column in range(1, columns))
    return (
        f'<svg viewBox="0 0 {columns} {rows}" preserveAspectRatio="none" aria-hidden="true">'
        f'<path d="{lines}" fill="none" stroke="#fff" stroke-opacity=".7" stroke-width="1" '
        'vector-effect="non-scaling-stroke"/></svg>'
    )
