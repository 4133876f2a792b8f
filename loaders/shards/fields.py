"""Names of members: path -> (key, field) by WebDataset's conventions; field -> modality and encoding.

Field rules: how the fields of a shard's samples are named, the function that makes their records, its container.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from orchdata.loaders.functions import UserFunction
from orchdata.loaders.modalities.builtin import BUILTINS, ON_REQUEST, OTHER, TEXT
from orchdata.loaders.shards.container import Container, identity_of
from orchdata.loaders.storage.paths import ARROW_SUFFIXES, PARQUET_SUFFIXES, RECORD_SUFFIXES, suffix_of
from orchdata.loaders.text.messages import CHAT_KEYS, PAIR_KEYS
from orchdata.loaders.text.preprocessor import TEXT_FIELDS
from orchdata.loaders.text.template import record_keys

RAW, GZIP, SPARSE, PARQUET, TABLE_ROW, NAMED, OWN_BYTES = range(7)
"""How a member's bytes are stored: plain, gzipped, in a sparse tar member, in a cell of a Parquet or Arrow file, as a
row of CSV, named by a record (in another file, or encoded in the record), or returned by a container of the user's."""

TEXT_SUFFIXES = frozenset((*TEXT_FIELDS, *PAIR_KEYS, "response", "question", "answer", "json", "jsn", "jsonl"))

_SUFFIXES = dict.fromkeys(TEXT_SUFFIXES, TEXT) | {
    suffix: code for code, kind in enumerate(BUILTINS.values(), TEXT + 1) for suffix in kind.fields
}

# The expressions of webdataset (tariterators.base_plus_ext and tar_file_iterator): names are split as it splits them.
_SPLIT = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
_META = re.compile(r"__[^/]*__($|/)")
_LONG_NAME = 256
_LONGEST_NFC = 1024


_MEDIA_KEYS = record_keys((*BUILTINS, *ON_REQUEST))


def listed_modality(name: str) -> str | None:
    """Return the modality of a column of lists or structs with this whole name, as `pixels`; None for none."""
    return next((modality for modality, kind in BUILTINS.items() if name.lower() in kind.column_words), None)


def names_content(name: str) -> bool:
    """Return whether a sample's text, chat or media are read from fields of this name."""
    name = name.lower()
    kind = classify(name)[0]
    is_text = name in (*CHAT_KEYS, *PAIR_KEYS) or name.rpartition(".")[2] in TEXT_FIELDS
    return is_text or name in _MEDIA_KEYS or kind not in (TEXT, OTHER)


class ColumnRules(NamedTuple):
    """Which columns of a table are read, and under which names.

    Attributes:
        names: (old name, new name) of each renamed column.
        all: read all columns, as JSON if they are no text or media, for a function of the user's.
        kept: names of `Recipe.keep`; columns that are not read otherwise are read as values.
        only: names of the only columns to read, as they are, after renaming; empty: those with media or text.
    """

    names: tuple[tuple[str, str], ...] = ()
    all: bool = False
    kept: tuple[str, ...] = ()
    only: tuple[str, ...] = ()


ALL_AS_NAMED = ColumnRules()


class Met:
    """Counts in how many samples the names of `columns=` are met, old and new, as they are stored."""

    def __init__(self, names: Iterable[tuple[str, str]]) -> None:
        self._names = frozenset(name for pair in names for name in pair)
        self.counts: dict[str, int] = {}

    def add(self, stored: Iterable[str], count: int = 1) -> None:
        """Count the names of `count` samples, or of a member."""
        if self._names:
            for name in self._names.intersection(stored):
                self.counts[name] = self.counts.get(name, 0) + count


def split_name(name: str) -> tuple[str, str] | None:
    """Return (key, lower-case field) of a member; None for names outside of samples: `__meta__` or without a dot."""
    if name[:2] == "__" and _META.match(name):
        return None
    if len(name) > _LONG_NAME:  # the expression takes quadratic time, and names may be 1 MiB long
        return _split_long(name)
    match = _SPLIT.match(name)
    return None if match is None else (match[1], match[2].lower())


def split_at_last_dot(name: str) -> tuple[str, str] | None:
    """Return the same with a key up to the last dot of the file's name: `a.b` of `a.b.txt` and `a.b.txt.gz`."""
    base = name.rfind("/") + 1
    if (name[:2] == "__" and _META.match(name)) or name.startswith("._", base):
        return None
    dot = name.rfind(".", base + 1, len(name) - 3 if name[-3:].lower() == ".gz" else len(name))
    dot = name.rfind(".", base + 1) if dot < 0 else dot
    return None if dot < 0 else (name[:dot], name[dot + 1 :].lower())


SPLITS: Final = {"": split_name, "last_dot": split_at_last_dot}
"""`FieldRules.key` -> how the names of members are split."""


