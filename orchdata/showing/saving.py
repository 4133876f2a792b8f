"""Media of samples, written as files: what the model gets, for people to view and listen to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from orchdata.building.spec import IndexedShards
from orchdata.loaders.errors import DataError, FieldError, as_field_error
from orchdata.loaders.generators import Pass
from orchdata.loaders.index.index import basename
from orchdata.loaders.index.stored import StoredSample
from orchdata.loaders.samples.decode import decode_media
from orchdata.loaders.storage.atomic import write_whole

_LONGEST_NAME: Final = 100
"""Limit for a key's or a shard's bytes in a file's name: file systems allow 255 for the whole name."""


def save_media(
    shards: IndexedShards, rows: Sequence[int], folder: str | Path, passes: Sequence[Pass] = ()
) -> Iterator[Path | DataError]:
    """Write the media of rows into `folder`, in a subfolder per shard, as `row-key.part.suffix`. Yield each file, or
    the error if there is none.

    Args:
        passes: pass in which each row is decoded; default: pass 0, with seed 0.
    """
    opened = shards.open()
    try:
        for row, of in zip(rows, passes or [Pass()] * len(rows), strict=True):
            if row in shards.index.bad_rows():
                yield shards.index.failure(row)
                continue
            stored = StoredSample(shards.index, opened, row)
            target = Path(folder) / _plain(basename(stored.shard))
            try:
                for number in range(len(stored.parts)):
                    yield _saved(shards, stored, number, target, of)
            except FieldError as error:
                yield error.at(stored.shard, stored.key)
            except DataError as error:
                yield error
    finally:
        opened.close()


def _saved(shards: IndexedShards, stored: StoredSample, number: int, folder: Path, of: Pass) -> Path:
    index, recipe = shards.index, shards.recipe_of(stored.row)
    part = stored.parts[number]
    name, member = index.modality_of(part), stored.member_of(part)
    (size,) = index.sizes(range(part, part + 1), recipe)
    data = stored.read(recipe, text=False, parts=[part])[member]
    generator = partial(stored.generator, of, number)
    arrays = decode_media(name, data, size, recipe, stored.members[member].field, generator).arrays
    try:
        suffix, content = recipe.modalities[name].to_file(data, size, arrays, recipe.limits)
    except Exception as error:  # a user's modality may raise anything
        raise as_field_error(error, "written", stored.members[member].field) from error
    file = folder / f"{stored.row}-{_plain(stored.key)}.{number}.{suffix}"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, content)
    return file


def _plain(name: str) -> str:
    """Return a name that is valid for a file on any system, and not a path; the end of a long name."""
    plain = re.sub(r"[^\w.=+-]", "_", name)
    return plain.encode()[-_LONGEST_NAME:].decode(errors="ignore").lstrip(".") or "_"
