"""A clip as a list of pictures in JSON, in base64 or as `data:` URLs, already taken from a video:

{"fps": 2.0, "frames": ["data:image/jpeg;base64,...", ...]}, or the list alone
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Generator, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, Final

from orchdata.loaders.errors import NOT_DATA, DecodeError, pass_trouble
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.checks import described
from orchdata.loaders.modalities.image_decode import Pixels, to_rgb, upright_pixels
from orchdata.loaders.modalities.image_header import ImageFiles
from orchdata.loaders.modalities.probing import read_header
from orchdata.loaders.modalities.video.timeline import Timeline

_FRAMES: Final = ("frames", "video", "images")
_RATES: Final = ("fps", "sample_fps")
_DEFAULT_FPS: Final = 2.0
"""Of a list that does not say, as Qwen's own tools have it."""
_FINEST: Final = 1_000_000
_DATA_URL: Final = re.compile(r"data:[^,]{0,256};base64,", re.IGNORECASE)


def written(frames: Sequence[bytes], fps: Any) -> bytes:
    """Files of pictures as a list of frames; `fps` as JSON has it, None where nobody says."""
    held = {} if fps is None else {"fps": fps}
    return json.dumps({**held, "frames": [base64.b64encode(frame).decode() for frame in frames]}).encode()


def is_frame_list(data: bytes | memoryview) -> bool:
    """Whether bytes are JSON, which no video file is."""
    return bytes(data[:64]).lstrip()[:1] in (b"{", b"[")


class FrameList:
    """Pictures of a list, with the face of `VideoFile`. Raises DecodeError."""

    def __init__(self, data: bytes | memoryview, limits: Limits) -> None:
        self._limits = limits
        try:
            held: Any = json.loads(bytes(data))
        except (ValueError, RecursionError) as error:
            raise DecodeError(f"not a list of frames: {described(error)}") from None
        frames, fps = held, _DEFAULT_FPS
        if isinstance(held, dict):
            frames = next((held[key] for key in _FRAMES if key in held), None)
            fps = next((held[key] for key in _RATES if held.get(key) is not None), _DEFAULT_FPS)
        if not isinstance(frames, list) or not all(isinstance(frame, str) for frame in frames):
            raise DecodeError('not a list of frames: write {"fps": 2.0, "frames": ["data:image/jpeg;base64,...", ...]}')
        if isinstance(fps, bool) or not isinstance(fps, int | float) or not 1 / _FINEST <= fps <= _FINEST:
            raise DecodeError(f"a list of frames at fps={str(fps)[:40]}: that is pictures a second, above 0")
        self._frames: list[str] = frames
        tick = 1 / Fraction(fps).limit_denominator(_FINEST)
        self.timeline = Timeline.of(list(range(len(frames))), tick)

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
        """Frames (height, width, 3), each valid until the next is asked for."""
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
            width, height = read_header(ImageFiles, len(data), lambda count: data[:count], self._limits)
        except DecodeError as error:
            raise DecodeError(f"frame {number}: {error.reason}") from error.__cause__
        except Exception as error:
            pass_trouble(error)
            raise DecodeError(f"frame {number}: {described(error)}") from error
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
