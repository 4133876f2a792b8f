"""The index on a store: what a job asks the server for, next generations, builders at the same time, damage."""

from __future__ import annotations

import json
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from published_job import __file__ as JOB
from rank_jobs import run_ranks
from servers.fixtures import Proxied
from servers.proxy import Proxy, Request
from servers.s3_server import S3Server
from shard_factory import RECIPE, omni_samples, omni_shards, write_shard
from typer.testing import CliRunner

import orchdata as od
from orchdata.cli import app

SHARDS = 6
SAMPLES = 4


class Bucket:
    """A bucket with shards, and a proxy that counts what is asked of it."""

    def __init__(self, server: S3Server, name: str, proxy: Proxy, folder: Path) -> None:
        self.server, self.name, self.proxy = server, name, proxy
        self.options = server.options_of("all", proxy.endpoint)
        self.pattern = f"s3://{name}/data/*.tar"
        self.store = f"s3://{name}/index"
        self.paths = omni_shards(folder, shards=SHARDS, samples=SAMPLES)
        for path in self.paths:
            self.put(path)

    def put(self, path: str) -> None:
        self.server.put(self.name, f"data/{Path(path).name}", Path(path).read_bytes())

    def dataset(self, **more: Any) -> od.ShardDataset:
        given = {"storage_options": self.options, "index_store": self.store} | more
        return od.ShardDataset(self.pattern, RECIPE, **given)

    def keys(self, folder: str) -> list[str]:
        return [key for key in self.server.list(self.name) if key.startswith(folder)]

    def asked(self) -> Counter[str]:
        """How often each kind of request was made of each kind of file, since the last time; then it is forgotten."""
        seen = Counter(_called(each) for each in self.proxy.requests())
        self.proxy.clear()
        return seen


def _called(request: Request) -> str:
    if request.kind == "LIST":
        listed = next(part for part in request.query.split("&") if part.startswith("prefix="))
        what = listed.removeprefix("prefix=").replace("%2F", "/")
        return f"LIST {what.split('/')[0]}"
    folder, _, rest = request.path.partition("/")[2].partition("/")[2].partition("/")
    of_index = next((name for name in ("files", "parts", "fields") if rest.startswith(f"{name}/")), "manifest")
    return f"{request.method} {of_index if folder == 'index' else folder}"


@pytest.fixture
def bucket(s3_server: S3Server, new_bucket: Callable[[], str], proxied: Proxied, tmp_path: Path) -> Bucket:
    folder = tmp_path / "shards"
    folder.mkdir()
    return Bucket(s3_server, new_bucket(), proxied(s3_server), folder)


def new_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> Path:
    """Be another node."""
    monkeypatch.setenv("ORCHDATA_CACHE", str(tmp_path / name))
    return tmp_path / name


def test_one_process_builds_and_publishes_and_another_node_asks_for_no_shard(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = bucket.dataset()
    assert (len(first), first.generation) == (SHARDS * SAMPLES, 1)
    assert [key for key in bucket.keys("index/") if "parts" in key] == []
    bucket.asked()

    new_cache(monkeypatch, tmp_path, "another")
    second = bucket.dataset()
    assert second.urls == first.urls
    assert len(second) == len(first)
    assert bucket.asked() == {"LIST index": 1, "GET manifest": 1, "GET files": 1}
    third = bucket.dataset()
    assert len(third) == len(first)
    assert bucket.asked() == {"LIST index": 1, "GET manifest": 1}, "the node's copy"
    assert second.index().path.read_bytes() == first.index().path.read_bytes()
    od.DataLoader(bucket.dataset(), dp=(0, 2), index="require")


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (2, 4), (4, 2)])
def test_a_job_asks_once_for_the_manifest_and_once_a_node_for_the_index(
    bucket: Bucket, tmp_path: Path, nodes: int, per_node: int
) -> None:
    bucket.dataset().index()
    bucket.asked()
    ranks = run_ranks(
        JOB, _arguments(bucket, tmp_path, per_node, steps=False), num_ranks=nodes * per_node, folder=tmp_path
    )
    assert bucket.asked() == {"LIST index": 1, "GET manifest": 1, "GET files": nodes}
    assert [rank["measured"] for rank in ranks] == [[]] * len(ranks)
    assert {rank["generation"] for rank in ranks} == {1}


