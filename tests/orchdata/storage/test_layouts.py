"""All that reads shards, over objects of storage: equal to the same over local files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard
from remote_epochs import LOADER, epoch
from servers.odd_server import OddServer
from servers.s3_server import S3Server
from shard_factory import RECIPE, omni_shards

import orchdata as od

pytestmark = pytest.mark.usefixtures("kept_parquet_processes")

ROWS = [
    {"text": f"text {number} " + "word " * (number % 7), "score": number / 10, "id": f"k{number}"}
    for number in range(40)
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of all kinds."""
    folder = tmp_path_factory.mktemp("files")
    tars = omni_shards(folder, shards=2, samples=12)
    for number, path in enumerate(tars):
        content = Path(path).read_bytes()
        (folder / f"packed-{number}.tar.gz").write_bytes(gzip.compress(content, mtime=0))
        (folder / f"packed-{number}.tar.zst").write_bytes(zstandard.compress(content))
    for number in (0, 1):
        rows = ROWS[20 * number : 20 * (number + 1)]
        table = pa.Table.from_pylist(rows)
        pa.parquet.write_table(table, folder / f"rows-{number}.parquet", row_group_size=8)
        with pa.ipc.new_stream(folder / f"rows-{number}.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=8)
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (folder / f"rows-{number}.jsonl").write_bytes(lines)
        (folder / f"rows-{number}.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
        (folder / f"rows-{number}.csv").write_text(
            "text,score,id\n" + "".join(f"{r['text']},{r['score']},{r['id']}\n" for r in rows)
        )
        (folder / f"pairs-{number}.pairs").write_bytes(b"".join(f"{r['id']}\t{r['text']}\n".encode() for r in rows))
    return folder


@pytest.fixture(scope="module")
def bucket(s3_server: S3Server, files: Path) -> str:
    name = s3_server.make_bucket("layouts")
    for path in files.iterdir():
        s3_server.put(name, f"d/{path.name}", path.read_bytes())
    return name


LAYOUTS = ["omni-*.tar", "packed-*.tar.gz", "packed-*.tar.zst"]
LAYOUTS += [f"rows-*.{suffix}" for suffix in ("parquet", "jsonl", "jsonl.gz", "csv")]


def some_slow(patterns: Iterable[str], *quick: str) -> pytest.MarkDecorator:
    """Layouts to test; all but some only where there is time."""
    slow = [each if each in quick else pytest.param(each, marks=pytest.mark.slow) for each in patterns]
    return pytest.mark.parametrize("pattern", slow)


class Both:
    """The same data set on this machine and in a bucket."""

    def __init__(self, server: S3Server, bucket: str, files: Path) -> None:
        self._server, self._bucket, self._files = server, bucket, files

    def __call__(self, pattern: str, **more: Any) -> tuple[od.ShardDataset, od.ShardDataset]:
        arguments = {"recipe": RECIPE} | more
        url = f"s3://{self._bucket}/d/{pattern}"
        local = od.ShardDataset(str(self._files / pattern), **arguments)
        return local, od.ShardDataset(url, storage_options=self._server.options, **arguments)


@pytest.fixture
def both(s3_server: S3Server, bucket: str, files: Path) -> Both:
    return Both(s3_server, bucket, files)


@pytest.mark.slow_cases("parquet")
@pytest.mark.parametrize("pattern", LAYOUTS)
def test_an_epoch(both: Both, pattern: str) -> None:
    local, remote = both(pattern)
    expected = epoch(local)
    assert epoch(remote) == expected
    assert epoch(remote, num_threads=0) == expected


def test_arrow_needs_a_cache_on_the_node(both: Both, tmp_path: Path) -> None:
    local, remote = both("rows-*.arrow")
    with pytest.raises(ValueError, match=r"rows-0.arrow: .*to_parquet.*od.Cache"):
        od.DataLoader(remote, **LOADER)
    assert repr(remote[0].parts) == repr(local[0].parts)
    assert epoch(remote, cache=od.Cache(tmp_path, max_bytes=1 << 30)) == epoch(local)
    pytest.importorskip("datasets")
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["one", "two"]})
    rows.save_to_disk(str(tmp_path / "saved"))
    datasets.load_from_disk(str(tmp_path / "saved")).to_parquet(str(tmp_path / "train.parquet"), batch_size=100)
    assert len(od.ShardDataset(str(tmp_path / "train.parquet"), recipe=RECIPE).index()) == 2


@some_slow(LAYOUTS, "omni-*.tar")
def test_worker_processes(both: Both, pattern: str) -> None:
    local, remote = both(pattern)
    assert epoch(remote, num_workers=2) == epoch(local)


@some_slow(LAYOUTS, "omni-*.tar", "rows-*.jsonl")
def test_single_samples_and_selections(both: Both, pattern: str) -> None:
    local, remote = both(pattern)
    assert [repr(remote[n].parts) for n in (0, 7, -1)] == [repr(local[n].parts) for n in (0, 7, -1)]
    for chosen in (
        lambda data: data.filter("tokens < 12"),
        lambda data: data.split("train", 0.5),
        lambda data: data.select([1, 3, 8]),
        lambda data: data[4:9],
    ):
        assert epoch(chosen(remote)) == epoch(chosen(local))


@pytest.mark.slow
def test_a_mixture_of_a_local_and_a_remote_source(both: Both) -> None:
    (tars, remote_tars), (rows, remote_rows) = both("omni-*.tar"), both("rows-*.jsonl")
    expected = mixed(tars, rows)
    assert mixed(remote_tars, rows) == expected
    assert mixed(tars, remote_rows) == expected
    assert mixed(remote_tars, remote_rows) == expected
    assert mixed(remote_tars, remote_rows, num_workers=1) == expected


def test_a_mixture_of_stores_with_other_options(both: Both, files: Path, odd_server: OddServer) -> None:
    (tars, remote_tars), (rows, _) = both("omni-*.tar"), both("rows-*.jsonl")
    odd_server.credentials = ("me", "word")
    for path in files.glob("rows-*.jsonl"):
        odd_server.put(path.name, path.read_bytes())
    place = odd_server.endpoint.removeprefix("http://")
    of_http = od.ShardDataset(f"http://me:word@{place}/rows-{{0,1}}.jsonl", recipe=RECIPE)
    assert mixed(remote_tars, of_http) == mixed(tars, rows)
    assert mixed(remote_tars, of_http, num_workers=1) == mixed(tars, rows)


def mixed(*datasets: od.ShardDataset, **options: Any) -> list[str]:
    sources = {name: od.Source(dataset, weight=0.5) for name, dataset in zip("ab", datasets, strict=True)}
    return epoch(od.Mixture(sources), **options)
