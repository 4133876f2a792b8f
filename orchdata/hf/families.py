"""What families of models want beside the common: one row a family, by `config.model_type`.

What can be asked of a model's class is asked there (`model_class`): the names that its forward takes, and whether its
loss follows `num_items_in_batch`. Here stands what only reading its code tells, held by the parity tests.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Final, Literal

SeesAhead = Literal["", "media", "prefix"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a model reads a batch.

    Attributes:
        packs: whether samples may stand in one row at all; whether they are kept apart there is tried (`packing/`).
        mrope: whether positions are (4, rows, T): counting, then time, height and width.
        first_position: of each sample.
        sees_ahead: what attends in both directions: tokens of the same "media" part, or the "prefix" that is only
            read. Padded, `token_type_ids` tell it (1 on media, or behind the prefix). Packed, transformers would let
            samples see each other, and gets the masks themselves.
        nested: whether pixel arrays have a leading dimension for samples, (1, num_tiles, ...).
        part_features: modalities whose features it takes ready made, in `mm_encoder_outputs`: they can be encoded per
            phase.
        expects_runs: whether it takes tokens of media that all stand alone for marks of an older processor.
        decoder: whether text is what a decoder says of what its encoder hears: no media in the sequence.
    """

    packs: bool = True
    mrope: bool = False
    first_position: int = 0
    sees_ahead: SeesAhead = ""
    nested: bool = False
    part_features: tuple[str, ...] = ("image",)
    decoder: bool = False
    expects_runs: bool = False


_QWEN_VL: Final = Family(mrope=True, part_features=("image", "video"))
_LLAVA: Final = Family()
_IDEFICS: Final = Family(nested=True)
_TEXT: Final = Family(part_features=())

FAMILIES: Final[dict[str, Family]] = {
    "qwen2_vl": _QWEN_VL,
    "qwen2_5_vl": _QWEN_VL,
    "qwen3_vl": _QWEN_VL,
    "qwen2_5_omni_thinker": Family(mrope=True),
    "llava": _LLAVA,
    "llava_next": _LLAVA,
    "llava_onevision": _LLAVA,
    "internvl": _LLAVA,
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
    "gemma3": Family(sees_ahead="media"),
    "paligemma": Family(sees_ahead="prefix", first_position=1),
    "qwen2_audio": Family(part_features=(), expects_runs=True),
    "whisper": Family(packs=False, part_features=(), decoder=True),
}
TOWERS: Final = {"image": "get_image_features", "video": "get_video_features"}
"""Modality -> the method that encodes it."""


def thinker(config: Any) -> Any:
    """The part of a configuration whose model is trained: of Qwen2.5-Omni the thinker."""
    return config.thinker_config if hasattr(config, "thinker_config") else config


def family_of(config: Any) -> Family | None:
    """The family of a configuration; any of text alone is one, whatever its layers are. None for one unknown."""
    return FAMILIES.get(config.model_type) or (_TEXT if _is_text(config) else None)


def _is_text(config: Any) -> bool:
    return not getattr(config, "is_encoder_decoder", False) and config.get_text_config() is config


def model_class(config: Any) -> type[Any]:
    """The class whose forward is called. Raises ValueError for a configuration of no such model."""
    from transformers.models.auto import modeling_auto

    for task in ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ", "CAUSAL_LM"):
        mapping = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING", {})
        if type(config) in mapping:
            found: type[Any] = mapping[type(config)]
            return found
    raise ValueError(
        f"transformers knows no model that is trained on text for {type(config).__name__}: pass the configuration of "
        "such a model"
    )


def takes(config: Any) -> frozenset[str]:
    """Names that its forward takes."""
    return frozenset(inspect.signature(model_class(config).forward).parameters)
