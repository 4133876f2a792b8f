"""Bytes of a clip -> patches, written into the batch's memory.

bytes --open_video--> pictures of the timeline --resize--> the grid's size --patchify, some at a time--> out
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import DecodeError
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.image_decode import Pixels, byte_table, resized
from orchdata.loaders.modalities.modality import Header, Modality, PartSize
from orchdata.loaders.modalities.video.frame_list import FrameList, is_frame_list
from orchdata.loaders.modalities.video.timeline import Timeline
from orchdata.native.decoding import patchify

if TYPE_CHECKING:
    from orchdata.loaders.modalities.video.file import VideoFile
    from orchdata.loaders.modalities.video.preprocessor import VideoPreprocessor

_APART: Final = Fraction(1, 20)
"""Maximum difference in seconds between tables and packets of a file."""


def open_video(data: bytes | memoryview, limits: Limits) -> VideoFile | FrameList:
    """Open a clip to read its pictures; a context manager. Raises DecodeError, and ImportError without PyAV."""
    if is_frame_list(data):
        return FrameList(data, limits)
    from orchdata.loaders.modalities.video.file import VideoFile

    return VideoFile(data, limits)


def header_of(video: VideoFile | FrameList, size: tuple[int, int]) -> Header:
    """Return (width, height, frames, numerator and denominator of seconds) of a clip with pictures of this size."""
    seconds = video.timeline.seconds
    return *size, video.timeline.frames, seconds.numerator, seconds.denominator


def decode_video(
    data: bytes | memoryview, pre: VideoPreprocessor, size: PartSize, limits: Limits, out: NDArray[Any]
) -> None:
    """Decode and resize the pictures of a clip that are used, and cut them into patches.

    Args:
        size: its size in the index.
        out: (grid_t * grid_h * grid_w, pre.patch_dim), C-contiguous, fully overwritten: float32, uint16 (bfloat16 bits)
            or uint8, according to `pre.dtype`. Rows and values are ordered as in `native.patchify`.

    Raises:
        DecodeError: not a video, damaged, above a limit, or of another length or size than in the index.
    """
    table = byte_table(pre.mean, pre.std, pre.dtype)
    cut = Cut(pre.patch_size, pre.merge, pre.temporal_patch_size, table, pre.resizer, pre.resample)
    with taken_pictures(pre, data, size, limits, lambda line: line.pictures(size.extent[3])) as pictures:
        write_patches(pictures, size, cut, out)


@contextmanager
def taken_pictures(
    modality: Modality,
    data: bytes | memoryview,
    size: PartSize,
    limits: Limits,
    numbers_of: Callable[[Timeline], Sequence[int]],
) -> Iterator[Iterator[Pixels]]:
    """Yield the pictures (height, width, 3 or 4) of a clip that are used, each valid until the next.

    Args:
        modality: counts a clip.
        size: its size in the index; the extent ends with frames, and the numerator and denominator of seconds.
        numbers_of: returns which pictures of a timeline are used.

    Raises:
        DecodeError: as in `decode_video`, also while iterating.
    """
    with open_video(data, limits) as video:

        def check(width: int, height: int) -> None:
            counted = modality.count_header((width, height, *size.extent[-3:]), limits)
            if counted.extent != tuple(size.extent):
                raise DecodeError(_differs(video, (width, height)))

        frames, seconds = size.extent[-3], Fraction(*size.extent[-2:])
        if video.timeline.frames != frames or abs(video.timeline.seconds - seconds) > max(_APART, seconds / 100):
            raise DecodeError(_differs(video))
        with closing(_of_one_size(video, numbers_of(video.timeline), check)) as pictures:
            yield pictures


def _differs(video: VideoFile | FrameList, size: tuple[int, int] | None = None) -> str:
    """The error for a clip with other counts than in the index."""
    line = video.timeline
    shown = f"{line.frames} frames in {float(line.seconds):.3f} s"
    shown += "" if size is None else f" of {size[0]} x {size[1]} pixels"
    return (
        f"decoded to {shown}, the index says otherwise: it was changed and has to be indexed again, or its header is "
        "wrong, which writing it again repairs (`ffmpeg -i in.mp4 out.mp4`)"
    )


def _of_one_size(
    video: VideoFile | FrameList, numbers: Sequence[int], check: Callable[[int, int], None]
) -> Generator[Pixels]:
    """Yield pictures; `check` is called once with their width and height. Must be closed."""
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
                    "the video again, all frames at one size"
                )
            yield pixels


class Cut(NamedTuple):
    """How pictures become patches.

    Attributes:
        patch, merge: side of a patch in pixels, of a merged token in patches.
        times: pictures of a patch.
        table: see `patchify`.
        resizer, resample: see `resized`.
    """

    patch: int
    merge: int
    times: int
    table: NDArray[Any]
    resizer: str
    resample: str


def write_patches(pictures: Iterator[Pixels], size: PartSize, cut: Cut, out: NDArray[Any]) -> None:
    """Cut pictures into patches; an incomplete last patch repeats the last picture.

    Args:
        size: its extent begins with the grid in time, height and width, and the number of pictures.
        out: (grid_t * grid_h * grid_w, values of a patch), of the table's dtype.
    """
    grid_t, grid_h, grid_w, count = size.extent[:4]
    canvas = np.empty((cut.times, grid_h * cut.patch, grid_w * cut.patch, 3), np.uint8)
    target = (canvas.shape[2], canvas.shape[1])
    for moment, rows in enumerate(out.reshape(grid_t, grid_h * grid_w, -1)):
        for time in range(cut.times):
            if moment * cut.times + time < count:
                canvas[time] = resized(next(pictures), target, cut.resizer, cut.resample)[..., :3]
            else:
                canvas[time] = canvas[time - 1]
        patchify(canvas, cut.patch, cut.merge, cut.table, rows)
