"""Video processors of Hugging Face as text, and what runs from it: which pictures they take, how large these become,
and their pixels, by this library's own resizing and cutting too.

processor --JSON--> source --running--> the same again, one a thread
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from orchdata.hf.image.sizes import Settings
from orchdata.hf.processor_parts import as_array, class_at
from orchdata.loaders.modalities.image_decode import Pixels, resized
from orchdata.native.patchify import patchify_clip

_RESAMPLES: Final = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # as Pillow numbers them
ARRAY: Final = "pixel_values_videos"
GRID: Final = "video_grid_thw"


@lru_cache(maxsize=1 << 12)
def taken(source: str, frames: int, fps: float) -> tuple[int, ...]:
    run = running(source)
    if not run.settings.do_sample_frames:
        return tuple(range(frames))
    from transformers.video_utils import VideoMetadata

    found = run.processor.sample_frames(metadata=VideoMetadata(total_num_frames=frames, fps=fps), **run.sampling)
    numbers = tuple(int(number) for number in as_array(found).tolist())
    if not numbers or numbers[0] < 0 or numbers[-1] >= frames or list(numbers) != sorted(numbers):
        raise ValueError(f"it takes pictures {numbers[:8]} of {frames}")
    return numbers


# Sizes that pictures become, as the `resize` of each class has them; proven when a modality is made.
Rule = Callable[[Settings, int, int, int], tuple[int, int]]


def _qwen2(settings: Settings, count: int, width: int, height: int) -> tuple[int, int]:
    least, most, factor = _budget(settings)
    if settings.cap_pixels_per_frame:
        total = int(settings.max_video_tokens * factor * factor * 0.9)
        most = max(min(most, total * settings.temporal_patch_size // count), int(least * 1.05))
    found: tuple[int, int] = settings.module.smart_resize(
        height, width, factor=factor, min_pixels=least, max_pixels=most
    )
    return found


def _qwen3(settings: Settings, count: int, width: int, height: int) -> tuple[int, int]:
    least, most, factor = _budget(settings)
    if settings.cap_pixels_per_frame:
        cap = settings.max_video_tokens * factor * factor
        most = max(min(cap, most // count), int(least * 1.05)) * count
    found: tuple[int, int] = settings.module.smart_resize(
        num_frames=count,
        height=height,
        width=width,
        temporal_factor=settings.temporal_patch_size,
        factor=factor,
        min_pixels=least,
        max_pixels=most,
    )
    return found


def _budget(settings: Settings) -> tuple[int, int, int]:
    """Fewest and most pixels, and the side that a merged token has."""
    if not settings.do_resize:
        raise ValueError("without do_resize")
    size = dict(settings.size)
    return size["shortest_edge"], size["longest_edge"], settings.patch_size * settings.merge_size


RULES: Final[Mapping[str, Rule]] = {"Qwen2VLVideoProcessor": _qwen2, "Qwen3VLVideoProcessor": _qwen3}


@dataclass(frozen=True)
class Running:
    """What a source describes, rebuilt."""

    processor: Any
    call: Mapping[str, Any]

    @cached_property
    def settings(self) -> Settings:
        return Settings(self.processor, self.call)

    @cached_property
    def rule(self) -> Rule:
        return RULES[type(self.processor).__name__]

    @property
    def sampling(self) -> dict[str, Any]:
        """What `sample_frames` is called with: all settings of the processor, as its `preprocess` does."""
        names = self.processor.valid_kwargs.__annotations__
        held = {name: getattr(self.settings, name, None) for name in names}
        beside = ("input_data_format", "do_convert_rgb", "do_sample_frames", "device", "video_metadata")
        return {name: value for name, value in held.items() if name not in beside}

    def outputs(self, clip: NDArray[np.uint8]) -> tuple[NDArray[np.float32], tuple[int, ...]]:
        """Patches of pictures (count, height, width, 3) that were taken already, and their grid."""
        import torch

        call = {**self.call, "do_sample_frames": False, "return_tensors": "pt"}
        found = self.processor([torch.from_numpy(clip).permute(0, 3, 1, 2).contiguous()], **call)
        return as_array(found[ARRAY]), tuple(as_array(found[GRID])[0].tolist())

    @cached_property
    def table(self) -> NDArray[np.float32]:
        """(3, 256): what the processor makes of each byte in each channel."""
        import torch

        levels = torch.arange(256, dtype=torch.uint8).expand(1, 3, 1, 256).clone()
        settings = self.settings
        scaling = (settings.do_rescale, settings.rescale_factor, settings.do_normalize)
        means, stds = tuple(settings.image_mean), tuple(settings.image_std)
        found = self.processor.rescale_and_normalize(levels, *scaling, means, stds)[0].numpy()
        if found.dtype != np.float32:
            raise LookupError(f"values of {found.dtype}")
        return np.ascontiguousarray(found.reshape(3, 256))


class _Held(threading.local):
    """A thread's own processors, as of images."""

    def __init__(self) -> None:
        self.running: dict[str, Running] = {}


_held = _Held()


def running(source: str) -> Running:
    """What a source describes; this thread's own. Raises ImportError without transformers and torchvision."""
    found = _held.running.get(source)
    if found is None:
        held = json.loads(source)
        processor = class_at(held["class"]).from_dict(held["settings"])
        found = _held.running[source] = Running(processor, held["call"])
    return found


def write_clip(source: str, pictures: Iterator[Pixels], extent: Sequence[int], out: NDArray[np.float32]) -> None:
    """Write pictures as the video processor described by `source` would; the last stands for those that are missing."""
    run = running(source)
    side, merge, times = (
        int(getattr(run.settings, name)) for name in ("patch_size", "merge_size", "temporal_patch_size")
    )
    grid_t, high, wide, count = extent[:4]
    resample, rows, filled = _RESAMPLES[int(run.settings.resample)], high * wide, 0
    canvas = np.empty((times, high * side, wide * side, 3), np.uint8)
    for number in range(grid_t * times):
        if number < count:
            pixels: Pixels = next(pictures)
            canvas[filled] = resized(pixels, (wide * side, high * side), "torchvision", resample)[..., :3]
        else:
            canvas[filled] = canvas[filled - 1]
        filled += 1
        if filled == times:
            first = number // times * rows
            patchify_clip(canvas, side, merge, run.table, out[first : first + rows])
            filled = 0
