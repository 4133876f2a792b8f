"""Keys and columns with names for a sample's words."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

WORDS_SUFFIX: Final = ".words"
"""After the name of a Parquet column of lists or structs with words: JSON that is no chat, and is only inspected."""

_NOUNS: Final = (
    "text caption transcript transcription sentence utterance question answer instruction output prompt completion "
    "response query dialog dialogue qa content conversation"
)
_LAST: Final = frozenset(
    (*_NOUNS.split(), *(noun + "s" for noun in _NOUNS.split()), "txt", "queries", "chosen", "rejected")
)
_OF_LABELS: Final = frozenset("label class category id file path url type mime".split())
_KEY_CHARACTERS: Final = 64


@lru_cache(maxsize=4096)
def names_words(key: str) -> bool:
    """Whether a key names words: `question`, `TEXT`, `raw_transcription`, `text_list`; not `text_id`, `class_text`."""
    parts = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", key[:_KEY_CHARACTERS])]
    if parts[1:] and parts[-1] in ("list", "raw"):
        parts.pop()
    return bool(parts) and parts[-1] in _LAST and not (parts[1:] and parts[0] in _OF_LABELS)
