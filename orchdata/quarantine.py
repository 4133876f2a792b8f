"""The list of samples to leave out, as JSON Lines: written by `orchdata verify`, read by `DataLoader(quarantine=path)`.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from orchdata.loaders.errors import DataError
from orchdata.loaders.storage.atomic import write_whole
from orchdata.loaders.storage.opening import check_given, read_small

_MOST_BYTES: Final = 1 << 30


def write_quarantine(path: str | Path, failures: Sequence[DataError]) -> None:
    """Write failures; the file appears whole, or stays unchanged.

    Raises:
        ValueError: the path exists and is not a file.
        StorageError: it cannot be written now.
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


def read_quarantine(path: str | os.PathLike[str]) -> list[tuple[str, str]]:
    """Return the (shard, key) of each sample of a list.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a regular file, it is cut, or a line of it is not a sample.
    """
    samples: list[tuple[str, str]] = []
    is_open = False
    for number, line in enumerate(_lines(path), 1):
        text = line.rstrip("\n")
        if not text.strip():
            is_open = is_open or (number == 1 and text == " ")
            continue
        row = _parsed(text)
        if not (isinstance(row, dict) and isinstance(row.get("shard"), str) and isinstance(row.get("key"), str)):
            wanted = '{"shard": "...", "key": "..."}'
            raise ValueError(f"quarantine file {path}, line {number}: expected {wanted}, got {text[:80]!r}")
        samples.append((row["shard"], row["key"]))
        is_open = (is_open or text.startswith(" ")) and not text.endswith(" ")
    if is_open:
        raise ValueError(
            f"quarantine file {path} is cut after {len(samples)} samples: its first line begins with a blank, and its "
            "last line does not end with one. Write it again with `orchdata verify --out`; if you removed samples from "
            "it yourself, remove that blank too"
        )
    return samples


def _lines(path: str | os.PathLike[str]) -> io.TextIOWrapper:
    content = read_small(path, _MOST_BYTES)
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"quarantine file {os.fspath(path)} is not UTF-8: {error}") from None
    return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig")


def _parsed(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