def _split_long(name: str) -> tuple[str, str] | None:
    """Split as `_SPLIT` does, in linear time."""
    slash = name.rfind("/")
    dot = name.find(".", slash + 1)
    if dot < 0:
        return None
    # The last part of the key has no dot. It begins after the last slash, or after the slash before it if the basename
    # starts with a dot; `.*/` does not match across a newline.
    newline = name.find("\n", 0, slash + 1)
    start = (slash if newline < 0 else name.rfind("/", 0, newline)) + 1
    if start == dot:
        start = name.rfind("/", 0, max(0, slash)) + 1
    if start == dot or name.find(".", start, dot) >= 0:
        return None
    return name[:dot], name[dot + 1 :].lower()


def classify(field: str) -> tuple[int, int]:
    """Return (kind, encoding) by the last suffix: "0.jpg" is an image, "txt.gz" gzipped text, "audio.pth" other."""
    suffix = field.rpartition(".")[2]
    kind = _SUFFIXES.get(suffix)
    if kind is not None:
        return kind, RAW
    if suffix == "gz" and field[:-3].rpartition(".")[2] in TEXT_SUFFIXES:
        return TEXT, GZIP
    return OTHER, RAW


def classify_renamed(stored: str, field: str) -> tuple[int, int]:
    """Classify a field that is stored under another name: by its own suffix, else by the stored one."""
    kind, encoding = classify(stored)
    if field == stored:
        return kind, encoding
    named, _ = classify(field)
    return (kind if named == OTHER else named), encoding


def nfc(name: str) -> str:
    """Return a name in the form in which names are compared: macOS writes "é" as "e" and an accent."""
    # Python takes quadratic time for accents in a row.
    return name if len(name) > _LONGEST_NFC else unicodedata.normalize("NFC", name)


def printable(name: str) -> str:
    """Return a name as valid Unicode: bytes that are not UTF-8 (surrogates, as tarfile decodes them) become escapes."""
    if name.isascii():
        return name
    try:
        return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # a lone surrogate that stands for no byte
        return name.encode("utf-8", "backslashreplace").decode()


class FieldRules(NamedTuple):
    """How the samples of a shard are read.

    Attributes:
        columns: (old name, new name) of each renamed field.
        record: the recipe's function, which makes a record of a sample's fields.
        keep: names of `Recipe.keep`.
        container: of the user's, which opens the shard; None: by its suffix.
        key: "last_dot" if the keys of a tar end at the last dot of a file's name; "": at the first.
    """

    columns: tuple[tuple[str, str], ...] = ()
    record: UserFunction | None = None
    keep: tuple[str, ...] = ()
    container: Container | None = None
    key: str = ""

    @property
    def of_columns(self) -> ColumnRules:
        """The rules for tables, in which the function gets all columns."""
        return ColumnRules(self.columns, all=self.record is not None, kept=self.keep)

    def identity(self, url: str) -> list[Any]:
        """Return what the facts of a shard depend on, JSON-safe; empty without rules."""
        parts: list[Any] = [["columns", *map(list, self.columns)]] if self.columns else []
        parts += [["key", self.key]] if self.key else []
        if self.container is not None:
            every = [] if self.record is None else ["every column"]
            return [*parts, ["container", identity_of(self.container), *every]]
        if self.record is not None:
            if suffix_of(url) in RECORD_SUFFIXES:
                parts.append(["record", self.record.id])
            elif suffix_of(url) in (*PARQUET_SUFFIXES, *ARROW_SUFFIXES):
                parts.append(["every column"])
        has_columns = self.keep and suffix_of(url) in (*PARQUET_SUFFIXES, *ARROW_SUFFIXES)
        return [*parts, ["kept", *self.keep]] if has_columns else parts


NO_RULES = FieldRules()


def check_met(columns: Sequence[tuple[str, str]], met: Iterable[Mapping[str, int]]) -> None:
    """Raise ValueError if no sample has a field to rename, or samples have its new name already; `met`: FactsMeta."""
    names = {name for each in met for name in each}
    old_names = {old for old, _ in columns}
    missing = [old for old, _ in columns if old not in names]
    if missing and all(new in names for old, new in columns if old in missing):
        swapped = {new: old for old, new in columns}
        raise ValueError(
            f"columns maps old name -> new name, and the data have {', '.join(repr(swap) for swap in swapped)}, not "
            f"{', '.join(map(repr, missing))}. The other way round: columns={swapped!r}"
        )
    if missing:
        raise ValueError(f"columns renames {', '.join(map(repr, missing))}, and no sample has a field of this name")
    taken = [(old, new) for old, new in columns if new in names and new not in old_names]
    if taken:
        old, new = taken[0]
        raise ValueError(
            f"columns gives {old!r} the name {new!r}, and the data already have a field of this name: rename that one "
            f"too ({new!r}: 'other_{new}'), or choose another name"
        )
