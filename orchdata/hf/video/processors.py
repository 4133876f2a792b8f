"""Video processors of Hugging Face as text, and what runs from it: which pictures they take, how large these become,
and their pixels, by this library's own resizing and cutting too.

processor --JSON--> source --running--> the same again, one a thread
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from orchdata.hf.image.sizes import Settings
from orchdata.hf.processor_parts import RESAMPLES, OwnByThread, as_array, class_at
from orchdata.loaders.modalities.video.decode import Cut

ARRAY: Final = "pixel_values_videos"
GRID: Final = "video_grid_thw"


@lru_cache(maxsize=1 << 12)
def taken(source: str, frames: int, fps: float) -> tuple[int, ...]:
    run = running(source)
    if not run.settings.do_sample_frames:
        return tuple(range(frames))
    from transformers.video_utils import VideoMetadata

    sampled = run.processor.sample_frames(metadata=VideoMetadata(total_num_frames=frames, fps=fps), **run.sampling)
    numbers = tuple(int(number) for number in as_array(sampled).tolist())
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
    resized: tuple[int, int] = settings.module.smart_resize(
        height, width, factor=factor, min_pixels=least, max_pixels=most
    )
    return resized


def _qwen3(settings: Settings, count: int, width: int, height: int) -> tuple[int, int]:
    least, most, factor = _budget(settings)
    if settings.cap_pixels_per_frame:
        cap = settings.max_video_tokens * factor * factor
        most = max(min(cap, most // count), int(least * 1.05)) * count
    resized: tuple[int, int] = settings.module.smart_resize(
        num_frames=count,
        height=height,
        width=width,
        temporal_factor=settings.temporal_patch_size,
        factor=factor,
        min_pixels=least,
        max_pixels=most,
    )
    return resized


def _budget(settings: Settings) -> tuple[int, int, int]:
    """Fewest and most pixels, and the side that a merged token has."""
    if not settings.do_resize:
        raise ValueError("without do_resize")
    size = dict(settings.size)
    return size["shortest_edge"], size["longest_edge"], settings.patch_size * settings.merge_size


RULES: Final[Mapping[str, Rule]] = {"Qwen2VLVideoProcessor": _qwen2, "Qwen3VLVideoProcessor": _qwen3}


@dataclass(frozen=True)
class Running:
    """The processor that a source describes, rebuilt."""

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
        """The arguments of `sample_frames`: all settings of the processor, as in its `preprocess`."""
        names = self.processor.valid_kwargs.__annotations__
        settings = {name: getattr(self.settings, name, None) for name in names}
        left_out = ("input_data_format", "do_convert_rgb", "do_sample_frames", "device", "video_metadata")
        return {name: value for name, value in settings.items() if name not in left_out}

    def outputs(self, clip: NDArray[np.uint8]) -> tuple[NDArray[np.float32], tuple[int, ...]]:
        """Patches of pictures (count, height, width, 3) that were taken already, and their grid."""
        import torch

        call = {**self.call, "do_sample_frames": False, "return_tensors": "pt"}
        arrays = self.processor([torch.from_numpy(clip).permute(0, 3, 1, 2).contiguous()], **call)
        return as_array(arrays[ARRAY]), tuple(as_array(arrays[GRID])[0].tolist())

    @cached_property
    def cut(self) -> Cut:
        """Return how this library makes the same patches. Raises LookupError for unknown settings."""
        settings = self.settings
        sides = (settings.patch_size, settings.merge_size, settings.temporal_patch_size)
        patch, merge, times = map(int, sides)
        return Cut(patch, merge, times, settings.byte_table, "torchvision", RESAMPLES[int(settings.resample)])


running: Final = OwnByThread(
    lambda source: Running(class_at(source["class"]).from_dict(source["settings"]), source["call"])
)
"""What a source describes. Raises ImportError without transformers and torchvision."""
