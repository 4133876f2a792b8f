"""What families of models need besides the common inputs: one row a family, by `config.model_type`.

What can be asked of a model's class is asked there (`model_class`): the names that its forward takes, and whether its
loss follows `num_items_in_batch`. Here stands what only reading its code tells, held by the parity tests.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, Literal

SeesAhead = Literal["", "media", "prefix"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a model reads a batch."""

    packs: bool = True  # samples may stand in one row at all; whether they are kept apart there is tried (`trials`)
    mrope: bool = False  # positions are (4, rows, T): counting, then time, height and width
    first_position: int = 0  # of each sample
    # What attends in both directions: tokens of the same "media" part, or the "prefix" that is only read. Padded,
    # `token_type_ids` say so (1 on media, or after the prefix). Packed, transformers would let samples see each other,
    # so it gets the masks.
    sees_ahead: SeesAhead = ""
    nested: bool = False  # pixel arrays have a leading dimension for samples, (1, num_tiles, ...)
    part_features: tuple[str, ...] = ("image",)  # taken ready made, in `mm_encoder_outputs`: can be encoded per phase
    decoder: bool = False  # text is what a decoder says of what its encoder hears: no media in the sequence
    expects_runs: bool = False  # tokens of media that all stand alone are taken for marks of an older processor


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
READ_PADDING: Final = {
    "granite_speech": "audio",
    "granite_speech_plus": "audio",
    "phi4_multimodal": "audio",
    "prophetnet": "text",
}
"""Models whose samples change each other also in padded rows -> what they read the padding of."""
TOWERS: Final = {"image": "get_image_features", "video": "get_video_features"}
"""Modality -> the method that encodes it."""

_TASKS: Final = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ", "CAUSAL_LM")
_MEDIA_ARGUMENTS: Final = frozenset(
    (
        "pixel_values",
        "pixel_values_videos",
        "image_pixel_values",
        "input_features",
        "audio_input_features",
        "input_values",
    )
)


def thinker(config: Any) -> Any:
    """The part of a configuration whose model is trained: of Qwen2.5-Omni the thinker."""
    return config.thinker_config if hasattr(config, "thinker_config") else config


def family_of(config: Any) -> Family | None:
    """Return the family of a configuration; models of text alone are one family, with any layers. None if unknown."""
    return FAMILIES.get(config.model_type) or (_TEXT if _is_text(config) else None)


def _is_text(config: Any) -> bool:
    """Return whether the model reads only text: a configuration that is its own text part may have towers too."""
    if getattr(config, "is_encoder_decoder", False) or config.get_text_config() is not config:
        return False
    kind = model_class(config)
    read = kind.input_modalities
    # Gemma3ForCausalLM names images too, which its forward does not take.
    return "text" in ((read,) if isinstance(read, str) else read) and not (takes(config) & _MEDIA_ARGUMENTS)


def model_class(config: Any) -> type[Any]:
    """The class whose forward is called. Raises ValueError for a configuration of no such model."""
    from transformers.models.auto import modeling_auto

    names = [name for name in vars(modeling_auto) if re.fullmatch(r"MODEL_FOR_\w+_MAPPING", name)]
    first = [f"MODEL_FOR_{task}_MAPPING" for task in _TASKS]
    for name in dict.fromkeys((*first, *sorted(names))):
        mapping = getattr(modeling_auto, name, {})
        kind: type[Any] | None = mapping.get(type(config), None)
        # Of other tasks, those whose models write text: AudioFlamingo3 is listed as one from sequence to sequence.
        if kind is None:
            continue
        can_generate, named = getattr(kind, "can_generate", None), inspect.signature(kind.forward).parameters
        if name in first or (can_generate and can_generate() and {"input_ids", "labels"} <= named.keys()):
            return kind
    raise ValueError(
        f"transformers {import_module('transformers').__version__} has no model for {type(config).__name__} that reads "
        "and writes text, which od.hf.Inputs is for: give the configuration of one (its model_type is "
        f"{config.model_type!r}), or use od.Packed() or od.Padded(), whose batches any model can be fed from"
    )


def takes(config: Any) -> frozenset[str]:
    """Names that its forward takes."""
    return frozenset(inspect.signature(model_class(config).forward).parameters)
