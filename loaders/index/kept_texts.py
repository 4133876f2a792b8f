"""Counts of the texts of one shard, kept in the cache: a layer between facts and costs.

A text is tokenized once for all recipes that read it alike, for all sizes of media and all limits.

    facts --tokenizer--> outlines (kept here) --sizes of media, limits--> costs

Only what was counted is kept. A sample that fails before its text is tokenized is measured again with each new recipe.
"""

from __future__ import annotations

import hashlib
import operator
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from orchdata.loaders import versions
from orchdata.loaders.errors import FieldError
from orchdata.loaders.index.table import offsets_of
from orchdata.loaders.records import LeftOut
from orchdata.loaders.samples.measure import Outline
from orchdata.loaders.samples.spans import TextRun
from orchdata.loaders.storage.atomic import write_whole
from orchdata.loaders.storage.sealed import read_sealed, seal
from orchdata.loaders.unread_names import UnreadNames
from orchdata.loaders.versions import TEXTS_FORMAT

FOLDER: Final = "texts"
KIND: Final = b"text"
_NONE, _TEXT, _CHAT, _LEFT_OUT, _FAILED = range(5)
_OTHER_NAME: Final = -1

# Column -> its dtype, and the column of lengths that says how many values a sample has; None for one value a sample.
_COLUMNS: Final[dict[str, tuple[Any, str | None]]] = {
    "state": (np.uint8, None),
    "layout": (np.int32, None),
    "shape": (np.int64, None),
    "cut_at": (np.int32, None),
    "num_texts": (np.int32, None),
    "num_parts": (np.int32, None),
    "num_spans": (np.int32, None),
    "num_starts": (np.int32, None),
    "num_names": (np.int32, None),
    "text": (np.int32, "num_texts"),
    "part_modality": (np.int32, "num_parts"),
    "part_member": (np.int32, "num_parts"),
    "span_kind": (np.int32, "num_spans"),
    "span_tokens": (np.int32, "num_spans"),
    "span_first": (np.int32, "num_spans"),
    "start": (np.int32, "num_starts"),
    "name": (np.int32, "num_names"),
}
_LENGTHS: Final = tuple(name for name in _COLUMNS if name.startswith("num_"))

Counted = Outline | FieldError | LeftOut | None
"""What is kept of a sample: its outline, the error of its tokenizer, that the recipe's function leaves it out, or
nothing."""


class Kept(NamedTuple):
    """What is known of a sample's text.

    Attributes:
        counted: see `Counted`.
        shape: as `shape_of`, of the expansions that were tokenized with the text.
        unread: names of the sample that are not read, see `unread_names`; and the number of others.
    """

    counted: Counted
    shape: int
    unread: tuple[str, ...] = ()
    others: int = 0


