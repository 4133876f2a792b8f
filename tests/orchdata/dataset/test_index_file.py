"""An index as a file: what a job asks the server for, what does not fit, replaced, damaged and forged files, parts."""

from __future__ import annotations

import json
import os
import shutil
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from changed_job import __file__ as CHANGED_JOB
from index_file_job import __file__ as JOB
from rank_jobs import run_ranks
from servers.fixtures import Proxied
from servers.proxy import Proxy, Request
from servers.s3_server import S3Server
from shard_factory import RECIPE, omni_samples, omni_shards, png, write_shard
from typer.testing import CliRunner

import orchdata as od
from orchdata.cli import app
from orchdata.loaders import recipe as recipes
from orchdata.loaders.index.index import KIND
from orchdata.loaders.index.table import TABLE_FORMAT
from orchdata.loaders.limits import Limits
from orchdata.loaders.shards import open as changes
from orchdata.loaders.shards.open import find_changes
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.sealed import head_of, seal

SHARDS = 6
SAMPLES = 4


class Bucket:
    """A bucket with shards, and a proxy that counts what is asked of it."""

    def __init__(self, server: S3Server, name: str, proxy: Proxy, folder: Path) -> None:
        self.server, self.name, self.proxy = server, name, proxy
        self.options = server.options_of("all", proxy.endpoint)
        self.pattern = f"s3://{name}/data/*.tar"
        self.file = f"s3://{name}/index/train.index"
        self.paths = omni_shards(folder, shards=SHARDS, samples=SAMPLES)
        for path in self.paths:
            self.put(path)

    def put(self, path: str) -> None:
        self.server.put(self.name, f"data/{Path(path).name}", Path(path).read_bytes())

    def dataset(self, **more: Any) -> od.ShardDataset:
        given = {"storage_options": self.options, "index_file": self.file} | more
        return od.ShardDataset(self.pattern, RECIPE, **given)

    def asked(self) -> Counter[str]:
        """How often each kind of request was made of each folder, since the last time; then it is forgotten."""
        seen = Counter(_called(each) for each in self.proxy.requests())
        self.proxy.clear()
        return seen

    def index(self, *more: str, out: str | None = None) -> Any:
        """What `orchdata index --out` reports."""
        options = [f"--storage-options={name}={value}" for name, value in self.options.items()]
        return index(self.pattern, "--out", out or self.file, *options, *more)


def index(*arguments: object, recipe: tuple[str, ...] = ("--recipe", "shard_factory:RECIPE", "--json")) -> Any:
    result = CliRunner().invoke(app, ["index", *map(str, arguments), *recipe])
    if result.exit_code:
        raise ValueError(result.stderr)
    return json.loads(result.stdout) if recipe else result.stdout


def _called(request: Request) -> str:
    if request.kind == "LIST":
        listed = next(part for part in request.query.split("&") if part.startswith("prefix="))
        return f"LIST {listed.removeprefix('prefix=').replace('%2F', '/').split('/')[0]}"
    return f"{request.method} {request.path.partition('/')[2].partition('/')[2].partition('/')[0]}"


@pytest.fixture
def bucket(s3_server: S3Server, new_bucket: Callable[[], str], proxied: Proxied, tmp_path: Path) -> Bucket:
    folder = tmp_path / "shards"
    folder.mkdir()
    return Bucket(s3_server, new_bucket(), proxied(s3_server), folder)


@pytest.fixture
def shards(tmp_path: Path) -> str:
    """A pattern of local shards, and `train.index` next to their folder."""
    (tmp_path / "shards").mkdir()
    omni_shards(tmp_path / "shards", shards=SHARDS, samples=SAMPLES)
    index(f"{tmp_path}/shards/*.tar", "--out", tmp_path / "train.index")
    return f"{tmp_path}/shards/*.tar"


def new_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> Path:
    """Be another node."""
    monkeypatch.setenv("ORCHDATA_CACHE", str(tmp_path / name))
    return tmp_path / name


