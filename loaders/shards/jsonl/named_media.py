"""The media that a record of JSON names: by path, as a `data:` URL, or in base64.

Read are LLaVA's, LLaMA-Factory's, ms-swift's and Qwen's keys (`image`, `images`, `audio`, `audios`: a name, a list of
them, {"path"} or {"bytes"}), items of a turn's content ({"type": "image", "image": ...}, `image_url`, `input_audio`),
and the `file_name` columns of a folder of media with a table. Fields are called `image.0`, `image.1`, `audio.0`, ...
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.builtin import BUILTINS, KINDS, ON_REQUEST, OTHER
from orchdata.loaders.modalities.modality import Modality
from orchdata.loaders.shards.fields import classify
from orchdata.loaders.text.chat_keys import Repeating, says, shown
from orchdata.loaders.text.media_words import record_keys

_CLASSES: Final = {**BUILTINS, **ON_REQUEST}
_CODES: Final = {name: KINDS.index(name) if name in KINDS else OTHER for name in ("text", *_CLASSES)}
_RECORD_KEYS: Final = record_keys(_CLASSES)
_ITEM_TYPES: Final = {word: name for name, kind in _CLASSES.items() for word in (name, *kind.words)}
_CHATS: Final = ("messages", "conversations", "conversation")
_ITEM_NAMES: Final = ("path", "url", "base64")
"""Keys of an item beside that of its type, as transformers takes them."""
_CONTENTS: Final = ("content", "value")
_LISTED: Final = "frames"
_FILE_NAMES: Final = re.compile(r"(?:.*_)?file_names?")
_BASE64: Final = re.compile(r"[A-Za-z0-9+/\s]{24,}(?:=+\s*)?")  # linear: no blank can be matched by two parts of it
_TAG: Final = re.compile(rf"<({'|'.join(('img', *BUILTINS))})>[^<>\n]+\.\w{{2,5}}</\1>")
_PATHS: Final = re.compile(r"s?_?((file_?)?(path|name)|file)s?")
_SNIFFED: Final = 24  # characters of base64: 18 bytes
_DATA_URL: Final = re.compile(r"data:[^,]{0,256};base64,", re.IGNORECASE)


class NamedMedia(NamedTuple):
    """One image or clip that a record names.

    Attributes:
        field: what it is called in the sample.
        kind: code of its modality in the facts; OTHER where these keep no header of it.
        path: as the record has it; None where `encoded` holds it.
        encoded: base64.
        error: why it can be neither.
        files: that are listed in place of it, as the frames of a video.
        told: what the record says of these, by its own keys.
    """

    field: str
    kind: int
    path: str | None = None
    encoded: str | None = None
    error: str | None = None
    files: tuple[NamedMedia, ...] = ()
    told: Mapping[str, Any] = {}

    def parts(self) -> tuple[NamedMedia, ...]:
        """The files that are listed, or itself."""
        return self.files or (self,)

    def joined(self, contents: Sequence[bytes]) -> bytes:
        """The files that are listed as one of its modality."""
        return _CLASSES[self.field.partition(".")[0]].from_frames(contents, self.told)

    def decoded_size(self) -> int:
        """Bytes of what is encoded, at most."""
        return 3 * (len(self.encoded or "") // 4) + 3

    def decoded(self, limits: Limits) -> bytes:
        """What is encoded. Raises DecodeError."""
        if self.decoded_size() - 3 > limits.member_bytes:
            raise DecodeError(f"{self.decoded_size()} bytes in base64, above Limits.member_bytes={limits.member_bytes}")
        try:
            return base64.b64decode("".join((self.encoded or "").split()), validate=True)
        except (binascii.Error, ValueError) as error:
            raise DecodeError(f"not valid base64: {error}") from None


def media_of(value: Any, *, file_names: bool) -> list[NamedMedia]:
    """The media of a record, by modality, in the order in which they are named.

    Args:
        value: JSON.
        file_names: whether its `file_name` columns name media, as in the table of a folder of media.

    Raises:
        DecodeError: the record names media twice, and not the same ones, or in tags of its text.
    """
    named: dict[str, list[Any]] = {}
    placed: dict[str, list[Any]] = {}
    if isinstance(value, dict):
        _check_once(value)
        for key, modality in _RECORD_KEYS.items():
            held = _list_of(value.get(key))
            if held and named.setdefault(modality, held) != held:
                raise DecodeError(f"it names {modality} under {key!r} and under another key, and not the same")
        if file_names:
            _add_files(value, named)
    for modality, held in _items(value):
        placed.setdefault(modality, []).append(held)
    found = []
    for modality, kind in _CODES.items():
        said = placed.get(modality, [])
        held = named.get(modality) or said
        if said and held != said:
            raise DecodeError(f"it names {modality} beside its turns and in them, and not the same")
        found += [_media(modality, number, one) for number, one in enumerate(held)]
        if modality in BUILTINS and not held and isinstance(value, dict):
            found += _elsewhere(value, modality, kind)
    return found


def _elsewhere(value: Mapping[str, Any], modality: str, kind: int) -> list[NamedMedia]:
    """Of a modality of which a record names nothing else, a file under a key that is not read: an error."""
    for key in value:
        if key.startswith(modality) and _PATHS.fullmatch(key, len(modality)):
            for one in _list_of(value[key]):
                if isinstance(one, str) and classify(one.lower())[0] == kind:
                    error = (
                        f"{shown(key)} names {shown(one)} and is not read, so that the text would be learned alone: "
                    )
                    error += f"call the key {modality!r}, or leave it out"
                    return [NamedMedia(f"{modality}.0", kind, error=error)]
    return []


def _check_once(value: dict[str, Any]) -> None:
    if isinstance(value, Repeating) and not value.keys().isdisjoint((*_RECORD_KEYS, *_CHATS)):
        raise DecodeError("a key comes twice in the record")


def _list_of(held: Any) -> list[Any]:
    """What is named: without what says nothing, as None; a number says something, though it is no name."""
    listed = held if isinstance(held, list) else [held]
    return [one for one in listed if says(one) or (isinstance(one, int | float) and one is not False)]


def _add_files(value: Mapping[str, Any], named: dict[str, list[Any]]) -> None:
    for key, held in value.items():
        if _FILE_NAMES.fullmatch(key):
            for one in _list_of(held):
                kind = classify(one.lower())[0] if isinstance(one, str) else OTHER
                if kind in (OTHER, 0):
                    raise DecodeError(f"{shown(key)} names {shown(str(one))}, which is none of: {', '.join(BUILTINS)}")
                named.setdefault(KINDS[kind], []).append(one)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """(modality, name) of items of media in the turns of a record. Raises DecodeError for names in tags of the text."""
    if isinstance(value, dict):
        turns = [value[key] for key in _CHATS if isinstance(value.get(key), list)][:1] or [[value]]
    else:
        turns = [value] if isinstance(value, list) else []
    for turn in turns[0] if turns else ():
        content = next((turn[key] for key in _CONTENTS if turn.get(key) is not None), None) if _is_dict(turn) else None
        tag = _TAG.search(content) if isinstance(content, str) else None
        if tag is not None:
            raise DecodeError(
                f"{shown(tag[0])} names a file in the text: write its mark there, and its path beside the turns"
            )
        for item in content if isinstance(content, list) else ():
            if _is_dict(item):
                kind = item.get("type")
                kind = next((key for key in _ITEM_TYPES if item.get(key) is not None), None) if kind is None else kind
                if isinstance(kind, str) and kind in _ITEM_TYPES:
                    key = next((key for key in (kind, *_ITEM_NAMES) if item.get(key) is not None), kind)
                    for held in _of_item(_ITEM_TYPES[kind], item, item.get(key)):
                        yield _ITEM_TYPES[kind], held


def _of_item(modality: str, item: Mapping[str, Any], held: Any) -> list[Any]:
    """What an item names: a list is of one part, where its modality knows lists."""
    named = _list_of(held)
    kind = _CLASSES[modality]
    if not kind.listed or not isinstance(held, list) or (len(named) == 1 and not _is_piece(named[0], kind)):
        return named
    return [{**{key: one for key, one in item.items() if key != "type" and one is not held}, _LISTED: named}]


def _is_piece(held: Any, kind: type[Modality]) -> bool:
    """Whether a name is of a file that such a part is made of, and not of the part itself."""
    if not kind.listed or not isinstance(held, str):
        return False
    name = held.lower()
    return classify(name)[0] == _CODES[kind.listed] and not name.endswith(tuple(f".{ending}" for ending in kind.fields))


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _media(modality: str, number: int, held: Any) -> NamedMedia:
    field, kind, encoded = f"{modality}.{number}", _CODES[modality], False
    if listed := _CLASSES[modality].listed:
        held = {_LISTED: held} if isinstance(held, list) else held
        if isinstance(held, dict) and isinstance(held.get(_LISTED), list):
            files = tuple(_media(listed, at, one) for at, one in enumerate(held[_LISTED]))
            told = {key: one for key, one in held.items() if key != _LISTED}
            return NamedMedia(field, kind, files=files, told=told, error=None if files else "a list of nothing")
    if isinstance(held, dict):  # {"bytes", "path"}, {"url"}, {"data", "format"}
        key = next((key for key in ("bytes", "data", "path", "url") if isinstance(held.get(key), str)), None)
        encoded = key in ("bytes", "data")
        held = held[key] if key is not None else held
    if not isinstance(held, str):
        what = f"the {type(held).__name__} {held}" if isinstance(held, int | float) else f"a {type(held).__name__}"
        return NamedMedia(field, kind, error=f"{what[:80]}, not a path, a data: URL or base64")
    if held[:5].lower() == "data:":
        match = _DATA_URL.match(held)
        if match is None:
            return NamedMedia(field, kind, error="a data: URL that is not base64")
        return NamedMedia(field, kind, encoded=held[match.end() :])
    if encoded or _is_base64(held, modality):
        return NamedMedia(field, kind, encoded=held)
    if _is_piece(held, _CLASSES[modality]):
        error = f"{shown(held)} is not a {modality}: put the files of one {modality} in a list of their own, [[...]]"
        return NamedMedia(field, kind, error=error)
    return NamedMedia(field, kind, path=held)


def _is_base64(held: str, modality: str) -> bool:
    """Whether a string is base64 of what it should be, by its first bytes: one of a JPEG looks like a path."""
    if len(held) < _SNIFFED or not _BASE64.fullmatch(held, 0, _SNIFFED):
        return False
    head = base64.b64decode(held[:_SNIFFED].encode(), validate=False)
    return bool(_CLASSES[modality].matches_magic(head[:16])) and _BASE64.fullmatch(held) is not None
