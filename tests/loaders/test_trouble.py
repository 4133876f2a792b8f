"""Builds in trouble: what cannot be read now is tried again, ends the build if it lasts, and is never recorded."""

from __future__ import annotations

import errno
import gzip
import io
import os
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image
from shard_factory import SKIP_ANY, omni_shards, write_shard

import orchdata as od
from orchdata.loaders import memory
from orchdata.loaders.errors import DecodeError, StorageError, TooManyFailures, as_field_error, pass_trouble
from orchdata.loaders.index import build as builder
from orchdata.loaders.index import costs as chunk
from orchdata.loaders.index.build import build_index
from orchdata.loaders.index.index import open_index
from orchdata.loaders.memory import Room
from orchdata.loaders.modalities import image_decode
from orchdata.loaders.recipe import Recipe, TextPreprocessor
from orchdata.loaders.storage.local import LocalFile

Call = Callable[..., Any]


class Trouble:
    """Refuses calls that concern one file, until it is stopped."""

    def __init__(self, name: str, number: int, times: float = float("inf")) -> None:
        self.name = name
        self.number = number
        self.left = times

    def __call__(self, call: Call) -> Call:
        def refuse(file: LocalFile, *args: Any) -> Any:
            if self.left > 0 and file.url.endswith(self.name):
                self.left -= 1
                raise OSError(self.number, os.strerror(self.number))
            return call(file, *args)

        return refuse


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    paths = omni_shards(tmp_path, shards=2, samples=10)
    packed = tmp_path / "packed.tar.gz"
    (tmp_path / "plain").mkdir()
    packed.write_bytes(gzip.compress(Path(omni_shards(tmp_path / "plain", shards=1, samples=5)[0]).read_bytes()))
    return [*paths, str(packed)]


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    return [text_shard(tmp_path / f"t{number}.tar", f"t{number}-") for number in range(2)]


def text_shard(path: Path, prefix: str, count: int = 100) -> str:
    return write_shard(path, [{"__key__": f"{prefix}{i:03d}", "txt": b"some text"} for i in range(count)])


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES])
@pytest.mark.parametrize("shard", ["omni-000001.tar", "packed.tar.gz"])
def test_a_moment_of_trouble_costs_a_build_nothing(
    shards: list[str], no_pauses: None, monkeypatch: pytest.MonkeyPatch, shard: str, number: int
) -> None:
    whole = build_index(shards, Recipe(), num_threads=1)
    trouble = Trouble(shard, number, times=9)  # more than one call is tried
    monkeypatch.setattr(LocalFile, "_open", trouble(LocalFile._open))
    with pytest.warns(UserWarning, match=rf"{shard}: cannot be opened: .*; trying again"):
        healed = build_index(shards, Recipe(), num_threads=2, force=True)
    assert trouble.left == 0
    assert [healed.key(row) for row in range(len(healed))] == [whole.key(row) for row in range(len(whole))]
    assert not len(healed.bad_rows())


