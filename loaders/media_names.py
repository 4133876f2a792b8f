"""Endings of the files of each modality, read or not: which of the fields that are not read are media."""

from __future__ import annotations

from typing import Final

from orchdata.loaders.modalities.builtin import BUILTINS, ON_REQUEST, UNDECODED
from orchdata.loaders.text.media_words import record_keys

_CLASSES: Final = {**BUILTINS, **ON_REQUEST}
_MEAN_OTHERS: Final = frozenset(("au", "snd", "mts"))
"""Endings that strings often have for another reason, as domains of Australia and modules of TypeScript do."""
_ENDINGS: Final = {
    ending: name
    for name, kind in reversed(_CLASSES.items())  # a GIF is an image first
    for ending in (*kind.fields, *UNDECODED[name].split())
    if "." not in ending and ending not in _MEAN_OTHERS
}
_RECORD_KEYS: Final = record_keys(_CLASSES)


def modality_of_name(name: str) -> str | None:
    """Return the modality of a field that is called so, or is a file with this ending; None for no media."""
    return _RECORD_KEYS.get(name) or _ENDINGS.get(name.rpartition(".")[2].lower())
