"""Objects that change: an error in a run, and never bytes of two objects; a new loader measures them again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from remote_epochs import LOADER, Epochs, digests, epoch, remote
from servers import odd_server
from servers.fixtures import Proxied
from servers.http_server import HttpServer
from servers.odd_server import OddServer
from servers.s3_server import S3Server
from shard_factory import omni_shards

import orchdata as od

OTHER = "omni-000001.tar"


class Place:
    """Where the shards of a test are: `put` and `delete` change one of them."""

    def __init__(
        self, urls: list[str], options: dict[str, Any], put: Callable[[bytes], Any], delete: Callable[[], Any]
    ) -> None:
        self.dataset = remote(urls, options)
        self.dataset.index()
        self.put = put
        self.delete = delete

    def epoch(self, **options: Any) -> list[str]:
        return epoch(self.dataset, **options)


@pytest.fixture(params=["s3", "http without etags", "weak etags", "no etags", "etags, If-Match ignored"])
def place(
    request: pytest.FixtureRequest, local: Epochs, new_bucket: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> Place:
    names = [Path(path).name for path in local.paths]
    if request.param == "s3":
        s3: S3Server = request.getfixturevalue("s3_server")
        bucket = new_bucket()
        local.to_s3(s3, bucket)
        urls = [f"s3://{bucket}/train/{name}" for name in names]
        key = f"train/{OTHER}"
        return Place(urls, s3.options, lambda data: s3.put(bucket, key, data), lambda: s3.delete(bucket, key))
    if request.param == "http without etags":
        http: HttpServer = request.getfixturevalue("http_server")
        folder = f"changed-{os.urandom(4).hex()}"
        urls = local.to_http(http, folder)
        path = http.folder / folder / OTHER
        os.utime(path, (1_700_000_000, 1_700_000_000))  # dates of HTTP are whole seconds
        return Place(urls, {}, path.write_bytes, path.unlink)
    odd: OddServer = request.getfixturevalue("odd_server")
    odd.etags = request.param != "no etags"
    odd.weak_etags = request.param == "weak etags"
    urls = [odd.put(name, Path(path).read_bytes()) for name, path in zip(names, local.paths, strict=True)]
    if request.param == "no etags":

        def put(data: bytes) -> None:
            monkeypatch.setattr(odd_server, "_FIRST_MODIFIED", odd_server._FIRST_MODIFIED + 100)
            odd.put(OTHER, data)

        return Place(urls, {}, put, lambda: odd.files.pop(OTHER))
    if "ignored" in request.param:
        answer = odd.answer

        def ignoring(seen: Any) -> Any:
            seen.headers.pop("if-match", None)
            return answer(seen)

        odd.answer = ignoring  # type: ignore[method-assign]
    return Place(urls, {}, lambda data: odd.put(OTHER, data), lambda: odd.files.pop(OTHER))


def test_what_has_not_changed_is_read(place: Place, local: Epochs) -> None:
    assert place.epoch() == local.local


def test_a_replaced_object_is_stale(place: Place, local: Epochs) -> None:
    content = Path(local.paths[1]).read_bytes()
    place.put(content[:-1] + b"x")  # as large as before
    with pytest.raises(od.StaleIndexError, match=f"{OTHER}: was replaced since it was indexed"):
        place.epoch(on_error="skip")


@pytest.mark.parametrize("change", ["shrank", "grew"])
def test_an_object_of_another_size_is_stale(place: Place, local: Epochs, change: str) -> None:
    content = Path(local.paths[1]).read_bytes()
    place.put(content[:30_000] if change == "shrank" else content + bytes(10_240))
    with pytest.raises(od.StaleIndexError, match=OTHER):
        place.epoch(on_error="skip")


def test_a_removed_object_is_named(place: Place) -> None:
    place.delete()
    with pytest.raises(od.StorageError, match=f"{OTHER}: cannot be read at .*no such object"):
        place.epoch(on_error="skip")


def test_an_object_that_is_replaced_in_the_middle_of_an_epoch(
    s3_server: S3Server, local: Epochs, new_bucket: Callable[[], str]
) -> None:
    bucket = new_bucket()
    dataset = remote(local.to_s3(s3_server, bucket), s3_server.options)
    batches = iter(od.DataLoader(dataset, num_threads=0, **LOADER))
    assert digests([next(batches)]) == local.local[:1]
    for path in local.paths:
        s3_server.put(bucket, f"train/{Path(path).name}", Path(path).read_bytes()[::-1])
    with pytest.raises(od.StaleIndexError, match="was replaced"):
        next(batches)


def test_pieces_of_one_read_are_of_one_object(
    s3_server: S3Server, new_bucket: Callable[[], str], proxied: Proxied, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second piece waits until the object was replaced: If-Match refuses it."""
    from orchdata.loaders.storage.files import Files
    from orchdata.loaders.storage.remote import objects

    monkeypatch.setattr(objects, "PIECE_BYTES", 1000)
    bucket, proxy = new_bucket(), proxied(s3_server)
    s3_server.put(bucket, "a.bin", bytes(2000))
    file = Files(s3_server.options_of("all", proxy.endpoint)).open(f"s3://{bucket}/a.bin")
    assert file.read(0, 2000) == bytes(2000)
    s3_server.put(bucket, "a.bin", b"x" * 2000)
    with pytest.raises(od.StaleIndexError, match="was replaced"):
        file.read(500, 1000)
    asked = proxy.requests("RANGE")
    assert all(each.if_match == file.version for each in asked)
    assert {each.status for each in asked} == {206, 412}