def layout_digest(layout: Sequence[object]) -> str:
    """Return a digest of the names and kinds of a sample's members: the text of another layout is another text."""
    return hashlib.blake2b(repr(layout).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


@dataclass(slots=True)
class KeptTexts:
    """The outlines of a shard's samples, as they were kept, and those to keep.

    Attributes:
        source: digest of the source text of the recipe's function; "" if there is none.
        limits: the largest of each of `scan_limits` under which texts were counted.
    """

    source: str
    limits: Mapping[str, float]
    _modalities: Sequence[str]
    _layouts: dict[str, int]
    _names: Sequence[str]
    _failed: Mapping[int, FieldError]
    _columns: Mapping[str, NDArray[Any]]
    _offsets: Mapping[str, NDArray[np.int64]]
    _valid: frozenset[int] = field(default=frozenset())

    def __len__(self) -> int:
        return len(self._columns["state"])

    def of(self, number: int, layout: str) -> Kept | None:
        """Return what is kept of a sample with this layout.

        Args:
            number: of the sample in its shard.
        """
        columns = self._columns
        if number >= len(self) or self._layouts.get(layout) != columns["layout"][number]:
            return None
        state = int(columns["state"][number])
        if state not in self._valid:
            return None
        if state == _LEFT_OUT:
            return Kept(LeftOut(), 0)
        if state == _FAILED:
            return Kept(self._failed[number], 0)
        outline = self._outline(number, state == _CHAT)
        names = columns["name"][slice(*self._offsets["num_names"][number : number + 2])].tolist()
        unread = tuple(self._names[name] for name in names if name != _OTHER_NAME)
        return Kept(outline, int(columns["shape"][number]), unread, len(names) - len(unread))

    def _outline(self, number: int, is_chat: bool) -> Outline:
        lists = {
            name: self._columns[name][slice(*self._offsets[lengths][number : number + 2])].tolist()
            for name, (_, lengths) in _COLUMNS.items()
            if lengths is not None
        }
        codes, members, texts = lists["part_modality"], lists["part_member"], lists["text"]
        kinds, tokens = lists["span_kind"], lists["span_tokens"]
        spans: list[TextRun | int] = []
        for kind, count, first in zip(kinds, tokens, lists["span_first"], strict=True):
            if kind >= 0:
                spans.append(kind)
            else:
                leads, loss = divmod(-1 - kind, 2)
                spans.append(TextRun(count, bool(loss), bool(leads), first))
        parts = tuple((self._modalities[code], member) for code, member in zip(codes, members, strict=True))
        cut_at = int(self._columns["cut_at"][number])
        return Outline(parts, tuple(texts), is_chat, tuple(spans), tuple(lists["start"]), cut_at)


def read_texts(path: str, identity: Sequence[str]) -> KeptTexts | None:
    """Return what is kept of the texts of a shard; None if there is nothing, or it is of another shard or version.

    Args:
        identity: of the facts of the shard.
    """
    try:
        head, packed = read_sealed(path, KIND, TEXTS_FORMAT)
        values = head.values
        if values["meta"] != identity:
            return None
        body = pa.decompress(pa.py_buffer(packed), values["uncompressed_bytes"], codec="zstd")
        columns, at = {}, 0
        for name, (dtype, _) in _COLUMNS.items():
            columns[name] = np.frombuffer(body, dtype, values["sizes"][name], at)
            at += columns[name].nbytes
        offsets = {name: offsets_of(columns[name]) for name in _LENGTHS}
    except (OSError, ValueError, pa.ArrowException):
        return None  # absent, damaged or of another version
    # Counts hold under other verdicts.
    judged, counted = map(operator.eq, values["rules"], versions.rules())
    states = {**dict.fromkeys((_TEXT, _CHAT), counted), **dict.fromkeys((_LEFT_OUT, _FAILED), judged and counted)}
    return KeptTexts(
        values["source"],
        values["limits"],
        values["modalities"],
        {layout: number for number, layout in enumerate(values["layouts"])},
        values["names"],
        {number: FieldError(name, reason) for number, name, reason in values["failed"]},
        columns,
        offsets,
        frozenset(state for state, is_valid in states.items() if is_valid),
    )


class TextsWriter:
    """Collects what is to be kept of the texts of a shard, sample by sample.

    Args:
        modalities: names by their codes.
    """

    def __init__(self, modalities: Sequence[str]) -> None:
        self._codes = {name: code for code, name in enumerate(modalities)}
        self._columns = {name: array(np.dtype(dtype).char) for name, (dtype, _) in _COLUMNS.items()}
        self._layouts: dict[str, int] = {}
        self._names = UnreadNames()
        self._failed: list[tuple[int, str, str]] = []

    def put(self, kept: Kept | None, layout: str) -> None:
        """Add the next sample."""
        columns, counted = self._columns, None if kept is None else kept.counted
        outline = counted if isinstance(counted, Outline) else _NO_OUTLINE
        if isinstance(counted, FieldError):
            self._failed.append((len(columns["state"]), counted.field, counted.reason))
        columns["state"].append(_state_of(counted))
        columns["layout"].append(self._layouts.setdefault(layout, len(self._layouts)))
        columns["shape"].append(0 if kept is None else kept.shape)
        columns["cut_at"].append(outline.cut_at)
        columns["num_texts"].append(len(outline.texts))
        columns["num_parts"].append(len(outline.parts))
        columns["num_spans"].append(len(outline.spans))
        columns["num_starts"].append(len(outline.starts))
        columns["text"].extend(outline.texts)
        for name, member in outline.parts:
            columns["part_modality"].append(self._codes[name])
            columns["part_member"].append(member)
        for span in outline.spans:
            kind, tokens, first_id = span, 0, 0
            if isinstance(span, TextRun):
                kind, tokens, first_id = -1 - span.loss - 2 * span.leads, span.num_tokens, span.first_id
            columns["span_kind"].append(kind)
            columns["span_tokens"].append(tokens)
            columns["span_first"].append(first_id)
        columns["start"].extend(outline.starts)
        names = [] if kept is None or not kept.unread else self._names.add(kept.unread)
        others = 0 if kept is None else kept.others
        columns["num_names"].append(len(names) + others)
        columns["name"].extend([*names, *[_OTHER_NAME] * others] if others else names)

    def write(self, path: str, identity: Sequence[str], source: str, limits: Mapping[str, float]) -> None:
        """Write the file for `read_texts`, which appears when it is complete. Raises StorageError."""
        # Names are numbered as they came; of those that are kept, in the order in which they are stored.
        names = self._names.numbers()
        numbers = np.array([*names.values()], np.int32)
        places = np.argsort(numbers)
        given = np.asarray(self._columns["name"], np.int32)
        found = np.searchsorted(numbers, given, sorter=places)
        found[found == len(numbers)] = 0
        stored = np.where(numbers[places[found]] == given, places[found], _OTHER_NAME) if len(numbers) else given
        columns: dict[str, Any] = {**self._columns, "name": stored.astype(np.int32)}
        body = b"".join(columns.values())
        values = {
            "meta": identity,
            "rules": versions.rules(),
            "source": source,
            "limits": dict(limits),
            "modalities": list(self._codes),
            "layouts": list(self._layouts),
            "names": list(names),
            "failed": self._failed,
            "sizes": {name: len(column) for name, column in self._columns.items()},
            "uncompressed_bytes": len(body),
        }
        packed = pa.compress(body, codec="zstd")
        write_whole(path, seal(KIND, TEXTS_FORMAT, values, [packed])[0])


_NO_OUTLINE: Final = Outline((), (), False, ())


def _state_of(counted: Counted) -> int:
    if isinstance(counted, Outline):
        return _CHAT if counted.is_chat else _TEXT
    if isinstance(counted, FieldError):
        return _FAILED
    return _NONE if counted is None else _LEFT_OUT
