"""Default configurations of transformers by `model_type`, with the tokens of a made-up processor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

_ENDS: Final = ("_token_id", "_token_index", "_index", "_id")


def config_of(model_type: str, processor: Any, features: Mapping[str, int] = MappingProxyType({})) -> Any:
    """The default configuration, in which tokens are those of the processor. Raises whatever its class raises.

    Args:
        features: modality -> the token that its processor writes for each feature.
    """
    kind = CONFIG_MAPPING[model_type]
    absent = {name: each for name, each in kind.sub_configs.items() if getattr(kind(), name, None) is None}
    config = kind(**{name: each().to_dict() for name, each in absent.items() if each is not AutoConfig})
    for each in tree(config):
        for name in [name for name in vars(each) if any(name.endswith(end) for end in _ENDS)]:
            found = _token(name, processor)
            if found is not None and hasattr(each, name):
                setattr(each, name, found)
        for modality, token_id in features.items():
            for name in (f"{modality}_token_id", f"{modality}_token_index"):
                if hasattr(each, name):
                    setattr(each, name, token_id)
        for stem in ("vision_start", "vision_end", "audio_start", "audio_end"):  # which published ones say
            bos = f"{stem.partition('_')[0]}_{'bos' if stem.endswith('start') else 'eos'}_token"
            text = getattr(processor, bos, None)
            if isinstance(text, str) and not hasattr(each, f"{stem}_token_id"):
                setattr(each, f"{stem}_token_id", int(processor.tokenizer.convert_tokens_to_ids(text)))
    return config


def tree(config: Any) -> Iterator[Any]:
    """A configuration and all that it holds."""
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PretrainedConfig):
            yield from tree(value)


def _token(name: str, processor: Any) -> int | None:
    stem = next(name.removesuffix(end) for end in _ENDS if name.endswith(end))
    tokenizer = processor.tokenizer
    for holder in (processor, tokenizer):
        found = getattr(holder, f"{stem}_token_id", None)
        if isinstance(found, int):
            return found
        text = getattr(holder, f"{stem}_token", None)
        if isinstance(text, str):
            return int(tokenizer.convert_tokens_to_ids(text))
    return None
