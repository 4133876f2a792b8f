"""The folder of copies: found while whole, refused when damaged, made once, within the cap; and kept files."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from servers.fixtures import Proxied
from servers.proxy import Fault
from servers.s3_server import S3Server

import orchdata as od
from orchdata.loaders.storage.cache import CacheFolder, copy_name, kept_files, prune
from orchdata.loaders.storage.files import FOLDER, Copies, Files
from orchdata.loaders.storage.remote.objects import BLOCK_BYTES, Blocks, RemoteFile
from orchdata.loaders.storage.storage import FileVersion, ReadBytes
from orchdata.loaders.watch import Ended, here

URL = "s3://bucket/train-0.tar"
CONTENT = bytes(range(256)) * 400
FILE = FileVersion(len(CONTENT), '"abc"')


def writing(content: bytes = CONTENT) -> Callable[[IO[bytes]], None]:
    return lambda out: out.write(content) and None


def never(_: Any) -> None:
    raise AssertionError("it is there")


@pytest.fixture
def cache(tmp_path: Path) -> od.Cache:
    return od.Cache(tmp_path / "nvme", max_bytes=10 * len(CONTENT))


@pytest.fixture
def copies(cache: od.Cache) -> Copies:
    return Copies(cache)


def content_of(copies: Copies, file: FileVersion = FILE, url: str = URL) -> bytes | None:
    copy = copies.find(url, file)
    return None if copy is None else copy.read(0, copy.size)


def test_a_copy_is_found_by_url_size_and_version(copies: Copies) -> None:
    assert content_of(copies) is None
    assert copies.add(URL, FILE, writing()) == "added"
    assert copies.add(URL, FILE, never) == "there"
    assert content_of(copies) == CONTENT
    assert content_of(copies, FILE._replace(version='"xyz"')) is None
    assert content_of(copies, FILE._replace(size=FILE.size - 1)) is None
    assert content_of(copies, FILE._replace(version="")) is None
    assert content_of(copies, url="s3://bucket/train-1.tar") is None


@pytest.mark.parametrize("damage", [b"", CONTENT[:-1], CONTENT[1:] + b"x", CONTENT + b"x"])
def test_a_damaged_copy_is_refused_and_made_again(copies: Copies, cache: od.Cache, damage: bytes) -> None:
    copies.add(URL, FILE, writing())
    path = Path(cache.path) / FOLDER / f"{copy_name(URL, FILE)}.copy"
    before = path.stat()
    while path.stat().st_mtime_ns == before.st_mtime_ns:
        path.write_bytes(damage)
    assert content_of(copies) is None
    assert not path.exists()
    assert copies.add(URL, FILE, writing()) == "added"
    assert content_of(copies) == CONTENT


def test_room_is_made_of_other_data_alone_the_least_recently_used_first(cache: od.Cache) -> None:
    copies = Copies(od.Cache(cache.path, max_bytes=3 * len(CONTENT) + 8192))
    urls = [f"s3://bucket/{number}.tar" for number in range(4)]
    for number, url in enumerate(urls[:3]):
        copies.add(url, FILE, writing())
        os.utime(Path(cache.path) / FOLDER / f"{copy_name(url, FILE)}.copy", (1, 1_000 + number))
    own = {copy_name(urls[0], FILE)}
    assert copies.add(urls[3], FILE, writing(), own) == "added"
    assert [content_of(copies, url=url) is not None for url in urls] == [True, False, True, True]
    everything = {copy_name(url, FILE) for url in urls}
    assert copies.add(urls[1], FILE, never, everything) == "full"


def test_copies_are_listed_and_pruned_and_files_of_others_stay(copies: Copies, cache: od.Cache) -> None:
    copies.add(URL, FILE, writing())
    folder = Path(cache.path) / FOLDER
    (folder / "mine.copy").write_bytes(b"of the user's own")
    (folder / "notes.txt").write_bytes(b"of the user's own")
    (listed,) = kept_files(CacheFolder(cache.path))
    assert listed.kind == FOLDER and listed.size >= len(CONTENT)
    pruned = prune(CacheFolder(cache.path), older_than_seconds=0)
    assert pruned.removed[FOLDER].files == 1
    assert sorted(os.listdir(folder)) == ["mine.copy", "notes.txt"]


OBJECT = random.Random(7).randbytes(5 * BLOCK_BYTES // 2)


def blocks(files: Files, url: str, file: FileVersion, reads: ReadBytes) -> Iterator[bytes]:
    source = Blocks(RemoteFile(files.objects, url, file, reads))
    return (bytes(source.view(start, BLOCK_BYTES)) for start in range(0, file.size, BLOCK_BYTES))


def test_an_object_is_copied_in_blocks_in_spite_of_faults(
    s3_server: S3Server, new_bucket: Callable[[], str], proxied: Proxied, tmp_path: Path
) -> None:
    proxy = proxied(s3_server, Fault("cut_body", kinds=("RANGE",), times=1))
    url = f"s3://{(bucket := new_bucket())}/a.bin"
    s3_server.put(bucket, "a.bin", OBJECT)
    files = Files(s3_server.options_of("all", proxy.endpoint))
    file = files.version(url)
    assert file is not None
    copies, reads = Copies(od.Cache(tmp_path, max_bytes=1 << 30)), ReadBytes()

    def make(out: object) -> None:
        for block in blocks(files, url, file, reads):
            out.write(block)  # type: ignore[attr-defined]

    assert copies.add(url, file, make) == "added"
    copy = copies.find(url, file)
    assert copy is not None
    assert copy.read(0, copy.size) == OBJECT
    assert reads.storage.value == len(OBJECT)
    assert reads.requests.as_dict() == {"get": 4, "again": 1}  # three blocks, and one again
    assert {each.if_match for each in proxy.requests("RANGE")} == {file.version}


def test_blocks_that_are_no_longer_wanted_end(
    s3_server: S3Server, new_bucket: Callable[[], str], proxied: Proxied, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = proxied(s3_server, Fault("stall", kinds=("RANGE",), after=0, seconds=600))
    url = f"s3://{(bucket := new_bucket())}/a.bin"
    s3_server.put(bucket, "a.bin", OBJECT)
    files = Files(s3_server.options_of("all", proxy.endpoint))
    file = files.version(url)
    assert file is not None
    monkeypatch.setattr(here(), "ended", lambda: True)
    with pytest.raises(Ended):
        list(blocks(files, url, file, ReadBytes()))
