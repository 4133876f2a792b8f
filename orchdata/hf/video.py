"""Videos of a Hugging Face processor, as a modality: those of the Qwen-VL families.

    processor --video_modality--> HFVideos(source=JSON, ...): (width, height, frames, seconds) -> counts, text, extras
                                                              bytes -> the array of its video processor

Which pictures are taken, at which times they are said to be, and how large they become is the processor's own
arithmetic, given the same `VideoMetadata`: its fps is frames / seconds of the header. Pixels are the processor's own,
or this library's where it was seen to give the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from orchdata.hf.image_rules import RESAMPLES, Settings
from orchdata.hf.processors import OwnByThread, as_array, class_at, id_of, joined, merged_kwargs, path_of
from orchdata.loaders.errors import DecodeError
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.image import grid_positions
from orchdata.loaders.modalities.image_decode import laid_out, nearest_bytes, png_of
from orchdata.loaders.modalities.modality import ArraySpec, Header, PartSize, Slot
from orchdata.loaders.modalities.video.decode import Cut, taken_pictures, write_patches
from orchdata.loaders.modalities.video.preprocessor import VideoFiles

ARRAY: Final = "pixel_values_videos"
GRID: Final = "video_grid_thw"


@lru_cache(maxsize=1 << 12)
def taken(source: str, frames: int, fps: float) -> tuple[int, ...]:
    run = running(source)
    if not run.settings.do_sample_frames:
        return tuple(range(frames))
    from transformers.video_utils import VideoMetadata

    # All settings of the processor, as in its `preprocess`.
    left_out = {"input_data_format", "do_convert_rgb", "do_sample_frames", "device", "video_metadata"}
    names = run.processor.valid_kwargs.__annotations__.keys() - left_out
    sampling = {name: getattr(run.settings, name, None) for name in names}
    sampled = run.processor.sample_frames(metadata=VideoMetadata(total_num_frames=frames, fps=fps), **sampling)
    numbers = tuple(int(number) for number in as_array(sampled).tolist())
    if not numbers or numbers[0] < 0 or numbers[-1] >= frames or list(numbers) != sorted(numbers):
        raise ValueError(f"it takes pictures {numbers[:8]} of {frames}")
    return numbers


_KNOWN: Final = ("Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor")


@dataclass(frozen=True)
class Running:
    """The processor that a source describes, rebuilt."""

    processor: Any
    call: Mapping[str, Any]

    @cached_property
    def settings(self) -> Settings:
        return Settings(self.processor, self.call)

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

_LOOKED_AT: Final = ((9, 130, 90, 10.0), (4, 64, 200, 25.0), (31, 48, 40, 29.97))
"""Frames, width, height and fps at which a processor is looked at."""
_INTERVAL: Final = "second_per_grid_ts"
_PROCESSORS: Final = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor")


@dataclass(frozen=True, kw_only=True)
class HFVideos(VideoFiles):
    """Videos as a Hugging Face processor prepares them: made by `video_modality`.

    An extent is (grid in time, height, width; pictures taken; frames; numerator and denominator of seconds).
    """

    num_extents = 7

    source: str = field(repr=False)  # the video processor and what its processor calls it with, as JSON
    patch_dim: int  # values of a patch
    merge: int  # side of a merged token in patches
    times: int  # pictures of a temporal patch
    stamped: tuple[str, ...] = ()  # marks around each temporal patch, where its time stands before it, as of Qwen3-VL
    tokens_per_second: float | None = None  # of positions in time, as of Qwen2.5-VL; None: temporal patches are counted
    native: bool = False  # this library prepares pixels itself: it was seen to do it as the video processor does
    placeholder: str = ""  # in rendered chats
    slot: Slot = Slot()

    def arrays(self) -> Mapping[str, ArraySpec]:
        return {ARRAY: ArraySpec((self.patch_dim,), "float32")}

    def required_modules(self) -> tuple[str, ...]:
        return (*super().required_modules(), "transformers", json.loads(self.source)["class"][0])

    def set_up_process(self) -> None:
        super().set_up_process()
        running(self.source)

    def count_header(self, header: Header, limits: Limits) -> PartSize:
        width, height, frames, seconds = self.checked_header(header, limits)
        try:
            count, high, wide = _counted(self, frames, float(frames / seconds), width, height)
        except (ValueError, ZeroDivisionError) as error:  # too few frames, an aspect ratio that it refuses
            raise DecodeError(
                f"a video of {frames} frames of {width} x {height} pixels, which its processor refuses: {error}"
            ) from error
        grid_t = -(-count // self.times)
        patches = grid_t * high * wide
        extent = (grid_t, high, wide, count, frames, seconds.numerator, seconds.denominator)
        return PartSize(patches, patches // self.merge**2, patches, extent)

    def parameters(self) -> dict[str, Any]:
        """Leave out how pixels are computed, which does not change them."""
        return {name: value for name, value in super().parameters().items() if name != "native"}

    def decode_into(
        self, data: bytes | memoryview, size: PartSize, out: Mapping[str, NDArray[Any]], limits: Limits
    ) -> None:
        with taken_pictures(self, data, size, limits, lambda _: self.numbers(size)) as pictures:
            if self.native:
                write_patches(pictures, size, running(self.source).cut, out[ARRAY])
                return
            clip = np.stack([pixels[..., :3] for pixels in pictures])
        prepared, _ = running(self.source).outputs(clip)
        if prepared.shape != out[ARRAY].shape:
            raise DecodeError(f"prepared to shape {prepared.shape}, the index says {out[ARRAY].shape}: index again")
        out[ARRAY][...] = prepared

    def to_file(
        self, data: bytes | memoryview, size: PartSize, arrays: Mapping[str, NDArray[Any]], limits: Limits
    ) -> tuple[str, bytes]:
        """The pictures that the patches hold, as an animated PNG; the arrays where settings are of another form."""
        grid_t, high, wide, count = size.extent[:4]
        try:
            cut = running(self.source).cut
        except LookupError:
            return super().to_file(data, size, arrays, limits)
        moments = [laid_out(rows, cut.patch, cut.merge, (high, wide)) for rows in np.split(arrays[ARRAY], grid_t)]
        pictures = nearest_bytes(np.concatenate(moments)[:count], cut.table)
        return "png", png_of(pictures, float(self.seconds_per_grid(size)) / self.times)

    def numbers(self, size: PartSize) -> list[int]:
        """Which pictures of a clip are taken."""
        return list(taken(self.source, size.extent[4], self._fps(size)))

    def _fps(self, size: PartSize) -> float:
        frames, numerator, denominator = size.extent[4:]
        return float(frames / Fraction(numerator, denominator))

    def seconds_per_grid(self, size: PartSize) -> np.float32:
        """From one temporal patch to the next, as Qwen2.5-VL's processor has it."""
        count, frames = size.extent[3:5]
        return np.float32(self.times / (count / frames * self._fps(size)))

    def timestamps(self, size: PartSize) -> list[float]:
        """Seconds of each temporal patch, as Qwen3-VL's processor has them: picture / fps, in the middle of it."""
        numbers, fps = self.numbers(size), self._fps(size)
        numbers += [numbers[-1]] * (-len(numbers) % self.times)
        moments = [number / fps for number in numbers]
        return [(moments[at] + moments[at + self.times - 1]) / 2 for at in range(0, len(moments), self.times)]

    def extras(self, sizes: Sequence[PartSize]) -> Mapping[str, NDArray[Any]]:
        extras: dict[str, NDArray[Any]] = {GRID: np.array([size.extent[:3] for size in sizes], np.int64).reshape(-1, 3)}
        if self.tokens_per_second is not None:
            extras[_INTERVAL] = np.array([self.seconds_per_grid(size) for size in sizes], np.float32)
        return extras

    def expand(self, size: PartSize) -> tuple[str | int, ...] | None:
        grid_t, high, wide = size.extent[:3]
        tokens = high * wide // self.merge**2
        if not self.stamped:
            return (grid_t * tokens,)
        opens, closes = self.stamped
        pieces: list[str | int] = []
        for number, moment in enumerate(self.timestamps(size)):
            pieces += [f"{closes if number else ''}<{moment:.1f} seconds>{opens}", tokens]
        return (*pieces, closes)

    def rope(self, size: PartSize) -> NDArray[np.int64]:
        grid_t, high, wide = (size.extent[0], *(side // self.merge for side in size.extent[1:3]))
        moments = np.arange(grid_t)
        if self.stamped:
            moments = np.zeros(grid_t, np.int64)  # each temporal patch is a picture of its own
        elif self.tokens_per_second is not None:
            step = np.float32(self.tokens_per_second) * self.seconds_per_grid(size)
            moments = (moments.astype(np.float32) * step).astype(np.int64)
        return grid_positions(moments, high, wide)

    def rope_span(self, size: PartSize) -> int | None:
        """Return the position after the grid, where what follows continues for any length of the clip."""
        return None if self.stamped else max(size.extent[1:3]) // self.merge

    def dummy(self) -> PartSize:
        side = self.merge
        return PartSize(side * side, 1, side * side, (1, side, side, self.times, self.times, 1, 1))

    def decoding_bytes(self, parts: Sequence[tuple[Header, PartSize]]) -> int:
        """Return what a decoder takes, and, if the processor prepares clips, all pictures and values of one."""
        num_bytes = super().decoding_bytes(parts)
        if self.native:
            return num_bytes
        row_bytes = self.row_bytes()
        return num_bytes + max(
            3 * wide * high * of.extent[3] + of.num_rows * row_bytes for (wide, high, *_), of in parts
        )


@lru_cache(maxsize=1 << 14)
def _counted(videos: HFVideos, frames: int, fps: float, width: int, height: int) -> tuple[int, int, int]:
    """Pictures taken, and patches along height and width. Raises ValueError for a clip that the processor refuses."""
    count, settings = len(taken(videos.source, frames, fps)), running(videos.source).settings
    if not settings.do_resize:
        raise ValueError("without do_resize")

    # As the `resize` of each class has it, proven when a modality is made. Limits of pixels are of a picture for
    # Qwen2-VL, and of all pictures for Qwen3-VL.
    size, factor, times = dict(settings.size), settings.patch_size * settings.merge_size, settings.temporal_patch_size
    least, most = size["shortest_edge"], size["longest_edge"]
    of_all = type(settings.processor).__name__ == "Qwen3VLVideoProcessor"
    if settings.cap_pixels_per_frame:
        cap = settings.max_video_tokens * factor * factor
        of_picture = min(cap, most // count) if of_all else min(most, int(cap * 0.9) * times // count)
        most = max(of_picture, int(least * 1.05)) * (count if of_all else 1)
    sizes = {"height": height, "width": width, "factor": factor, "min_pixels": least, "max_pixels": most}
    sizes |= {"num_frames": count, "temporal_factor": times} if of_all else {}
    high, wide = settings.module.smart_resize(**sizes)
    return count, high // settings.patch_size, wide // settings.patch_size


def video_modality(processor: Any, *, tokens_per_second: float = 2.0) -> HFVideos:
    """Videos as a processor of Qwen2-VL, Qwen2.5-VL or Qwen3-VL prepares them. Raises TypeError for no video processor
    in it; ValueError for one of another class, or that does something else than this knows of it.
    """
    name = type(processor).__name__
    video: Any = getattr(processor, "video_processor", None)
    if not callable(getattr(video, "sample_frames", None)):
        raise TypeError(f"{name} has no video processor of transformers' in it, which takes torchvision to be made")
    if name not in _PROCESSORS or type(video).__name__ not in _KNOWN:
        raise ValueError(
            f"{name} has a {type(video).__name__}, and videos are read as {', '.join(_PROCESSORS)} have them: write an "
            "od.Modality for it, Recipe(video=...)"
        )
    call = merged_kwargs(processor)["videos_kwargs"]
    call = {key: value for key, value in call.items() if key not in ("return_tensors", "return_metadata")}
    described = {"class": path_of(video), "settings": json.loads(video.to_json_string()), "call": call}
    source = json.dumps(described, sort_keys=True)
    settings = running(source).settings
    mark = str(processor.video_token)
    stamped = hasattr(processor, "_calculate_timestamps")
    timed = not stamped and _INTERVAL in processor.model_input_names
    videos = HFVideos(
        source=source,
        patch_dim=3 * settings.temporal_patch_size * settings.patch_size**2,
        merge=settings.merge_size,
        times=settings.temporal_patch_size,
        stamped=(str(processor.vision_start_token), str(processor.vision_end_token)) if stamped else (),
        tokens_per_second=tokens_per_second if timed else None,
        placeholder=mark,
        slot=Slot(mark=mark, token_id=id_of(processor.tokenizer, mark, is_added=False)),
    )
    return replace(videos, native=_proven(videos, processor))


def _proven(videos: HFVideos, processor: Any) -> bool:
    """Return whether this library gives the processor's pixels, to the bit. Raises ValueError if counts differ."""
    from transformers.video_utils import VideoMetadata

    run, same, name = running(videos.source), True, type(processor).__name__
    for frames, width, height, fps in _LOOKED_AT:
        seconds = Fraction(frames / fps).limit_denominator(1_000_000)
        size = videos.count_header((width, height, frames, seconds.numerator, seconds.denominator), Limits())
        numbers = videos.numbers(size)
        clip = np.random.default_rng(frames).integers(0, 256, (len(numbers), height, width, 3), np.uint8)
        metadata = VideoMetadata(total_num_frames=frames, fps=videos._fps(size), frames_indices=list(numbers))
        values, grid = run.outputs(clip)
        given = {GRID: np.array([size.extent[:3]]), "video_metadata": [metadata]}
        text = processor.replace_video_token(given, video_idx=0)
        if grid != size.extent[:3] or text != joined(videos.expand(size) or (), videos.placeholder):
            raise ValueError(f"{name} makes something else of a video than is known of its class: use another version")
        with suppress(LookupError, ValueError, KeyError):
            rows = np.empty_like(values)
            write_patches(iter(clip), size, run.cut, rows)
            same = same and np.array_equal(rows, values)
            continue
        same = False
    return same
