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
from orchdata.native.patchify import patchify

if TYPE_CHECKING:
    from orchdata.loaders.modalities.video.file import VideoFile
    from orchdata.loaders.modalities.video.preprocessor import VideoPreprocessor

_APART: Final = Fraction(1, 20)
"""Seconds by which tables and packets of a file may differ."""


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
    """Pictures (height, width, 3 or 4) of a clip that are taken, each valid until the next is asked for.

    Args:
        modality: counts a clip.
        size: as the index has it; its extent ends with frames, and the numerator and denominator of seconds.
        numbers_of: which pictures of a timeline are taken.

    Raises:
        DecodeError: as of `decode_video`, the pictures too.
    """
    with open_video(data, limits) as video:

        def check(width: int, height: int) -> None:
            found = modality.count_header((width, height, *size.extent[-3:]), limits)
            if found.extent != tuple(size.extent):
                raise DecodeError(_differs(video, (width, height)))

        frames, seconds = size.extent[-3], Fraction(*size.extent[-2:])
        if video.timeline.frames != frames or abs(video.timeline.seconds - seconds) > max(_APART, seconds / 100):
            raise DecodeError(_differs(video))
        with closing(_of_one_size(video, numbers_of(video.timeline), check)) as pictures:
            yield pictures


def _differs(video: VideoFile | FrameList, size: tuple[int, int] | None = None) -> str:
    """Why a clip is refused whose counts are not those of the index."""
    line = video.timeline
    shown = f"{line.frames} frames in {float(line.seconds):.3f} s"
    shown += "" if size is None else f" of {size[0]} x {size[1]} pixels"
    return (
        f"decoded to {shown}, the index says otherwise: it was changed and has to be indexed again, or its header "
        "tells other than it holds, which writing it anew mends (`ffmpeg -i in.mp4 out.mp4`)"
    )


def _of_one_size(
    video: VideoFile | FrameList, numbers: Sequence[int], check: Callable[[int, int], None]
) -> Generator[Pixels]:
    """Pictures, whose size `check` is told once: width, height. To be closed."""
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


class Cut(NamedTuple):
    """How pictures become patches.

    Attributes:
        patch, merge: side of a patch in pixels, of a merged token in patches.
        times: pictures of a patch.
        table: as of `patchify`.
        resizer, resample: as of `resized`.
    """

    patch: int
    merge: int
    times: int
    table: NDArray[Any]
    resizer: str
    resample: str


def write_patches(pictures: Iterator[Pixels], size: PartSize, cut: Cut, out: NDArray[Any]) -> None:
    """Pictures as patches; the last one stands for those that its patch lacks.

    Args:
        size: whose extent begins with the grid in time, height and width, and the number of pictures.
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
