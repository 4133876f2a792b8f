"""The members of a sample: what the index knows of each, and which of them text and media are read from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from orchdata.loaders.modality import AUDIO, IMAGE, TEXT

_JSON_NAMES: Final = ("json", "jsonl", "jsn", "messages", "conversations")
_LEADING_NUMBER: Final = re.compile(r"(\d+)\.")


class Member(NamedTuple):
    """What the index knows of one field of a sample, from headers.

    Attributes:
        field: lower-cased, as "0.jpg" or "json".
        kind: a modality code, or 255 for what is no modality.
        width, height: of an image as displayed, EXIF orientation applied.
        frames, rate: of an audio clip, per channel, and Hz.
        size: bytes of payload.
        error: why the field is bad; raised only when the field is used.
    """

    field: str
    kind: int
    width: int = 0
    height: int = 0
    frames: int = 0
    rate: int = 0
    size: int = 0
    error: str | None = None


class Layout(NamedTuple):
    """Indices of a sample's members by use.

    Attributes:
        json: JSON, in the order of the shard.
        plain: the preferred plain text, numbered fields by number.
        image, audio: media, numbered fields by number.
    """

    json: tuple[int, ...]
    plain: tuple[int, ...]
    image: tuple[int, ...]
    audio: tuple[int, ...]


def layout_of(members: Sequence[Member], text_fields: tuple[str, ...]) -> Layout:
    """Sort members by use; of plain text the first of `text_fields` that is there, whole names before extensions."""
    return _layout(tuple([member[:2] for member in members]), text_fields)


@lru_cache(maxsize=4096)  # samples of a data set are alike
def _layout(names: tuple[tuple[str, int], ...], text_fields: tuple[str, ...]) -> Layout:
    texts = _in_field_order(names, TEXT)
    json = sorted(index for index in texts if _is_json(names[index][0]))
    plain = [index for index in texts if index not in json]
    return Layout(
        json=tuple(json),
        plain=_preferred([(index, _name(names[index][0])) for index in plain], text_fields),
        image=tuple(_in_field_order(names, IMAGE)),
        audio=tuple(_in_field_order(names, AUDIO)),
    )


def _preferred(candidates: Sequence[tuple[int, str]], text_fields: Iterable[str]) -> tuple[int, ...]:
    for wanted in text_fields:
        chosen = [index for index, name in candidates if name == wanted]
        chosen = chosen or [index for index, name in candidates if name.endswith("." + wanted)]
        if chosen:
            return tuple(chosen)
    return ()


def _in_field_order(names: Sequence[tuple[str, int]], kind: int) -> list[int]:
    found = [index for index, (_, its_kind) in enumerate(names) if its_kind == kind]
    return sorted(found, key=lambda index: (_number(names[index][0]), index))


def _number(name: str) -> int:
    match = _LEADING_NUMBER.match(name)
    return int(match[1]) if match else -1


def _name(name: str) -> str:
    """A field's name in lower case (columns of Parquet files keep theirs), without its leading number and `.gz`."""
    return _LEADING_NUMBER.sub("", name.lower().removesuffix(".gz"), count=1)


def _is_json(name: str) -> bool:
    return _name(name).rpartition(".")[2] in _JSON_NAMES
