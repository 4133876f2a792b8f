"""Bytes of a clip -> patches, written into the batch's memory.

bytes --open_video--> pictures of the timeline --resize--> the grid's size --patchify, some at a time--> out
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.image_decode import Pixels, resized
from orchdata.loaders.modalities.modality import Header, PartSize
from orchdata.loaders.modalities.video.frame_list import FrameList, is_frame_list
from orchdata.native.patchify import channel_table, patchify_clip

if TYPE_CHECKING:
    from orchdata.loaders.modalities.video.file import VideoFile
    from orchdata.loaders.modalities.video.preprocessor import VideoPreprocessor


def open_video(data: bytes | memoryview, limits: Limits) -> VideoFile | FrameList:
    """A clip whose pictures can be asked for; a context manager. Raises DecodeError, and ImportError without PyAV."""
    if is_frame_list(data):
        return FrameList(data, limits)
    from orchdata.loaders.modalities.video.file import VideoFile

    return VideoFile(data, limits)


def header_of(video: VideoFile | FrameList, size: tuple[int, int]) -> Header:
    """(width, height, frames, numerator and denominator of seconds) of a clip whose pictures have this size."""
    seconds = video.timeline.seconds
    return *size, video.timeline.frames, seconds.numerator, seconds.denominator


def decode_video(
    data: bytes | memoryview, pre: VideoPreprocessor, size: PartSize, limits: Limits, out: NDArray[Any]
) -> None:
    """Decode, resize and cut the pictures of a clip that are taken into patches.

    Args:
        size: as the index has it.
        out: (grid_t * grid_h * grid_w, pre.patch_dim), C-contiguous, written in whole: float32, uint16 (bfloat16 bits)
            or uint8, as `pre.dtype` says. Rows and values are ordered as `native.patchify` says.

    Raises:
        DecodeError: not a video, damaged, above a limit, or of another length or size than the index says.
    """
    with open_video(data, limits) as video:

        def check(width: int, height: int) -> None:
            found = pre.count_header(header_of(video, (width, height)), limits)
            if found.extent != tuple(size.extent):
                raise DecodeError(differs(video, (width, height)))

        count = size.extent[3]
        if count > video.timeline.frames:
            raise DecodeError(differs(video))
        with closing(upright_pictures(video, video.timeline.pictures(count), check)) as pictures:
            write_patches(pictures, pre, size, out)


def differs(video: VideoFile | FrameList, size: tuple[int, int] | None = None) -> str:
    """Why a clip is refused whose counts are not those of the index."""
    line = video.timeline
    shown = f"{line.frames} frames in {float(line.seconds):.3f} s"
    shown += "" if size is None else f" of {size[0]} x {size[1]} pixels"
    return f"decoded to {shown}, the index says otherwise: it is damaged, or has to be indexed again"


def upright_pictures(
    video: VideoFile | FrameList, numbers: Sequence[int], check: Callable[[int, int], None]
) -> Generator[Pixels]:
    """Pictures (height, width, 3) of one size, which `check` is told once: width, height. To be closed."""
    first: tuple[int, int] | None = None
    with closing(video.frames(numbers)) as frames:
        for number, pixels in zip(numbers, frames, strict=True):
            height, width = pixels.shape[:2]
            if first is None:
                first = (width, height)
                check(*first)
            if first != (width, height):
                raise DecodeError(
                    f"frame {number} has {width} x {height} pixels, those before it {first[0]} x {first[1]}: encode "
                    "the video anew, all frames at one size"
                )
            yield pixels


def write_patches(pictures: Iterator[Pixels], pre: VideoPreprocessor, size: PartSize, out: NDArray[Any]) -> None:
    """Pictures as patches; the last one stands for those that its patch lacks."""
    grid_t, grid_h, grid_w, count = size.extent[:4]
    side, times = pre.patch_size, pre.temporal_patch_size
    table = _table(pre.mean, pre.std, pre.dtype)
    canvas = np.empty((times, grid_h * side, grid_w * side, 3), np.uint8)
    rows, filled = grid_h * grid_w, 0
    for number in range(grid_t * times):
        if number < count:
            pixels = resized(next(pictures), (canvas.shape[2], canvas.shape[1]), pre.resizer, pre.resample)
            canvas[filled] = pixels[..., :3]
        else:
            canvas[filled] = canvas[filled - 1]
        filled += 1
        if filled == times:
            first = (number // times) * rows
            patchify_clip(canvas, side, pre.merge, table, out[first : first + rows])
            filled = 0


@lru_cache(maxsize=8)
def _table(mean: tuple[float, ...], std: tuple[float, ...], dtype: str) -> NDArray[Any]:
    return channel_table(mean, std, dtype)
