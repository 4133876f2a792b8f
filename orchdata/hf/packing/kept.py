"""Earlier results about models: in this process, and in orchdata's cache folder, for other runs and ranks.

An entry is a small JSON file, named by a digest of all that it depends on, which it repeats. One that is damaged, or of
something else, is as good as none. A folder that cannot be written is no error.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from orchdata.hf.families import model_class
from orchdata.hf.tiny.shrink import parts
from orchdata.loaders.errors import StorageError
from orchdata.loaders.storage.atomic import write_once
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.shared.files import read_small
from orchdata.loaders.storage.shared.values import check_shape

_KIND: Final = "packing"
_MOST_BYTES: Final = 1 << 20
_VERSIONED: Final = frozenset(
    ("builtins", "abc", "typing", "collections", "enum", "dataclasses", "torch", "transformers", "huggingface_hub")
)
_seen: dict[str, dict[str, Any]] = {}


# Of a configuration, what changes nothing that its model computes.
_NAMES: Final = (
    "_name_or_path",
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
    "id2label",
    "label2id",
)


def facts_of(config: Any) -> dict[str, Any]:
    """Return what a model's behaviour depends on: its configuration and class, and the versions of both packages."""
    import torch
    import transformers

    kind = model_class(config)
    return {
        "config": _without_names(config.to_dict()),
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "code": code_of(config),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _without_names(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {str(name): _without_names(each) for name, each in value.items() if name not in _NAMES}


def code_of(config: Any) -> dict[str, str]:
    """Return digests of the files of classes outside of transformers and torch, which have no version: the models of a
    configuration and its parts, the configurations, and their base classes.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    kinds: set[type[Any]] = {model_class(config)}
    for _, part in parts(config):
        kinds.add(type(part))
        for mapping in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
            known = mapping.get(type(part), None)
            kinds |= {each for each in (known if isinstance(known, tuple | list) else (known,)) if each is not None}
    modules = {base.__module__ for kind in kinds for base in kind.__mro__}
    outside = [name for name in modules if name.partition(".")[0] not in _VERSIONED]
    return {name: _digest_of_file(name) for name in sorted(outside)}


def _digest_of_file(module: str) -> str:
    file = getattr(sys.modules.get(module), "__file__", None)
    try:
        return hashlib.blake2b(Path(file).read_bytes(), digest_size=8).hexdigest() if file else ""
    except OSError:
        return ""


def digest_of(facts: Mapping[str, Any]) -> str:
    """Return the digest of JSON-like facts; anything else counts as its text."""
    return hashlib.blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=20).hexdigest()


def find(digest: str, fields: Mapping[str, type]) -> dict[str, Any] | None:
    """Return the result stored under a digest, if it has these fields of these types."""
    if digest in _seen:
        return _seen[digest]
    try:
        stored = json.loads(read_small(CacheFolder().root / _KIND / f"{digest}.json", _MOST_BYTES))
        check_shape(stored, {"digest": str, **fields}, "it")
    except (OSError, ValueError, RecursionError):
        return None
    if stored["digest"] != digest:
        return None
    return _seen.setdefault(digest, {name: stored[name] for name in fields})


def keep(digest: str, entry: Mapping[str, Any], *, on_disk: bool = True) -> None:
    """Remember it, on disk too where that can be written."""
    _seen[digest] = dict(entry)
    with suppress(OSError, StorageError):
        if on_disk:
            path = CacheFolder().file(_KIND, f"{digest}.json")
            write_once(path, json.dumps({"digest": digest, **entry}).encode())
