"""How text speaks of media: a table that the recipe fills, so that nothing here knows which modalities there are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class MediaWords(NamedTuple):
    """What stands for media in texts, chats and records, and for which modality, by name.

    Attributes:
        marks: (text, modality): where the text stands, a part goes.
        items: type of an item in a turn's content -> modality.
        records: key of a record, and column of text, that names media by path -> modality.
        slots: modality -> what stands for a part in the text that a model reads.
    """

    marks: tuple[tuple[str, str], ...]
    items: Mapping[str, str]
    records: Mapping[str, str]
    slots: Mapping[str, str] = {}


def record_keys(names: Iterable[str]) -> dict[str, str]:
    """Keys under which records name media of these modalities: `image`, `images`."""
    return {key: name for name in names for key in (name, f"{name}s")}


def holds_mark(name: str, mark: str | None) -> str:
    """Why a text that holds the mark of a modality is refused."""
    return (
        f"its text holds {mark}, which stands for a part of {name}: write <{name}>, or an item of type {name!r}, where "
        "one goes, and no mark anywhere else"
    )
