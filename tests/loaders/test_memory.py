"""Lack of memory and bad data: what fails for want of memory is no verdict, and what is damaged is one all the same."""

from __future__ import annotations

import errno
import io
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image
from shard_factory import write_shard

from orchdata.loaders import memory
from orchdata.loaders.errors import DecodeError, StorageError, as_field_error, pass_trouble
from orchdata.loaders.index.build import build_index
from orchdata.loaders.memory import Room
from orchdata.loaders.modalities import image_decode
from orchdata.loaders.recipe import Recipe

LIMITED = Room("RLIMIT_AS (ulimit -v) of 1000 bytes", 10)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "room", lambda: LIMITED)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EPERM, errno.EIO, errno.ENOSYS, errno.EAGAIN])
def test_numbers_of_libav_are_words_about_the_clip(number: int) -> None:
    with pytest.raises(av.FFmpegError) as raised:
        av.error.err_check(-number)
    assert "cannot be decoded" in as_field_error(raised.value, "decoded").reason
    with pytest.raises(StorageError):
        pass_trouble(OSError(number, "of the system"))


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


class Shaky:
    """A probe that fails for lack of memory some times, and what is left then."""

    def __init__(self, times: int) -> None:
        self.left, self.probe = times, image_decode.probe_image

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
        patch.setattr(image_decode, "probe_image", Shaky(times))
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
