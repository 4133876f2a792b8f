"""Sound inside of clips: as long as the index says, in time with the pictures, a part of its own in every engine."""

from __future__ import annotations

import io
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shard_factory import audio, chat, write_shard
from video_clips import clip, sound_alone

import orchdata as od
from orchdata.loaders.errors import DecodeError
from orchdata.loaders.modalities.audio_decode import decode_wave, read_mono
from orchdata.loaders.modalities.modality import read_header
from orchdata.loaders.modalities.video.containers import Timeline

av = pytest.importorskip("av")

LIMITS = od.Limits()
SOUND = od.AudioPreprocessor(num_mels=16, tracks=True)
VIDEO = od.VideoPreprocessor(patch_size=8, fps=4, min_tokens=1, max_tokens=24, dtype="float32")
RECIPE = od.Recipe(image=None, audio=SOUND, video=VIDEO)
# (codec of the pictures, container, codec of the sound), and whether the sound comes out as it went in.
CLIPS = [
    (("h264", "mp4", "aac"), False),
    (("h264", "mkv", "aac"), False),
    (("h264", "mp4", "libmp3lame"), False),
    (("vp9", "webm", "libopus"), False),
    (("h264", "mkv", "flac"), True),
    (("h264", "mov", "pcm_s16le"), True),
    (("h264", "mkv", "pcm_f32le"), True),
    (("h264", "mkv", "wavpack"), False),  # which does not say how long its packets are
]


def header_of(data: bytes) -> tuple[int, ...]:
    return read_header(od.AudioPreprocessor, len(data), lambda count: data[:count], LIMITS)


def tone(rate: int, seconds: float = 1.0) -> np.ndarray:
    """What clips sound like: encoders make two channels of it, of half its power each."""
    return 0.3 / np.sqrt(2) * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)


def later(data: bytes, by: Fraction) -> bytes:
    """The same, its sound beginning later."""
    out = io.BytesIO()
    with av.open(io.BytesIO(data)) as given, av.open(out, "w", format="matroska") as made:
        targets = {stream.index: made.add_stream_from_template(stream) for stream in given.streams}
        for packet in given.demux():
            if packet.dts is not None:
                if packet.stream.type == "audio":
                    packet.pts += int(by / packet.time_base)
                    packet.dts += int(by / packet.time_base)
                packet.stream = targets[packet.stream.index]
                made.mux(packet)
    return out.getvalue()


