"""Small clips made with PyAV, whose pictures say by large black and white bars which of the clip they are."""

from __future__ import annotations

import io
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

os.environ.setdefault("SVT_LOG", "-1")  # or the encoder of AV1 tells all of itself
av = pytest.importorskip("av", reason="video needs PyAV, the extra `video`")

BITS = 8
ENCODERS = {
    "h264": "libx264",
    "h265": "libx265",
    "mpeg4": "mpeg4",
    "vp8": "libvpx",
    "vp9": "libvpx-vp9",
    "av1": "libsvtav1",
    "gif": "gif",
}
# Little work for the encoder; a key picture now and then, and pictures made of later ones where a codec has them.
_OPTIONS = {
    "libx264": {"preset": "ultrafast", "bf": "2", "x264-params": "scenecut=0:bframes=2:b-adapt=0:threads=1"},
    "libx265": {"preset": "ultrafast", "x265-params": "log-level=none:bframes=2:b-adapt=0:keyint=8:pools=none"},
    "mpeg4": {"bf": "2"},
    "libvpx": {"deadline": "realtime", "cpu-used": "8", "auto-alt-ref": "0"},
    "libvpx-vp9": {"deadline": "realtime", "cpu-used": "8", "lag-in-frames": "8", "auto-alt-ref": "1"},
    "libsvtav1": {"preset": "12", "svtav1-params": "lp=1"},
    "libaom-av1": {"cpu-used": "8", "usage": "realtime"},
}


def encoder_of(codec: str) -> str:
    """The encoder of a codec; skips the test where the installed PyAV has none."""
    names = [ENCODERS[codec], *({"av1": ["libaom-av1"], "h264": ["libopenh264"]}.get(codec, []))]
    for name in names:
        try:
            av.codec.Codec(name, "w")
        except Exception:
            continue
        return name
    pytest.skip(f"the installed PyAV {av.__version__} has no encoder for {codec}: {', '.join(names)}")


