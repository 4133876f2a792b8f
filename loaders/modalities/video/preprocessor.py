"""Videos: which pictures of a clip are used, and how they become patches, as a value.

    (width, height, frames, seconds) -> pictures to use -> grid of patches in time, height and width -> merged tokens

All counts follow from headers, in integers and fractions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DecodeError, as_failure
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.image import (
    CLIP_MEAN,
    CLIP_STD,
    READS_IMAGES,
    ImagePreprocessor,
    grid_positions,
    image_grid,
)
from orchdata.loaders.modalities.modality import (
    ArraySpec,
    Header,
    Heads,
    Modality,
    PartSize,
    Slot,
    check_at_least_one,
    check_pixels,
)
from orchdata.loaders.modalities.video.containers import is_video, plain_header, sampled
from orchdata.native.scan import FOUND

_FINEST: Final = 1_000_000
_OF_PICTURES: Final = "patch_size merge min_tokens temporal_patch_size mean std resizer resample dtype".split()
"""Parameters that images have too."""
UNREAD: Final = tuple("avi wmv flv mpg mpeg m2ts mts ogv".split())
"""Videos too; their error says what to do, because a sample without its clip would be learned as text only."""
_PIXEL_BYTES: Final = 32
"""For a picture as decoded and as RGB, and for up to sixteen that a decoder keeps as references."""


class VideoFiles(Modality):
    """A modality read from video files and lists of frames. A header is (width, height, frames, numerator and
    denominator of seconds), as displayed. It comes from the tables of a plain MP4, and for all other files from a scan
    of packets.
    """

    fields = tuple("mp4 m4v mov 3gp webm mkv gif frames.json video.json".split()) + UNREAD
    words = ("video", "video_url")
    plural = "videos"
    column_words = frozenset("video videos clip clips movie movies".split())
    hf_feature = "Video"
    listed = "image"
    num_facts = 5

    def required_modules(self) -> tuple[str, ...]:
        return (*READS_IMAGES, "av", "orchdata.loaders.modalities.video.file")

    def set_up_process(self) -> None:
        from orchdata.loaders.modalities.image_decode import load_formats

        load_formats()  # for frames that a record lists

    @staticmethod
    def scan(heads: Heads) -> None:
        data = heads.buffer.data
        heads_of = zip(heads.starts.tolist(), heads.available.tolist(), heads.sizes.tolist(), strict=True)
        for number, (start, available, size) in enumerate(heads_of):
            status, header = plain_header(data[start : start + available], size)
            heads.status[number] = status
            if status == FOUND:
                heads.facts[number] = header

    @classmethod
    def probe(cls, data: bytes, limits: Limits) -> Header:
        from orchdata.loaders.modalities.video.decode import open_video

        with as_failure(DecodeError, "damaged video"), open_video(data, limits) as video:
            line = video.timeline
            return *video.size(), line.frames, line.seconds.numerator, line.seconds.denominator

    @staticmethod
    def from_frames(files: Sequence[bytes], metadata: Mapping[str, Any]) -> bytes:
        from orchdata.loaders.modalities.video.decode import frame_list

        return frame_list(files, metadata)

    @staticmethod
    def seconds(header: Header) -> float:
        return header[3] / max(1, header[4])

    @classmethod
    def matches_magic(cls, head: bytes) -> bool:
        return is_video(head)

    @staticmethod
    def checked_header(header: Header, limits: Limits) -> tuple[int, int, int, Fraction]:
        """Return (width, height, frames, seconds) of a clip that may be decoded. Raises DecodeError for others."""
        width, height, frames, numerator, denominator = header
        if min(header) < 1:
            raise DecodeError(
                f"not a readable video: its header says {frames} frames of {width} x {height} pixels in "
                f"{numerator} / {denominator} s"
            )
        check_pixels(width, height, limits, "video")
        seconds = Fraction(numerator, denominator)
        if seconds > limits.audio_seconds:
            raise DecodeError(f"video of {float(seconds):.0f} s, above Limits.audio_seconds={limits.audio_seconds:g}")
        return width, height, frames, seconds

    def decoding_bytes(self, parts: Sequence[tuple[Header, PartSize]]) -> int:
        """Memory of a decoder for the largest of them: they are decoded one after the other."""
        return _PIXEL_BYTES * max([header[0] * header[1] for header, _ in parts])


@dataclass(frozen=True, kw_only=True)
class VideoPreprocessor(VideoFiles):
    """Clips as patches of some of their pictures, within a token budget. Needs PyAV, the extra `video`.

    A patch is `patch_size` pixels square and `temporal_patch_size` pictures long; `merge` x `merge` neighbouring
    patches become one LLM token. Pictures are taken at equal distances from the clip's start: at a constant rate,
    picture i * frames // n for i < n; at a variable rate, the one shown at i / n of its length.

    Attributes:
        fps: pictures per second to use.
        min_frames, max_frames: limits for a clip; never more than it has, and whole temporal patches if it has that
            many.
        patch_size: side of a patch in pixels.
        merge: side of a merged token in patches.
        temporal_patch_size: pictures per patch; if a clip has fewer, the last one is repeated.
        min_tokens, max_tokens: merged tokens of one temporal patch.
        total_tokens: maximum of merged tokens of a clip: pictures get smaller, down to `min_tokens`, then fewer.
        positions_per_second: rotary positions in time per second; None counts temporal patches, as Qwen2-VL.
        mean, std: normalisation of channels in [0, 1] (default: CLIP's); unused with dtype "uint8".
        resizer, resample, dtype: see `ImagePreprocessor`.
        slot: what stands in text for a clip.
    """

    num_extents = 7

    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    patch_size: int = 14
    merge: int = 2
    temporal_patch_size: int = 2
    min_tokens: int = 4
    max_tokens: int = 768
    total_tokens: int = 16_384
    positions_per_second: float | None = None
    mean: tuple[float, float, float] = CLIP_MEAN
    std: tuple[float, float, float] = CLIP_STD
    resizer: Literal["torchvision", "pillow"] = "torchvision"
    resample: Literal["bicubic", "bilinear", "lanczos"] = "bicubic"
    dtype: Literal["bfloat16", "float32", "uint8"] = "bfloat16"
    slot: Slot = Slot(token_id=258)

    no_counts = frozenset("mean std resizer resample dtype pass_order".split())
    may_differ_in_mixture = frozenset(
        "fps min_frames max_frames min_tokens max_tokens total_tokens resizer resample".split()
    )

    def __post_init__(self) -> None:
        for name in ("min_frames", "max_frames", "temporal_patch_size"):
            check_at_least_one("VideoPreprocessor", name, getattr(self, name))
        if not _is_number(self.fps) or not 1 / _FINEST <= self.fps <= _FINEST:
            raise ValueError(f"VideoPreprocessor.fps must be a number above 0, got {self.fps!r}")
        if self.max_frames < self.min_frames:
            raise ValueError(f"VideoPreprocessor.max_frames={self.max_frames} is below min_frames={self.min_frames}")
        rate = self.positions_per_second
        if rate is not None and (not _is_number(rate) or not 0 < rate <= _FINEST):
            raise ValueError(f"VideoPreprocessor.positions_per_second must be None or above 0, got {rate!r}")
        picture = _picture(self, self.max_tokens)  # checks the parameters that images have too
        object.__setattr__(self, "mean", picture.mean)
        object.__setattr__(self, "std", picture.std)
        if not isinstance(self.total_tokens, int) or self.total_tokens < self.min_tokens:
            raise ValueError(
                f"VideoPreprocessor.total_tokens must be an int of at least min_tokens={self.min_tokens}, "
                f"got {self.total_tokens!r}"
            )

    @property
    def patch_dim(self) -> int:
        """Values in one patch: 3 channels x temporal_patch_size x patch_size x patch_size."""
        return 3 * self.temporal_patch_size * self.patch_size * self.patch_size

    def parameters(self) -> dict[str, Any]:
        """With the pass order of the installed Pillow, if it resizes."""
        picture = _picture(self, self.max_tokens).parameters()
        return {**super().parameters(), **{name: picture[name] for name in picture.keys() & {"pass_order"}}}

    def arrays(self) -> Mapping[str, ArraySpec]:
        return {"patches": ArraySpec((self.patch_dim,), self.dtype)}

    def count_header(self, header: Header, limits: Limits) -> PartSize:
        """The extent is (grid in time, height, width; pictures used; frames; numerator and denominator of seconds)."""
        width, height, frames, seconds = self.checked_header(header, limits)
        fps = Fraction(self.fps).limit_denominator(_FINEST)
        times = self.temporal_patch_size
        count = sampled(frames, seconds, fps, self.min_frames, self.max_frames, times)
        count = min(count, self.total_tokens // self.min_tokens * times)
        grid_t = -(-count // times)
        picture = _picture(self, min(self.max_tokens, self.total_tokens // grid_t))
        try:
            grid_h, grid_w = image_grid(width, height, picture)
        except ValueError as error:
            raise DecodeError(str(error)) from None
        patches = grid_t * grid_h * grid_w
        extent = (grid_t, grid_h, grid_w, count, frames, seconds.numerator, seconds.denominator)
        return PartSize(patches, patches // self.merge**2, patches, extent)

    def decode_into(
        self, data: bytes | memoryview, size: PartSize, out: Mapping[str, NDArray[Any]], limits: Limits
    ) -> None:
        from orchdata.loaders.modalities.image_decode import byte_table
        from orchdata.loaders.modalities.video.decode import Cut, taken_pictures, write_patches

        table = byte_table(self.mean, self.std, self.dtype)
        cut = Cut(self.patch_size, self.merge, self.temporal_patch_size, table, self.resizer, self.resample)
        with taken_pictures(self, data, size, limits, lambda line: line.pictures(size.extent[3])) as pictures:
            write_patches(pictures, size, cut, out["patches"])

    def to_file(
        self, data: bytes | memoryview, size: PartSize, arrays: Mapping[str, NDArray[Any]], limits: Limits
    ) -> tuple[str, bytes]:
        """The pictures in the patches, as an animated PNG."""
        from orchdata.loaders.modalities.image_decode import png_of

        grid_t, grid_h, grid_w, count = size.extent[:4]
        picture = _picture(self, self.max_tokens)
        moments = np.split(arrays["patches"], grid_t)
        pictures = np.concatenate([picture._pictures(moment, (grid_h, grid_w)) for moment in moments])
        return "png", png_of(pictures[:count], float(self._interval(size)))

    def extras(self, sizes: Sequence[PartSize]) -> Mapping[str, NDArray[Any]]:
        """Return arrays that follow from the sizes of clips.

        grid_thw: int32 (num_videos, 3), patches along time, height and width.
        seconds_per_grid: float32 (num_videos,), distance of consecutive temporal patches.
        timestamps: float32 (sum of grid_t,), seconds: the middle of a temporal patch's first and last picture.
        """
        intervals = [self._interval(size) for size in sizes]
        stamps: list[float] = []
        for size, interval in zip(sizes, intervals, strict=True):
            grid_t, count, times = size.extent[0], size.extent[3], self.temporal_patch_size
            ends = [(at * times, min(at * times + times, count) - 1) for at in range(grid_t)]
            stamps += [float(interval * (first + last) / 2) for first, last in ends]
        return {
            "grid_thw": np.array([size.extent[:3] for size in sizes], np.int32).reshape(-1, 3),
            "seconds_per_grid": np.array([float(each * self.temporal_patch_size) for each in intervals], np.float32),
            "timestamps": np.array(stamps, np.float32),
        }

    def _interval(self, size: PartSize) -> Fraction:
        """Seconds between consecutive pictures."""
        count, _, numerator, denominator = size.extent[3:]
        return Fraction(numerator, denominator * count)

    def rope(self, size: PartSize) -> NDArray[np.int64]:
        """As in Qwen-VL: the number or the time of temporal patches; the merged grid along height and width."""
        grid_t, grid_h, grid_w = size.extent[:3]
        high, wide = grid_h // self.merge, grid_w // self.merge
        moments = np.arange(grid_t)
        if self.positions_per_second is not None:
            step = self._interval(size) * self.temporal_patch_size
            step *= Fraction(self.positions_per_second).limit_denominator(_FINEST)
            moments = np.array([at * step.numerator // step.denominator for at in range(grid_t)], np.int64)
        return grid_positions(moments, high, wide)

    def dummy(self) -> PartSize:
        return self._flat(self.merge)

    def padding(self, positions: int) -> PartSize:
        """One row of merged tokens, a temporal patch long."""
        return self._flat(positions // self.merge)

    def _flat(self, wide: int) -> PartSize:
        patches, times = self.merge * wide, self.temporal_patch_size
        return PartSize(patches, patches // self.merge**2, patches, (1, self.merge, wide, times, times, 1, 1))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@lru_cache(maxsize=256)
def _picture(pre: VideoPreprocessor, max_tokens: int) -> ImagePreprocessor:
    """Return how one picture of a clip is prepared, within `max_tokens`."""
    try:
        return ImagePreprocessor(max_tokens=max_tokens, **{name: getattr(pre, name) for name in _OF_PICTURES})
    except ValueError as error:
        raise ValueError(str(error).replace("ImagePreprocessor", "VideoPreprocessor")) from None