@pytest.mark.parametrize(("made", "exact"), CLIPS, ids=["-".join(made) for made, _ in CLIPS])
def test_the_sound_of_a_clip_is_what_was_put_in(made: tuple[str, str, str], exact: bool) -> None:
    codec, container, sound = made
    data = clip(codec, container, audio=sound)
    frames, rate = header_of(data)
    assert rate == (48_000 if sound == "libopus" else 16_000) and abs(frames / rate - 1) < 0.08
    wave, decoded_rate = read_mono(data, LIMITS)
    assert (len(wave), decoded_rate, wave.dtype) == (frames, rate, np.float32)
    expected = tone(rate)
    if exact:
        assert np.abs(wave[: len(expected)] - expected).max() < 1e-4 and not wave[len(expected) :].any()
    assert np.argmax(np.abs(wave) > 0.05) < 0.03 * rate  # it begins with the pictures
    middle = wave[rate // 4 : 3 * rate // 4]
    spectrum = np.abs(np.fft.rfft(middle))
    assert abs(np.argmax(spectrum) * 2 - 440) <= 2 and abs(np.sqrt((middle**2).mean()) - 0.15) < 0.01
    size = SOUND.count_header((frames, rate), LIMITS)
    assert len(decode_wave(data, 16_000, size.extent[0], LIMITS)) == -(-frames * 16_000 // rate)


def test_sound_that_begins_later_stays_in_time() -> None:
    data = later(clip("mpeg4", "mkv", audio="flac"), Fraction(1, 2))
    wave, rate = read_mono(data, LIMITS)
    assert header_of(data) == (24_000, 16_000)
    assert not wave[:7_990].any() and np.abs(wave[8_000:] - tone(rate)[: len(wave) - 8_000]).max() < 1e-4


def test_what_has_no_sound_says_so() -> None:
    assert header_of(clip("h264")) == (0, 0)
    with pytest.raises(DecodeError, match="no track of sound"):
        read_mono(clip("h264"), LIMITS)
    data = clip("h264", audio="aac")
    with pytest.raises(DecodeError, match="the file is cut"):
        header_of(data[: len(data) // 2])
    with pytest.raises(DecodeError, match="above Limits.audio_seconds=0.5"):
        read_header(od.AudioPreprocessor, len(data), lambda count: data[:count], od.Limits(audio_seconds=0.5))
    assert header_of(sound_alone("mp4"))[1] == 16_000


def batch_of(dataset: od.ShardDataset, **options: Any) -> od.Batch:
    options = {"global_batch_size": 6, "shuffle": False, "num_threads": 0} | options
    return next(iter(od.DataLoader(dataset, **options)))


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> str:
    samples = [
        {"__key__": "marks", "mp4": clip("h264", audio="aac"), "txt": b"a <video> that sounds like <audio>"},
        {"__key__": "none", "webm": clip("vp9", "webm", audio="libopus"), "txt": b"no marks"},
        {"__key__": "silent", "mp4": clip("h264"), "txt": b"silent <video>"},
        {
            "__key__": "two",
            "0.mkv": clip("h264", "mkv", audio="flac"),
            "1.mp4": clip("h264"),
            "1.wav": audio(0.5),
            "json": chat("<video><audio> and <video><audio>", "both"),
        },
        {"__key__": "broken", "mp4": clip("h264", audio="aac")[:-9], "txt": b"cut"},
    ]
    return write_shard(tmp_path_factory.mktemp("sound") / "a.tar", samples)


def test_tracks_are_parts_of_their_own(shard: str) -> None:
    dataset = od.ShardDataset(shard, recipe=RECIPE)
    index = dataset.index()
    assert [(error.key, error.field) for error in map(index.failure, index.bad_rows().tolist())] == [
        ("broken", "mp4 (audio)")
    ]
    fields = [[member.field for member in index.members(row) if member.kind == 1] for row in range(4)]
    assert fields == [["mp4 (audio)"], ["webm (audio)"], [], ["0.mkv (audio)", "1.wav"]]
    batch = batch_of(dataset, on_error=od.ErrorPolicy("skip", max_failures=None))
    clips, one = batch.media["audio"], [dataset[number] for number in range(4)]
    assert clips.num_tokens == int(index.part_tokens[index.part_modality == 1].sum()) > 75
    apart = [part for sample in one for part in sample.parts if getattr(part, "modality", "") == "audio"]
    assert len(apart) == 4
    features = np.concatenate([part.arrays["features"] for part in apart])
    assert torch.equal(clips.features, torch.from_numpy(features))
    again = batch_of(dataset, on_error=od.ErrorPolicy("skip", max_failures=None), num_workers=1, num_threads=None)
    assert torch.equal(again.media["audio"].features, clips.features)
    assert torch.equal(again.media["video"].patches, batch.media["video"].patches)
    assert torch.equal(again.llm.input_ids, batch.llm.input_ids)


def test_tracks_of_records_and_columns(tmp_path: Path) -> None:
    data, silent = clip("h264", audio="aac"), clip("h264")
    (tmp_path / "a.mp4").write_bytes(data)
    (tmp_path / "b.mp4").write_bytes(silent)
    records = [
        {"id": "a", "video": "a.mp4", "text": "<video> and <audio>"},
        {"id": "b", "video": "b.mp4", "text": "<video>"},
        {"id": "c", "video": "b.mp4", "text": "<video> and <audio>"},
    ]
    lines = tmp_path / "records.jsonl"
    lines.write_text("\n".join(map(json.dumps, records)))
    columns = tmp_path / "a.parquet"
    cells = pa.array([{"bytes": data, "path": "a.mp4"}, {"bytes": silent, "path": "b.mp4"}])
    pq.write_table(pa.table({"video": cells, "text": ["<video> and <audio>", "<video>"]}), columns)
    expected = dict.fromkeys(("of records", "of columns"))
    for name, path in (("of records", lines), ("of columns", columns)):
        dataset = od.ShardDataset(str(path), recipe=RECIPE, media_root=str(tmp_path) if name == "of records" else None)
        batch = batch_of(dataset, global_batch_size=2, on_error=od.ErrorPolicy("skip", max_failures=None))
        expected[name] = batch.media["audio"].features
        assert len(batch.media["video"].grid_thw) == 2
    assert torch.equal(expected["of records"], expected["of columns"]) and len(expected["of records"]) > 90
    index = od.ShardDataset(str(lines), recipe=RECIPE, media_root=str(tmp_path)).index()
    assert "<audio> placeholder 1 of 1 has no audio" in str(index.failure(int(index.bad_rows()[0])))


# Which pictures of a clip are taken: at a constant rate by their places, at a variable one by their times.


MILLI = Fraction(1, 1000)


def test_a_constant_rate_is_seen_through_rounded_times() -> None:
    rounded = [round(1000 * at / 30) for at in range(100)]
    line = Timeline.of(rounded[::-1], MILLI)
    assert line.is_constant and line.frames == 100
    assert line.seconds == Fraction(100, 30)
    assert line.pictures(10) == list(range(0, 100, 10))  # not 9, 19, ...: 10 / 30 s is written as 333 ms


@pytest.mark.parametrize(
    ("ticks", "tick", "message"),
    [
        ([], MILLI, "without a single frame"),
        ([0, 5, 5], MILLI, "two frames at one time"),
        ([1, 2], Fraction(0), "impossible times"),
    ],
)
def test_what_is_no_timeline(ticks: list[int], tick: Fraction, message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        Timeline.of(ticks, tick)


@given(
    gaps=st.lists(st.integers(1, 10**6), min_size=1, max_size=60),
    tick=st.fractions(Fraction(1, 10**9), 1),
    count=st.integers(1, 80),
)
def test_pictures_are_those_shown_at_equal_distances(gaps: list[int], tick: Fraction, count: int) -> None:
    ticks = np.cumsum([0, *gaps]).tolist()
    line = Timeline.of(ticks, tick)
    pictures = line.pictures(count)
    assert len(pictures) == count and pictures == sorted(pictures) and pictures[0] == 0 and pictures[-1] < line.frames
    assert max(line.seconds.numerator, line.seconds.denominator) < 2**31
    if line.seconds == Fraction(ticks[-1] * line.frames, line.frames - 1) * tick and not line.is_constant:
        for number, at in enumerate(pictures):
            moment = line.seconds * number / count
            assert ticks[at] * tick <= moment
            assert at + 1 == line.frames or moment < ticks[at + 1] * tick
