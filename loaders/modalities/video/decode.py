"""Bytes of a clip -> patches, written into the batch's memory.

bytes --open_video--> pictures of the timeline --resize--> the grid's size --patchify, some at a time--> out

A clip is a video file, or a list of pictures in JSON, in base64 or as `data:` URLs, already taken from a video:
{"fps": 2.0, "frames": ["data:image/jpeg;base64,...", ...]}, with "timestamps" in seconds instead of a rate, or only the
list.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import json
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchdata.loaders.errors import NOT_DATA, DecodeError, as_failure, one_line
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.image import ImageFiles
from orchdata.loaders.modalities.image_decode import Pixels, resized, to_rgb, upright_pixels
from orchdata.loaders.modalities.modality import Modality, PartSize, read_header
from orchdata.loaders.modalities.video.containers import TIMING, Timeline
from orchdata.native.decoding import patchify

if TYPE_CHECKING:
    from orchdata.loaders.modalities.video.file import VideoFile

_APART: Final = Fraction(1, 20)
"""Maximum difference in seconds between tables and packets of a file."""
_FRAMES: Final = ("frames", "video", "images")
_RATES: Final = ("fps", "sample_fps")
_TIMES: Final = "timestamps"
_OF_SOURCE: Final = ("raw_fps", "total_num_frames", "frames_indices", "duration", "video_duration")
"""Keys about the source of the frames: permitted next to a rate, or times."""
_DEFAULT_FPS: Final = 2.0
"""For a list without a rate, as in Qwen's own tools."""
_FINEST: Final = 1_000_000
_DATA_URL: Final = re.compile(r"data:[^,]{0,256};base64,", re.IGNORECASE)


def frame_list(frames: Sequence[bytes], metadata: Mapping[str, Any]) -> bytes:
    """Return files of pictures as a list of frames, with their metadata."""
    return json.dumps({**metadata, _FRAMES[0]: [base64.b64encode(frame).decode() for frame in frames]}).encode()


def _timeline(metadata: Mapping[str, Any], count: int) -> Timeline:
    """Return when frames are shown, according to the list. Raises DecodeError, also for unknown keys about this."""
    rates = [key for key in _RATES if metadata.get(key) is not None]
    says = bool(rates) or metadata.get(_TIMES) is not None
    for key, value in metadata.items():
        known = key in (*_FRAMES, *_RATES, _TIMES) or (says and key in _OF_SOURCE)
        if not known and value is not None and TIMING.search(key) and not key.endswith("pixels"):
            raise DecodeError(
                f"a list of frames with {key[:40]!r}, which is not read: give {_RATES[0]!r}, pictures a second, or "
                f"{_TIMES!r}, seconds"
            )
    if metadata.get(_TIMES) is not None:
        return _timed(metadata[_TIMES], count)
    fps = metadata[rates[0]] if rates else _DEFAULT_FPS
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 1 / _FINEST <= fps <= _FINEST:
        raise DecodeError(f"a list of frames at fps={repr(fps)[:40]}: that is a number of pictures a second, above 0")
    return Timeline.of(list(range(count)), 1 / Fraction(fps).limit_denominator(_FINEST), last=1)


def _timed(times: Any, count: int) -> Timeline:
    plain = isinstance(times, list) and all(type(at) in (int, float) and abs(at) < _FINEST for at in times)
    if not plain or len(times) != count:
        raise DecodeError(f"a list of {count} frames whose {_TIMES} are not as many numbers of seconds")
    ticks = [round(at * _FINEST) for at in times]
    if any(after <= at for at, after in pairwise(ticks)):
        raise DecodeError(f"a list of frames whose {_TIMES} do not ascend")
    return Timeline.of(ticks, Fraction(1, _FINEST))


