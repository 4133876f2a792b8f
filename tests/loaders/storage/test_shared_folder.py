"""A cache folder that others may write to: nothing in it hangs, leads elsewhere, or opens private data to others."""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from children import as_user, only_root
from shard_factory import omni_samples, write_shard

import orchdata as od
from orchdata.loaders.claims import Claims
from orchdata.loaders.errors import StorageError
from orchdata.loaders.index.build import build_index
from orchdata.loaders.index.index import Index
from orchdata.loaders.kept import remove_leftovers
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.retries import tried
from orchdata.loaders.storage.shared.access import Access, access_of, restrict
from orchdata.loaders.storage.shared.files import make_folder, open_lock, opened, read_small

pytestmark = pytest.mark.usefixtures("no_hang")
ALICE, BOB, TEAM = 61_001, 61_002, 61_010


def a_link(path: Path, other: Path) -> None:
    path.symlink_to(other)


def a_dangling_link(path: Path, other: Path) -> None:
    path.symlink_to(other.with_name("not there"))


def a_pipe(path: Path, other: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path, other: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


def a_folder(path: Path, other: Path) -> None:
    path.mkdir()


def another_name(path: Path, other: Path) -> None:
    os.link(other, path)


THINGS = [a_link, a_dangling_link, a_pipe, a_socket, a_folder, another_name]


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Path]:
    """A file of the victim in another folder, which must not change."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    path = folder / "file"
    path.write_bytes(b"precious")
    os.utime(path, (1, 1))
    yield path
    assert path.read_bytes() == b"precious" and path.stat().st_mtime == 1
    assert os.listdir(folder) == ["file"]


def write_compressed(path: Path, prefix: str) -> Path:
    plain = Path(write_shard(path.with_name("plain"), omni_samples(9, prefix=prefix)))
    path.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    return path


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    plain = write_shard(tmp_path / "a.tar", omni_samples(9, prefix="a"))
    return [plain, str(write_compressed(tmp_path / "b.tar.gz", "b"))]


def samples_of(shards: list[str]) -> list[Any]:
    loader = od.DataLoader(od.ShardDataset(shards), batch_size=3)
    return [key for batch in loader for key in batch.sample_ids]


# --- other things with the name of a file


@pytest.mark.parametrize("thing", THINGS)
def test_what_is_no_file_is_read_as_not_there(tmp_path: Path, other: Path, thing: Callable[[Path, Path], None]) -> None:
    path = tmp_path / "x"
    thing(path, other)
    if thing is another_name:  # an ordinary file, of which a copy of a folder by links consists
        assert read_small(path, 100) == b"precious"
        return
    for read in (lambda: read_small(path, 100), lambda: opened(path).__enter__(), lambda: Index(path)):
        with pytest.raises(FileNotFoundError):
            read()


@pytest.mark.parametrize("number", [errno.ENODEV, errno.ENXIO])
def test_storage_in_trouble_is_not_taken_for_a_missing_file(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both also mean that no regular file has the name."""
    path = tmp_path / "x"
    path.write_bytes(b"content")

    def refuse(*_: Any, **__: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match="device") as raised:
        read_small(path, 100)
    assert not isinstance(raised.value, FileNotFoundError)


@pytest.mark.parametrize("number", [errno.ENODEV, errno.ENXIO])
def test_a_lock_that_cannot_be_created_once_is_created_later(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is missing because it could not be created, and not because something else has its name."""
    path, opens = tmp_path / "x", os.open
    errors = [OSError(number, os.strerror(number))]

    def refuse_once(*args: Any, **options: Any) -> int:
        if errors:
            raise errors.pop()
        return opens(*args, **options)

    monkeypatch.setattr(os, "open", refuse_once)
    os.close(tried(str(path), "cannot be locked", lambda: open_lock(path)))
    assert path.is_file()


def test_a_folder_that_exists_and_is_gone_again_is_created_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when another process makes and removes it meanwhile."""
    folder, errors = tmp_path / "x", [FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))]
    real = Path.mkdir

    def exists_once(path: Path, *args: Any, **options: Any) -> None:
        if errors:
            raise errors.pop()
        real(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", exists_once)
    tried(str(folder), "cannot be created", lambda: make_folder(folder))
    assert folder.is_dir() and not errors


@pytest.mark.parametrize("thing", THINGS)
def test_a_lock_is_taken_on_a_file_alone(tmp_path: Path, other: Path, thing: Callable[[Path, Path], None]) -> None:
    path = tmp_path / "x"
    thing(path, other)
    for lock in (open_lock, Claims):
        with pytest.raises(StorageError, match=r"x: .* a lock.*: remove it, or set ORCHDATA_CACHE") as raised:
            lock(path)
        assert raised.value.errno is not None  # a permanent error: no retries


def test_a_longer_file_than_any_of_its_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(11))
    with pytest.raises(ValueError, match="more than 10 bytes"):
        read_small(tmp_path / "x", 10)


