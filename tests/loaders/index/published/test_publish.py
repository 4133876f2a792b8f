"""Publishing on a store: generations, builders at the same time, and what a killed one leaves."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from servers.fixtures import Proxied
from servers.http_server import HttpServer
from servers.proxy import Fault
from servers.s3_server import S3Server
from shard_factory import RECIPE, omni_shards

import orchdata as od
from orchdata.loaders.index import build
from orchdata.loaders.index.building import builder
from orchdata.loaders.index.published import folder as folders
from orchdata.loaders.index.published.folder import PublishedFolder, opened_folder
from orchdata.loaders.index.published.manifest import IndexStore, Manifest, generations, read_manifest
from orchdata.loaders.index.published.parts import Parts, PublishedMeanwhile
from orchdata.loaders.index.published.publish import publish
from orchdata.loaders.storage.files import Files

FORK = multiprocessing.get_context("fork")
SHARDS = 4


@pytest.fixture(params=["local", "s3", "fsspec"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> PublishedFolder:
    if request.param == "local":
        return opened_folder(str(tmp_path / "store"), Files())
    if request.param == "fsspec":
        return opened_folder(f"memory://{tmp_path.name}/store", Files())
    server: S3Server = request.getfixturevalue("s3_server")
    bucket: str = request.getfixturevalue("new_bucket")()
    return opened_folder(f"s3://{bucket}/store", Files(server.options))


def published(folder: PublishedFolder, path: Path, content: bytes, **more: Any) -> Manifest:
    path.write_bytes(content)
    return publish(folder, "name", path, patterns=("*.tar",), shards=1, **more)


class TestFolder:
    def test_writes_lists_reads_and_removes(self, folder: PublishedFolder) -> None:
        assert folder.names("some") == {}
        assert folder.version("some/a.json") is None
        assert folder.write("some/b.json", b"two")
        assert folder.write("some/a.json", b"one", create=True)
        assert not folder.write("some/a.json", b"other", create=True)
        names = folder.names("some")
        assert sorted(names) == ["a.json", "b.json"]
        assert folder.version("some/a.json") == names["a.json"]
        assert folder.read("some/a.json", names["a.json"]) == b"one"
        folder.remove(["some/a.json", "some/none.json"])
        assert sorted(folder.names("some")) == ["b.json"]
        assert folder.read("some/a.json", names["a.json"]) is None

    def test_copies_large_files_in_order(self, folder: PublishedFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(folders, "_WINDOW_BYTES", 1000)
        content = os.urandom(7654)
        folder.write("files/large", content)
        pieces: list[bytes] = []
        assert folder.copy_to("files/large", len(content), lambda data: pieces.append(bytes(data)))
        assert b"".join(pieces) == content
        assert len(pieces) == 8
        assert not folder.copy_to("files/large", len(content) + 1, lambda data: None)
        assert not folder.copy_to("files/none", 5, lambda data: None)


class TestGenerations:
    def test_follow_each_other_and_equal_content_is_no_new_one(self, folder: PublishedFolder, tmp_path: Path) -> None:
        path = tmp_path / "one.index"
        assert published(folder, path, b"first").generation == 1
        assert published(folder, path, b"first").generation == 1
        assert published(folder, path, b"second").generation == 2
        assert published(folder, path, b"first").generation == 3, "data that changed back"
        assert sorted(generations(folder, "name")) == [1, 2, 3]
        assert len(folder.names("files")) == 2

    @pytest.mark.parametrize("is_equal", [True, False])
    def test_who_loses_a_race_takes_an_equal_winner_or_the_next_number(
        self, folder: PublishedFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_equal: bool
    ) -> None:
        write = folder.write

        def late(name: str, data: Any, *, create: bool = False) -> bool:
            if create:
                monkeypatch.setattr(folder, "write", write)
                published(folder, tmp_path / "winner.index", b"content" if is_equal else b"other content")
            return write(name, data, create=create)

        monkeypatch.setattr(folder, "write", late)
        manifest = published(folder, tmp_path / "one.index", b"content")
        assert manifest.generation == (1 if is_equal else 2)
        known = generations(folder, "name")
        assert max(known) == manifest.generation
        assert read_manifest(folder, "name", max(known), known[max(known)]) == manifest

    def test_a_manifest_that_was_cut_is_followed_by_the_next(self, folder: PublishedFolder, tmp_path: Path) -> None:
        published(folder, tmp_path / "one.index", b"content")
        whole = folder.read("name/00000001.json", generations(folder, "name")[1])
        assert whole is not None
        folder.write("name/00000001.json", whole[:40])
        with pytest.raises(od.DamagedIndexError, match=r"name/00000001\.json is damaged"):
            read_manifest(folder, "name", 1, generations(folder, "name")[1])
        assert published(folder, tmp_path / "one.index", b"content").generation == 2

    @pytest.mark.parametrize(
        "change",
        [
            {"format": 2},
            {"generation": 2},
            {"digest": "../../etc/passwd"},
            {"size": -1},
            {"shards": True},
            {"patterns": "*.tar"},
            {"more": 1},
        ],
    )
    def test_a_manifest_with_other_values_is_refused(
        self, folder: PublishedFolder, tmp_path: Path, change: dict[str, Any]
    ) -> None:
        values = published(folder, tmp_path / "one.index", b"content").as_dict()
        folder.write("name/00000001.json", json.dumps(values | change).encode())
        with pytest.raises(od.DamagedIndexError):
            read_manifest(folder, "name", 1, generations(folder, "name")[1])


def test_an_answer_that_is_lost_makes_no_second_generation(
    s3_server: S3Server, new_bucket: Callable[[], str], proxied: Proxied, tmp_path: Path
) -> None:
    proxy = proxied(s3_server, Fault("cut", kinds=("PUT",), key="00000001.json", times=1))
    bucket = new_bucket()
    folder = opened_folder(f"s3://{bucket}/store", Files(s3_server.options_of("all", proxy.endpoint)))
    assert published(folder, tmp_path / "one.index", b"content").generation == 1
    assert [each.fault for each in proxy.requests("PUT") if each.fault] == ["cut"]
    assert sorted(generations(folder, "name")) == [1]


def test_a_server_without_listings_is_read_and_not_written(http_server: HttpServer, tmp_path: Path) -> None:
    local = opened_folder(str(tmp_path / "store"), Files())
    for number in range(1, 6):
        published(local, tmp_path / "one.index", bytes([number]))
    for path in (tmp_path / "store").rglob("*"):
        if path.is_file():
            http_server.put(f"indexes/{path.relative_to(tmp_path / 'store')}", path.read_bytes())
    remote = opened_folder(f"{http_server.endpoint}/indexes", Files())
    known = generations(remote, "name")
    assert max(known) == 5
    assert read_manifest(remote, "name", 5, known[5]).digest == published(local, tmp_path / "a", bytes([5])).digest
    assert generations(remote, "another") == {}
    with pytest.raises(od.StorageError, match="an HTTP server takes no files"):
        published(remote, tmp_path / "one.index", b"new")


class TestParts:
    def test_what_another_builder_gave_is_taken_and_nothing_is_asked_for_that_is_in_no_listing(
        self, folder: PublishedFolder, tmp_path: Path
    ) -> None:
        now = [0.0]
        (tmp_path / "a.costs").write_bytes(b"costs")
        Parts(folder, "name", newest=0, gives=True).give(str(tmp_path / "a.costs"))
        (tmp_path / "b.costs").write_bytes(b"not given")
        Parts(folder, "name", newest=0, gives=False).give(str(tmp_path / "b.costs"))
        asked: list[str] = []
        names = folder.names
        folder.names = lambda where: asked.append(where) or names(where)  # type: ignore[method-assign, func-returns-value]
        parts = Parts(folder, "name", newest=0, gives=True, clock=lambda: now[0])
        target = tmp_path / "here"
        target.mkdir()
        assert parts.take(str(target / "a.costs"))
        assert (target / "a.costs").read_bytes() == b"costs"
        for _ in range(3):
            assert not parts.take(str(target / "b.costs"))
        assert asked.count("parts/name") == 1
        now[0] += 100
        assert not parts.take(str(target / "b.costs"))
        assert asked.count("parts/name") == 2

    def test_a_builder_ends_once_another_has_published(self, folder: PublishedFolder, tmp_path: Path) -> None:
        now = [0.0]
        parts = Parts(folder, "name", newest=0, gives=True, clock=lambda: now[0])
        assert not parts.take(str(tmp_path / "a.costs"))
        published(folder, tmp_path / "one.index", b"content")
        now[0] += 100
        with pytest.raises(PublishedMeanwhile):
            parts.take(str(tmp_path / "a.costs"))

    def test_a_listing_that_failed_is_tried_again(
        self, folder: PublishedFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = [0.0]
        parts = Parts(folder, "name", newest=0, gives=True, clock=lambda: now[0])
        assert not parts.take(str(tmp_path / "a.costs"))
        (tmp_path / "b.costs").write_bytes(b"costs")
        Parts(folder, "name", newest=0, gives=True).give(str(tmp_path / "b.costs"))
        now[0] += 100
        with monkeypatch.context() as patched:

            def failing(_: str) -> Any:
                raise od.StorageError(folder.url, "cannot be listed")

            patched.setattr(folder, "names", failing)
            with pytest.raises(od.StorageError):
                parts.take(str(tmp_path / "b.costs"))
        assert parts.take(str(tmp_path / "b.costs"))

    def test_a_part_that_was_removed_is_looked_for_again(self, folder: PublishedFolder, tmp_path: Path) -> None:
        (tmp_path / "a.costs").write_bytes(b"costs")
        giver = Parts(folder, "name", newest=0, gives=True)
        giver.give(str(tmp_path / "a.costs"))
        taker = Parts(folder, "name", newest=0, gives=True)
        assert not taker.take(str(tmp_path / "none.costs"))
        published(folder, tmp_path / "one.index", b"content")
        giver.remove()
        with pytest.raises(PublishedMeanwhile):
            taker.take(str(tmp_path / "a.costs"))


# What is written while a rank builds: a part a shard, the file, the manifest; then the parts are removed.
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", range(1, SHARDS + 4))
def test_a_build_goes_on_from_what_a_killed_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, after: bool
) -> None:
    shards = omni_shards(tmp_path, shards=SHARDS, samples=2)
    store = tmp_path / "store"

    def child() -> None:
        monkeypatch.setenv("ORCHDATA_CACHE", str(tmp_path / "killed"))
        monkeypatch.setattr(build, "threads_or_default", lambda _, far: 1)
        calls = [0]
        local = type(opened_folder(str(store), Files()))
        for name in ("write", "remove"):
            monkeypatch.setattr(local, name, _killing(getattr(local, name), calls, number, after=after))
        od.ShardDataset(shards, RECIPE, index_store=store).index(num_ranks=2, rank=0)

    process = FORK.Process(target=child)
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    parts = {path.name for path in store.glob("parts/*/*.costs")}
    is_published = bool(list(store.glob("*/00000001.json")))

    measured: list[str] = []
    real = builder.cost_shard
    monkeypatch.setattr(
        builder, "cost_shard", lambda facts, *more: measured.append(facts.meta.url) or real(facts, *more)
    )
    dataset = od.ShardDataset(shards, RECIPE, index_store=store)
    content = dataset.index().path.read_bytes()
    assert dataset.generation == 1
    assert len(measured) == (0 if is_published else SHARDS - len(parts))
    alone = od.ShardDataset(shards, RECIPE, index_store=tmp_path / "alone").index().path.read_bytes()
    assert content == alone
    if not is_published:
        assert not list(store.glob("parts/*/*.costs"))


def _killing(call: Callable[..., Any], calls: list[int], number: int, *, after: bool) -> Callable[..., Any]:
    """The call, and the end of the process at a call of this number."""

    def counted(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == number and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = call(*arguments, **options)
        if calls[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return counted


@pytest.mark.parametrize(
    ("given", "url", "generation"),
    [
        ("s3://bucket/index/", "s3://bucket/index", None),
        ("s3://bucket/index/@3", "s3://bucket/index", 3),
        ("S3://bucket/index/@12/", "s3://bucket/index", 12),
        ("/shared/index", "/shared/index", None),
        ("file:///shared/index/@2", "/shared/index", 2),
        ("s3://bucket/@home", "s3://bucket/@home", None),
    ],
)
def test_an_index_store_is_a_folder_and_a_generation(given: str, url: str, generation: int | None) -> None:
    store = IndexStore.of(given)
    assert (store.url, store.generation) == (url, generation)
    if generation is not None:
        assert IndexStore.of(store.at(generation)) == store


@pytest.mark.parametrize("given", ["https://host/index?signature=hidden", "https://me:hidden@host/index", "", "/a/@0"])
def test_an_index_store_that_is_none_is_refused_without_secrets(given: str) -> None:
    with pytest.raises(ValueError, match="index_store") as caught:
        IndexStore.of(given)
    assert "hidden" not in str(caught.value)
