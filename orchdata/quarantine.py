"""Lists of samples to leave out, as JSON Lines: written by `orchdata verify`, read by `DataLoader(quarantine=path)`
and `ErrorPolicy(blank=path)`.

    {"shard": "a.tar", "key": "s1", "field": "jpg", "reason": "..."}
    {"shard": "b.tar", "key": "s7", "field": "wav", "reason": "..."}

Each line is a sample. If the first line begins with a blank, the last line ends with one: this reveals a list that was
cut at the end of a line. JSON ignores these blanks, so that other programs can read the lines. A list without them, as
users write, is read without this check. Lists may be concatenated.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from orchdata.loaders.errors import DataError
from orchdata.loaders.storage.local import check_given, read_small, write_whole

_MOST_BYTES: Final = 1 << 30


def write_quarantine(path: str | Path, failures: Sequence[DataError]) -> None:
    """Write failures; the file appears whole, or stays unchanged. Raises ValueError if the path exists and is not a
    file, StorageError if it cannot be written now.
    """
    check_target(path)
    names = ("shard", "key", "field", "reason")
    lines = [json.dumps({name: getattr(failure, name) for name in names}) for failure in failures]
    content = " " + "\n".join(lines) + " \n" if lines else ""
    write_whole(os.path.realpath(path), content.encode())  # a link stays, and what it points to is replaced


def check_target(path: str | Path) -> None:
    """Raise ValueError if the path exists and is not a file: before a search for bad samples that may take hours."""
    if os.path.exists(path):
        check_given(path)


def sample_names(given: Any, argument: str, most: int = 2) -> list[tuple[str, ...]]:
    """Return names of samples, as given, or as they are in the list at a path: (shard, key); if `most` is 3 also
    (source, shard, key). Raises TypeError and ValueError for anything else, and as `_rows`.
    """
    if isinstance(given, str | os.PathLike):
        wanted = ("source", "shard", "key")[-most:]
        return [tuple(row[name] for name in wanted if name in row) for row in _rows(given)]
    if not isinstance(given, Iterable):
        raise TypeError(f"{argument} is (shard, key) pairs, or the path of a list of them, got {given!r}")
    names = list(given)  # it may be an iterator
    for name in names:
        are_strings = isinstance(name, tuple | list) and all(isinstance(each, str) for each in name)
        if not are_strings or not 2 <= len(name) <= most:
            raise ValueError(f"{argument} is (shard, key) pairs of strings, got {name!r}")
    return [tuple(name) for name in names]


def _rows(path: str | os.PathLike[str]) -> list[dict[str, str]]:
    """Return the samples of a list. Raises FileNotFoundError, and ValueError for what is not a regular file, a list
    that is cut, or a line that is not a sample.
    """
    samples: list[dict[str, str]] = []
    is_open = False
    content = read_small(path, _MOST_BYTES)
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"list of samples {os.fspath(path)} is not UTF-8: {error}") from None
    for number, line in enumerate(io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig"), 1):
        text = line.rstrip("\n")
        if not text.strip():
            is_open = is_open or (number == 1 and text == " ")
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):
            row = None
        names = [row.get(name, "") for name in ("source", "shard", "key")] if isinstance(row, dict) else []
        if not (names and {"shard", "key"} <= row.keys() and all(isinstance(name, str) for name in names)):
            wanted = '{"shard": "...", "key": "..."}'
            raise ValueError(f"list of samples {path}, line {number}: expected {wanted}, got {text[:80]!r}")
        samples.append(row)
        is_open = (is_open or text.startswith(" ")) and not text.endswith(" ")
    if is_open:
        raise ValueError(
            f"list of samples {path} is cut after {len(samples)} samples: its first line begins with a blank, and its "
            "last line does not end with one. Write it again with `orchdata verify --out`; if you removed samples from "
            "it yourself, remove that blank too"
        )
    return samples