@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize("suffix", [".used", ".sum", ".tar", ".tar note"])
def test_an_entry_is_found_or_made_again(
    tmp_path: Path, other: Path, suffix: str, thing: Callable[[Path, Path], None], no_pauses: None
) -> None:
    cache = CacheFolder(tmp_path / "cache")
    path = cache.entry("x", lambda file, limit: file.write(b"content") and None)
    replaced = path.with_suffix(suffix) if " " not in suffix else next(path.parent.glob(".x.tar.*.verified"))
    replaced.unlink()
    thing(replaced, other)
    try:
        again = cache.entry("x", lambda file, limit: file.write(b"content") and None)
    except StorageError as error:
        assert thing is a_folder and f"a folder has the name {replaced}: remove it" in str(error)
        return
    with opened(again) as fd:
        assert os.read(fd, 100) == b"content"


def test_a_killed_makers_link_is_no_file_to_remove(tmp_path: Path, other: Path) -> None:
    cache = CacheFolder(tmp_path / "cache")
    cache.make("shards")
    for name in ("a.part", "b.part"):
        (a_link if name == "a.part" else a_pipe)(cache.root / "shards" / name, other)
    assert cache.entry("x", lambda file, limit: None).exists()


@pytest.mark.parametrize("thing", [a_link, a_dangling_link, a_pipe, another_name])
@pytest.mark.parametrize("kind", ["facts", "costs", "index"])
def test_kept_files_are_made_again(
    shards: list[str], other: Path, kind: str, thing: Callable[[Path, Path], None]
) -> None:
    build_index(shards, od.Recipe())
    expected = samples_of(shards)
    root = CacheFolder().root
    for path in [*root.glob(f"{kind}/*"), *root.glob(f"{kind}/.*")]:
        path.unlink()
        thing(path, other)
    if kind == "facts":
        shutil.rmtree(root / "costs")
    if kind != "index":
        shutil.rmtree(root / "index")
    if thing is another_name and kind == "index":
        with pytest.warns(RuntimeWarning, match="damaged"):
            assert samples_of(shards) == expected
    else:
        assert samples_of(shards) == expected


@pytest.mark.parametrize("kind", ["facts", "costs", "index", "shards", "locks"])
@pytest.mark.parametrize("thing", [a_link, a_dangling_link, a_pipe])
def test_a_folder_is_a_folder(
    shards: list[str], other: Path, kind: str, thing: Callable[[Path, Path], None], no_pauses: None
) -> None:
    thing(CacheFolder().root / kind, other.parent)
    with pytest.raises(StorageError, match=rf"/{kind}: is a link or a file, not a folder: remove it, or set"):
        build_index(shards, od.Recipe(), retry_seconds=0)


def test_old_files_are_removed_through_no_link(shards: list[str], other: Path) -> None:
    """Files of a killed build are removed a day later, but not in another folder."""
    old = other.with_name(".x.tmp")
    other.rename(old)
    (CacheFolder().root / "facts").symlink_to(other.parent)
    remove_leftovers(CacheFolder())
    old.rename(other)


# --- who may read it


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def reached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that every user can read, unlike that of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        before = os.umask(0o002)
        yield Path(folder)
        os.umask(before)