def test_a_shard_that_changes_while_it_is_indexed_is_indexed_again(
    s3_server: S3Server, local: Epochs, new_bucket: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listing is of the object before: its bytes are refused, and it is looked at again. It is no bad shard."""
    from orchdata.loaders.storage.files import Files

    bucket = new_bucket()
    dataset = remote(local.to_s3(s3_server, bucket), s3_server.options)
    urls, looked_up = dataset.urls, Files.looked_up

    def replaced(files: Files, paths: Any) -> Files:
        known = looked_up(files, paths)
        s3_server.put(bucket, f"train/{OTHER}", Path(local.paths[0]).read_bytes())
        return known

    monkeypatch.setattr(Files, "looked_up", replaced)
    with pytest.warns(UserWarning, match=f"{OTHER}: was replaced since it was indexed"):
        index = dataset.index()
    assert [shard.url for shard in index.shards] == list(urls)
    assert len(index.bad_rows()) == 0
    assert len(epoch(dataset)) == len(local.local)


def test_another_index_finds_the_replaced_object(place: Place, local: Epochs) -> None:
    place.put(Path(local.paths[0]).read_bytes())
    place.dataset.index(rebuild=True)
    assert len(place.epoch()) == len(local.local)
    assert place.epoch() != local.local


def test_a_new_loader_lists_a_pattern_again(
    s3_server: S3Server, local: Epochs, new_bucket: Callable[[], str], tmp_path: Path
) -> None:
    bucket = new_bucket()
    pattern = local.to_s3(s3_server, bucket)
    remote(pattern, s3_server.options).index()
    other, third = (Path(path).read_bytes() for path in omni_shards(tmp_path, shards=2, samples=9))
    s3_server.put(bucket, f"train/{OTHER}", other)
    changed = remote(pattern, s3_server.options)
    with pytest.warns(UserWarning, match=f"s3://{bucket}/train/{OTHER} changed since the index was built"):
        loader = od.DataLoader(changed, batch_size=3)
    assert sum(len(batch.sample_ids) for batch in loader) == 10 + 9
    s3_server.put(bucket, "train/omni-000002.tar", third)
    assert len(changed) == 10 + 9
    assert changed.index(rebuild=True).num_samples == len(changed) == 10 + 9 + 9
