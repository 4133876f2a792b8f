"""The index: mapped, shared, and equal to the tables it was made from."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jobs_recipes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shard_factory import RECIPE, omni_samples, omni_shards, write_shard
from text_shards import same, texts

from orchdata.bench import synthetic_index
from orchdata.loaders import compact
from orchdata.loaders.compact import RowsOfKeys, Strings
from orchdata.loaders.errors import ProcessError, StorageError
from orchdata.loaders.index import jobs
from orchdata.loaders.index.build import BuildProgress, build_index
from orchdata.loaders.index.fields import Piece, column_of_array, column_of_values, joined
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.joined import JoinedIndex
from orchdata.loaders.index.table import Columns
from orchdata.loaders.recipe import Recipe, TextPreprocessor
from orchdata.loaders.storage.cache import CacheFolder

pytestmark = pytest.mark.usefixtures("kept_parquet_processes")

IMAGE, AUDIO = 1, 2

ARRAYS = [name for name in Columns.__slots__ if name.startswith(("part_", "member_"))]


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return synthetic_index(tmp_path_factory.mktemp("index") / "synthetic.index", 50_000, seed=3, num_shards=7)


def test_arrays_are_read_only_and_the_index_pickles_as_its_path(synthetic: Index) -> None:
    for name in ARRAYS:
        with pytest.raises(ValueError, match="read-only"):
            getattr(synthetic, name)[0] = 1
    data = pickle.dumps(synthetic)
    assert len(data) < 1000
    assert np.array_equal(pickle.loads(data).llm_tokens, synthetic.llm_tokens)


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


# Several indexes as one: each row and part has the values of its own index, and damage is detected.


@pytest.fixture
def indexes(tmp_path: Path) -> list[Index]:
    broken = [{"__key__": "bad", "jpg": b"no image"}, *omni_samples(6, prefix="b", seed=9)]
    one = build_index(omni_shards(tmp_path, shards=2, samples=7), RECIPE)
    two = build_index([write_shard(tmp_path / "broken.tar", broken)], RECIPE)
    return [one, two, one]


def test_failures_names_and_totals_are_those_of_all(indexes: list[Index]) -> None:
    joined = pickle.loads(pickle.dumps(JoinedIndex(indexes)))
    assert [joined.failure(row).key for row in joined.bad_rows().tolist()] == ["bad"]
    assert joined.find_all("broken.tar", "b0003") == [14 + 4]
    key = indexes[0].key(3)
    assert joined.find_all("omni-000000.tar", key) == [3, 14 + 7 + 3], "in both sources that have it"
    assert joined.totals["samples"] == len(joined)
    assert joined.totals["llm_tokens"] == int(joined.llm_tokens[np.arange(len(joined))].sum())
    assert joined.lost_samples().tolist() == [0] * 5
    assert joined.sample_rows().tolist() == list(range(len(joined)))
    assert joined.build_id != JoinedIndex(indexes[:2]).build_id
    with pytest.raises(ValueError, match="row 35 of an index of 35"):
        joined.key(35)
    joined.check_unchanged()


# Compact columns behave as the lists and dicts that they replace.


@pytest.mark.parametrize("same_hashes", [False, True])
def test_rows_of_keys_are_those_of_a_dict(same_hashes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if same_hashes:
        monkeypatch.setattr(compact, "hash", lambda key: len(key), raising=False)
    generator, keys, known = random.Random(3), Strings(), dict[str, int]()
    rows = RowsOfKeys(keys)
    for row in range(400 if same_hashes else 5000):
        key = str(generator.randrange(3000))
        assert (key in rows) == (key in known)
        assert rows.setdefault(key, row) == known.setdefault(key, row)
        keys.append(key)


# Types of the user's own columns: one for all shards, in any order; what the index does not keep is named.


KEYS = ("a", "b", "c")


def text(*values: str | None) -> Piece:
    return Piece("text.csv", pa.array(values, pa.large_string()), True)


def stored(*values: Any) -> Piece:
    return Piece("stored.jsonl", column_of_values(values, "stored.jsonl", KEYS, "x"), False)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([text("1", " 2\n"), text("", "3")], [[1, 2], [None, 3]]),
        ([text("1", "2"), text("2.5")], [[1.0, 2.0], [2.5]]),
        ([text("1", "2"), text("x")], [["1", "2"], ["x"]]),
        ([text("007"), text("8")], [["007"], ["8"]]),
        ([text("", None)], [[None, None]]),
        ([text("1"), stored(2.5, None)], [[1.0], [2.5, None]]),
        ([text("1"), stored("de", None)], [["1"], ["de", None]]),
        ([stored(1, 2), stored(2.5)], [[1.0, 2.0], [2.5]]),
        ([stored(1, 2.5)], [[1.0, 2.5]]),
        ([stored(True, None), stored(None)], [[True, None], [None]]),
    ],
)
def test_the_type_is_that_of_all_shards_in_any_order(pieces: list[Piece], expected: list[list[Any]]) -> None:
    for order in itertools.permutations(range(len(pieces))):
        columns = joined([pieces[at] for at in order], "x")
        assert repr([column.to_pylist() for column in columns]) == repr([expected[at] for at in order])


@pytest.mark.parametrize(
    "pieces", [[stored(1), stored("x")], [stored(True), stored(1)], [stored(1), text("x")], [stored(True), text("1")]]
)
def test_shards_of_different_types_are_named(pieces: list[Piece]) -> None:
    for order in (pieces, pieces[::-1]):
        with pytest.raises(ValueError, match=r"index_fields: 'x' is \w+ in \w+\.\w+ and \w+ in"):
            joined(order, "x")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((1, "x"), "'x' is int and str; the index keeps"),
        ((None, [1]), "'x' is list"),
        (({"a": 1},), "'x' is dict"),
        ((2.5, True), "'x' is bool and float"),
        ((1 << 63,), "'x' cannot be kept: Python int too large"),
        ((2.5, (1 << 53) + 1), "'x' cannot be kept: Integer value 9007199254740993 is outside"),
        (("\ud800",), "'x' cannot be kept: 'utf-8' codec"),
        (("y", "y" * 2000), "sample 'b': 'x' has 2000 bytes, above 1024"),
    ],
)
def test_values_that_the_index_does_not_keep_are_named(values: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        column_of_values(values, "a.jsonl", KEYS, "x")


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([1, None], pa.uint8()), [1, None]),
        (pa.array([1.5, 2], pa.float32()), [1.5, 2.0]),
        (pa.array(["a", None, "a"]).dictionary_encode().dictionary_decode(), ["a", None, "a"]),
        (pa.array([datetime.date(2024, 1, 2)]), ["2024-01-02"]),
        (pa.array([True, None]), [True, None]),
        (pa.nulls(2), [None, None]),
    ],
)
def test_columns_of_files(array: pa.Array, expected: list[Any]) -> None:
    assert column_of_array(array, (), "a.parquet", KEYS, "x").to_pylist() == expected


def test_numbers_of_classes_are_their_names() -> None:
    column = column_of_array(pa.array([1, -1, None, 0]), ("cat", "dog"), "a.parquet", "abcd", "x")
    assert column.to_pylist() == ["dog", None, None, "cat"]
    with pytest.raises(ValueError, match=r"a\.parquet: 'x' cannot be kept"):
        column_of_array(pa.array([2]), ("cat", "dog"), "a.parquet", KEYS, "x")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (pa.array([[1]]), "'x' is list<"),
        (pa.array([{"a": 1}]), "'x' is struct<"),
        (pa.array([b"x"]), "'x' is binary"),
        (pa.array([1 << 63], pa.uint64()), "'x' cannot be kept: Integer value"),
    ],
)
def test_columns_that_the_index_does_not_keep_are_named(array: pa.Array, message: str) -> None:
    with pytest.raises(ValueError, match=rf"a\.parquet: {message}"):
        column_of_array(array, (), "a.parquet", KEYS, "x")


# Processes that measure shards: the same index, and one clear error if they cannot go on.


SUPPORT = Path(__file__).parents[2] / "support"


def processes(folder: Path) -> set[int]:
    return {int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")}


def is_running(process: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


@pytest.fixture
def no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(given: bytes) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(jobs, "ChildProcess", refuse)


def test_the_index_is_that_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = omni_shards(tmp_path, shards=2, samples=6)
    broken, empty = tmp_path / "broken.tar", tmp_path / "empty.jsonl"
    broken.write_bytes(Path(urls[0]).read_bytes()[:700])
    empty.touch()
    table = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": ["a cat", "on the mat"]}), table)
    large = texts(tmp_path / "large.jsonl", 6_000)
    urls += [str(broken), str(empty), str(table), large, texts(tmp_path / "small.jsonl", 3)]
    alone = build_index(urls, RECIPE, cache=CacheFolder(tmp_path / "alone"))

    seen: list[BuildProgress] = []
    shown: list[float] = []
    together = build_index(
        urls,
        RECIPE,
        cache=CacheFolder(tmp_path / "together"),
        jobs=2,
        progress=seen.append,
        under_way=lambda done, total: shown.append(done / total),
    )
    assert same(together, alone)
    assert sorted(each.url for each in seen) == sorted(urls) and all(each.measured for each in seen)
    assert shown == sorted(shown) and shown[-1] == 1

    # Nothing is measured again, except by force.
    monkeypatch.setattr(jobs, "ChildProcess", None)
    seen.clear()
    again = build_index(urls, RECIPE, cache=CacheFolder(tmp_path / "together"), jobs=2, progress=seen.append)
    assert same(again, alone) and not any(each.measured for each in seen)


@pytest.mark.slow
def test_a_process_that_ends_is_one_error_that_names_the_shard(tmp_path: Path) -> None:
    urls = [texts(tmp_path / f"{number}.jsonl", 30) for number in range(2)]
    recipe, cache = jobs_recipes.recipe(tmp_path), CacheFolder(tmp_path / "cache")
    (tmp_path / "kill").write_text("0 has 7 words")
    words = "was ended by SIGKILL, 3 times: is memory short"
    with pytest.raises(ProcessError, match=f"0.jsonl: the process that measures it {words}"):
        build_index(urls, recipe, cache=cache, jobs=2)
    assert not any(map(is_running, processes(tmp_path)))
    (tmp_path / "kill").unlink()
    index = build_index(urls, recipe, cache=cache, jobs=2)
    assert same(index, build_index(urls, recipe, cache=CacheFolder(tmp_path / "alone")))


@pytest.mark.slow
def test_errors_of_processes_are_those_of_threads(tmp_path: Path) -> None:
    urls = [texts(tmp_path / f"{number}.jsonl", 30) for number in range(2)]
    recipe, cache = jobs_recipes.recipe(tmp_path), CacheFolder(tmp_path / "cache")
    (tmp_path / "memory").write_text("1 has 7 words")
    with pytest.raises(MemoryError, match=r"1.jsonl.*no memory for this text"):
        build_index(urls, recipe, cache=cache, jobs=2)
    (tmp_path / "memory").unlink()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "facts").touch()  # which the child cannot make a folder
    with pytest.raises(StorageError, match="facts"):
        build_index(urls, recipe, cache=CacheFolder(tmp_path / "other"), jobs=2, retry_seconds=0)
    assert build_index(urls, recipe, cache=cache, jobs=2).num_samples == 60


@pytest.mark.usefixtures("no_children")
def test_what_cannot_be_sent_is_refused_with_the_way_out(tmp_path: Path) -> None:
    url = texts(tmp_path / "a.jsonl", 3)
    recipe = Recipe(text=TextPreprocessor(lambda text: [1] * len(text), id="characters"))
    with pytest.raises(ValueError, match=r"cannot be sent to processes.*lambda.*--jobs 1"):
        build_index([url], recipe, jobs=2)
    with pytest.raises(ValueError, match="num_threads=3 is for jobs=1"):
        build_index([url], RECIPE, jobs=2, num_threads=3)
    with pytest.raises(ValueError, match="jobs must be at least 1, got 0"):
        build_index([url], RECIPE, jobs=0)


@pytest.mark.slow
def test_two_builds_at_the_same_time_share_the_work(tmp_path: Path) -> None:
    urls = [texts(tmp_path / f"{number}.jsonl", 30) for number in range(4)]
    measured: list[str] = []

    def note(shard: BuildProgress) -> None:
        if shard.measured:
            measured.append(shard.url)

    def work() -> None:
        build_index(urls, RECIPE, cache=CacheFolder(tmp_path / "cache"), jobs=2, progress=note)

    builds = [threading.Thread(target=work) for _ in range(2)]
    for each in builds:
        each.start()
    for each in builds:
        each.join()
    assert sorted(measured) == urls
    alone = build_index(urls, RECIPE, cache=CacheFolder(tmp_path / "alone"))
    assert same(build_index(urls, RECIPE, cache=CacheFolder(tmp_path / "cache")), alone)


def run(arguments: list[str], folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "ORCHDATA_CACHE": str(folder / "cache"), "PYTHONPATH": str(SUPPORT)}
    environment["JOBS_FOLDER"] = str(folder)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *arguments], env=environment, start_new_session=True, **pipes)


@pytest.mark.slow
def test_the_command_reports_and_ends_at_ctrl_c(tmp_path: Path) -> None:
    urls = [texts(tmp_path / f"{number}.jsonl", 30) for number in range(3)]
    command = ["-m", "orchdata.cli", "index", *urls, "--recipe=jobs_recipes:FROM_ENVIRONMENT", "--json", "--jobs=2"]
    (tmp_path / "sleep").write_text("1 has 7 words")
    process = run(command, tmp_path)
    while len(processes(tmp_path)) < 2:
        assert process.poll() is None
        threading.Event().wait(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130 and "orchdata: stopped" in errors and "Traceback" not in errors
    assert not any(map(is_running, processes(tmp_path)))

    (tmp_path / "sleep").unlink()
    process = run(command, tmp_path)
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert json.loads(output)["samples"] == 90


@pytest.mark.slow
def test_children_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    url = texts(tmp_path / "a.jsonl", 30)
    (tmp_path / "sleep").write_text("a has 7 words")
    process = run(["-m", "orchdata.cli", "index", url, "--recipe=jobs_recipes:FROM_ENVIRONMENT", "--jobs=2"], tmp_path)
    while not processes(tmp_path):
        assert process.poll() is None
        threading.Event().wait(0.05)
    process.kill()
    process.communicate(timeout=120)
    while any(map(is_running, processes(tmp_path))):
        threading.Event().wait(0.05)


@pytest.mark.slow
def test_a_script_without_a_guard_is_refused(tmp_path: Path) -> None:
    url = texts(tmp_path / "a.jsonl", 3)
    script = tmp_path / "script.py"
    script.write_text(
        "from orchdata.loaders.index.build import build_index\nfrom orchdata.loaders.recipe import Recipe\n"
        f"build_index([{url!r}], Recipe(), jobs=2)\n"
    )
    _, errors = run([str(script)], tmp_path).communicate(timeout=240)
    assert errors.count("Traceback") == 1 and 'if __name__ == "__main__"' in errors