def _arguments(bucket: Bucket, folder: Path, per_node: int, **more: Any) -> str:
    given = {"paths": bucket.pattern, "options": bucket.options, "index_store": bucket.store, "folder": str(folder)}
    return json.dumps(given | {"ranks_per_node": per_node} | more)


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (4, 1)])
def test_ranks_of_several_nodes_build_it_together_through_the_store(
    bucket: Bucket, tmp_path: Path, nodes: int, per_node: int
) -> None:
    ranks = run_ranks(JOB, _arguments(bucket, tmp_path, per_node), num_ranks=nodes * per_node, folder=tmp_path)
    assert {rank["generation"] for rank in ranks} == {1}
    measured = {name for rank in ranks for name in rank["measured"]}
    assert measured == {Path(path).name for path in bucket.paths}
    keys = [key for rank in ranks for key in rank["keys"]]
    assert len(keys) == len(set(keys)) == SHARDS * SAMPLES
    folders = Counter(key.split("/")[1] for key in bucket.keys("index/"))
    assert folders.pop("files") == 1
    assert list(folders.values()) == [1], "one manifest, and no parts are left"
    alone = bucket.dataset(index_store=f"s3://{bucket.name}/other")
    alone.index()
    contents = [bucket.server.get(bucket.name, key) for key in bucket.keys("") if "/files/" in key]
    assert len(contents) == 2
    assert contents[0] == contents[1], "whoever builds it"


def test_nodes_without_a_store_or_a_common_folder_are_an_error_with_the_command(bucket: Bucket, tmp_path: Path) -> None:
    ranks = run_ranks(JOB, _arguments(bucket, tmp_path, 1, index_store=None, steps=False), num_ranks=2, folder=tmp_path)
    errors = [rank["error"] for rank in ranks if "error" in rank]
    assert errors, "the first rank may have measured all before another one came"
    for error in errors:
        assert f"orchdata index '{bucket.pattern}' --storage-options endpoint=..." in error
        assert "--to" in error
        assert bucket.options["secret_access_key"] not in error


def test_nodes_with_a_common_folder_build_together(bucket: Bucket, tmp_path: Path) -> None:
    arguments = _arguments(bucket, tmp_path, 1, index_store=None, common=True)
    ranks = run_ranks(JOB, arguments, num_ranks=2, folder=tmp_path)
    assert sorted(name for rank in ranks for name in rank["measured"]) == [Path(path).name for path in bucket.paths]


