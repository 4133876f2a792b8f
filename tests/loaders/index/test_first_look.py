"""A first look at shards: what it says of each container, and that it reads only beginnings and keeps nothing."""

from __future__ import annotations

import dataclasses
import gzip
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from fault_data import CONTAINERS, RECIPE, given
from own_containers import Zips
from shard_factory import omni_samples, write_shard

import orchdata as od
from orchdata.loaders.index.build import build_index
from orchdata.loaders.index.first.look import first_look
from orchdata.loaders.index.probed import Probes
from orchdata.loaders.index.shard_costs import cost_shard
from orchdata.loaders.shards.first.begun import begun
from orchdata.loaders.shards.reading import Reading
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.local import LocalFile

TEXT = od.Recipe(image=None, audio=None)
NUM = 40


def rows(number: int) -> list[str]:
    """Texts of a shard; a look at the first ones knows the length of all."""
    return [f"{number:02d} {at:03d} words" for at in range(NUM)]


def write_text_shard(folder: Path, kind: str, number: int) -> Path:
    path, texts = folder / f"{number:03d}.{kind}", rows(number)
    if kind.startswith("tar"):
        plain = folder / "plain"
        write_shard(plain, [{"__key__": f"{at:04d}", "txt": text.encode()} for at, text in enumerate(texts)])
        plain.rename(path)
    elif kind == "parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=7)
    elif kind == "arrow":
        table = pa.table({"text": texts})
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=9)
    elif kind.startswith("jsonl"):
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    elif kind == "json":
        path.write_text(json.dumps([{"text": text} for text in texts]))
    else:
        between = {"csv": ",", "tsv": "\t"}.get(kind)
        header = [] if between is None else [f"id{between}text"]
        lines = texts if between is None else [f"{at}{between}{text}" for at, text in enumerate(texts)]
        path.write_text("".join(f"{line}\n" for line in [*header, *lines]))
    for suffix, compress in ((".gz", gzip.compress), (".zst", zstandard.ZstdCompressor().compress)):
        if kind.endswith(suffix):
            path.write_bytes(compress(path.read_bytes()))
    return path


