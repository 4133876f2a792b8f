"""The index: mapped, shared, and equal to the tables it was made from."""

from __future__ import annotations

import pickle
import time
from pathlib import Path

import numpy as np
import pytest
from shard_factory import chat, jpeg, write_shard

from orchdata.bench import synthetic_index
from orchdata.loaders.index.build import build_index
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.table import Columns, summarize
from orchdata.loaders.modalities.builtin import TEXT
from orchdata.loaders.recipe import Recipe

IMAGE, AUDIO = 1, 2

ARRAYS = [name for name in Columns.__slots__ if name.startswith(("part_", "member_"))]


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return synthetic_index(tmp_path_factory.mktemp("index") / "synthetic.index", 50_000, seed=3, num_shards=7)


def test_totals_are_those_of_the_columns(synthetic: Index) -> None:
    assert synthetic.totals == summarize(synthetic, synthetic.modalities, {}, {"names": {}, "others": 0})


def test_synthetic_content_depends_on_its_arguments_only(tmp_path: Path, synthetic: Index) -> None:
    again = synthetic_index(tmp_path / "again.index", 50_000, seed=3, num_shards=7)
    other = synthetic_index(tmp_path / "other.index", 50_000, seed=4, num_shards=7)
    assert again.path.read_bytes() == synthetic.path.read_bytes()
    assert again.fingerprint == synthetic.fingerprint != other.fingerprint
    assert not np.array_equal(other.llm_tokens, synthetic.llm_tokens)
    assert len(synthetic_index(tmp_path / "one.index", 1, seed=0)) == 1


def test_arrays_are_read_only_and_the_index_pickles_as_its_path(synthetic: Index) -> None:
    for name in ARRAYS:
        with pytest.raises(ValueError, match="read-only"):
            getattr(synthetic, name)[0] = 1
    data = pickle.dumps(synthetic)
    assert len(data) < 1000
    assert np.array_equal(pickle.loads(data).llm_tokens, synthetic.llm_tokens)


def test_members_as_compose_takes_them(tmp_path: Path) -> None:
    sample = {"__key__": "k", "jpg": jpeg(80, 60), "txt": b"unused", "cls": b"1", "json": chat("<image> what", "a")}
    url = write_shard(tmp_path / "a.tar", [sample])
    index = build_index([url], Recipe())
    members = index.members(0)
    assert [(member.field, member.kind, member.header) for member in members] == [
        ("jpg", IMAGE, (80, 60)),
        ("json", TEXT, (0, 0)),
    ]
    assert [member.size for member in members] == [len(sample["jpg"]), len(sample["json"])]
    content = (tmp_path / "a.tar").read_bytes()
    for offset, size, encoding, field in index.read_spec(0):
        assert content[offset : offset + size] == sample[field]
        assert encoding == 0


def test_find(tmp_path: Path, synthetic: Index) -> None:
    assert synthetic.find("synthetic-000002.tar", synthetic.key(20_000)) == 20_000
    assert synthetic.find("synthetic-000001.tar", synthetic.key(20_000)) is None
    assert synthetic.find("other.tar", "x") is None

    urls = []
    for folder in "ab":
        (tmp_path / folder).mkdir()
        keys = ["same", f"only-{folder}", "längst"]
        urls.append(write_shard(tmp_path / folder / "x.tar", [{"__key__": key, "txt": b"t"} for key in keys]))
    index = build_index(urls, Recipe())
    assert [index.find(url, "same") for url in urls] == [0, 3]
    assert index.find("x.tar", "only-b") == 4
    assert index.find(urls[1], "längst") == 5
    with pytest.raises(ValueError, match=r"several shards called 'x.tar', name one of .*a/x.tar, .*b/x.tar"):
        index.find("x.tar", "same")


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:")) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_opening_and_reading_copies_nothing(tmp_path: Path) -> None:
    path = synthetic_index(tmp_path / "big.index", 400_000, seed=0).path
    assert path.stat().st_size > 50 << 20
    Index(path).llm_tokens.sum()
    before = anonymous_bytes()
    seconds = time.perf_counter()
    indexes = [Index(path) for _ in range(4)]
    seconds = time.perf_counter() - seconds
    for index in indexes:
        for name in ARRAYS:
            getattr(index, name).max()
        index.members(1000)
    assert anonymous_bytes() - before < 8 << 20
    assert seconds < 0.5  # 1 ms each
