"""Procedural clips: one shape that moves over a textured ground, encoded by PyAV, and what moves where in words."""

from __future__ import annotations

import io
from fractions import Fraction
from typing import Any, Final

import numpy as np
from PIL import Image, ImageDraw

from orchdata.synth import COLOURS, SHAPES, draw_shape, ground

_WAYS: Final = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
# Encoders of a format, the best first, with options under which equal pictures give equal bytes.
_ENCODERS: Final[dict[str, tuple[tuple[str, dict[str, str]], ...]]] = {
    "mp4": (("libx264", {"preset": "ultrafast", "x264-params": "threads=1"}), ("mpeg4", {})),
    "webm": (("libvpx-vp9", {"deadline": "realtime", "cpu-used": "8", "row-mt": "0"}),),
    "gif": (("gif", {}),),
}
_PIXELS: Final = {"gif": "rgb8"}


def make_video(
    rng: np.random.Generator, seconds: float, fps: int, width: int, height: int, format: str
) -> tuple[bytes, str]:
    """Draw and encode a clip.

    Args:
        rng: drawn from; the same state gives the same clip, with equal versions of PyAV.
        seconds: duration; at least one picture is drawn.
        fps: pictures a second.
        width, height: size in pixels, made even.
        format: `mp4`, `webm` or `gif`.

    Returns:
        The encoded bytes, and what is seen: "a red circle that moves left".
    """
    width, height = max(16, width - width % 2), max(16, height - height % 2)
    colour = list(COLOURS)[int(rng.integers(len(COLOURS)))]
    shape = SHAPES[int(rng.integers(len(SHAPES)))]
    way = list(_WAYS)[int(rng.integers(len(_WAYS)))]
    under = ground(rng, width, height)
    radius = 0.15 * min(width, height)
    count = max(1, round(seconds * fps))
    pictures = []
    for number in range(count):
        canvas = under.copy()
        part = (number + 0.5) / count - 0.5
        centre = (width / 2 + _WAYS[way][0] * part * width, height / 2 + _WAYS[way][1] * part * height)
        draw_shape(ImageDraw.Draw(canvas), shape, centre, radius, COLOURS[colour])
        pictures.append(canvas)
    return _encoded(pictures, fps, format), f"a {colour} {shape} that moves {way}"


def _encoded(pictures: list[Image.Image], fps: int, format: str) -> bytes:
    import av

    out = io.BytesIO()
    name, options = next((each for each in _ENCODERS[format] if each[0] in av.codecs_available), _ENCODERS[format][-1])
    with av.open(out, "w", format=format, options={"fflags": "+bitexact"}) as container:
        stream: Any = container.add_stream(name, rate=Fraction(fps), options=options)
        stream.width, stream.height = pictures[0].size
        stream.pix_fmt = _PIXELS.get(format, "yuv420p")
        stream.codec_context.thread_count = 1
        for number, picture in enumerate(pictures):
            frame = av.VideoFrame.from_image(picture)  # type: ignore[no-untyped-call]
            frame.pts, frame.time_base = number, Fraction(1, fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return out.getvalue()
