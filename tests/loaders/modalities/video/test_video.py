"""Clips of many containers, codecs and rates: counted without decoding, and decoded to just what was counted."""

from __future__ import annotations

import base64
import gc
import io
import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import video_clips
from PIL import Image
from video_clips import VARIABLE, animation, clip, number_of, picture, sound_alone, turn, without_first_group

import orchdata as od
from orchdata.loaders.errors import DecodeError
from orchdata.loaders.modalities.modality import PartSize, read_header
from orchdata.loaders.modalities.video import containers as mp4
from orchdata.loaders.modalities.video import file as opened
from orchdata.loaders.modalities.video.decode import open_video
from orchdata.loaders.modalities.video.preprocessor import VideoFiles
from orchdata.native.scan import FOUND

LIMITS = od.Limits()
# Patches of 8 pixels that keep the size of small clips, so that pictures can be read from them.
PRE = od.VideoPreprocessor(
    patch_size=8, merge=1, fps=6, min_frames=2, max_frames=64, min_tokens=1, max_tokens=4096, dtype="uint8"
)

# Groups of pictures whose first are made of those before; pictures that are kept and never shown.
OPEN_H264 = (("x264-params", "open-gop=1:bframes=3:b-pyramid=normal:keyint=10:min-keyint=1:scenecut=0:threads=1"),)
OPEN_H265 = (("x265-params", "log-level=none:open-gop=1:bframes=4:keyint=10:min-keyint=10:pools=none"),)
HIDDEN = (("deadline", "good"), ("auto-alt-ref", "1"), ("lag-in-frames", "16"))

CLIPS: dict[str, Any] = {
    "h264 mp4": lambda: clip("h264"),
    "h264 mp4, no key but the first": lambda: clip("h264", frames=40, gop=250),
    "h264 mp4, 29.97": lambda: clip("h264", rate=Fraction(30_000, 1001), frames=60),
    "h264 mp4, sound": lambda: clip("h264", audio="aac"),
    "h264 mp4, tables first": lambda: clip("h264", options=(("movflags", "faststart"),)),
    "h264 mp4, fragments": lambda: clip("h264", options=(("movflags", "frag_keyframe+empty_moov"),)),
    "h264 mkv": lambda: clip("h264", "mkv"),
    "h264 mkv, streamed out": lambda: clip("h264", "mkv", options=(("live", "1"),)),
    "h264 mkv, variable": lambda: clip("h264", "mkv", times=VARIABLE),
    "h264 mp4, variable": lambda: clip("h264", "mp4", times=VARIABLE),
    "h264 mp4, odd": lambda: clip("h264", size=(67, 45)),
    "h265 mp4": lambda: clip("h265"),
    "mpeg4 mp4": lambda: clip("mpeg4"),
    "vp8 webm": lambda: clip("vp8", "webm"),
    "vp9 webm": lambda: clip("vp9", "webm"),
    "vp9 webm, variable": lambda: clip("vp9", "webm", times=VARIABLE),
    "av1 webm": lambda: clip("av1", "webm", size=(128, 96)),
    "gif": lambda: clip("gif", "gif", rate=10),
    "gif by Pillow": lambda: animation(12),
    "gif by Pillow, variable": lambda: animation(6, milliseconds=[50, 50, 400, 50, 50, 900]),
    "one frame": lambda: clip("h264", frames=1),
    "h264 mp4, open groups": lambda: clip("h264", frames=40, given=OPEN_H264),
    "h264 mkv, open groups": lambda: clip("h264", "mkv", frames=40, given=OPEN_H264),
    "h265 mkv, open groups": lambda: clip("h265", "mkv", frames=40, given=OPEN_H265),
    "h264 mp4, interlaced": lambda: clip("h264", given=(("x264-params", "interlaced=1:bframes=2:threads=1"),)),
    "h264 mp4, late": lambda: clip("h264", start=13),
    "h264 mp4, a fragment a frame": lambda: clip("h264", options=(("movflags", "frag_every_frame+empty_moov"),)),
    "h265 mp4, 10 bits": lambda: clip("h265", pix_fmt="yuv420p10le"),
    "vp8 webm, hidden pictures": lambda: clip("vp8", "webm", frames=60, gop=40, given=HIDDEN),
    "vp9 webm, hidden pictures": lambda: clip("vp9", "webm", frames=60, gop=40, given=HIDDEN),
}


