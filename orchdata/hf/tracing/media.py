"""What a tower takes of media of some lengths, by the names that its method has, in the units that modalities count.

Images are counted in patches before merging, of all tiles together; audio in frames of its features, or in samples
where a model takes the wave itself.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

_GRIDS: Final = ("image_grid_thw", "image_grid_hw", "grid_thw", "grid_hw")
_ROWS: Final = ("image_position_ids", "pixel_position_ids", "spatial_shapes")
_PATCH_SIDES: Final = (14, 16)
_TOKENS: Final = (
    "mm_tokens_per_image",
    "vision_soft_tokens_per_image",
    "image_seq_length",
    "image_seq_len",
    "num_image_tokens",
)
# Frames of clips; fewer where a tower has no more positions.
_FRAMES: Final = (800, 1600, 3200, 6400)
_FEWER_FRAMES: Final = (200, 400, 800, 1600)
# Samples of a wave.
_SAMPLES: Final = (19_200, 38_400, 76_800, 153_600)
# Frames of a window of 30 s.
_WINDOW: Final = 3000


@dataclass(frozen=True, slots=True)
class Medium:
    """Images or clips of some length, as arguments.

    Attributes:
        length: positions, as the modality counts them; 0 where it counts what the tower makes of them.
    """

    length: int
    arguments: Mapping[str, Any]


def _ones(shape: tuple[int, ...]) -> Tensor:
    """Ones without memory: some models take zeros for padding."""
    return torch.ones(()).expand(shape)


def owner_of(model: Any, method: str) -> Any:
    """The model, or the module inside of it, that has a method; None where none has."""
    return next((each for each in model.modules() if hasattr(each, method)), None)


def names_of(model: Any, method: str) -> set[str]:
    """Arguments that a method takes, of the model or of the one inside of it that does the work."""
    owner, names = owner_of(model, method), set()
    for each in (owner, getattr(owner, "model", None)):
        taken = inspect.signature(getattr(each, method)).parameters.values() if hasattr(each, method) else ()
        names |= {each.name for each in taken if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)}
    return names


def images(config: Any, names: set[str]) -> Iterator[list[Medium]]:
    """Ways in which a model may take images, each at several lengths; those that fit its method first."""
    vision = _part(config, "vision_config")
    if names & {*_GRIDS}:
        yield from _grids(vision, config)
    elif names & {*_ROWS}:
        yield from _rows(vision, config)
    for side in _sides(vision, config):
        yield _tiles(vision, config, side)
        yield _nested(vision, config, side)


def audio(config: Any, names: set[str]) -> Iterator[list[Medium]]:
    """Ways in which a model may take clips, each at several lengths."""
    part = _part(config, "audio_config", "encoder_config", "speech_config")
    wave = "input_values" in names
    if wave:
        for shape in ((1,), (1, 1)):
            yield [Medium(each, _clip("input_values", (*shape, each), each, torch.bool)) for each in _SAMPLES]
    name = next(
        (each for each in ("input_features", "audio_input_features", "audio_features") if each in names),
        "input_features",
    )
    for bins in _mels(part):
        for lengths in (_FRAMES, _FEWER_FRAMES):
            for kind in (torch.long, torch.bool):
                yield [Medium(each, _clip(name, (1, bins, each), each, kind)) for each in lengths]
                yield [Medium(each, _clip(name, (1, each, bins), each, kind)) for each in lengths]
        yield [Medium(count * _WINDOW, _clip(name, (count, bins, _WINDOW), _WINDOW)) for count in (1, 2, 3, 4)]


def _clip(name: str, shape: tuple[int, ...], frames: int, kind: torch.dtype = torch.long) -> dict[str, Any]:
    mask = torch.ones(shape[0], frames, dtype=kind)
    lengths = torch.full((shape[0],), frames)
    masks = ("input_features_mask", "feature_attention_mask", "attention_mask", "audio_attention_mask", "padding_mask")
    return {
        name: _ones(shape),
        **dict.fromkeys(masks, mask),
        "audio_feature_lengths": lengths,
        "feature_lens": lengths,
        "audio_embed_sizes": lengths // 8,
    }


def _mels(part: Any) -> list[int]:
    keys = ("num_mel_bins", "input_dim", "input_feat_size", "feature_size", "input_size", "n_mels", "d_input")
    said = [value for key in keys if isinstance(value := getattr(part, key, None), int)]
    return list(dict.fromkeys([*said, 128, 80]))


def _part(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), config)


def _first(config: Any, *names: str, default: Any = None) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)


def _patch(vision: Any) -> tuple[int, int]:
    side = _first(vision, "patch_size", "patch_side", default=0)
    return (side, side) if isinstance(side, int) else (side[-2], side[-1])


def _channels(vision: Any) -> int:
    channels = _first(vision, "in_channels", "num_channels", "in_chans", default=3)
    return channels if isinstance(channels, int) else 3


def _unit(vision: Any, config: Any) -> int:
    """Patches of a side that mergers, pools and windows divide."""
    merges = [_first(each, "spatial_merge_size", "merge_size", default=1) for each in (vision, config)]
    merges += [_first(vision, "pooling_kernel_size", "downsample_factor", default=1)]
    merges += [_first(config, "downsample_factor", default=1)]
    whole = [each for each in merges if isinstance(each, int) and each > 0]
    return math.lcm(8, *whole)


def _squares(vision: Any, config: Any) -> list[int]:
    unit = _unit(vision, config)
    return [unit, 2 * unit, 4 * unit, 8 * unit]


def _grids(vision: Any, config: Any) -> Iterator[list[Medium]]:
    """Patches of all images one after another, and their grids."""
    (high, wide), channels = _patch(vision), _channels(vision)
    frames = _first(vision, "temporal_patch_size", default=1)
    shapes: list[tuple[int, ...]] = [
        (channels * frames * high * wide,),
        (channels, high, wide),
        (channels * high * wide,),
    ]
    merge = _first(vision, "spatial_merge_size", "merge_size", default=_first(config, "spatial_merge_size", default=2))
    for shape in dict.fromkeys(shapes):
        yield [
            Medium(
                side * side,
                {
                    "pixel_values": _ones((side * side, *shape)),
                    "image_grid_thw": torch.tensor([[1, side, side]]),
                    "image_grid_hw": torch.tensor([[side, side]]),
                    "image_merge_sizes": torch.tensor([merge if isinstance(merge, int) else 2]),
                },
            )
            for side in _squares(vision, config)
        ]


def _rows(vision: Any, config: Any) -> Iterator[list[Medium]]:
    """An image a row, its patches one after another, and where they lie."""
    (high, wide), channels = _patch(vision), _channels(vision)
    values = channels * high * wide
    media = []
    for side in _squares(vision, config):
        positions = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy"), -1).view(
            1, -1, 2
        )
        mask = torch.ones(1, side * side, dtype=torch.long)
        media.append(
            Medium(
                side * side,
                {
                    "pixel_values": _ones((1, side * side, values)),
                    "image_position_ids": positions,
                    "pixel_position_ids": positions,
                    "spatial_shapes": torch.tensor([[side, side]]),
                    "pixel_attention_mask": mask,
                },
            )
        )
    yield media


def _sides(vision: Any, config: Any) -> list[tuple[int, int]]:
    said = _first(vision, "image_size", "input_size", "img_size", default=_first(config, "image_size", default=None))
    if isinstance(said, dict):
        said = said.get("height")
    if isinstance(said, list | tuple) and len(said) >= 2:
        return [(int(said[-2]), int(said[-1]))]
    sides = [said] if isinstance(said, int) else [768, 448, 384, 224]
    return [(side, side) for side in sides]


def _patches(vision: Any, config: Any, side: tuple[int, int]) -> int:
    """Positions that `od.hf.recipe` counts for a tile; 0 for the tokens that it becomes."""
    high, wide = _patch(vision)
    if high and wide:
        return (side[0] // high) * (side[1] // wide)
    tokens = _first(config, *_TOKENS, default=0)
    root = math.isqrt(tokens) if isinstance(tokens, int) else 0
    fits = [each for each in _PATCH_SIDES if root and root * root == tokens and (side[0] // each) % root == 0]
    return (side[0] // fits[0]) * (side[1] // fits[0]) if fits else int(tokens or 0)


def _tiles(vision: Any, config: Any, side: tuple[int, int]) -> list[Medium]:
    """Tiles of one size, an image each."""
    patches, channels = _patches(vision, config, side), _channels(vision)
    return [
        Medium(
            count * patches,
            {
                "pixel_values": _ones((count, channels, *side)),
                "high_res_pixel_values": _ones(
                    (count, channels, *_sides(_part(config, "high_res_vision_config"), config)[0])
                ),
                "image_sizes": torch.tensor([side] * count),
                "pixel_mask": torch.ones(count, *side, dtype=torch.long),
            },
        )
        for count in (1, 2, 3, 4)
    ]


def _nested(vision: Any, config: Any, side: tuple[int, int]) -> list[Medium]:
    """Tiles of one image, under an axis of images: as many as its size gives."""
    patches, channels = _patches(vision, config, side), _channels(vision)
    shapes = sorted(map(tuple, getattr(config, "image_grid_pinpoints", None) or ()))
    sizes: Sequence[tuple[int, int]] = [
        each for each in shapes if all(long % short == 0 for long, short in zip(each, side, strict=True))
    ]
    sizes_by_count = {1 + (high // side[0]) * (wide // side[1]): (high, wide) for high, wide in sizes}
    counts = sorted(sizes_by_count)[:4] if sizes_by_count else [1, 2, 3, 4]
    return [
        Medium(
            count * patches,
            {
                "pixel_values": _ones((1, count, channels, *side)),
                "image_sizes": torch.tensor([sizes_by_count.get(count, side)]),
                "batch_num_images": torch.tensor([1]),
            },
        )
        for count in counts
    ]


def tokens_of(output: Any) -> int:
    """Tokens that a tower made."""
    features = output if isinstance(output, Tensor | list | tuple) else getattr(output, "pooler_output", None)
    if isinstance(features, list | tuple):
        return sum(tokens_of(each) for each in features)
    return math.prod(features.shape[:-1]) if isinstance(features, Tensor) else 0
