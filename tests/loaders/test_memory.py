"""Lack of memory and bad data: what fails for want of memory is no verdict, and what is damaged is one all the same."""

from __future__ import annotations

import errno
import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image
from shard_factory import jpeg, write_shard
from video_clips import clip

import orchdata as od
from orchdata.loaders import memory
from orchdata.loaders.errors import DecodeError, StorageError, pass_trouble
from orchdata.loaders.failures import as_field_error
from orchdata.loaders.index.build import build_index
from orchdata.loaders.memory import Room, pass_shortage
from orchdata.loaders.modalities import image_header
from orchdata.loaders.pace import Turns
from orchdata.loaders.recipe import Recipe

JOB = Path(__file__).parents[1] / "support" / "limited_memory_job.py"
LIMITED = Room("RLIMIT_AS (ulimit -v) of 1000 bytes", 10)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "room", lambda: LIMITED)


def webp() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.zeros((40, 30, 3), np.uint8)).save(stream, "WEBP")
    return stream.getvalue()


DAMAGED = {
    "cut.jpg": jpeg(300, 200, 9)[:3000],
    "unknown.png": b"no picture at all",
    "cut.mp4": clip(frames=8)[:-900],
    "flipped.webm": bytes(200),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_media_are_bad_samples(tmp_path: Path, name: str) -> None:
    ending = name.rpartition(".")[2]
    mark = "video" if ending in ("mp4", "webm") else "image"
    samples: list[dict[str, Any]] = [
        {"__key__": "bad", ending: DAMAGED[name], "txt": f"<{mark}>".encode()},
        {"__key__": "good", "jpg": jpeg(50, 50), "txt": b"<image>"},
    ]
    data = od.ShardDataset(write_shard(tmp_path / "a.tar", samples), Recipe(video=od.VideoPreprocessor()))
    loader = od.DataLoader(data, batch_size=1, num_threads=0, on_error=od.ErrorPolicy("skip", max_failures=None))
    assert [key for batch in loader for _, key in batch.sample_ids] == ["good"]
    assert [failure["key"] for failure in loader.stats()["failures"]["samples"]] == ["bad"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EPERM, errno.EIO, errno.ENOSYS, errno.EAGAIN])
def test_numbers_of_libav_are_words_about_the_clip(number: int) -> None:
    with pytest.raises(av.FFmpegError) as raised:
        av.error.err_check(-number)
    assert "cannot be decoded" in as_field_error(raised.value, "decoded").reason
    with pytest.raises(StorageError):
        pass_trouble(OSError(number, "of the system"))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_libav_without_files_is_trouble(number: int) -> None:
    with pytest.raises(av.FFmpegError) as raised:
        av.error.err_check(-number)
    with pytest.raises(StorageError):
        pass_trouble(raised.value)


def test_a_clip_that_asks_for_too_much_memory_is_damaged_unless_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(av.FFmpegError) as raised:
        av.error.err_check(-errno.ENOMEM)
    assert "Cannot allocate memory" in as_field_error(raised.value, "decoded").reason
    monkeypatch.setattr(memory, "room", lambda: LIMITED)
    with pytest.raises(MemoryError, match="10 bytes of memory left under RLIMIT_AS"):
        as_field_error(raised.value, "decoded")


@pytest.mark.parametrize(
    "said", ["Out of memory", "could not allocate buffer", "std::bad_alloc", "Allocation error : not enough memory"]
)
def test_words_of_libraries_for_lack_of_memory_are_known(short: None, said: str) -> None:
    with pytest.raises(MemoryError, match="whether it is damaged is not known"):
        as_field_error(RuntimeError(said), "measured")
    assert "KeyError" in as_field_error(KeyError("memory"), "measured").reason


def test_no_thread_is_trouble() -> None:
    with pytest.raises(StorageError, match="a thread: cannot be started"):
        pass_trouble(RuntimeError("can't start new thread"))


def test_what_no_decoder_said_counts_under_a_limit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pass_shortage(DecodeError("could not create decoder object"))
    for left, raises in ((1 << 29, True), (1 << 31, False)):
        monkeypatch.setattr(memory, "room", lambda left=left: Room("a limit", left))
        with pytest.raises(MemoryError) if raises else none():
            pass_shortage(DecodeError("could not create decoder object"))


@contextmanager
def none() -> Iterator[None]:
    yield


class Shaky:
    """A probe that fails for lack of memory some times, and what is left then."""

    def __init__(self, times: int) -> None:
        self.left, self.probe = times, image_header.probe_image

    def __call__(self, data: bytes, limits: Any) -> Any:
        if self.left > 0:
            self.left -= 1
            raise DecodeError("damaged image: could not create decoder object")
        return self.probe(data, limits)


@pytest.mark.parametrize("times", [1, 9])
def test_a_sample_that_failed_under_a_limit_is_measured_again_alone(
    tmp_path: Path, short: None, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    samples = [{"__key__": f"s{number}", "bmp": bmp(number), "txt": b"<image>"} for number in range(3)]
    url = write_shard(tmp_path / "a.tar", samples)
    with monkeypatch.context() as patch:
        patch.setattr(image_header, "probe_image", Shaky(times))
        if times == 1:
            assert not len(build_index([url], Recipe()).bad_rows())
            return
        with pytest.raises(MemoryError, match=r"a\.tar: sample 's0', field 'bmp': not enough memory .*raise RLIMIT_AS"):
            build_index([url], Recipe())
    assert not len(build_index([url], Recipe()).bad_rows())


def bmp(number: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((40, 30), number, np.uint8)).save(stream, "BMP")
    return stream.getvalue()


def test_alone_means_that_no_other_thread_is_at_work() -> None:
    turns, inside, begun, events = Turns(2), threading.Event(), threading.Event(), []

    def other() -> None:
        with turns.turn():
            begun.set()
            inside.wait(60)
            events.append("other ends")

    def alone() -> None:
        with turns.alone():
            events.append("alone")

    threads = [threading.Thread(target=other), threading.Thread(target=alone)]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    inside.set()
    for thread in threads:
        thread.join(60)
    assert events == ["other ends", "alone"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["webp", "gif", "mp4", "records", "parquet"])
def test_under_a_real_limit_a_good_sample_is_never_kept_as_damaged(tmp_path: Path, kind: str) -> None:
    ran = subprocess.run(
        [sys.executable, JOB, kind, str(tmp_path)], capture_output=True, text=True, timeout=600, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    outcomes = json.loads(ran.stdout.splitlines()[-1])
    # "" is of a process that LLVM ended: it knows no other way.
    assert set(outcomes) <= {"whole", "doubt", "MemoryError", "StorageError", "PackageError", ""}, outcomes
    assert set(outcomes) & {"MemoryError", "doubt"} and "whole" in outcomes, outcomes