KINDS = ["tar", "tar.gz", "tar.zst", "parquet", "arrow", "jsonl", "jsonl.gz", "jsonl.zst", "json", "csv", "tsv", "txt"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_look_says_about_what_the_index_says_and_keeps_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHDATA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    urls = [str(write_text_shard(tmp_path / "data", kind, number)) for number in range(5)]
    looked = first_look(urls, TEXT, 25)
    assert not (tmp_path / "cache").exists()
    index = build_index(urls, TEXT)
    assert (looked.num_shards, looked.looked_at, looked.measured) == (5, 5, 25)
    assert looked.num_bytes == sum(Path(url).stat().st_size for url in urls)
    assert index.num_samples == 200 and looked.totals["bad"] == 0 and not looked.failures and not looked.failed_shards
    exact = kind in ("parquet", "arrow")  # their files say how many rows there are
    assert looked.totals["samples"] == (200 if exact else pytest.approx(200, rel=0.15))
    tokens = looked.totals["llm_tokens"] / looked.totals["samples"]
    assert tokens == pytest.approx(index.totals["llm_tokens"] / 200, rel=0.01)
    assert looked.index_seconds > 0


@pytest.mark.parametrize("name", CONTAINERS)
def test_the_first_samples_of_a_shard_cost_what_they_cost_in_its_index(name: str, tmp_path: Path) -> None:
    """With media, to the last column; a shard of two samples ends before three."""
    folder = tmp_path / name
    folder.mkdir()
    CONTAINERS[name](folder)
    paths, media_root = given(folder)
    dataset = od.ShardDataset([str(path) for path in paths], RECIPE, media_root=media_root)
    index = dataset.index()
    for number, url in enumerate(dataset.urls):
        rules = dataset.reading.rules(url, dataset.recipe)
        how: dict[str, Any] = {"media_root": dataset.reading.root_of(url, rules), "rules": rules}
        with begun(url, 3, limits=RECIPE.limits, cache=CacheFolder(), **how) as (shard, beginning):
            costs = cost_shard(beginning.facts, lambda shard=shard: shard, RECIPE, Probes(RECIPE, None))
        start, stop = index.shard_rows[number : number + 2].tolist()
        assert beginning.is_whole == (stop - start <= 3)
        assert costs.columns.llm_tokens.tolist() == index.llm_tokens[start : min(stop, start + 3)].tolist()
        parts = slice(*index.part_offsets[[start, min(stop, start + 3)]].tolist())
        for column in ("part_modality", "part_positions", "part_tokens", "part_extent"):
            assert getattr(costs.columns, column).tolist() == getattr(index, column)[parts].tolist()
        members = slice(*index.member_offsets[[start, min(stop, start + 3)]].tolist())
        for column in ("member_offset", "member_size", "member_header", "member_encoding"):
            assert getattr(costs.columns, column).tolist() == getattr(index, column)[members].tolist()


def test_only_the_beginnings_of_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    sound_read, sound_into = LocalFile.read, LocalFile.read_into

    def noted(self: LocalFile, offset: int, size: int) -> bytes:
        data = sound_read(self, offset, size)
        read.append(offset + len(data))
        return data

    def noted_into(self: LocalFile, offset: int, buffer: memoryview) -> int:
        got = sound_into(self, offset, buffer)
        read.append(offset + got)
        return got

    monkeypatch.setattr(LocalFile, "read", noted)
    monkeypatch.setattr(LocalFile, "read_into", noted_into)
    noise = bytes(range(256)) * 4000
    many = [{"__key__": f"{at:04d}", "txt": b"words", "bin": noise} for at in range(200)]
    url = write_shard(tmp_path / "large.tar", many)
    assert first_look([url], TEXT, 10).totals["samples"] == pytest.approx(200, rel=0.1)
    assert max(read) < Path(url).stat().st_size / 2


def test_shards_are_spread_and_seeded(tmp_path: Path) -> None:
    urls = [str(write_text_shard(tmp_path, "tar", number)) for number in range(70)]
    looked = first_look(urls, TEXT, 1000)
    assert looked.looked_at == 32 and looked.measured == 32 * 32
    assert first_look(urls, TEXT, 1000).totals == looked.totals
    assert first_look(urls, TEXT, 3).looked_at == 3


def test_bad_samples_and_shards_count_and_are_named(tmp_path: Path) -> None:
    urls = [str(write_text_shard(tmp_path, "tar", number)) for number in range(4)]
    samples = omni_samples(10)
    samples[1]["jpg"] = b"no picture"
    urls.append(write_shard(tmp_path / "bad.tar", samples))
    (tmp_path / "cut.tar.gz").write_bytes(gzip.compress(bytes(10_000))[:20])
    (tmp_path / "no.parquet").write_bytes(b"PAR1 and nothing else")
    urls += [str(tmp_path / "cut.tar.gz"), str(tmp_path / "no.parquet")]
    looked = first_look(urls, od.Recipe(), 70)
    assert [failure.key for failure in looked.failures] == ["s0001"]
    assert {Path(failure.shard).name for failure in looked.failed_shards} == {"cut.tar.gz", "no.parquet"}
    assert looked.totals["bad"] == 1


def test_damage_after_the_beginning_is_not_seen(tmp_path: Path) -> None:
    texts = [np.random.default_rng(at).bytes(100_000).hex() for at in range(60)]
    plain = write_shard(tmp_path / "a.tar", [{"__key__": f"{at:03d}", "txt": t.encode()} for at, t in enumerate(texts)])
    data = Path(plain).read_bytes()
    (tmp_path / "b.tar").write_bytes(data[:-2000])
    noisy = zstandard.ZstdCompressor(level=1).compress(data)
    (tmp_path / "c.tar.zst").write_bytes(noisy[: len(noisy) - 8])
    for name in ("b.tar", "c.tar.zst"):
        looked = first_look([str(tmp_path / name)], TEXT, 5)
        assert looked.measured == 5 and not looked.failures and not looked.failed_shards
    assert build_index([str(tmp_path / "c.tar.zst")], TEXT).totals["bad"] == 1


@dataclasses.dataclass(frozen=True)
class Noting(Zips):
    """Notes which samples it was asked for."""

    def open(self, source: Any) -> Any:
        shard = super().open(source)
        read = shard.read
        shard.read = lambda rows: (ASKED.extend(rows), read(rows))[1]  # type: ignore[func-returns-value,method-assign]
        return shard


ASKED: list[int] = []


def test_a_container_of_ones_own_is_asked_for_the_first_samples_alone(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as out:
        for number in range(50):
            out.writestr(f"{number:02d}.txt", f"text {number:02d}")
    looked = first_look([str(tmp_path / "a.zip")], TEXT, 4, reading=Reading(containers=(Noting(),)))
    assert looked.totals["samples"] == 50 and set(ASKED) == {0, 1, 2, 3}


@pytest.mark.parametrize("limit", [0, -3])
def test_a_limit_is_at_least_one(limit: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        first_look([str(tmp_path / "a.tar")], TEXT, limit)