@pytest.mark.parametrize(("mode", "allowed"), [(0o600, 0o600), (0o400, 0o400), (0o640, 0o640), (0o666, 0o644)])
def test_copies_are_as_private_as_their_shard(
    reached: Path, monkeypatch: pytest.MonkeyPatch, mode: int, allowed: int
) -> None:
    monkeypatch.setenv("ORCHDATA_CACHE", str(reached / "cache"))
    private, public = write_compressed(reached / "private.tar.gz", "hidden"), reached / "public.tar"
    write_shard(public, omni_samples(9, prefix="public"))
    private.chmod(mode)
    build_index([str(private)], od.Recipe())
    kept = [path for kind in ("shards", "facts", "costs", "index") for path in (reached / "cache" / kind).iterdir()]
    holding = [path for path in kept if path.suffix in (".tar", ".facts", ".costs", ".index")]
    assert len(holding) == 4
    assert {path.name: mode_of(path) for path in holding} == {path.name: allowed for path in holding}
    both = build_index([str(private), str(public)], od.Recipe())
    assert mode_of(both.path) == allowed  # it contains the keys of both
    alone = build_index([str(public)], od.Recipe())
    assert mode_of(alone.path) == 0o644


def test_a_private_folder_makes_what_is_in_it_private(reached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHDATA_CACHE", str(reached / "cache"))
    home = reached / "home"
    (home / "data").mkdir(parents=True)
    home.chmod(0o700)
    shard = write_shard(home / "data" / "a.tar", omni_samples(3))
    Path(shard).chmod(0o644)
    (reached / "link.tar").symlink_to(shard)
    assert access_of(shard) == access_of(str(reached / "link.tar")) == Access(0o600, os.stat(shard).st_gid)
    assert mode_of(build_index([str(reached / "link.tar")], od.Recipe()).path) == 0o600


def test_what_was_kept_before_follows_a_shard_that_is_made_private(
    reached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHDATA_CACHE", str(reached / "cache"))
    shard = write_compressed(reached / "a.tar.gz", "a")
    build_index([str(shard)], od.Recipe())
    shard.chmod(0o600)
    build_index([str(shard)], od.Recipe())
    samples_of([str(shard)])
    for suffix in (".tar", ".costs", ".index"):
        (path,) = (reached / "cache").rglob(f"*{suffix}")
        assert mode_of(path) == 0o600, path


@pytest.mark.parametrize(
    ("accesses", "expected"),
    [
        ([Access(0o644, 1), Access(0o644, 2)], 0o644),
        ([Access(0o644, 1), Access(0o640, 2)], 0o640),
        ([Access(0o640, 1), Access(0o640, 2)], 0o600),
        ([Access(0o640, 1), Access(0o600, 2)], 0o600),
    ],
)
def test_several_sources_are_read_by_who_reads_all(accesses: list[Access], expected: int) -> None:
    assert Access.joined(accesses).mode & 0o644 == expected
    assert Access.joined(accesses[::-1]).mode & 0o644 == expected


def test_another_file_under_the_name_keeps_its_mode(reached: Path) -> None:
    """A hard link to a file of the victim: changing the permissions of the link changes that file."""
    path = reached / "mine"
    path.write_bytes(b"")
    path.chmod(0o644)
    os.link(path, reached / "kept")
    restrict(reached / "kept", Access(0o600, 0))
    assert mode_of(path) == 0o644


def test_the_default_folder_is_for_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0o002)
    try:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("ORCHDATA_CACHE", str(tmp_path / "named"))
        assert mode_of(CacheFolder().file("index", "x").parent.parent) == 0o700
        (tmp_path / "named").chmod(0o775)  # so that a team can share it
        assert mode_of(CacheFolder().file("index", "y").parent.parent) == 0o775
        monkeypatch.delenv("ORCHDATA_CACHE")
        CacheFolder().make("index")
        assert mode_of(tmp_path / ".cache" / "orchdata") == 0o700
        assert mode_of(tmp_path / ".cache") == 0o775
    finally:
        os.umask(before)


# --- other users


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> None:
    """What other users import late: files of the interpreter may be for root alone."""
    samples_of([str(write_compressed(tmp_path_factory.mktemp("imported") / "a.tar.gz", "a"))])


def as_one_of_the_team(user: int, work: Callable[[], None]) -> None:
    """Run in a child process of that user, who is in the team."""

    def share() -> None:
        os.umask(0o002)
        work()

    as_user(user, share, groups=[TEAM])


@only_root
@pytest.mark.usefixtures("imported")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("folder_mode", [0o2770, 0o770, 0o777])
@pytest.mark.parametrize("shard_mode", [0o644, 0o640])
def test_two_users_of_a_team_share_a_folder(
    reached: Path, monkeypatch: pytest.MonkeyPatch, folder_mode: int, shard_mode: int
) -> None:
    cache = reached / "cache"
    cache.mkdir()
    os.chown(cache, 0, TEAM)
    cache.chmod(folder_mode)
    monkeypatch.setenv("ORCHDATA_CACHE", str(cache))
    plain = write_shard(reached / "a.tar", omni_samples(9, prefix="a"))
    shard = write_compressed(reached / "b.tar.gz", "b")
    for path in (plain, shard):
        os.chown(path, 0, TEAM)
        os.chmod(path, shard_mode)
    urls = [str(shard)]

    def use() -> None:
        assert build_index(urls, od.Recipe(), retry_seconds=0).num_samples == 9
        assert len(samples_of(urls)) == 9

    def more() -> None:
        urls.append(str(plain))
        if folder_mode & stat.S_ISGID:  # else what Alice made belongs to her own group, which Bob is not in
            assert build_index(urls, od.Recipe(), retry_seconds=0).num_samples == 18

    as_one_of_the_team(ALICE, use)
    made = {path: path.stat() for path in cache.rglob("*") if path.is_file() and path.suffix != ".used"}
    assert {status.st_uid for status in made.values()} == {ALICE}
    as_one_of_the_team(BOB, use)
    as_one_of_the_team(BOB, more)
    assert {path: path.stat().st_mtime_ns for path in made} == {path: was.st_mtime_ns for path, was in made.items()}


@only_root
@pytest.mark.usefixtures("imported")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_files_of_another_user_are_never_touched(reached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alice, in a folder that Bob prepared: he may read nothing of hers through it, and none of her files changes."""
    cache, home = reached / "cache", reached / "home"
    for folder in (cache, home):
        folder.mkdir()
    cache.chmod(0o777)
    os.chown(home, ALICE, ALICE)
    monkeypatch.setenv("ORCHDATA_CACHE", str(cache))
    shard = write_compressed(home / "a.tar.gz", "a")
    os.chown(shard, ALICE, ALICE)
    shard.chmod(0o600)

    def use() -> None:
        assert len(samples_of([str(shard)])) == 9

    as_one_of_the_team(ALICE, use)
    entries = [path.relative_to(cache) for path in cache.rglob("*.used")]
    shutil.rmtree(cache / "shards")

    def prepare() -> None:
        (cache / "shards").mkdir(mode=0o777)
        (cache / "shards").chmod(0o777)
        for entry in entries:
            (cache / entry).symlink_to(home / "planted")
            (cache / entry.with_suffix(".sum")).symlink_to(home / "planted too")
            os.mkfifo(cache / entry.with_suffix(".tar"))

    as_one_of_the_team(BOB, prepare)
    as_one_of_the_team(ALICE, use)
    assert os.listdir(home) == ["a.tar.gz"]
    (copy,) = cache.rglob("*.tar")
    assert mode_of(copy) == 0o600 and copy.stat().st_uid == ALICE


def test_use_is_marked_by_a_new_file(tmp_path: Path) -> None:
    """Changing the times of the existing file could change another user's file."""
    cache = CacheFolder(tmp_path)
    path = cache.entry("x", lambda file, limit: None)
    mark = path.with_suffix(".used")
    before = mark.stat().st_ino
    os.link(mark, tmp_path / "of another")
    os.utime(mark, (1, 1))
    cache.entry("x", lambda file, limit: None)
    assert mark.stat().st_mtime > time.time() - 3600 and mark.stat().st_ino != before
    assert (tmp_path / "of another").stat().st_mtime == 1