class TestNextGeneration:
    def test_the_command_publishes_it_if_shards_changed_and_nothing_otherwise(
        self, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        report = command(bucket)
        assert report["index_store"] == {"store": bucket.store, "generation": 1, "published": True}
        before = bucket.keys("index/")
        bucket.asked()
        assert command(bucket)["index_store"]["published"] is False
        assert bucket.asked() == {"LIST data": 1, "LIST index": 2, "GET manifest": 1}
        new_cache(monkeypatch, tmp_path, "another")
        assert command(bucket)["scanned"] == 0, "a machine that never indexed it"
        assert bucket.keys("index/") == before

        bucket.put(changed_shard(bucket))
        report = command(bucket)
        assert (report["index_store"]["generation"], report["scanned"]) == (2, SHARDS)
        assert bucket.dataset().index().totals["samples"] == SHARDS * SAMPLES
        assert len(bucket.keys("index/")) == 4, "two manifests and two files"

    @pytest.mark.filterwarnings("ignore:.*are not in generation")
    def test_a_job_keeps_its_own_and_goes_on_with_it(self, bucket: Bucket) -> None:
        loader = od.DataLoader(bucket.dataset(), batch_size=4, num_threads=0)
        steps = iter(loader)
        next(steps)
        state = loader.state_dict()
        bucket.put(more_shard(bucket))
        command(bucket)
        assert len(list(steps)) == SHARDS * SAMPLES // 4 - 1

        later = od.DataLoader(bucket.dataset(), batch_size=4, num_threads=0)
        with pytest.raises(od.StateError, match="the list of shards"):
            later.load_state_dict(state)
        same = od.DataLoader(bucket.dataset(index_store=f"{bucket.store}/@1"), batch_size=4, num_threads=0)
        same.load_state_dict(state)
        assert len(list(same)) == SHARDS * SAMPLES // 4 - 1
        wait_for_looks()

    def test_shards_that_the_index_lacks_are_one_warning_after_the_first_step(self, bucket: Bucket) -> None:
        bucket.dataset().index()
        bucket.put(more_shard(bucket))
        bucket.asked()
        dataset = bucket.dataset()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loader = od.DataLoader(dataset, batch_size=4, num_threads=0)
            assert "LIST data" not in bucket.asked()
            assert len([key for batch in loader for key in batch.sample_ids]) == SHARDS * SAMPLES
            wait_for_looks()
        said = [str(each.message) for each in caught if "generation 1" in str(each.message)]
        assert len(said) == 1
        assert said[0].startswith(f"1 shard (the first: s3://{bucket.name}/data/omni-{SHARDS:06d}.tar)")
        assert bucket.asked()["LIST data"] == 1

    def test_a_generation_that_is_not_there_is_an_error_with_those_that_are(self, bucket: Bucket) -> None:
        bucket.dataset().index()
        with pytest.raises(od.MissingIndexError, match="no generation 7 .* generations there: 1$"):
            bucket.dataset(index_store=f"{bucket.store}/@7").index()
        with pytest.raises(ValueError, match="leave out the @"):
            command(bucket, to=f"{bucket.store}/@1")


def test_a_damaged_file_is_an_error_that_names_it_and_the_command_which_writes_it_again(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.dataset().index()
    file = next(key for key in bucket.keys("index/") if "/files/" in key)
    content = bucket.server.get(bucket.name, file)
    bucket.server.put(bucket.name, file, damaged(content))
    new_cache(monkeypatch, tmp_path, "another")
    with pytest.raises(od.DamagedIndexError, match=rf"{file}.* --to {bucket.store} --force` writes it again"):
        bucket.dataset().index()
    bucket.server.delete(bucket.name, file)
    with pytest.raises(od.DamagedIndexError, match="there is no such file"):
        bucket.dataset().index()
    assert list((tmp_path / "another" / "index").glob("*")) == [], "nothing half is left"
    command(bucket, "--force")
    assert bucket.server.get(bucket.name, file) == content
    assert bucket.dataset().generation is None
    assert bucket.dataset().index().path.read_bytes() == content


def test_a_damaged_manifest_is_an_error_and_the_command_publishes_the_next(bucket: Bucket) -> None:
    content = bucket.dataset().index().path.read_bytes()
    manifest = next(key for key in bucket.keys("index/") if key.endswith(".json"))
    bucket.server.put(bucket.name, manifest, bucket.server.get(bucket.name, manifest)[:-9])
    with pytest.raises(od.DamagedIndexError, match=rf"{manifest}.* --to {bucket.store}` publishes the next"):
        bucket.dataset().index()
    assert command(bucket)["index_store"]["generation"] == 2
    assert bucket.dataset().index().path.read_bytes() == content


def test_a_damaged_copy_of_a_node_is_fetched_again(bucket: Bucket) -> None:
    path = bucket.dataset().index().path
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(damaged(content))
    bucket.asked()
    assert bucket.dataset().index().path.read_bytes() == content
    assert bucket.asked()["GET files"] == 1


def test_wrong_credentials_are_one_error_without_them(bucket: Bucket) -> None:
    bucket.dataset().index()
    options = bucket.options | {"secret_access_key": "not-the-secret"}
    with pytest.raises(od.StorageError, match="credentials|403|denied") as caught:
        bucket.dataset(storage_options=options).index()
    assert "not-the-secret" not in str(caught.value)
    assert caught.value.url.startswith(bucket.store)


def test_secrets_are_in_no_file(bucket: Bucket, tmp_path: Path, private_cache: Path) -> None:
    secrets = [bucket.options[name].encode() for name in ("secret_access_key", "access_key_id")]
    ranks = run_ranks(JOB, _arguments(bucket, tmp_path, 1), num_ranks=2, folder=tmp_path)
    dataset = bucket.dataset()
    dataset.index()
    files = [path for folder in (tmp_path, private_cache) for path in folder.rglob("*") if path.is_file()]
    assert len(files) > SHARDS
    objects = [bucket.server.get(bucket.name, key) for key in bucket.keys("index/")]
    shown = [json.dumps(ranks).encode(), repr(dataset).encode(), repr(dataset.stored_index).encode()]
    for content in [*(path.read_bytes() for path in files), *objects, *shown]:
        assert not any(secret in content for secret in secrets)


def test_a_store_of_one_bucket_cannot_have_an_index_in_another(bucket: Bucket) -> None:
    store = bucket.server.store(bucket.name)
    with pytest.raises(ValueError, match="store is of one bucket"):
        od.ShardDataset(bucket.pattern, store=store, index_store="s3://other/index")
    dataset = od.ShardDataset(bucket.pattern, RECIPE, store=store, index_store=bucket.store)
    assert (len(dataset), dataset.generation) == (SHARDS * SAMPLES, 1)


def damaged(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def wait_for_looks() -> None:
    """Wait until what looks for new shards in the background has ended."""
    for thread in threading.enumerate():
        if thread.name == "orchdata-new-shards":
            thread.join()


def changed_shard(bucket: Bucket) -> str:
    """Another shard under the name of the first."""
    folder = Path(bucket.paths[0]).parent / "changed"
    folder.mkdir()
    return write_shard(folder / Path(bucket.paths[0]).name, omni_samples(SAMPLES, prefix="c-", seed=99))


def more_shard(bucket: Bucket) -> str:
    folder = Path(bucket.paths[0]).parent
    return write_shard(folder / f"omni-{SHARDS:06d}.tar", omni_samples(SAMPLES, prefix="m-", seed=98))


def command(bucket: Bucket, *more: str, to: str | None = None) -> Any:
    """What `orchdata index --to` reports."""
    options = [f"--storage-options={name}={value}" for name, value in bucket.options.items()]
    arguments = ["index", bucket.pattern, "--to", to or bucket.store, "--recipe", "shard_factory:RECIPE", "--json"]
    result = CliRunner().invoke(app, [*arguments, *options, *more])
    if result.exit_code:
        raise ValueError(result.stderr)
    return json.loads(result.stdout)


def test_bad_samples_do_not_make_one_rank_build_again(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(bucket.paths[0]).parent
    bucket.put(write_shard(folder / f"omni-{SHARDS:06d}.tar", [{"__key__": "bad", "jpg": b"no image", "txt": b"x"}]))
    bucket.dataset().index()
    new_cache(monkeypatch, tmp_path, "another")
    bucket.asked()
    with pytest.raises(od.DataError, match="the first of 1 bad samples"):
        od.DataLoader(bucket.dataset(), batch_size=1, num_threads=0)
    assert bucket.asked() == {"LIST index": 1, "GET manifest": 1, "GET files": 1}


@pytest.mark.parametrize("is_there", [False, True])
def test_a_shared_folder_is_an_index_store_too(tmp_path: Path, is_there: bool) -> None:
    (tmp_path / "shards").mkdir()
    paths = omni_shards(tmp_path / "shards", shards=SHARDS, samples=SAMPLES)
    pattern, store = f"{tmp_path}/shards/*.tar", tmp_path / "store"
    if is_there:
        assert od.ShardDataset(pattern, RECIPE, index_store=store).index().path.exists()
    given = {"paths": pattern, "index_store": str(store), "folder": str(tmp_path), "ranks_per_node": 2}
    ranks = run_ranks(JOB, json.dumps(given), num_ranks=4, folder=tmp_path)
    measured = {name for rank in ranks for name in rank["measured"]}
    assert measured == (set() if is_there else {Path(path).name for path in paths})
    assert len({key for rank in ranks for key in rank["keys"]}) == SHARDS * SAMPLES
    assert len(list(store.glob("*/*.json"))) == len(list(store.glob("files/*.index"))) == 1
    assert not list(store.glob("parts/*/*"))
