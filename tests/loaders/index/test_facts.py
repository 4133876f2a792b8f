"""Facts in the cache: fresh ones are used, stale or damaged ones are not."""

from __future__ import annotations

import io
import os
import tarfile
from contextlib import ExitStack, closing
from pathlib import Path

import pyarrow as pa
import pytest

from orchdata.loaders import versions
from orchdata.loaders.index.facts import KIND, facts_path, load_facts
from orchdata.loaders.limits import Limits
from orchdata.loaders.shards.open import open_shard
from orchdata.loaders.shards.shard import SCHEMA, Facts, FactsTable, Shard
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.sealed import read_sealed, seal
from orchdata.loaders.versions import KEPT_FORMAT


@pytest.fixture
def cache(tmp_path: Path) -> CacheFolder:
    return CacheFolder(tmp_path / "cache")


class Loads:
    """Loads facts, and counts the shards that were scanned for them."""

    def __init__(self) -> None:
        self.scans = 0

    def __call__(self, url: str, *, cache: CacheFolder, limits: Limits | None = None, force: bool = False) -> Facts:
        limits = limits or Limits()
        with ExitStack() as opened:

            def shard() -> Shard:
                self.scans += 1
                return opened.enter_context(closing(open_shard(url, limits=limits, cache=cache)))

            return load_facts(url, shard, limits=limits, cache=cache, force=force)


@pytest.fixture
def load() -> Loads:
    return Loads()


NAMES = tuple(f"{key}.{field}" for key in "abcde" for field in ("txt", "pth"))  # enough rows for facts to be stored


def shard(path: Path, *names: str) -> str:
    with tarfile.open(path, "w") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
    return str(path)


def test_facts_are_scanned_once(tmp_path: Path, cache: CacheFolder, load: Loads) -> None:
    url = shard(tmp_path / "a.tar", *NAMES)
    first = load(url, cache=cache)
    assert first.table.arrow().schema == SCHEMA
    assert load(url, cache=cache) == first
    assert load.scans == 1
    load(url, cache=cache, force=True)
    assert load.scans == 2
    meta = first.meta
    assert (meta.url, meta.size, meta.ignored) == (url, Path(url).stat().st_size, {"pth": 5})
    assert [path.name for path in (tmp_path / "cache" / "facts").iterdir()] == [Path(facts_path(url, cache=cache)).name]


@pytest.mark.parametrize("change", ["content", "time", "limits", "damage", "other table", "rules"])
def test_stale_facts_are_scanned_again(
    tmp_path: Path, cache: CacheFolder, load: Loads, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = shard(tmp_path / "a.tar", *NAMES)
    load(url, cache=cache)
    limits = Limits()
    kept = Path(facts_path(url, cache=cache))
    if change == "content":
        shard(tmp_path / "a.tar", *(f"{i}.txt" for i in range(30)))
    elif change == "time":
        os.utime(url, ns=(1, 1))
    elif change == "limits":
        limits = Limits(text_bytes=2)
    elif change == "damage":
        kept.write_bytes(kept.read_bytes()[:-50])
    elif change == "rules":
        monkeypatch.setattr(versions, "VERDICTS", 9)
    else:
        head, body = read_sealed(kept, KIND, KEPT_FORMAT)
        kept.write_bytes(seal(KIND, KEPT_FORMAT + 1, head.values, [body])[0])
    table = load(url, limits=limits, cache=cache).table
    assert load.scans == 2
    assert len(table) == (30 if change == "content" else 10)
    assert (0 in table.errors) == (change == "limits")


def test_large_facts_come_back(tmp_path: Path, cache: CacheFolder, load: Loads) -> None:
    url = shard(tmp_path / "a.tar", *(f"{i}.txt" for i in range(3_000)))
    first = load(url, cache=cache)
    kept = Path(facts_path(url, cache=cache)).stat().st_size
    assert first.table.arrow().nbytes > 3 * kept  # compressed
    assert load(url, cache=cache) == first
    assert load.scans == 1


def test_facts_that_do_not_fit_in_one_batch_are_not_kept_in_part(
    tmp_path: Path, cache: CacheFolder, load: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow splits a column of more than 2 GiB of strings."""
    url = shard(tmp_path / "a.tar", *NAMES)
    whole = FactsTable.arrow
    monkeypatch.setattr(FactsTable, "arrow", lambda self: pa.concat_tables([whole(self)[:3], whole(self)[3:]]))
    assert [len(load(url, cache=cache).table) for _ in range(2)] == [10, 10]
    assert load.scans == 2
