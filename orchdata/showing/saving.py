"""Media of samples, written as files: what the model gets, for people to view and listen to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from numpy.typing import NDArray

from orchdata.building.spec import IndexedShards
from orchdata.loaders.errors import DataError, FieldError, as_field_error
from orchdata.loaders.generators import Pass
from orchdata.loaders.index.index import basename
from orchdata.loaders.index.stored import StoredSample
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.modality import Modality, PartSize
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


class DecodedPart(NamedTuple):
    """A part of a sample, as a loader decodes it, with the bytes that it is decoded from."""

    modality: Modality
    field: str
    size: PartSize
    data: bytes | memoryview
    arrays: Mapping[str, NDArray[Any]]
    limits: Limits

    def to_file(self) -> tuple[str, bytes]:
        """Return the suffix and the content of a file of it. Raises FieldError."""
        try:
            return self.modality.to_file(self.data, self.size, self.arrays, self.limits)
        except Exception as error:  # a user's modality may raise anything
            raise as_field_error(error, "written", self.field) from error


def decoded_part(shards: IndexedShards, stored: StoredSample, number: int, of: Pass | None = None) -> DecodedPart:
    """Return a part of a sample by its number. Raises FieldError, DataError.

    Args:
        of: pass in which it is decoded; default: pass 0, with seed 0.
    """
    index, recipe = shards.index, shards.recipe_of(stored.row)
    part = stored.parts[number]
    name, member = index.modality_of(part), stored.member_of(part)
    (size,) = index.sizes(range(part, part + 1), recipe)
    data = stored.read(recipe, text=False, parts=[part])[member]
    field = stored.members[member].field
    generator = partial(stored.generator, of or Pass(), number)
    arrays = decode_media(name, data, size, recipe, field, generator).arrays
    return DecodedPart(recipe.modalities[name], field, size, data, arrays, recipe.limits)


def _saved(shards: IndexedShards, stored: StoredSample, number: int, folder: Path, of: Pass) -> Path:
    suffix, content = decoded_part(shards, stored, number, of).to_file()
    file = folder / f"{stored.row}-{_plain(stored.key)}.{number}.{suffix}"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, content)
    return file


def _plain(name: str) -> str:
    """Return a name that is valid for a file on any system, and not a path; the end of a long name."""
    plain = re.sub(r"[^\w.=+-]", "_", name)
    return plain.encode()[-_LONGEST_NAME:].decode(errors="ignore").lstrip(".") or "_"