@pytest.mark.parametrize("shard", ["omni-000001.tar", "packed.tar.gz"])
def test_trouble_that_lasts_ends_the_build_and_is_not_recorded(
    shards: list[str], no_pauses: None, monkeypatch: pytest.MonkeyPatch, shard: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(LocalFile, "_open", Trouble(shard, errno.EACCES)(LocalFile._open))
        with pytest.raises(StorageError, match=rf"{shard}: cannot be opened: Permission denied"):
            build_index(shards, Recipe(), retry_seconds=0)
    assert open_index(shards, Recipe()) is None
    index = build_index(shards, Recipe())
    assert len(index) == 25  # 10 + 10 + 5
    assert not len(index.bad_rows())


def test_under_skip_too_trouble_in_training_ends_the_run(
    texts: list[str], no_pauses: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = od.DataLoader(od.ShardDataset(texts), batch_size=10, on_error=SKIP_ANY)
    monkeypatch.setattr(LocalFile, "_open", Trouble("t1.tar", errno.EACCES)(LocalFile._open))
    with pytest.raises(StorageError, match=r"t1\.tar"):
        list(loader)
    assert loader.stats()["failures"]["count"] == 0


@pytest.mark.parametrize("error", [TypeError("odd"), ValueError("int of 5000 digits"), RecursionError(), KeyError("x")])
def test_an_exception_while_measuring_a_sample_fails_the_sample(
    texts: list[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    prepare, seen = chunk.prepare, [0]

    def odd(*args: Any) -> Any:
        seen[0] += 1
        if seen[0] == 7:
            raise error
        return prepare(*args)

    monkeypatch.setattr(chunk, "prepare", odd)
    index = build_index(texts, Recipe(), num_threads=1)
    assert index.bad_rows().tolist() == [6]
    assert f"cannot be measured: {type(error).__name__}" in str(index.failure(6))


@pytest.mark.parametrize("error", [MemoryError(), StorageError("x", "gone")])
def test_what_says_nothing_about_the_data_ends_the_build(
    texts: list[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(chunk, "prepare", fail)
    with pytest.raises(type(error)):
        build_index(texts, Recipe(), retry_seconds=0)
    assert open_index(texts, Recipe()) is None


def test_an_exception_while_scanning_a_shard_fails_the_shard(texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from orchdata.loaders.shards.tar import TarShard

    facts = TarShard.facts

    def odd(shard: TarShard) -> Any:
        if shard.url.endswith("t0.tar"):
            raise TypeError("odd")
        return facts(shard)

    with monkeypatch.context() as patch:
        patch.setattr(TarShard, "facts", odd)
        index = build_index(texts, Recipe())
    assert index.bad_rows().tolist() == [0]
    assert str(index.failure(0)) == f"{texts[0]}: cannot be scanned: TypeError: odd"
    assert len(index) == 101
    again = build_index(texts, Recipe())  # the reason may pass, so a later build reads it again
    assert (len(again), again.bad_rows().size) == (200, 0)


def zero(path: str, start: int = 0) -> None:
    size = os.path.getsize(path)
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(b"\xee" * (size - start))


def test_a_damaged_shard_counts_by_its_samples(texts: list[str]) -> None:
    zero(texts[0])
    policy = od.ErrorPolicy("skip", max_failures=Fraction(1, 50))
    with (
        pytest.raises(TooManyFailures, match=r"100 of 200 samples cannot be used, the policy allows 4"),  # 2 % of 200
        pytest.warns(UserWarning, match=r"1 of 2 shards are damaged, and about 99 of their samples lost.*t0\.tar"),
    ):
        od.DataLoader(od.ShardDataset(texts), batch_size=10, on_error=policy)


def test_a_shard_rewritten_after_its_facts_were_stored_is_scanned_again(
    texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build_index(texts, Recipe(), num_threads=1)
    cost_shard, rewritten = builder.cost_shard, []

    def rewrite_first(facts: Any, open_shard: Any, *given: Any) -> Any:
        if not rewritten:
            size = Path(texts[0]).stat().st_size
            rewritten.append(text_shard(Path(texts[0]), "x0-"))
            assert Path(texts[0]).stat().st_size == size
        return cost_shard(facts, open_shard, *given)

    monkeypatch.setattr(builder, "cost_shard", rewrite_first)
    other = Recipe(text=TextPreprocessor(lambda text: [1] * len(text), id="characters"))
    with pytest.warns(UserWarning, match=r"t0\.tar: was changed while it was indexed.*trying again"):
        index = build_index(texts, other, num_threads=1)
    assert [index.key(row) for row in range(100)] == [f"x0-{number:03d}" for number in range(100)]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.EACCES])
def test_what_a_decoder_is_refused_is_no_damage(
    tmp_path: Path, no_pauses: None, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As a module that cannot be loaded at its first use, for want of file descriptors."""
    shard = omni_shards(tmp_path, shards=1, samples=5)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "/lib/some_decoder.so")

    with monkeypatch.context() as patch:
        patch.setattr("orchdata.loaders.shards.tar.read_header", refuse)
        patch.setattr("orchdata.loaders.shards.tar.scan_heads", refuse)
        with pytest.raises(StorageError, match=rf"some_decoder.so: cannot be used: {os.strerror(number)}"):
            build_index(shard, Recipe(), retry_seconds=0)
    assert not len(build_index(shard, Recipe()).bad_rows())


def test_a_shard_cut_in_half_counts_what_others_have_and_it_lacks(texts: list[str]) -> None:
    os.truncate(texts[0], os.path.getsize(texts[0]) // 2)
    with pytest.warns(UserWarning, match="1 of 2 shards are damaged"):
        loader = od.DataLoader(od.ShardDataset(texts), batch_size=10, on_error=SKIP_ANY)
    delivered = sum(len(batch.sample_ids) for batch in loader)
    assert delivered + loader.stats()["failures"]["count"] == 200


# Lack of memory and bad data: what fails for want of memory is no verdict, and what is damaged is one all the same.


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
