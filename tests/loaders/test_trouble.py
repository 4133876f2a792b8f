"""Builds in trouble: what cannot be read now is tried again, ends the build if it lasts, and is never recorded."""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from shard_factory import omni_shards, write_shard

import orchdata as od
from orchdata.loaders.errors import StorageError, TooManyFailures
from orchdata.loaders.index.build import build_index
from orchdata.loaders.index.building import builder
from orchdata.loaders.index.locations import open_index
from orchdata.loaders.index.measuring import chunk
from orchdata.loaders.recipe import Recipe, TextPreprocessor
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.local import LocalFile
from orchdata.loaders.storage.retries import Patience

Call = Callable[..., Any]


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


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
    loader = od.DataLoader(od.ShardDataset(texts), batch_size=10, on_error=od.ErrorPolicy("skip", max_failures=None))
    monkeypatch.setattr(LocalFile, "_open", Trouble("t1.tar", errno.EACCES)(LocalFile._open))
    with pytest.raises(StorageError, match=r"t1\.tar"):
        list(loader)
    assert loader.stats()["failures"]["count"] == 0


@pytest.mark.parametrize("name", ["orchdata.loaders.storage.node.entries.create_temporary", "os.fsync"])
def test_a_full_cache_ends_a_build_and_records_nothing(
    shards: list[str], no_pauses: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(name, no_space)
        with pytest.raises(StorageError, match="No space left on device"):
            build_index(shards, Recipe(), retry_seconds=0)
    assert not len(build_index(shards, Recipe()).bad_rows())


@pytest.mark.parametrize("removed", [False, True])
def test_a_moment_of_trouble_while_merging_costs_nothing(
    texts: list[str], monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    sync, refused = os.fsync, []

    def refuse_once(fd: int) -> None:
        if not refused:
            refused.append(fd)
            if removed:
                shutil.rmtree(CacheFolder().root / "index")
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(fd)

    monkeypatch.setattr(os, "fsync", refuse_once)
    with pytest.warns(UserWarning, match=r"\.index: cannot be written: Input/output error; trying again"):
        index = build_index(texts, Recipe())
    assert refused and not len(index.bad_rows())


def test_an_index_that_is_not_there_is_none_after_a_moment_of_trouble_too(
    shards: list[str], no_pauses: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, refused = os.open, []

    def refuse_once(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).endswith(".index") and not refused:
            refused.append(path)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opening(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse_once)
    assert open_index(shards, Recipe()) is None and refused
    refused.clear()
    assert not len(build_index(shards, Recipe()).bad_rows()) and refused


def test_patience_is_for_the_whole_build_and_not_for_each_shard() -> None:
    warnings: list[Exception] = []
    patience = Patience(0.2, warnings.append)

    def fail() -> None:
        raise StorageError("x", "no", errno.EIO)

    def keep_trying() -> None:
        with pytest.raises(StorageError):
            patience.keep_trying(fail, StorageError)

    threads = [threading.Thread(target=keep_trying) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    calls: list[int] = []

    def count() -> None:
        calls.append(1)
        fail()

    with pytest.raises(StorageError):
        patience.keep_trying(count, StorageError)
    assert len(warnings) == 1
    assert len(calls) == 1  # what the others waited is spent


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_what_may_not_be_read_is_tried_again_for_seconds_and_not_for_a_minute(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    pauses: list[float] = []
    calls: list[int] = []

    def fail(number: int) -> None:
        calls.append(number)
        if len(calls) == 20:
            raise KeyboardInterrupt
        raise StorageError("/data/a.jpg", "cannot be opened", number)

    monkeypatch.setattr(threading.Event, "wait", lambda self, timeout: pauses.append(timeout))
    with pytest.raises(StorageError):
        Patience(60, lambda error: None).keep_trying(lambda: fail(number), StorageError)
    assert len(calls) >= 3
    assert 1 < sum(pauses) < 5
    with pytest.raises(KeyboardInterrupt):  # another error may pass within the minute
        Patience(60, lambda error: None).keep_trying(lambda: fail(errno.EIO), StorageError)


def test_a_shard_that_does_not_exist_is_not_waited_for() -> None:
    warnings: list[Exception] = []
    with pytest.raises(StorageError):
        Patience(60, warnings.append).keep_trying(lambda: LocalFile("/nowhere/a.tar"), StorageError)
    assert not warnings


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


def test_what_comes_after_damage_counts_too(texts: list[str]) -> None:
    member = os.path.getsize(texts[0]) // 100 // 512 * 512
    zero(texts[0], start=40 * member)
    with pytest.warns(UserWarning, match="damaged"):
        loader = od.DataLoader(
            od.ShardDataset(texts), batch_size=10, on_error=od.ErrorPolicy("skip", max_failures=None)
        )
    failures = loader.stats()["failures"]
    assert failures["count"] == pytest.approx(60, rel=0.1)  # padding at the end counts as data
    assert failures["count"] == failures["lost"] + 1  # the sample before the damage is not known to be whole


def test_a_sample_that_fails_in_a_sound_shard_counts_once(tmp_path: Path) -> None:
    shard = write_shard(
        tmp_path / "a.tar", [{"__key__": f"k{i}", "txt": b"\xff" if i == 3 else b"x"} for i in range(9)]
    )
    failures = od.DataLoader(
        od.ShardDataset(shard), batch_size=2, on_error=od.ErrorPolicy("skip", max_failures=None)
    ).stats()["failures"]
    assert (failures["count"], failures["lost"]) == (1, 0)


def test_a_shard_rewritten_between_scan_and_measuring_is_scanned_again(
    texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cost_shard, rewritten = builder.cost_shard, []

    def rewrite_first(facts: Any, open_shard: Any, *given: Any) -> Any:
        if not rewritten:
            rewritten.append(text_shard(Path(texts[0]), "new-", count=50))
        return cost_shard(facts, open_shard, *given)

    monkeypatch.setattr(builder, "cost_shard", rewrite_first)
    with pytest.warns(UserWarning, match=r"t0\.tar: was changed while it was open.*trying again"):
        index = build_index(texts, Recipe(), num_threads=1)
    assert [index.key(row) for row in range(50)] == [f"new-{number:03d}" for number in range(50)]
    assert len(index) == 150


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


def test_a_moment_of_trouble_hides_no_link(texts: list[str], no_pauses: None, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Path(texts[0]).with_name("link.tar")
    link.symlink_to(texts[0])
    stat, left = os.stat, [1]

    def refuse_once(path: Any, **options: Any) -> os.stat_result:
        if str(path) == str(link) and left:
            left.pop()
            raise OSError(errno.EIO, "Input/output error")
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse_once)
    with pytest.raises(ValueError, match="are the same file"):
        build_index([*texts, str(link)], Recipe())
    assert not left


def test_a_damaged_shard_of_another_format_counts_as_much_as_the_others_have(tmp_path: Path, texts: list[str]) -> None:
    packed = tmp_path / "packed.tar.gz"
    packed.write_bytes(gzip.compress(Path(text_shard(tmp_path / "plain.tar", "p-")).read_bytes()))
    packed.write_bytes(packed.read_bytes()[:-100])
    (tmp_path / "plain.tar").unlink()
    with pytest.warns(UserWarning, match="1 of 3 shards are damaged, and about 99 of their samples lost"):
        loader = od.DataLoader(
            od.ShardDataset([*texts, packed]), batch_size=10, on_error=od.ErrorPolicy("skip", max_failures=None)
        )
    assert loader.stats()["failures"]["count"] == 100


def test_a_shard_cut_in_half_counts_what_others_have_and_it_lacks(texts: list[str]) -> None:
    os.truncate(texts[0], os.path.getsize(texts[0]) // 2)
    with pytest.warns(UserWarning, match="1 of 2 shards are damaged"):
        loader = od.DataLoader(
            od.ShardDataset(texts), batch_size=10, on_error=od.ErrorPolicy("skip", max_failures=None)
        )
    delivered = sum(len(batch.sample_ids) for batch in loader)
    assert delivered + loader.stats()["failures"]["count"] == 200


def test_an_archive_without_files_has_lost_nothing(tmp_path: Path, texts: list[str]) -> None:
    empty = tmp_path / "empty.tar"
    empty.write_bytes(bytes(10240))
    failures = od.DataLoader(
        od.ShardDataset([*texts, empty]), batch_size=10, on_error=od.ErrorPolicy("skip", max_failures=None)
    ).stats()["failures"]
    assert (failures["count"], failures["lost"]) == (1, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's place, which only root can")
def test_what_another_user_left_ends_no_build(tmp_path_factory: pytest.TempPathFactory) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        shard = text_shard(Path(folder) / "a.tar", "a-", count=3)
        (Path(folder) / "cache").mkdir()  # one that exists keeps its mode
        cache = CacheFolder(Path(folder) / "cache")
        build_index([shard], Recipe(), cache=cache)
        for kind in ("facts", "costs", "index"):
            left = cache.file(kind, ".x.tmp")
            left.write_bytes(b"")
            os.utime(left, (1, 1))
            left.parent.chmod(0o1777)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.setuid(65534)
                build_index([shard], Recipe(), cache=CacheFolder(Path(folder) / "cache"))
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