class FrameList:
    """Pictures of a list, with the interface of `VideoFile`. Raises DecodeError."""

    def __init__(self, data: bytes | memoryview, limits: Limits) -> None:
        self._limits = limits
        try:
            value: Any = json.loads(bytes(data).removeprefix(codecs.BOM_UTF8))
        except (ValueError, RecursionError) as error:
            raise DecodeError(f"not a list of frames: {one_line(error)}") from None
        metadata = value if isinstance(value, dict) else {}
        frames = next((metadata[key] for key in _FRAMES if key in metadata), None) if metadata else value
        if not isinstance(frames, list) or not all(isinstance(frame, str) for frame in frames):
            raise DecodeError('not a list of frames: write {"fps": 2.0, "frames": ["data:image/jpeg;base64,...", ...]}')
        self._frames: list[str] = frames
        self.timeline = _timeline(metadata, len(frames))

    def __enter__(self) -> FrameList:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def size(self) -> tuple[int, int]:
        """(width, height) of every frame."""
        sizes = [self._size_of(number) for number in range(len(self._frames))]
        for number, size in enumerate(sizes):
            if size != sizes[0]:
                shown = " and ".join(f"{width} x {height}" for width, height in (sizes[0], size))
                raise DecodeError(f"frames 0 and {number} are {shown} pixels: make all frames of a clip one size")
        return sizes[0]

    def frames(self, numbers: Sequence[int]) -> Generator[Pixels]:
        """Yield frames (height, width, 3), each valid until the next."""
        for number in numbers:
            try:
                yield upright_pixels(self._bytes(number), self._limits, partial(to_rgb, alpha="white"))
            except (*NOT_DATA, DecodeError) as error:
                if isinstance(error, DecodeError):
                    raise DecodeError(f"frame {number}: {error.reason}") from error.__cause__
                raise

    def _size_of(self, number: int) -> tuple[int, int]:
        data = self._bytes(number)
        try:
            with as_failure(DecodeError, "damaged image"):
                width, height = read_header(ImageFiles, len(data), lambda count: data[:count], self._limits)
        except DecodeError as error:
            raise DecodeError(f"frame {number}: {error.reason}") from error.__cause__
        return width, height

    def _bytes(self, number: int) -> bytes:
        frame = self._frames[number]
        match = _DATA_URL.match(frame)
        encoded = frame[match.end() :] if match else frame
        try:
            return base64.b64decode("".join(encoded.split()), validate=True)
        except (binascii.Error, ValueError):
            raise DecodeError(
                f"frame {number} is {frame[:40]!r}, neither a data: URL nor base64: frames of a list stand in it, and "
                "no file is opened by name"
            ) from None


def open_video(data: bytes | memoryview, limits: Limits) -> VideoFile | FrameList:
    """Open a clip to read its pictures; a context manager. Raises DecodeError, and ImportError without PyAV."""
    if bytes(data[:64]).removeprefix(codecs.BOM_UTF8).lstrip()[:1] in (b"{", b"["):  # no video file begins so
        return FrameList(data, limits)
    from orchdata.loaders.modalities.video.file import VideoFile

    return VideoFile(data, limits)


@contextmanager
def taken_pictures(
    modality: Modality,
    data: bytes | memoryview,
    size: PartSize,
    limits: Limits,
    numbers_of: Callable[[Timeline], Sequence[int]],
) -> Iterator[Iterator[Pixels]]:
    """Yield the pictures (height, width, 3 or 4) of a clip that are used, each valid until the next. `modality` counts
    a clip, whose extent in the index ends with frames, and numerator and denominator of seconds; `numbers_of` returns
    which pictures of a timeline are used. Raises DecodeError, also while iterating.
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
    """How pictures become patches."""

    patch: int  # side in pixels
    merge: int  # side of a merged token in patches
    times: int  # pictures of a patch
    table: NDArray[Any]  # see `patchify`
    resizer: str  # see `resized`
    resample: str


def write_patches(pictures: Iterator[Pixels], size: PartSize, cut: Cut, out: NDArray[Any]) -> None:
    """Cut pictures into patches, (grid_t * grid_h * grid_w, values of a patch); the last picture is repeated to a whole
    one. The extent of `size` begins with the grid in time, height and width, and the number of pictures.
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