def header_of(data: bytes) -> tuple[int, ...]:
    return read_header(VideoFiles, len(data), lambda count: data[:count], LIMITS)


def decoded(data: bytes, pre: od.VideoPreprocessor = PRE) -> tuple[PartSize, np.ndarray]:
    size = pre.count_header(header_of(data), LIMITS)
    out = np.full((size.num_rows, pre.patch_dim), 7, np.uint8)
    pre.decode_into(data, size, {"patches": out}, LIMITS)
    return size, out


def pictures_of(size: PartSize, out: np.ndarray, pre: od.VideoPreprocessor = PRE) -> np.ndarray:
    """(pictures, height, width, 3) again, of patches that are not merged."""
    grid_t, grid_h, grid_w = size.extent[:3]
    times, side = pre.temporal_patch_size, pre.patch_size
    cut = out.reshape(grid_t, grid_h, grid_w, 3, times, side, side)
    return cut.transpose(0, 4, 1, 5, 2, 6, 3).reshape(grid_t * times, grid_h * side, grid_w * side, 3)


def every_frame(data: bytes) -> list[np.ndarray]:
    """All pictures by PyAV, in order, from the first on."""
    import av

    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


@pytest.mark.parametrize("name", CLIPS)
def test_what_is_counted_is_what_is_there(name: str) -> None:
    data = CLIPS[name]()
    width, height, frames, numerator, denominator = header_of(data)
    whole = every_frame(data)
    assert frames == len(whole) and (height, width) == whole[0].shape[:2]
    with open_video(data, LIMITS) as video:
        assert (video.timeline.frames, video.timeline.seconds) == (frames, Fraction(numerator, denominator))
        shown = [pixels.copy() for pixels in video.frames(range(frames))]
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(shown, whole, strict=True))
    assert [number_of(pixels) for pixels in whole] == list(range(frames))  # guards the clips


