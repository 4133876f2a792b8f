"""A processor and a configuration that belong together, of defaults that do not.

What both say under one name is the configuration's; sides of images follow from its vision tower, and how many tokens
an image becomes is what its own model makes of one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

import torch
from PIL import Image
from transformers import PretrainedConfig

from orchdata.hf.tiny import tiny_model

# What a processor's parts say, and what a tower calls it where it has another name.
_ALSO: Final[Mapping[str, tuple[str, ...]]] = {
    "merge_size": ("spatial_merge_size",),
    "feature_size": ("num_mel_bins", "input_dim", "input_feat_size"),
    "img_size": ("image_size",),
    "downsample_rate": ("downsample_factor",),
}
# Names that both have and mean otherwise.
_OTHERS: Final = frozenset(("dtype", "transformers_version", "auto_map", "size", "image_size", "model_type"))
_TOWERS: Final = {"image": ("vision", "image", "vit"), "audio": ("audio", "encoder", "speech", "sound")}
_COUNTS: Final = ("num_image_tokens", "image_seq_length", "image_seq_len", "num_query_tokens")
"""What processors call the number of tokens of an image or tile."""
_IMAGE: Final = Image.new("RGB", (64, 64))
CLASS_TOKENS: Final = "num_additional_image_tokens"


def settings_of(processor: Any, config: Any) -> dict[str, Any]:
    """Arguments of a processor's constructor that the configuration says."""
    found: dict[str, Any] = {}
    for kind, _ in parts_of(processor):
        configs = [each for each in (tower_of(config, kind), config) if each is not None]
        for name in inspect.signature(type(processor).__init__).parameters:
            said = _said(configs, (name, *_ALSO.get(name, ())))
            if said is not None and name not in _OTHERS and "token" not in name:
                found.setdefault(name, said)
    return found


def align(processor: Any, config: Any) -> None:
    """Set what the image processor and the feature extractor of a processor say as the configuration has it."""
    for kind, part in parts_of(processor):
        tower = tower_of(config, kind)
        _copy(part, [each for each in (tower, config) if each is not None])
        if kind == "image":
            _set_sides(part, _side(tower, config))
        elif type(part).__name__ == "WhisperFeatureExtractor":
            seconds = getattr(tower, "max_source_positions", None)
            length = {"chunk_length": seconds // 50} if isinstance(seconds, int) and seconds % 50 == 0 else {}
            part.__init__(feature_size=part.feature_size, **length)  # its filters follow


def parts_of(processor: Any) -> Iterator[tuple[str, Any]]:
    """Its image processor and its feature extractor, by modality."""
    for kind, names in (("image", ("image_processor",)), ("audio", ("feature_extractor", "audio_processor"))):
        found = next((each for name in names if (each := getattr(processor, name, None)) is not None), None)
        if found is not None:
            yield kind, found


def tower_of(config: Any, kind: str) -> Any:
    """The configuration of a modality's tower, or None."""
    inner = [each for each in tree(config) if each is not config]
    for stem in _TOWERS[kind]:
        for each in inner:
            if stem in each.model_type or stem in str(getattr(each, "base_config_key", "")):
                return each
    return None


def tree(config: Any) -> Iterator[Any]:
    """A configuration and all that it holds."""
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PretrainedConfig):
            yield from tree(value)


def _copy(holder: Any, configs: list[Any]) -> None:
    for name, value in list(vars(holder).items()):
        if name in _OTHERS or name.startswith("_") or ("token" in name and name not in _COUNTS):
            continue
        found = _said(configs, (name, *_ALSO.get(name, ())))
        # An attribute that is None may have been left out for what the configuration says.
        if found is not None and (value is None or _is_of_one_kind(value, found)):
            with suppress(Exception):
                setattr(holder, name, found)


def _said(configs: list[Any], names: tuple[str, ...]) -> Any:
    """What the first configuration says under the first name that one has; of a square its side."""
    for name in names:
        for config in configs:
            found = vars(config).get(name)
            if isinstance(found, list | tuple) and len(found) == 2 and found[0] == found[1]:
                found = found[0] if isinstance(found[0], int) else found
            if isinstance(found, int | float | str | list | tuple) and not isinstance(found, bool):
                return found
    return None


def _is_of_one_kind(value: Any, found: Any) -> bool:
    numbers, sequences = (int, float), (list, tuple)
    if isinstance(value, bool):
        return False
    return any(isinstance(value, kinds) and isinstance(found, kinds) for kinds in (numbers, sequences, (str,)))


def _side(tower: Any, config: Any) -> int | None:
    """Pixels of a side of what a tower sees at once; None where it takes any."""
    found = _said([each for each in (tower, config) if each is not None], ("image_size", "force_image_size"))
    return found if isinstance(found, int) else None


def _set_sides(part: Any, side: int | None) -> None:
    if side is None or getattr(part, "merge_size", None) is not None:  # of a grid as large as the image
        return
    tile = getattr(part, "max_image_size", None)
    name = "max_image_size" if tile is not None else "size"  # of processors that cut tiles, that of a tile
    for key in (name, "crop_size"):
        found = getattr(part, key, None)
        if isinstance(found, int):
            setattr(part, key, side)
        elif found is not None:
            values = dict(found)
            setattr(part, key, type(found)(**{each: side for each, old in values.items() if old is not None}))
    if tile is not None and getattr(part, "size", None) is not None:
        whole = {each: 3 * side for each, old in dict(part.size).items() if old is not None}
        part.size = type(part.size)(**whole)


def counts_of(processor: Any, config: Any) -> Iterator[dict[str, int]]:
    """How many tokens of an image a processor is to write, as a tiny model of the configuration makes them: settings to
    be tried, until `writes` says that one is right. None where the processor finds that out by itself.
    """
    names = [name for name in _COUNTS if hasattr(processor, name)]
    if names:
        tokens, tiles = features_of(processor, config)
        yield dict.fromkeys(names, tokens // tiles)
    if hasattr(processor, CLASS_TOKENS):
        yield from ({CLASS_TOKENS: count} for count in (0, 1))


def writes(processor: Any, config: Any) -> bool:
    """Whether a processor writes as many tokens for an image as a tiny model of the configuration makes features."""
    _, (text, *_) = processor._process_images([_IMAGE], return_tensors="pt")
    return text.count(str(processor.image_token)) == features_of(processor, config)[0]


def features_of(processor: Any, config: Any) -> tuple[int, int]:
    """Features that a tiny model makes of an image, and of how many tiles. Raises any error of the model."""
    found = processor.image_processor([_IMAGE], return_tensors="pt")
    model = tiny_model(config)
    method = getattr(model, "get_image_features", None) or model.base_model.get_image_features
    taken = inspect.signature(method).parameters
    given = {name: value for name, value in found.items() if name in taken}
    given = given or {next(iter(taken)): found["pixel_values"]}  # under a name of its own
    with torch.no_grad():
        features = method(**given)
    features = features if torch.is_tensor(features) else getattr(features, "pooler_output", features)
    if isinstance(features, list | tuple):
        features = torch.cat([each.reshape(-1, each.shape[-1]) for each in features])
    pixels = found["pixel_values"]
    return features.reshape(-1, features.shape[-1]).shape[0], pixels.shape[:-3].numel()
