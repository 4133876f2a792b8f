"""The time of clips: finding their header, and decoding the chosen pictures, compared to PyAV and torchcodec alone.

    the same bytes --header: tables, or a scan of packets--> counts
                   --our decoder--------------------------> 16 pictures, patches
                   --PyAV, all pictures, 16 kept----------> the same pictures
                   --torchcodec, where it loads-----------> the same pictures

Bytes are in memory, so that nothing is read; all in one process and one thread, in turn.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Final

import numpy as np

from benchmarks.command import run_command
from benchmarks.made_clips import make_video
from orchdata.bench import Result, WideTable, interleave
from orchdata.engines.engine import use_one_thread
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.modality import read_header, stored_dtype
from orchdata.loaders.modalities.video.decode import open_video
from orchdata.loaders.modalities.video.preprocessor import VideoPreprocessor

LIMITS: Final = Limits()
_CONTAINERS: Final = ("mp4", "webm", "gif")
_ENCODERS: Final[dict[str, tuple[str, dict[str, str]]]] = {
    "mp4, H.264 with B-frames": ("libx264", {"preset": "medium", "g": "60"}),
    "mp4, HEVC with B-frames": ("libx265", {"preset": "fast", "g": "60", "x265-params": "log-level=none"}),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipBench:
    """What to measure.

    Attributes:
        seconds, fps, width, height: of a procedural clip in each container, and by other encoders.
        pictures: taken of it.
        max_tokens: of a temporal patch.
        repeats: of each, in turn, after one round that does not count.
    """

    seconds: float = 10.0
    fps: int = 30
    width: int = 640
    height: int = 360
    pictures: int = 16
    max_tokens: int = 128
    repeats: int = 7


def run(config: ClipBench) -> list[Result | WideTable]:
    """Measure. Raises ValueError for no repeats."""
    if config.repeats < 1:
        raise ValueError(f"a repeat is the least, got {config}")
    use_one_thread()
    rows = []
    shape = (config.seconds, config.fps, config.width, config.height)
    clips = {name: make_video(np.random.default_rng(0), *shape, name)[0] for name in _CONTAINERS}
    clips |= {name: _encoded(clips["mp4"], *encoder) for name, encoder in _ENCODERS.items()}
    for container, data in clips.items():
        jobs = _jobs(config, data)
        _check_equal({name: job() for name, job in jobs.items() if name in _PICTURES})
        times = interleave(jobs, repeats=config.repeats)
        median = {name: 1000 * float(np.median(seconds)) for name, seconds in times.items()}
        scanned = len(data) / 1e6 / (median["scan"] / 1000)
        rows.append((container, len(data) / 1e6, *(median.get(name) for name in _SHOWN), scanned))
    columns = ("clip", "MB", *_SHOWN.values(), "MB/s scanned")
    title = f"{config.seconds:g} s, {config.width} x {config.height}, {config.fps} pictures a second: milliseconds"
    return [WideTable(title=title, columns=columns, rows=tuple(rows), note=_NOTE)]


_PICTURES: Final = ("ours", "all", "torchcodec")
_SHOWN: Final = {
    "header": "header",
    "scan": "packet scan",
    "patches": "decode_into",
    "ours": "pictures",
    "all": "PyAV, all",
    "torchcodec": "torchcodec",
}
_NOTE: Final = (
    "header: what an index takes, by tables of a plain MP4 and else a scan and one picture; pictures: those that are "
    "taken, the same from all three; -: not installed, or not readable"
)


def _encoded(data: bytes, name: str, options: dict[str, str]) -> bytes:
    """The same pictures by another encoder."""
    av: Any = import_module("av")
    made = io.BytesIO()
    with av.open(io.BytesIO(data)) as given, av.open(made, "w", format="mp4") as out:
        shown = given.streams.video[0]
        stream: Any = out.add_stream(name, rate=shown.average_rate, options=options)
        stream.width, stream.height, stream.pix_fmt = shown.width, shown.height, "yuv420p"
        for frame in given.decode(shown):
            frame.pict_type = 0  # the encoder's choice
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return made.getvalue()


def _jobs(config: ClipBench, data: bytes) -> dict[str, Callable[[], Any]]:
    pre = VideoPreprocessor(
        fps=config.pictures / config.seconds, max_frames=config.pictures, max_tokens=config.max_tokens
    )
    size = pre.count_header(_header(data), LIMITS)
    with open_video(data, LIMITS) as video:
        numbers = video.timeline.pictures(size.extent[3])
    specs = pre.arrays().items()
    out = {name: np.empty((size.num_rows, *spec.row_shape), stored_dtype(spec.dtype)) for name, spec in specs}
    jobs: dict[str, Callable[[], Any]] = {
        "header": partial(_header, data),
        "scan": partial(_scan, data),
        "patches": partial(pre.decode_into, data, size, out, LIMITS),
        "ours": partial(_ours, data, numbers),
        "all": partial(_all, data, numbers),
    }
    try:
        from torchcodec.decoders import VideoDecoder

        jobs["torchcodec"] = partial(_torchcodec, VideoDecoder, data, numbers)
        jobs["torchcodec"]()
    except (ImportError, RuntimeError, OSError):  # not here, or without libraries of FFmpeg
        jobs.pop("torchcodec", None)
    return jobs


def _header(data: bytes) -> Any:
    return read_header(VideoPreprocessor, len(data), lambda size: data[:size], LIMITS)


def _scan(data: bytes) -> None:
    with open_video(data, LIMITS):
        pass


def _ours(data: bytes, numbers: list[int]) -> Any:
    with open_video(data, LIMITS) as video:
        return np.stack([pixels.copy() for pixels in video.frames(numbers)])


def _all(data: bytes, numbers: list[int]) -> Any:
    av: Any = import_module("av")
    wanted = set(numbers)
    with av.open(io.BytesIO(data)) as file:
        file.streams.video[0].codec_context.thread_count = 1
        decoded = enumerate(file.decode(video=0))
        kept = {at: frame.to_ndarray(format="rgb24") for at, frame in decoded if at in wanted}
    return np.stack([kept[number] for number in numbers])


def _torchcodec(decoder: Any, data: bytes, numbers: list[int]) -> Any:
    opened = decoder(data, dimension_order="NHWC", num_ffmpeg_threads=1)
    return opened.get_frames_at(indices=numbers).data.numpy()


def _check_equal(found: Mapping[str, Any]) -> None:
    for name, pictures in found.items():
        if not np.array_equal(pictures, found["ours"]):
            raise ValueError(f"{name} shows other pictures than this library")


if __name__ == "__main__":
    run_command("benchmarks.clips", ClipBench, run)