def test_a_node_fetches_the_file_once_and_asks_for_no_shard(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = bucket.index()
    assert report["out"] == bucket.file
    built = od.ShardDataset(bucket.pattern, RECIPE, storage_options=bucket.options)
    expected, fourth = built.urls, built[3].key
    new_cache(monkeypatch, tmp_path, "another")
    bucket.asked()
    first = bucket.dataset()
    assert (len(first), first.urls) == (SHARDS * SAMPLES, expected)
    head = {"HEAD index": 1, "GET index": 1}
    assert bucket.asked() == head | {"GET index": 2}, "its head, and all of it"
    again = bucket.dataset()
    assert len(again) == SHARDS * SAMPLES
    assert bucket.asked() == head, "the node's copy"
    assert again[3].key == fourth
    od.DataLoader(bucket.dataset(), dp=(0, 2), index="require")
    assert bucket.server.get(bucket.name, "index/train.index") == first.index().path.read_bytes()


def test_a_job_looks_at_the_file_once_and_fetches_it_once_a_node(bucket: Bucket, tmp_path: Path) -> None:
    nodes, per_node = 2, 2
    bucket.index()
    bucket.asked()
    ranks = run_ranks(
        JOB, _arguments(bucket, tmp_path, per_node, steps=False), num_ranks=nodes * per_node, folder=tmp_path
    )
    assert bucket.asked() == {"HEAD index": 1, "GET index": 1 + nodes}
    assert [rank["measured"] for rank in ranks] == [[]] * len(ranks)


def _arguments(bucket: Bucket, folder: Path, per_node: int, **more: Any) -> str:
    given = {"paths": bucket.pattern, "options": bucket.options, "index_file": bucket.file, "folder": str(folder)}
    return json.dumps(given | {"ranks_per_node": per_node} | more)


def test_nodes_without_a_file_or_a_common_folder_are_an_error_with_the_command(bucket: Bucket, tmp_path: Path) -> None:
    ranks = run_ranks(JOB, _arguments(bucket, tmp_path, 1, index_file=None, steps=False), num_ranks=2, folder=tmp_path)
    errors = [rank["error"] for rank in ranks if "error" in rank]
    assert errors, "the first rank may have measured all before another one came"
    for error in errors:
        assert f"orchdata index '{bucket.pattern}' --storage-options endpoint=..." in error
        assert "--out URL" in error
        assert bucket.options["secret_access_key"] not in error


def test_parts_of_several_machines_become_the_index_of_one(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [tmp_path / f"{number}.index" for number in range(1, 4)]
    for number, part in enumerate(parts, 1):
        new_cache(monkeypatch, tmp_path, f"machine-{number}")
        assert index(shards, "--share", f"{number}/3", "--out", part)["shards"] == SHARDS // 3
    new_cache(monkeypatch, tmp_path, "another")
    said = index("--merge", *parts[::-1], "--out", tmp_path / "merged.index", recipe=())
    assert f"the index of {SHARDS} shards" in said
    heads = [head(tmp_path / name) for name in ("train.index", "merged.index")]
    assert heads[0].crcs == heads[1].crcs
    assert heads[0].values | {"build_id": ""} == heads[1].values | {"build_id": ""}
    assert len(od.ShardDataset(shards, RECIPE, index_file=tmp_path / "merged.index")) == SHARDS * SAMPLES

    forged(parts[2], lambda values: values | {"share": f"3/{10**12}"})
    with pytest.raises(ValueError, match=r"3\.index is damaged: it was not written by"):
        index("--merge", *parts, "--out", tmp_path / "merged.index", recipe=())
    forged(parts[2], lambda values: values | {"share": "3/3"})
    with pytest.raises(ValueError, match=r"parts 2/3 of the index are not among the files"):
        index("--merge", parts[0], parts[2], "--out", tmp_path / "merged.index", recipe=())
    with pytest.raises(od.MissingIndexError, match=r"is part 1/3 of an index: "):
        od.ShardDataset(shards, RECIPE, index_file=parts[0]).index()
    with pytest.raises(ValueError, match=r"omni-000000\.tar is in two"):
        index("--merge", *parts, parts[0], "--out", tmp_path / "merged.index", recipe=())
    index(shards, "--out", tmp_path / "other.index", recipe=("--json",))
    with pytest.raises(ValueError, match="of another recipe"):
        index("--merge", parts[0], tmp_path / "other.index", "--out", tmp_path / "merged.index", recipe=())
    for wrong in ("0/3", "4/3", "1/9", "1", "a/b"):
        with pytest.raises(ValueError, match="--share is I/N"):
            index(shards, "--share", wrong, "--out", parts[0])


class TestWhatDoesNotFit:
    """It is an error before the first step, with the command, and nothing is measured."""

    @pytest.mark.parametrize(
        ("paths", "reason"),
        [
            (["omni-00000[0-4].tar"], "has .*omni-000005.tar, which the paths do not name"),
            (["omni-000003.tar", "*.tar"], "after shards that come later"),
            (["*.tar", "other/*.tar"], "has no shard of .*other/"),
            (["omni-{000000..000006}.tar"], "has no shard of .*omni-000006.tar"),
        ],
    )
    def test_paths(self, shards: str, tmp_path: Path, paths: list[str], reason: str) -> None:
        given = [f"{tmp_path}/shards/{path}" for path in paths]
        with pytest.raises(od.MissingIndexError, match=f"{reason}.*orchdata index .* --out {tmp_path}/train.index"):
            od.ShardDataset(given, RECIPE, index_file=tmp_path / "train.index").index()

    @pytest.mark.parametrize("how", [{"columns": {"a": "b"}}, {"key": "last_dot"}, {"recipe": od.Recipe()}])
    def test_how_shards_are_read(self, shards: str, tmp_path: Path, how: dict[str, Any]) -> None:
        reason = "another recipe: orchdata index" if "recipe" in how else "or other columns, key or containers"
        with pytest.raises(od.MissingIndexError, match=reason):
            od.ShardDataset(shards, index_file=tmp_path / "train.index", **{"recipe": RECIPE} | how).index()

    def test_no_file(self, shards: str, tmp_path: Path) -> None:
        with pytest.raises(od.MissingIndexError, match=r"there is no index .*no\.index: orchdata index"):
            od.ShardDataset(shards, RECIPE, index_file=tmp_path / "no.index").index()
        with pytest.raises(ValueError, match="never built here"):
            od.ShardDataset(shards, RECIPE, index_file=tmp_path / "train.index").index(rebuild=True)


def test_a_file_that_is_replaced_meanwhile_is_an_error(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.index()
    dataset = bucket.dataset()
    assert len(dataset) == SHARDS * SAMPLES
    bucket.put(write_shard(Path(bucket.paths[0]).parent / f"omni-{SHARDS:06d}.tar", omni_samples(1, seed=98)))
    bucket.index()
    assert len(dataset.filter("tokens > 0")) == SHARDS * SAMPLES, "the node's copy of the former one"
    new_cache(monkeypatch, tmp_path, "another")
    with pytest.raises(od.DamagedIndexError, match="was replaced or cut since the first rank looked"):
        dataset.filter("tokens > 1").index()
    assert not list((tmp_path / "another").glob("index/*.index")), "nothing half is left"
    assert len(bucket.dataset()) == SHARDS * SAMPLES + 1


@pytest.mark.parametrize("at", [0, 200, -9])
def test_a_damaged_file_is_an_error(shards: str, tmp_path: Path, at: int) -> None:
    content = bytearray((tmp_path / "train.index").read_bytes())
    content[at] ^= 1
    (tmp_path / "train.index").write_bytes(content)
    with pytest.raises(od.DamagedIndexError, match=r"train\.index"):
        od.ShardDataset(shards, RECIPE, index_file=tmp_path / "train.index").index()


def test_a_damaged_copy_of_a_node_is_fetched_again(bucket: Bucket) -> None:
    bucket.index()
    path = bucket.dataset().index().path
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    assert bucket.dataset().index().path.read_bytes() == content


@pytest.mark.parametrize("name", ["../a.tar", "/etc/a.tar", "s3://b/a.tar", ""])
def test_a_forged_file_names_no_shard_outside_of_the_paths(shards: str, tmp_path: Path, name: str) -> None:
    def renamed(values: dict[str, Any]) -> dict[str, Any]:
        return values | {"shards": [[name, *values["shards"][0][1:]], *values["shards"][1:]]}

    forged(tmp_path / "train.index", renamed)
    with pytest.raises(od.DamagedIndexError, match="is not named by a path below the common folder"):
        od.ShardDataset(shards, RECIPE, index_file=tmp_path / "train.index").index()


def head(path: Path) -> Any:
    fd = os.open(path, os.O_RDONLY)
    try:
        return head_of(fd, KIND, TABLE_FORMAT)
    finally:
        os.close(fd)


def forged(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Seal the file again with another head, as whoever wrote it could."""
    known = head(path)
    content, _ = seal(KIND, TABLE_FORMAT, change(dict(known.values)), [path.read_bytes()[known.start :]])
    path.write_bytes(content)


class TestAnotherPlace:
    """An index file serves shards under another root: times do not count there, contents do."""

    def test_copies_with_other_times_serve_and_other_contents_do_not(self, shards: str, tmp_path: Path) -> None:
        shutil.copytree(tmp_path / "shards", tmp_path / "copy")  # with the same times
        file = tmp_path / "train.index"
        here, there = (
            od.ShardDataset(f"{tmp_path}/{name}/*.tar", RECIPE, index_file=file) for name in ("shards", "copy")
        )
        expected = [sample.key for sample in here]
        os.utime(tmp_path / "copy" / "omni-000001.tar")
        assert [sample.key for sample in there] == expected
        assert there.urls[0] == f"{tmp_path}/copy/omni-000000.tar"

        changed = tmp_path / "copy" / "omni-000000.tar"
        stat = changed.stat()
        changed.write_bytes(changed.read_bytes().replace(b"s0-0000", b"s0-000x"))
        os.utime(changed, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        again = od.ShardDataset(f"{tmp_path}/copy/*.tar", RECIPE, index_file=file)
        with pytest.raises(od.StaleIndexError, match="was rewritten since it was indexed"):
            again[0]

    def test_objects_of_equal_etags_serve_in_another_bucket(
        self, bucket: Bucket, new_bucket: Callable[[], str], tmp_path: Path
    ) -> None:
        bucket.index(out=str(tmp_path / "train.index"))
        other = new_bucket()
        for path in bucket.paths:
            bucket.server.put(other, f"data/{Path(path).name}", Path(path).read_bytes())
        how: dict[str, Any] = {"storage_options": bucket.options, "index_file": tmp_path / "train.index"}
        there = od.ShardDataset(f"s3://{other}/data/*.tar", RECIPE, **how)
        assert [sample.key for sample in there] == [sample.key for sample in bucket.dataset(**how)]
        first = f"data/{Path(bucket.paths[0]).name}"
        bucket.server.put(other, first, bucket.server.get(other, first)[:-512] + bytes(511) + b"x")
        with pytest.raises(od.StaleIndexError, match="was replaced since it was indexed.*orchdata index"):
            list(od.ShardDataset(f"s3://{other}/data/*.tar", RECIPE, **how))

    def test_files_that_records_name_are_compared_by_size_and_header(self, tmp_path: Path) -> None:
        here, there = tmp_path / "here", tmp_path / "there"
        (here / "media").mkdir(parents=True)
        for number in range(4):
            (here / "media" / f"{number}.png").write_bytes(png(40 + 10 * number, 50, seed=number))
        lines = [json.dumps({"image": f"{number}.png", "text": f"<image> {number}"}) for number in range(4)]
        (here / "0.jsonl").write_text("\n".join(lines))
        index(here / "0.jsonl", "--media-root", here / "media", "--out", tmp_path / "train.index")
        shutil.copytree(here, there, copy_function=shutil.copy)

        def dataset(folder: Path) -> od.ShardDataset:
            how = {"media_root": folder / "media", "index_file": tmp_path / "train.index"}
            return od.ShardDataset(folder / "0.jsonl", RECIPE, **how)

        assert [sample.key for sample in dataset(there)] == [sample.key for sample in dataset(here)]
        picture = there / "media" / "3.png"
        size = picture.stat().st_size
        for data in (png(50, 70, seed=3).ljust(size, b"\0")[:size], b"no picture", None):
            picture.unlink()
            if data is not None:
                picture.write_bytes(data)
            loader = od.DataLoader(dataset(there), batch_size=4, num_threads=0, on_error="skip")
            with pytest.raises(od.StaleIndexError, match="in another place .*orchdata index"):
                list(loader)
        with pytest.raises(od.MissingIndexError, match="another media_root"):
            od.ShardDataset(there / "0.jsonl", RECIPE, index_file=tmp_path / "train.index").index()


def test_shards_that_the_index_lacks_are_one_warning_after_the_first_step(bucket: Bucket) -> None:
    bucket.index()
    bucket.put(write_shard(Path(bucket.paths[0]).parent / f"omni-{SHARDS:06d}.tar", omni_samples(SAMPLES, seed=98)))
    bucket.asked()
    dataset = bucket.dataset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = od.DataLoader(dataset, batch_size=4, num_threads=0)
        assert "LIST data" not in bucket.asked()
        assert len([key for batch in loader for key in batch.sample_ids]) == SHARDS * SAMPLES
        for thread in threading.enumerate():
            if thread.name == "orchdata-new-shards":
                thread.join()
    said = [str(each.message) for each in caught if bucket.file in str(each.message)]
    assert len(said) == 1
    assert said[0].startswith(f"1 shard (the first: s3://{bucket.name}/data/omni-{SHARDS:06d}.tar)")
    assert bucket.asked()["LIST data"] == 1


def test_a_file_serves_a_release_that_judges_otherwise_and_none_that_counts_otherwise(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened() -> Any:
        return od.ShardDataset(shards, RECIPE, index_file=tmp_path / "train.index").index()

    expected = opened()
    with monkeypatch.context() as patch:
        patch.setattr(recipes, "VERDICTS", recipes.VERDICTS + 1)
        with pytest.warns(UserWarning, match=r"judges samples otherwise.*`?orchdata index --again .*--out "):
            assert opened().build_id == expected.build_id
    monkeypatch.setattr(recipes, "COUNTS", recipes.COUNTS + 1)
    with pytest.raises(od.MissingIndexError, match=r"counts samples otherwise: .*orchdata index .*--out "):
        opened()


def test_secrets_are_in_no_file(bucket: Bucket, tmp_path: Path, private_cache: Path) -> None:
    secrets = [bucket.options[name].encode() for name in ("secret_access_key", "access_key_id")]
    bucket.index()
    ranks = run_ranks(JOB, _arguments(bucket, tmp_path, 1), num_ranks=2, folder=tmp_path)
    dataset = bucket.dataset()
    dataset.index()
    files = [path for folder in (tmp_path, private_cache) for path in folder.rglob("*") if path.is_file()]
    assert len(files) > SHARDS
    shown = [bucket.server.get(bucket.name, "index/train.index"), json.dumps(ranks).encode(), repr(dataset).encode()]
    shown += [repr(dataset.named_file(bucket.file)).encode(), dataset.index_command.encode()]
    for content in [*(path.read_bytes() for path in files), *shown]:
        assert not any(secret in content for secret in secrets)


# Local shards that were rewritten: measured again by a new data set, refused by what began before.


AGAIN = "changed since the index was built: measured again"


@pytest.fixture
def three_shards(tmp_path: Path) -> list[str]:
    (tmp_path / "data").mkdir()
    three_shards = omni_shards(tmp_path / "data", shards=3, samples=4)
    od.ShardDataset(three_shards, RECIPE).index()
    return three_shards


def rewrite(three_shards: list[str], samples: int = 6) -> None:
    """The second shard, with other samples."""
    write_shard(Path(three_shards[1]), omni_samples(samples, prefix="other", seed=9))


def loader(three_shards: list[str], **options: Any) -> od.DataLoader:
    return od.DataLoader(od.ShardDataset(three_shards, RECIPE), global_batch_size=4, num_threads=0, **options)


def keys_of(loader: od.DataLoader) -> list[Any]:
    return sorted(key for batch in loader for key in batch.sample_ids)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_new_data_set_measures_a_rewritten_shard_again(three_shards: list[str], on_error: str) -> None:
    rewrite(three_shards)
    with pytest.warns(UserWarning, match=rf"omni-000001\.tar {AGAIN}"):
        reloaded = loader(three_shards, on_error=on_error)
    assert reloaded.dataset.index().num_samples == len(keys_of(reloaded)) == 4 + 6 + 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(od.ShardDataset(three_shards, RECIPE)) == 14  # nothing is measured a second time


def test_other_content_of_the_same_size_is_found(three_shards: list[str]) -> None:
    size = os.path.getsize(three_shards[1])
    write_shard(Path(three_shards[1]), omni_samples(4, prefix="t1-", seed=1))  # the same files under other names
    assert os.path.getsize(three_shards[1]) == size
    with pytest.warns(UserWarning, match=AGAIN):
        keys_of(loader(three_shards))


def test_a_copy_with_another_time_of_change_is_not_measured_again(three_shards: list[str]) -> None:
    os.utime(three_shards[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(keys_of(loader(three_shards))) == 12


def test_copies_beyond_the_compared_ones_are_reported(three_shards: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MOST_SHARDS", 2)
    for shard in three_shards:
        os.utime(shard)
    index = od.ShardDataset(three_shards, RECIPE).index(check=False)
    assert find_changes(index.shards, limits=Limits(), cache=CacheFolder()) == ([], 1)
    with pytest.warns(UserWarning, match="1 shard of the same size .* compared when it is opened"):
        loader(three_shards)


def test_require_and_a_run_under_way_refuse(three_shards: list[str]) -> None:
    under_way = loader(three_shards)
    rewrite(three_shards)
    with pytest.raises(od.StaleIndexError, match=r"omni-000001\.tar"):
        keys_of(loader(three_shards, index="require"))
    with pytest.raises(od.StaleIndexError, match=r"omni-000001\.tar"):
        keys_of(under_way)


def test_a_state_of_before_is_refused(three_shards: list[str]) -> None:
    before = loader(three_shards)
    next(iter(before))
    state = before.state_dict()
    rewrite(three_shards)
    with pytest.warns(UserWarning, match=AGAIN):
        after = loader(three_shards)
    with pytest.raises(od.StateError, match=r"contents, or .* differs.*3 shards \(omni-000000.tar to .* and '3 shards"):
        after.load_state_dict(state)


def test_one_rank_of_a_job_looks_and_all_measure_again(three_shards: list[str], tmp_path: Path) -> None:
    rewrite(three_shards)
    by_rank = run_ranks(CHANGED_JOB, str(tmp_path / "data"), num_ranks=3, folder=tmp_path)
    assert sum(rank["looked"] for rank in by_rank) == 2  # the old index, and the new one
    assert len({key for rank in by_rank for key in rank["keys"]}) == 14
    assert sum(len(rank["keys"]) for rank in by_rank) == 14
    assert [rank["warned"] for rank in by_rank].count(True) == 1
