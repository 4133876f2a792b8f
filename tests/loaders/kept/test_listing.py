"""The cache folder as a list: by kind, by data, each index; what is damaged or foreign is listed as such."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest
from shard_factory import omni_shards
from typer.testing import CliRunner

import orchdata as od
from orchdata.cli import app
from orchdata.dataset.item_costs import kept as item_costs
from orchdata.hf import packing
from orchdata.loaders.index import facts, index, probed, shard_costs
from orchdata.loaders.index.build import build_index
from orchdata.loaders.index.fields import layer, merged
from orchdata.loaders.index.measuring import kept_sizes, kept_texts
from orchdata.loaders.kept.builds import building
from orchdata.loaders.kept.kinds import KINDS, LOCKS
from orchdata.loaders.kept.listing import listing
from orchdata.loaders.storage import mapped_array
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.node import copies
from orchdata.loaders.storage.sealed import seal
from orchdata.loaders.versions import (
    COSTS_FORMAT,
    FACTS_FORMAT,
    FIELDS_FORMAT,
    SIZES_FORMAT,
    TABLE_FORMAT,
    TEXTS_FORMAT,
)

REPOSITORY = Path(__file__).resolve().parents[3]
DAY = 24 * 3600.0


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    return omni_shards(tmp_path, shards=3, samples=9)


def test_one_table_has_all_kinds_with_their_formats() -> None:
    formats = {code: sealed.format for kind in KINDS for code, sealed in kind.sealed.items()}
    assert formats == {
        facts.KIND: FACTS_FORMAT,
        kept_texts.KIND: TEXTS_FORMAT,
        kept_sizes.KIND: SIZES_FORMAT,
        probed.KIND: FACTS_FORMAT,
        shard_costs.KIND: COSTS_FORMAT,
        index.KIND: TABLE_FORMAT,
        layer.KIND: FIELDS_FORMAT,
        merged.KIND: FIELDS_FORMAT,
        item_costs.KIND: item_costs.FORMAT,
    }
    named = {layer.FOLDER, mapped_array.KIND, packing.FOLDER, "item_costs", "shards", copies.FOLDER}
    assert {kind.folder for kind in KINDS} == named | {"facts", "texts", "sizes", "costs", "index"}


def test_no_code_makes_a_folder_that_the_table_lacks() -> None:
    """The names that `CacheFolder.make` and `file` are called with."""
    made = set()
    for folder in ("loaders", "orchdata"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr
                    in (
                        "make",
                        "file",
                    )
                ):
                    made |= {each.value for each in node.args[:1] if isinstance(each, ast.Constant)}
    assert {"costs", "facts", "index", LOCKS} <= made <= {kind.folder for kind in KINDS} | {LOCKS}


def test_kinds_data_and_indexes_are_listed(shards: list[str]) -> None:
    opened = build_index(shards, od.Recipe())
    found = listing(CacheFolder())
    assert {name: (kind.files, kind.in_use) for name, kind in found.kinds.items()} == {
        "facts": (3, 0),
        "texts": (3, 0),
        "costs": (3, 0),
        "index": (1, 1),
    }
    assert found.bytes == sum(kind.bytes for kind in found.kinds.values())
    (data,) = found.data.values()
    assert list(found.data) == [str(Path(shards[0]).parent)] and data.in_use and data.shards == 3
    assert data.bytes == {name: kind.bytes for name, kind in found.kinds.items()}
    (listed,) = found.indexes
    assert (listed.path, listed.shards, listed.samples) == (str(opened.path), 3, 27)
    assert listed.modalities == ("text", "image", "audio") and listed.in_use
    del opened
    with building(CacheFolder()):
        assert listing(CacheFolder()).builds == 1
    assert not listing(CacheFolder()).indexes[0].in_use


def test_what_is_damaged_newer_or_foreign_is_listed_as_such(shards: list[str], tmp_path: Path) -> None:
    build_index(shards, od.Recipe())
    cache = CacheFolder()
    damaged, *_ = (cache.root / "costs").iterdir()
    damaged.write_bytes(damaged.read_bytes()[:-1])
    cache.file("costs", f"{0:032x}.costs").write_bytes(bytes(100))
    cache.file("costs", "newer.costs").write_bytes(seal(b"cost", COSTS_FORMAT + 1, {}, [])[0])
    cache.file("costs", "earlier.costs").write_bytes(seal(b"cost", COSTS_FORMAT - 1, {}, [])[0])
    cache.file("costs", "odd.costs").write_bytes(seal(b"cost", COSTS_FORMAT, {"url": 3}, [])[0])
    cache.file("costs", "notes.txt").write_text("mine")
    cache.file("costs", "link.costs").symlink_to(tmp_path / "none")
    (cache.root / "index").rename(tmp_path / "moved")
    (cache.root / "index").symlink_to(tmp_path / "moved")
    os.mkfifo(cache.root / "pipe")
    found = listing(cache)
    costs = found.kinds["costs"]
    assert (costs.files, costs.damaged, costs.newer, costs.foreign) == (8, 2, 1, 2)
    assert found.foreign == 2 and "index" not in found.kinds
    assert CliRunner().invoke(app, ["cache"]).exit_code == 0


def test_the_command_prints_a_table_or_json(shards: list[str], private_cache: Path) -> None:
    run = CliRunner()
    assert run.invoke(app, ["cache"]).output == f"nothing is kept in {private_cache}\n"
    build_index(shards, od.Recipe())
    output = run.invoke(app, ["cache"]).output
    assert f"{private_cache}: 10 files" in output
    for words in ("costs of a shard under a recipe", str(Path(shards[0]).parent), "text, image, audio", "just now"):
        assert words in output
    found = json.loads(run.invoke(app, ["cache", "--json"]).output)
    assert found["files"] == 10 and found["kinds"]["costs"]["files"] == 3 and found["indexes"][0]["samples"] == 27
    assert found["indexes"][0]["last_used"].endswith("+00:00")


def test_the_command_prunes(shards: list[str], private_cache: Path) -> None:
    run = CliRunner()
    build_index(shards, od.Recipe())
    assert run.invoke(app, ["cache", "prune"]).output.startswith("removed 0 files, 0 B, from")
    assert "would remove 10 files" in run.invoke(app, ["cache", "prune", "--older-than", "0s", "--dry-run"]).output
    opened = build_index(shards, od.Recipe())
    output = run.invoke(app, ["cache", "prune", "--max-bytes", "0"]).output
    assert "removed 9 files" in output and "  costs: 3 files" in output and "not removed, in use: 1 file" in output
    del opened
    found = json.loads(run.invoke(app, ["cache", "prune", "--older-than", "0s", "--json"]).output)
    assert found["removed"]["index"]["files"] == 1 and found["left"] == {"files": 0, "bytes": 0}
    for option, value, words in (
        ("--older-than", "30", "--older-than is '30', and should be a time with its unit, such as 30d"),
        ("--max-bytes", "lots", "--max-bytes is 'lots', and should be a number of bytes, such as 50GB"),
    ):
        failed = run.invoke(app, ["cache", "prune", option, value])
        assert failed.exit_code == 1 and words in failed.output