@pytest.mark.parametrize("name", CLIPS)
def test_only_the_pictures_that_are_taken_come_and_in_their_places(name: str) -> None:
    data = CLIPS[name]()
    size, out = decoded(data)
    grid_t, _, _, count, frames, numerator, denominator = size.extent
    with open_video(data, LIMITS) as video:
        taken = video.timeline.pictures(count)
    if "variable" not in name:
        assert taken == [number * frames // count for number in range(count)]
    numbers = [number_of(pixels) for pixels in pictures_of(size, out)]
    assert numbers == taken + [taken[-1]] * (grid_t * 2 - count)
    assert count == min(max(int(Fraction(numerator, denominator) * 6), 2), frames) // 2 * 2 or count == frames == 1


@pytest.mark.parametrize("options", [(), (("movflags", "faststart"),)])
@pytest.mark.parametrize("codec", ["h264", "h265", "mpeg4", "vp9", "av1"])
def test_tables_of_a_plain_mp4_say_what_its_packets_say(codec: str, options: Any) -> None:
    for frames, rate, times in ((24, 24, None), (31, Fraction(30_000, 1001), None), (1, 5, None), (0, 0, VARIABLE)):
        data = clip(codec, frames=frames, rate=rate, times=times, options=options, size=(128, 96))
        status, header = mp4.plain_header(memoryview(data), len(data))
        assert status == FOUND
        assert header == VideoFiles.probe(data, LIMITS)


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_turned_clips_are_upright(degrees: int) -> None:
    data = clip("h264", size=(96, 64), turned=degrees)
    width, height, frames = header_of(data)[:3]
    assert (width, height) == ((64, 96) if degrees != 180 else (96, 64))
    status, _ = mp4.plain_header(memoryview(data), len(data))
    assert status == FOUND
    assert VideoFiles.probe(data, LIMITS) == header_of(data)
    size, out = decoded(data)
    numbers = [number_of(np.rot90(pixels, degrees // 90)) for pixels in pictures_of(size, out)]
    assert numbers == [number * frames // size.extent[3] for number in range(size.extent[3])]


@pytest.mark.parametrize(
    ("way", "back"),
    [
        ("left to right", lambda pixels: pixels[:, ::-1]),
        ("upside down", lambda pixels: pixels[::-1]),
        ("transposed", lambda pixels: pixels.transpose(1, 0, 2)),
    ],
)
def test_mirrored_clips_are_mirrored(way: str, back: Any) -> None:
    plain = clip("h264", size=(96, 64))
    data = turn(plain, way)
    assert header_of(data)[:2] == ((64, 96) if way == "transposed" else (96, 64))
    with open_video(plain, LIMITS) as video, open_video(data, LIMITS) as mirrored:
        for stored, shown in zip(video.frames([1, 9]), mirrored.frames([1, 9]), strict=True):
            assert np.array_equal(back(shown), stored) and not np.array_equal(shown, stored)


@pytest.mark.parametrize("codec", ["h264", "h265", "mpeg4"])
@pytest.mark.parametrize("container", ["mkv", "mp4"])
def test_what_is_shown_before_the_first_whole_picture_is_left_out(codec: str, container: str) -> None:
    given = {"h264": OPEN_H264, "h265": OPEN_H265, "mpeg4": (("bf", "2"), ("flags", "-cgop"))}[codec]
    whole = clip(codec, "mkv", frames=40, given=given)
    cut = without_first_group(
        whole, {"mkv": "matroska"}.get(container, container), (("use_editlist", "0"),) * (container == "mp4")
    )
    frames = header_of(cut)[2]
    assert 20 <= frames < 40
    with open_video(cut, LIMITS) as video:
        shown = [number_of(pixels) for pixels in video.frames(range(frames - (codec == "mpeg4")))]
    assert shown == list(range(40 - frames, 40))[: len(shown)]
    decoded(cut)


def frame(number: int, width: int = 64, height: int = 48) -> str:
    out = io.BytesIO()
    Image.fromarray(picture(number, width, height)).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def test_lists_of_frames_are_clips() -> None:
    frames = [frame(number) for number in range(9)]
    urls = [f"data:image/png;base64,{each}" for each in frames]
    for listed, seconds in (({"fps": 3, "frames": frames}, 3), ({"sample_fps": 1.5, "video": urls}, 6), (urls, 4.5)):
        data = json.dumps(listed).encode()
        assert header_of(data)[:3] == (64, 48, 9)
        assert Fraction(*header_of(data)[3:]) == seconds
        size, out = decoded(data)
        taken = [number * 9 // size.extent[3] for number in range(size.extent[3])]
        assert size.extent[3] >= 8 and [number_of(pixels) for pixels in pictures_of(size, out)] == taken


def test_frames_may_come_with_their_times() -> None:
    frames = [frame(number) for number in range(4)]
    data = b"\xef\xbb\xbf" + json.dumps({"timestamps": [0, 0.5, 2, 7], "frames": frames, "raw_fps": 24}).encode()
    assert Fraction(*header_of(data)[3:]) == Fraction(28, 3)
    with open_video(data, LIMITS) as video:
        assert not video.timeline.is_constant and video.timeline.pictures(4) == [0, 2, 2, 3]
    even = json.dumps({"timestamps": [1.0, 1.25, 1.5, 1.75], "frames": frames}).encode()
    assert header_of(even) == header_of(json.dumps({"fps": 4, "frames": frames}).encode())


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ({"timestamps": [0, 1], "frames": ["aaaa"]}, "1 frames whose timestamps are not as many"),
        ({"timestamps": [1, 0], "frames": ["aaaa"] * 2}, "do not ascend"),
        ({"FPS": 4, "frames": ["aaaa"]}, "'FPS', which is not read"),
        ({"fps": 0, "frames": ["aaaa"]}, "fps=0"),
        (["frame_0.jpg"], "no file is opened by name"),
        ([frame(0), frame(1, 32)], "frames 0 and 1 are 64 x 48 and 32 x 48"),
        ([frame(0), "AAAA" * 40], "frame 1: not an image"),
    ],
)
def test_lists_that_are_none(listed: Any, message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        header_of(json.dumps(listed).encode())


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("share", [0.3, 0.7, 0.97])
def test_a_cut_file_is_counted_as_what_is_there_or_refused(name: str, share: float) -> None:
    data = CLIPS[name]()
    data = data[: int(len(data) * share)]
    try:
        frames = header_of(data)[2]
    except DecodeError as error:
        assert any(
            word in error.reason for word in ("cut", "damaged", "readable", "no video", "without a single frame")
        )
        return
    size, out = decoded(data)
    assert len({*map(number_of, pictures_of(size, out))}) <= frames
    assert "streamed out" in name


def zeroed(data: bytes, start: float, stop: float) -> bytes:
    first, last = int(start * len(data)), int(stop * len(data))
    return data[:first] + bytes(last - first) + data[last:]


@pytest.mark.parametrize(("start", "stop"), [(0.6, 1.0), (0.4, 0.6)])
@pytest.mark.parametrize(
    "name", ["vp9 webm", "h264 mkv, streamed out", "h264 mkv", "h264 mp4, a fragment a frame", "gif"]
)
def test_a_file_with_a_hole_is_refused(name: str, start: float, stop: float) -> None:
    with pytest.raises(DecodeError, match="there is no|damaged|cut"):
        header_of(zeroed(CLIPS[name](), start, stop))


def test_pieces_that_an_index_in_the_file_names_must_be_there() -> None:
    data = clip("h264", frames=48, options=(("movflags", "dash+frag_keyframe+global_sidx"),))
    assert b"sidx" in data and header_of(data)[2] == 48
    moofs = [at - 4 for at in range(len(data)) if data.startswith(b"moof", at)]
    for at in moofs[1:]:
        with pytest.raises(DecodeError, match="the file is cut"):
            header_of(data[:at])
    with pytest.raises(DecodeError, match="there is no box"):
        header_of(data + bytes(1000))
    assert header_of(data + bytes(3)) == header_of(data)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: clip("mpeg4", "avi"), "not a video that is read.*in.avi out.mp4"),
        (lambda: sound_alone(), "only audio"),
        (lambda: b"\0" * 400, "not a video"),
        (lambda: b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "not a video"),
        (lambda: b"ffconcat version 1.0\nfile /etc/passwd\n", "not a video"),
        (lambda: b"GIF89a" + bytes(7) + b";", "damaged|readable|single frame|no video"),
    ],
)
def test_what_is_no_video_is_refused_with_a_reason(make: Any, message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        header_of(make())


def test_an_index_of_another_clip_is_refused() -> None:
    size = PRE.count_header(header_of(clip("h264")), LIMITS)
    for other in (clip("h264", frames=30), clip("h264", size=(64, 64)), clip("h264", rate=12)):
        with pytest.raises(DecodeError, match="indexed again"):
            PRE.decode_into(other, size, {"patches": np.empty((size.num_rows, PRE.patch_dim), np.uint8)}, LIMITS)


def noise(frames: int, given: tuple[tuple[str, str], ...] = ()) -> bytes:
    """A clip of H.264 with much in every packet."""
    random = np.random.default_rng(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            video_clips, "picture", lambda _, width, height: random.integers(0, 256, (height, width, 3), np.uint8)
        )
        return clip.__wrapped__("h264", frames=frames, size=(128, 96), given=given)


def test_pictures_made_of_damaged_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data, random = noise(40), np.random.default_rng(0)
    first, damaged = data.index(b"mdat") + len(data) // 20, []
    for at in random.integers(first, len(data) - len(data) // 20, 24):
        damaged.append(data[:at] + random.bytes(4) + data[at + 4 :])

    def refused(data: bytes) -> bool:
        try:
            with open_video(data, LIMITS) as video:
                return len(list(video.frames(range(3, 40, 9)))) != 5
        except DecodeError as error:
            assert "damaged video" in error.reason
            return True

    num_refused = sum(map(refused, damaged))
    monkeypatch.setattr(opened, "SAYS_DAMAGE", {})
    made_up = len(damaged) - sum(map(refused, damaged))
    assert num_refused >= 6 and made_up > len(damaged) - num_refused


def test_ctrl_c_is_heard_wherever_it_comes() -> None:
    """Guards that no function of Python's is called by C, and what is held where PyAV raises."""
    clips = [clip("h264"), clip("vp9", "webm", times=VARIABLE), animation(5)]
    before, forgotten = len(os.listdir("/proc/self/fd")), 0
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    others = gc.callbacks[:]
    gc.callbacks.clear()  # of tools, in which it would be forgotten
    try:
        for number in range(100):
            came = threading.Timer(0.001 + 0.00015 * number, signal.raise_signal, (signal.SIGINT,))
            with suppress(KeyboardInterrupt):
                came.start()
                while came.is_alive():
                    for data in clips:
                        decoded(data)
                forgotten += 1
    finally:
        signal.signal(signal.SIGINT, previous)
        gc.callbacks.extend(others)
    gc.collect()
    assert not forgotten and len(os.listdir("/proc/self/fd")) <= before + 1


def test_threads_decode_at_once() -> None:
    clips = [make() for make in CLIPS.values()]
    expected = [decoded(data)[1] for data in clips]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            pixels = list(pool.map(lambda data: decoded(data)[1], clips))
            assert all(np.array_equal(ours, theirs) for ours, theirs in zip(pixels, expected, strict=True))


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_a_clip_is_written_as_the_pictures_that_are_taken(dtype: Any) -> None:
    pre = replace(PRE, dtype=dtype, temporal_patch_size=2, fps=3)
    data = clip("h264", frames=25)
    size = pre.count(data, LIMITS)
    out = {"patches": np.empty((size.num_rows, pre.patch_dim), dtype)}
    pre.decode_into(data, size, out, LIMITS)
    suffix, content = pre.to_file(data, size, out, LIMITS)
    assert suffix == "png"
    with Image.open(io.BytesIO(content)) as image:
        pictures = []
        for number in range(getattr(image, "n_frames", 1)):
            image.seek(number)
            pictures.append(number_of(np.asarray(image.convert("RGB"))))
    assert len(pictures) == size.extent[3]
    assert pictures == sorted(set(pictures))
    assert pictures[0] == 0


def test_counts_and_positions_are_those_of_the_docs() -> None:
    pre = od.VideoPreprocessor(fps=2, max_tokens=64, total_tokens=256, positions_per_second=25)
    size = pre.count_header((1280, 720, 300, 10, 1), LIMITS)  # 10 s at 30 a second
    grid_t, grid_h, grid_w, count = size.extent[:4]
    assert (count, grid_t) == (20, 10)
    assert (grid_h, grid_w) == (6, 12)  # 256 // 10 = 25 tokens, at 16:9
    assert size.tokens == 10 * 3 * 6 and size.positions == size.num_rows == 4 * size.tokens
    extras = pre.extras([size, size])
    assert extras["grid_thw"].tolist() == [[10, 6, 12]] * 2
    assert extras["seconds_per_grid"].tolist() == [1.0, 1.0]
    assert extras["timestamps"].tolist() == [each + 0.25 for each in range(10)] * 2
    rope = pre.rope(size)
    assert rope.shape == (3, size.tokens)
    assert rope[0].reshape(10, 18)[:, 0].tolist() == [25 * each for each in range(10)]
    assert rope[1].reshape(10, 3, 6)[4].tolist() == [[row] * 6 for row in range(3)]
    assert rope[2].reshape(10, 3, 6)[4].tolist() == [list(range(6))] * 3


def test_a_picture_made_from_a_damaged_one_after_the_first_is_an_error() -> None:
    import av

    data, random = without_first_group(noise(40, OPEN_H264), "matroska", leading=False), np.random.default_rng(3)
    with av.open(io.BytesIO(data)) as container:
        packet = [packet for packet in container.demux(video=0) if packet.size][1]
    start, stop = packet.pos + 64, packet.pos + packet.size
    refused = 0
    for at in random.integers(start, stop, 20):
        changed = data[:at] + random.bytes(8) + data[at + 8 :]
        try:
            with open_video(changed, LIMITS) as video:
                assert len(list(video.frames([7]))) == 1
        except DecodeError as error:
            assert "damaged video" in error.reason
            refused += 1
    assert refused >= 5


def test_a_slant_is_refused() -> None:
    data = turn(clip("h264", size=(96, 64)), 90)
    at = data.index(b"tkhd") + 4
    at += 52 if data[at] == 1 else 40
    with pytest.raises(DecodeError, match="turns by no quarter"):
        header_of(data[:at] + (1 << 14).to_bytes(4, "big") + data[at + 4 :])
