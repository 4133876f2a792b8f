"""Named files under system errors: a failed call is retried, and a lost folder does not make samples bad."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from digests import global_batch
from servers.fixtures import Proxied
from servers.http_server import HttpServer
from servers.s3_server import S3Server
from shard_factory import jpeg

import orchdata as od
from orchdata.loaders.errors import StorageError, TooManyFailures
from orchdata.loaders.index.build import build_index
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards.shard import Reading


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "media"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.jpg").write_bytes(jpeg(60, 60, number))
    return folder


@pytest.fixture
def url(tmp_path: Path, root: Path) -> str:
    path = tmp_path / "a.jsonl"
    records = [{"image": f"{number}.jpg", "text": f"<image> {number}"} for number in range(len(list(root.iterdir())))]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return str(path)


class Failing:
    """A system call that fails some of the times."""

    def __init__(self, call: Callable[..., Any], number: int, times: set[int], path: str = "") -> None:
        self.call, self.number, self.times, self.path = call, number, times, path
        self.count = self.refused = 0

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        if str(target).startswith(self.path):
            self.count += 1
            if self.count in self.times:
                self.refused += 1
                raise OSError(self.number, os.strerror(self.number))
        return self.call(target, *args, **kwargs)


def loader(url: str, root: Path, **options: Any) -> od.DataLoader:
    return od.DataLoader(od.ShardDataset([url], media_root=root), batch_size=4, num_threads=0, **options)


def keys(loader: od.DataLoader) -> list[Any]:
    return sorted(key for batch in loader for key in batch.sample_ids)


@pytest.mark.parametrize("call", ["fstat", "readlink", "open", "pread"])
def test_one_call_that_fails_costs_a_run_a_retry(
    url: str, root: Path, no_pauses: None, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    data_loader = loader(url, root, on_error=od.ErrorPolicy("skip", max_failures=None))
    failing = Failing(getattr(os, call), errno.ESTALE, {3, 8, 13})
    monkeypatch.setattr(os, call, failing)
    assert len(keys(data_loader)) == 12
    assert failing.refused == 3 and data_loader.stats()["failures"]["count"] == 0


@pytest.mark.parametrize("when", ["indexing", "loading"])
def test_an_empty_folder_is_a_mount_that_is_lost(
    url: str, root: Path, no_pauses: None, tmp_path: Path, when: str
) -> None:
    data_loader = loader(url, root, on_error=od.ErrorPolicy("skip", max_failures=None)) if when == "loading" else None
    if data_loader is not None:
        data_loader.dataset.index()
    root.rename(tmp_path / "away")
    root.mkdir()
    with pytest.raises(StorageError, match="media: media_root is an empty folder.*mount"):
        build_index(
            [url], Recipe(), reading=Reading(media_root=str(root)), retry_seconds=0
        ) if data_loader is None else keys(data_loader)
    root.rmdir()
    (tmp_path / "away").rename(root)
    assert len(keys(loader(url, root))) == 12


def test_a_folder_that_holds_none_of_many_files_ends_a_build(url: str, root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "README").touch()
    with pytest.raises(StorageError, match=r"other: .*none of the files .*'0\.jpg', '1\.jpg', '2\.jpg'.* media_root="):
        build_index([url], Recipe(), reading=Reading(media_root=str(other)))
    with pytest.raises(StorageError, match="none of the files"):  # also with cached costs
        build_index([url], Recipe(), reading=Reading(media_root=str(other)))
    shutil.copy(root / "7.jpg", other)
    assert len(build_index([url], Recipe(), reading=Reading(media_root=str(other))).bad_rows()) == 11


def test_files_that_were_missing_are_looked_for_again_by_a_new_data_set(url: str, root: Path, tmp_path: Path) -> None:
    moved = {name: root / name for name in ("3.jpg", "8.jpg")}
    for name, path in moved.items():
        path.rename(tmp_path / name)
    assert len(keys(loader(url, root, on_error=od.ErrorPolicy("skip", max_failures=None)))) == 10
    assert len(keys(loader(url, root, on_error=od.ErrorPolicy("skip", max_failures=None)))) == 10
    (tmp_path / "8.jpg").rename(moved["8.jpg"])
    with pytest.warns(UserWarning, match=r"a\.jsonl changed since the index was built"):
        data_loader = loader(url, root, on_error=od.ErrorPolicy("skip", max_failures=None))
    assert len(keys(data_loader)) == 11


def test_an_epoch_that_delivers_nothing_does_not_end_in_silence(url: str, root: Path) -> None:
    data_loader = loader(url, root, on_error=od.ErrorPolicy("skip", max_failures=None))
    data_loader.dataset.index()
    for path in root.iterdir():
        os.utime(path, ns=(1, 1))
    with pytest.raises(TooManyFailures, match="delivered nothing .*same size, but another modification time.*`cp -a`"):
        keys(data_loader)


# Records that name objects of storage: JSON Lines with `media_root` at a URL.


COUNT = 40
RECIPE = od.Recipe(image=od.ImagePreprocessor(dtype="float32"))


class Pictures(NamedTuple):
    """A file of records and its images: on this machine, and in a bucket below "data/"."""

    folder: Path
    bucket: str
    names: list[str]

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/data/records.jsonl"

    @property
    def root(self) -> str:
        return f"s3://{self.bucket}/data/images"

    def local(self) -> od.ShardDataset:
        return od.ShardDataset(self.folder / "records.jsonl", RECIPE, media_root=self.folder / "images")


def record(number: int, image: str) -> str:
    turns = [{"from": "human", "value": "<image> what?"}, {"from": "gpt", "value": "word " * (1 + number % 7)}]
    return json.dumps({"id": f"r{number:03d}", "image": image, "conversations": turns})


@pytest.fixture
def pictures(tmp_path: Path, s3_server: S3Server, new_bucket: Any) -> Pictures:
    bucket = new_bucket()
    names = [f"a/{number:03d}.jpg" if number % 2 else f"b c+%/{number:03d}.jpg" for number in range(COUNT)]
    for number, name in enumerate(names):
        data = jpeg(28 + 14 * (number % 5), 56, seed=number)
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        s3_server.put(bucket, f"data/images/{name}", data)
    local = "\n".join(record(number, name) for number, name in enumerate(names))
    (tmp_path / "records.jsonl").write_text(local)
    full = f"s3://{bucket}/data/images"
    lines = [record(number, name if number % 3 else f"{full}/{name}") for number, name in enumerate(names)]
    s3_server.put(bucket, "data/records.jsonl", "\n".join(lines).encode())
    return Pictures(tmp_path, bucket, names)


def epoch(dataset: od.ShardDataset, **options: Any) -> tuple[list[str], dict[str, Any]]:
    """The digest of each step, with sample ids by the names of shards, and the statistics."""
    loader = od.DataLoader(dataset, batch_size=8, seed=3, **options)
    return [global_batch([[batch]]) for batch in loader], loader.stats()


@pytest.mark.slow
def test_batches_are_those_of_local_files(pictures: Pictures, s3_server: S3Server, proxied: Proxied) -> None:
    proxy = proxied(s3_server)
    options = s3_server.options_of("all", proxy.endpoint)
    # Records below a URL have other bytes here, so their text alone is compared by the digests of the same recipe.
    there = od.ShardDataset(pictures.url, RECIPE, media_root=pictures.root, storage_options=options)
    local = {sample_id[1]: digest for sample_id, digest in samples(pictures.local())}
    far = {sample_id[1]: digest for sample_id, digest in samples(there)}
    assert local == far and len(far) == COUNT

    # Sizes come from a listing: there are far more names than pages.
    counts = proxy.counts()
    assert counts.get("HEAD", 0) <= 1 and counts["LIST"] <= 6
    # The local index of the second loader needs no listing of images, and each image is one request.
    proxy.clear()
    steps, stats = epoch(there, num_workers=1)
    assert len(steps) == COUNT // 8 and stats["failures"]["count"] == 0
    images = [request for request in proxy.requests("RANGE") if "images" in request.path]
    assert len(images) == COUNT


def samples(dataset: od.ShardDataset) -> list[tuple[tuple[str, str], str]]:
    """The ids of all samples in order, and the digests of each alone."""
    found = []
    for batch in od.DataLoader(dataset, batch_size=1, shuffle=False):
        (sample_id,) = batch.sample_ids
        media = b"".join(array.numpy().tobytes() for parts in batch.media.values() for array in parts.arrays.values())
        found.append((sample_id, f"{batch.llm.input_ids.tolist()} {hash(media)}"))
    return found


def test_a_replaced_object_fails_its_sample_alone(pictures: Pictures, s3_server: S3Server) -> None:
    dataset = od.ShardDataset(pictures.url, RECIPE, media_root=pictures.root, storage_options=s3_server.options)
    dataset.index()
    old = s3_server.get(pictures.bucket, f"data/images/{pictures.names[5]}")
    s3_server.put(pictures.bucket, f"data/images/{pictures.names[5]}", old[:-3] + b"abc")
    s3_server.delete(pictures.bucket, f"data/images/{pictures.names[6]}")
    policy = od.ErrorPolicy("skip", max_failures=5)
    loader = od.DataLoader(dataset, batch_size=8, seed=0, on_error=policy)
    delivered = sorted(key for batch in loader for _, key in batch.sample_ids)
    failures = {failure["key"]: failure["reason"] for failure in loader.stats()["failures"]["samples"]}
    assert set(failures) == {"r005", "r006"} and len(delivered) == COUNT - 2
    assert "was changed since it was indexed" in failures["r005"]
    assert "no such file" in failures["r006"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../secret.jpg", "leads upwards"),
        ("s3://other-bucket/x.jpg", "is a URL"),
        ("https://host/x.jpg", "is a URL, and nothing is downloaded"),
        ("/etc/passwd.jpg", "is an absolute path"),
        ("a/nothing.jpg", "no such file"),
        ("a/.", "no such file"),
        (".", "names a folder"),
        ("a/b\tc.jpg", "control characters"),
    ],
)
def test_names_that_lead_elsewhere_are_bad_samples(
    pictures: Pictures, s3_server: S3Server, name: str, reason: str
) -> None:
    lines = [record(0, pictures.names[0]), record(1, name)]
    s3_server.put(pictures.bucket, "data/records.jsonl", "\n".join(lines).encode())
    index = od.ShardDataset(pictures.url, RECIPE, media_root=pictures.root, storage_options=s3_server.options).index()
    assert index.bad_rows().tolist() == [1]
    assert reason in index.failure(1).reason


ODD_NAMES = ("scan", "scan#1", "scan#2", "scan?v=3", "a b.png", "a%20b.png", "%2Fx.png", "%2e%2e/x.png", "ü.png")


def test_a_name_below_an_http_root_is_no_url(tmp_path: Path, http_server: HttpServer) -> None:
    for number, name in enumerate(ODD_NAMES):
        data = jpeg(28 + 14 * number, 28, seed=number)
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        http_server.put(f"names/{name}", data)
    (tmp_path / "records.jsonl").write_text("\n".join(record(number, name) for number, name in enumerate(ODD_NAMES)))
    local = od.ShardDataset(tmp_path / "records.jsonl", RECIPE, media_root=tmp_path / "images")
    dataset = od.ShardDataset(
        tmp_path / "records.jsonl",
        RECIPE,
        media_root=f"{http_server.endpoint}/names",
        storage_options=http_server.options,
    )
    assert len(dataset) == len(ODD_NAMES) and samples(dataset) == samples(local)
    assert epoch(dataset)[0] == epoch(local)[0]


def test_a_bucket_that_may_not_be_listed(pictures: Pictures, s3_server: S3Server) -> None:
    options = s3_server.options_of("reader")
    dataset = od.ShardDataset(pictures.url, RECIPE, media_root=pictures.root, storage_options=options)
    assert not len(dataset.index().bad_rows())
