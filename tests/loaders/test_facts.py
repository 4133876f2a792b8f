"""Facts kept beside the cache: fresh ones are used, stale or damaged ones are not."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

import orchdata.loaders.facts
from orchdata.loaders.cache import CacheFolder
from orchdata.loaders.columns import SCHEMA, FactsMeta
from orchdata.loaders.errors import StorageError
from orchdata.loaders.facts import KIND, facts_path, load_facts
from orchdata.loaders.limits import Limits
from orchdata.loaders.sealed import read_sealed, seal
from orchdata.loaders.versions import FACTS_FORMAT, RULES


@pytest.fixture
def cache(tmp_path: Path) -> CacheFolder:
    return CacheFolder(tmp_path / "cache")


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shards that were scanned."""
    scanned: list[str] = []
    original = orchdata.loaders.facts.open_shard

    def counting(url: str, *, limits: Limits, cache: CacheFolder) -> object:
        scanned.append(url)
        return original(url, limits=limits, cache=cache)

    monkeypatch.setattr(orchdata.loaders.facts, "open_shard", counting)
    return scanned


NAMES = tuple(f"{key}.{field}" for key in "abcde" for field in ("txt", "pth"))  # enough that facts are kept


def shard(path: Path, *names: str) -> str:
    with tarfile.open(path, "w") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
    return str(path)


def test_facts_are_scanned_once(tmp_path: Path, cache: CacheFolder, scans: list[str]) -> None:
    url = shard(tmp_path / "a.tar", *NAMES)
    first = load_facts(url, limits=Limits(), cache=cache)
    assert first.schema.remove_metadata() == SCHEMA
    assert load_facts(url, limits=Limits(), cache=cache).equals(first, check_metadata=True)
    assert len(scans) == 1
    load_facts(url, limits=Limits(), cache=cache, force=True)
    assert len(scans) == 2
    meta = FactsMeta.of(first.schema)
    assert (meta.url, meta.size, meta.ignored) == (url, Path(url).stat().st_size, {"pth": 5})
    assert [path.name for path in (tmp_path / "cache" / "facts").iterdir()] == [
        facts_path(url, limits=Limits(), cache=cache).name
    ]


@pytest.mark.parametrize("change", ["content", "time", "limits", "damage", "other table", "rules"])
def test_stale_facts_are_scanned_again(
    tmp_path: Path, cache: CacheFolder, scans: list[str], change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = shard(tmp_path / "a.tar", *NAMES)
    load_facts(url, limits=Limits(), cache=cache)
    limits = Limits()
    kept = facts_path(url, limits=limits, cache=cache)
    if change == "content":
        shard(tmp_path / "a.tar", *(f"{i}.txt" for i in range(30)))
    elif change == "time":
        os.utime(url, ns=(1, 1))
    elif change == "limits":
        limits = Limits(text_bytes=2)
    elif change == "damage":
        kept.write_bytes(kept.read_bytes()[:-50])
    elif change == "rules":
        monkeypatch.setattr(orchdata.loaders.facts, "RULES", RULES + 1)
    else:
        head, body = read_sealed(kept, KIND, FACTS_FORMAT)
        kept.write_bytes(seal(KIND, FACTS_FORMAT + 1, head.values, [body])[0])
    table = load_facts(url, limits=limits, cache=cache)
    assert len(scans) == 2
    assert table.num_rows == (30 if change == "content" else 10)
    assert (table["error"][0].as_py() is not None) == (change == "limits")


def test_facts_of_a_few_members_are_not_kept(tmp_path: Path, cache: CacheFolder, scans: list[str]) -> None:
    url = shard(tmp_path / "a.tar", "a.txt", "a.pth")
    tables = [load_facts(url, limits=Limits(), cache=cache) for _ in range(2)]
    assert tables[0].equals(tables[1], check_metadata=True)
    assert len(scans) == 2  # no more work than reading them would be
    assert not any((tmp_path / "cache" / "facts").iterdir())


def test_large_facts_come_back(tmp_path: Path, cache: CacheFolder, scans: list[str]) -> None:
    url = shard(tmp_path / "a.tar", *(f"{i}.txt" for i in range(3_000)))
    first = load_facts(url, limits=Limits(), cache=cache)
    assert first.nbytes > 3 * facts_path(url, limits=Limits(), cache=cache).stat().st_size  # compressed
    assert load_facts(url, limits=Limits(), cache=cache).equals(first, check_metadata=True)
    assert len(scans) == 1


def test_beside_the_shard_only_when_asked(tmp_path: Path, cache: CacheFolder, scans: list[str]) -> None:
    url = shard(tmp_path / "a.tar", "a.txt")
    load_facts(url, limits=Limits(), cache=cache)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["a.tar"]
    for _ in range(2):
        load_facts(url, limits=Limits(), cache=cache, beside=True)
    assert (tmp_path / ".a.tar.odfacts").is_file()
    assert len(scans) == 2


def test_a_damaged_compressed_shard_is_one_row(tmp_path: Path, cache: CacheFolder) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(b"\x1f\x8b\x08 and then nonsense")
    (row,) = load_facts(str(path), limits=Limits(), cache=cache).to_pylist()
    assert row["error"].startswith("cannot be decompressed: gzip data damaged")
    assert (row["sample"], row["key"], row["field"], row["kind"]) == (0, "", "", 255)


def test_an_absent_shard_raises(tmp_path: Path, cache: CacheFolder) -> None:
    with pytest.raises(StorageError, match=r"absent\.tar: cannot be opened"):
        load_facts(str(tmp_path / "absent.tar"), limits=Limits(), cache=cache)
    with pytest.raises(ValueError, match="unknown kind of shard"):
        load_facts("a.zip", limits=Limits(), cache=cache)
