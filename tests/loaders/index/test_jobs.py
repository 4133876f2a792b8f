"""Processes that measure shards: the same index, and one clear error if they cannot go on."""

from __future__ import annotations

import json
import os
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
from shard_factory import RECIPE, omni_shards
from text_shards import same, texts

from orchdata.loaders.errors import ProcessError, StorageError
from orchdata.loaders.index import jobs
from orchdata.loaders.index.build import BuildProgress, build_index
from orchdata.loaders.recipe import Recipe, TextPreprocessor
from orchdata.loaders.storage.cache import CacheFolder

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
        jobs=3,
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
def test_parts_of_one_large_file_are_measured_by_several_processes(tmp_path: Path) -> None:
    url = texts(tmp_path / "large.jsonl", 5000)
    recipe = jobs_recipes.recipe(tmp_path)
    index = build_index([url], recipe, cache=CacheFolder(tmp_path / "cache"), jobs=2)
    assert len(processes(tmp_path)) == 2 and os.getpid() not in processes(tmp_path)
    assert same(index, build_index([url], recipe, cache=CacheFolder(tmp_path / "alone")))
    assert np.array_equal(index.llm_tokens, [4] * 5000)
    assert not any(map(is_running, processes(tmp_path) - {os.getpid()}))


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
    command = [
        "-m",
        "orchdata.cli",
        "index",
        *urls,
        "--recipe",
        "jobs_recipes:FROM_ENVIRONMENT",
        "--json",
        "--jobs",
        "2",
    ]
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


def test_children_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    url = texts(tmp_path / "a.jsonl", 30)
    (tmp_path / "sleep").write_text("a has 7 words")
    process = run(
        ["-m", "orchdata.cli", "index", url, "--recipe", "jobs_recipes:FROM_ENVIRONMENT", "--jobs", "2"], tmp_path
    )
    while not processes(tmp_path):
        assert process.poll() is None
        threading.Event().wait(0.05)
    process.kill()
    process.communicate(timeout=120)
    while any(map(is_running, processes(tmp_path))):
        threading.Event().wait(0.05)


def test_a_script_without_a_guard_is_refused(tmp_path: Path) -> None:
    url = texts(tmp_path / "a.jsonl", 3)
    script = tmp_path / "script.py"
    script.write_text(
        "from orchdata.loaders.index.build import build_index\nfrom orchdata.loaders.recipe import Recipe\n"
        f"build_index([{url!r}], Recipe(), jobs=2)\n"
    )
    _, errors = run([str(script)], tmp_path).communicate(timeout=240)
    assert errors.count("Traceback") == 1 and 'if __name__ == "__main__"' in errors
