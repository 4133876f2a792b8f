"""How texts refer to media: a table that the recipe fills, so that this package knows no modality by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from orchdata.loaders.errors import DecodeError

NOT_DECODED: Final = "`datasets` keeps the file if its feature has decode=False"


class MediaWords(NamedTuple):
    """Words that stand for media in texts, chats and records, with the name of their modality.

    Attributes:
        marks: (text, modality): a part goes where the text is.
        items: type of an item in a turn's content -> modality.
        records: key of a record, and column of text, that names media by path -> modality.
        slots: modality -> mark of a part in the text that a model reads.
        listed: modalities of which an item may list the files that form one part.
    """

    marks: tuple[tuple[str, str], ...]
    items: Mapping[str, str]
    records: Mapping[str, str]
    slots: Mapping[str, str] = {}
    listed: frozenset[str] = frozenset()

    def check_single(self, where: str, kind: str, item: Mapping[str, Any]) -> None:
        """Raise DecodeError for an item of a turn that stands for several parts."""
        value = item.get(kind)
        if isinstance(value, list) and len(value) > 1 and self.items[kind] not in self.listed:
            raise DecodeError(f"{where} has an item of type {kind!r} that holds {len(value)}: give each its own item")


def record_keys(names: Iterable[str]) -> dict[str, str]:
    """Keys with which records name media of these modalities: `image`, `images`."""
    return {key: name for name in names for key in (name, f"{name}s")}


def holds_mark(name: str, mark: str | None) -> str:
    """The error for a text that contains the mark of a modality."""
    return (
        f"its text holds {mark}, which stands for a part of {name}: write <{name}>, or an item of type {name!r}, where "
        "one goes, and no mark anywhere else"
    )