def picture(number: int, width: int, height: int) -> np.ndarray:
    """(height, width, 3): bars from left to right that are the bits of `number`, above a band that counts on."""
    pixels = np.empty((height, width, 3), np.uint8)
    for bit in range(BITS):
        bar = slice(bit * width // BITS, (bit + 1) * width // BITS)
        pixels[: 3 * height // 4, bar] = 235 if number >> bit & 1 else 20
    pixels[3 * height // 4 :] = (40 + number % 100, 120, 200 - number % 100)
    return pixels


def number_of(pixels: np.ndarray) -> int:
    """Which picture of its clip this is."""
    height, width = pixels.shape[:2]
    rows = slice(height // 4, height // 2)
    bars = [pixels[rows, (2 * bit + 1) * width // (2 * BITS)].mean() > 128 for bit in range(BITS)]
    return sum(1 << bit for bit, white in enumerate(bars) if white)


@contextmanager
def plain_scheduling() -> Iterator[None]:
    """SVT-AV1 makes the thread that calls it a real-time one where root runs it, and never takes that back."""
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, *before)


@lru_cache(maxsize=256)
def clip(
    codec: str = "h264",
    container: str = "mp4",
    frames: int = 24,
    rate: Fraction | int = 24,
    size: tuple[int, int] = (64, 48),
    *,
    times: tuple[int, ...] | None = None,
    gop: int = 8,
    audio: str | None = None,
    options: tuple[tuple[str, str], ...] = (),
    pix_fmt: str | None = None,
    turned: int = 0,
    given: tuple[tuple[str, str], ...] = (),
    start: int = 0,
) -> bytes:
    """A clip."""
    name, width, height = encoder_of(codec), *size
    number = len(times) if times else frames
    with plain_scheduling(), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"clip.{container}"
        with av.open(str(path), "w", options=dict(options)) as out:
            pace = Fraction(240 if name == "libsvtav1" else 1000) if times else Fraction(rate)
            asked = _OPTIONS.get(name, {}) | dict(given)
            if number == 1 and name == "libx265":  # which gives a lone picture a time at random, with B-frames
                asked["x265-params"] = asked["x265-params"].replace("bframes=2", "bframes=0")
            stream = out.add_stream(name, rate=pace, options=asked)
            stream.width, stream.height = size
            odd = width % 2 or height % 2
            stream.pix_fmt = pix_fmt or (
                "rgb8" if codec == "gif" else "yuv444p" if odd and codec != "mpeg4" else "yuv420p"
            )
            stream.codec_context.gop_size = gop
            stream.codec_context.thread_count = 1
            tick = Fraction(1, 1000) if times else 1 / Fraction(rate)
            stream.codec_context.time_base = tick
            sound = out.add_stream(audio, rate=48_000 if audio == "libopus" else 16_000) if audio else None
            for at in range(number):
                frame = av.VideoFrame.from_ndarray(picture(at, width, height), format="rgb24")
                frame.pts, frame.time_base = (times[at] if times else at + start), tick
                out.mux(stream.encode(frame))
            out.mux(stream.encode(None))
            if sound is not None:
                _add_sound(out, sound, 1.0)
        data = path.read_bytes()
    return turn(data, turned) if turned else data


def _add_sound(out: Any, stream: Any, seconds: float) -> None:
    rate, at = stream.codec_context.sample_rate, 0
    wave = (0.3 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)).astype(np.float32)
    for start in range(0, len(wave), 960):
        block = av.AudioFrame.from_ndarray(wave[None, start : start + 960], format="fltp", layout="mono")
        block.sample_rate, block.pts, block.time_base = rate, at, Fraction(1, rate)
        at += block.samples
        out.mux(stream.encode(block))
    out.mux(stream.encode(None))


def sound_alone(container: str = "mp4", codec: str = "aac") -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"sound.{container}"
        with av.open(str(path), "w") as out:
            _add_sound(out, out.add_stream(codec, rate=16_000), 1.0)
        return path.read_bytes()


_ONE = 1 << 16
_MATRICES = {
    90: (0, _ONE, -_ONE, 0),
    180: (-_ONE, 0, 0, -_ONE),
    270: (0, -_ONE, _ONE, 0),
    "left to right": (-_ONE, 0, 0, _ONE),
    "upside down": (_ONE, 0, 0, -_ONE),
    "transposed": (0, _ONE, _ONE, 0),
}


def without_first_group(
    data: bytes, container: str, options: tuple[tuple[str, str], ...] = (), *, leading: bool = True
) -> bytes:
    """A clip that was cut without re-encoding: from its second picture on that stands alone, in stored order, with
    those shown before it or without.
    """
    out = io.BytesIO()
    with av.open(io.BytesIO(data)) as given, av.open(out, "w", format=container, options=dict(options)) as made:
        stream = given.streams.video[0]
        target = made.add_stream_from_template(stream)
        keys = first = 0
        for packet in given.demux(stream):
            keys += packet.is_keyframe
            if packet.is_keyframe and keys == 2:
                first = packet.pts
            if keys > 1 and packet.dts is not None and (leading or packet.pts >= first):
                packet.stream = target
                made.mux(packet)
    return out.getvalue()


def turn(data: bytes, way: int | str) -> bytes:
    """An MP4 that players turn clockwise by so many degrees, or mirror: the matrix of its first track."""
    matrix = _MATRICES[way]
    at = data.index(b"tkhd") + 4
    at += 52 if data[at] == 1 else 40
    a, b, c, d = matrix
    return data[:at] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + data[at + 36 :]


def animation(numbers: int = 6, size: tuple[int, int] = (64, 48), milliseconds: Any = 100) -> bytes:
    """A GIF by Pillow."""
    pictures = [Image.fromarray(picture(number, *size)) for number in range(numbers)]
    out = io.BytesIO()
    pictures[0].save(out, "GIF", save_all=True, append_images=pictures[1:], duration=milliseconds, loop=0)
    return out.getvalue()


VARIABLE = (0, 40, 80, 500, 520, 540, 1_000, 1_900, 1_920, 2_400)
"""Milliseconds of a clip at a variable rate."""
