"""The shapes of the heads of cached files, see `storage.shared.values`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from orchdata.loaders.index.totals import UNREAD
from orchdata.loaders.shards.facts_table import OPTIONAL
from orchdata.loaders.storage.shared.values import COUNT, Check, check_of
from orchdata.loaders.unread_names import UNREAD_SHAPE

_OVERFLOW: Final = dict.fromkeys(("truncated", "cut_tokens", "split", "pieces"), COUNT)
_STRINGS: Final = [str]
_PARTS: Final = dict.fromkeys(("samples", "parts", "positions", "tokens", "max_positions"), COUNT)
_TOTALS: Final = {
    **dict.fromkeys(("samples", "bad", "bytes", "members", "llm_tokens", "loss_tokens"), COUNT),
    **dict.fromkeys(("without_loss", "max_llm_tokens"), COUNT),
    "overflow": _OVERFLOW,
    "ignored_fields": {str: COUNT},
}
_SIZE: Final = dict.fromkeys(
    (
        *("rows", "parts", "members", "bad", "key_bytes", "error_field_bytes", "error_reason_bytes"),
        *("extent_width", "header_width"),
    ),
    COUNT,
)
_FACTS: Final = {
    **dict.fromkeys(("url", "version", "checksum", "media"), str),
    **dict.fromkeys(("size", "lost_samples", "lost_bytes"), COUNT),
    "ignored": {str: COUNT},
}
_KEPT_FACTS: Final = {"meta": _FACTS, "limits": {str: float}, "rules": {str: COUNT}}
_COSTS: Final = {"url": str, "meta": _FACTS, "size": _SIZE, "fields": _STRINGS, "totals": dict, "media_root": str}
_SHARD: Final = (str, COUNT, str, str, COUNT, COUNT, str)  # as ShardInfo.as_list
_INDEX: Final = {
    **dict.fromkeys(("fingerprint", "build_id"), str),
    **dict.fromkeys(("recipe", "totals"), dict),
    "shards": [_SHARD],
    "shard_rows": [COUNT],
    "fields": _STRINGS,
    "modalities": _STRINGS,
    "size": _SIZE,
}


def check_facts(values: Mapping[str, Any]) -> None:
    """Raise ValueError if the head of stored facts is malformed."""
    if type(meta := values.get("meta")) is dict:
        values = {**values, "meta": _without_optional(meta)}
    _check_facts(values, "the head")


def check_costs(values: Mapping[str, Any], modalities: Sequence[str]) -> None:
    """Raise ValueError if the head of stored costs under these modalities is malformed."""
    if type(meta := values.get("meta")) is dict:
        values = {**values, "meta": _without_optional(meta)}
    _check_costs(_without_marks(values), "the head")
    _check_of_totals(tuple(modalities))(_without_unread(values["totals"]), "totals")


_SHARD_FLAGS: Final = 3
"""`packed`, `unproven` and `moved_media` of a ShardInfo."""


def check_index(values: Mapping[str, Any]) -> None:
    """Raise ValueError if the head of an index is malformed."""
    if type(shards := values.get("shards")) is list:
        longest = len(_SHARD)
        more = [shard[longest:] for shard in shards if type(shard) is list and len(shard) > longest]
        _check_renamed([each[:1] for each in more], "shards")
        _check_containers([each[1:2] for each in more if each[1:]], "shards")
        _check_reaches([each[2:3] for each in more if each[2:]], "shards")
        _check_flags([each[3 : 3 + _SHARD_FLAGS] for each in more], "shards")
        _check_containers([each[3 + _SHARD_FLAGS :] for each in more if each[3 + _SHARD_FLAGS :]], "shards")  # the key
        values = {**values, "shards": [shard[:longest] if type(shard) is list else shard for shard in shards]}
    _check_index(_without_marks(values), "the head")
    rows, modalities = values["shard_rows"], values["modalities"]
    starts = [0, *rows[:-1]] if rows else []
    if len(rows) != len(values["shards"]) + 1 or rows[0] or any(map(int.__gt__, starts, rows)):
        raise ValueError(f"the rows of shards do not follow each other: {rows!r:.80}")
    if rows[-1] != values["size"]["rows"]:
        raise ValueError(f"the shards have {rows[-1]} rows, and the columns {values['size']['rows']}")
    if modalities[:1] != ["text"] or len(set(modalities)) != len(modalities):
        raise ValueError(f"the modalities are {modalities!r:.80}: text must be the first, and none may come twice")
    _check_of_totals(tuple(modalities))(_without_unread(values["totals"]), "totals")
    if values["totals"]["samples"] > values["size"]["rows"]:
        raise ValueError(f"{values['totals']['samples']} samples have {values['size']['rows']} rows")


@lru_cache(maxsize=64)
def _check_of_totals(modalities: tuple[str, ...]) -> Check:
    counted = {"text": {"samples": COUNT, "tokens": COUNT}} | dict.fromkeys(modalities[1:], _PARTS)
    return check_of(_TOTALS | {"modalities": counted})


def _without_marks(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a head without what says that marks follow the columns, after a check of it."""
    if values.get("marks", True) is not True:
        raise ValueError(f"marks is said to be {values['marks']!r:.40}")
    return {name: value for name, value in values.items() if name != "marks"}


def _without_optional(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of facts without what only some shards have, after a check of it."""
    _check_met(meta.get("met", {}), "met")
    if meta.get("packed", True) is not True:
        raise ValueError(f"packed is said to be {meta['packed']!r:.40}")
    return {name: value for name, value in meta.items() if name not in OPTIONAL}


def _without_unread(totals: Mapping[str, Any]) -> dict[str, Any]:
    """Return totals without the counts of what is not read, after a check of them."""
    _check_unread(totals.get(UNREAD), UNREAD)
    return {name: value for name, value in totals.items() if name != UNREAD}


_check_met = check_of({str: COUNT})
_check_unread = check_of(UNREAD_SHAPE)
_check_facts, _check_costs, _check_index = map(check_of, (_KEPT_FACTS, _COSTS, _INDEX))
_check_renamed = check_of([([(str, str)],)])
_check_containers = check_of([(str,)])
_check_reaches = check_of([(COUNT,)])
_check_flags = check_of([[bool]])
