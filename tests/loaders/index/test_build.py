"""Building the index: in parallel, only changed shards, completely or not at all."""

from __future__ import annotations

import _thread
import errno
import gzip
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forked_program import ForkedProgram
from fresh_index import content
from shard_factory import omni_samples, omni_shards, write_shard

from orchdata.loaders import recipe as recipes
from orchdata.loaders.errors import DataError, FieldError, StaleIndexError, StorageError
from orchdata.loaders.index import build, table
from orchdata.loaders.index.build import BuildProgress, build_index
from orchdata.loaders.index.costs import ShardCosts, cost_shard
from orchdata.loaders.index.facts import Probes
from orchdata.loaders.index.index import open_index
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.builtin import TEXT
from orchdata.loaders.recipe import ImagePreprocessor, Recipe, TextPreprocessor
from orchdata.loaders.shards.fields import GZIP, RAW
from orchdata.loaders.shards.shard import SCHEMA, Facts, FactsMeta, FactsTable
from orchdata.loaders.shards.tar import TarShard
from orchdata.loaders.storage import local
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.sealed import NOTE_SUFFIX
from orchdata.order.order import Order


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the shards that were scanned."""
    seen: list[str] = []
    scan = TarShard.facts

    def counted(self: TarShard) -> Any:
        seen.append(Path(self.url).name)
        return scan(self)

    monkeypatch.setattr(TarShard, "facts", counted)
    yield seen


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    return omni_shards(tmp_path, shards=3, samples=10)


def names(urls: list[str]) -> list[str]:
    return [Path(url).name for url in urls]


def test_rows_follow_the_shards_in_order(shards: list[str]) -> None:
    shuffled = [shards[1], shards[2], shards[0]]
    index = build_index(shuffled, Recipe(), num_threads=3)
    assert [info.url for info in index.shards] == shuffled
    assert index.shard.tolist() == [0] * 10 + [1] * 10 + [2] * 10
    assert index.shard_rows.tolist() == [0, 10, 20, 30]
    assert [index.key(row) for row in (0, 10, 29)] == ["s1-0000", "s2-0000", "s0-0009"]
    assert [info.size for info in index.shards] == [Path(url).stat().st_size for url in shuffled]
    assert index.totals["samples"] == 30 and index.totals["bad"] == 0
    assert content(index) == content(build_index(shuffled, Recipe(), num_threads=1, force=True))


def test_a_second_build_reads_nothing_and_rewrites_nothing(shards: list[str], scans: list[str]) -> None:
    first = build_index(shards, Recipe())
    assert sorted(scans) == names(shards)
    written = first.path.stat()
    scans.clear()
    steps: list[BuildProgress] = []
    second = build_index(shards, Recipe(), progress=steps.append)
    assert scans == []
    assert [(step.measured, step.done, step.total, step.samples) for step in steps] == [
        (False, done, 3, 10) for done in (1, 2, 3)
    ]
    assert (second.path.stat().st_mtime_ns, second.path.stat().st_ino) == (written.st_mtime_ns, written.st_ino)
    forced = build_index(shards, Recipe(), force=True)
    assert sorted(scans) == names(shards)
    assert content(forced) == content(second) and forced.path.stat().st_ino != written.st_ino  # merged again


def test_only_a_changed_shard_and_a_new_one_are_scanned(tmp_path: Path, shards: list[str], scans: list[str]) -> None:
    before = build_index(shards, Recipe())
    write_shard(Path(shards[1]), omni_samples(7, prefix="new"))
    scans.clear()
    after = build_index(shards, Recipe())
    assert scans == [Path(shards[1]).name]
    assert after.num_samples == 27 and after.key(10) == "new0000"
    assert after.fingerprint != before.fingerprint
    assert before.num_samples == 30 and before.key(10) == "s1-0000"  # still mapped, unchanged

    scans.clear()
    more = [*shards, write_shard(tmp_path / "more.tar", omni_samples(3, prefix="more"))]
    assert build_index(more, Recipe()).num_samples == 30
    assert scans == ["more.tar"]


def test_text_edited_in_place_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write_shard(path, [{"__key__": "k", "txt": b"two words"}])
    recipe = Recipe(text=TextPreprocessor(lambda text: [1] * len(text.split()), id="words"))
    assert build_index([str(path)], recipe).llm_tokens.tolist() == [2]
    path.write_bytes(path.read_bytes().replace(b"two words", b"now 3 wor"))  # size and headers stay
    assert build_index([str(path)], recipe).llm_tokens.tolist() == [3]


def test_another_recipe_needs_no_scan_and_keeps_the_first(shards: list[str], scans: list[str]) -> None:
    first = build_index(shards, Recipe())
    scans.clear()
    second = build_index(shards, Recipe(image=ImagePreprocessor(max_tokens=4)))
    assert scans == []
    assert second.totals["llm_tokens"] < first.totals["llm_tokens"]
    assert second.recipe["image"]["max_tokens"] == 4
    opened = open_index(shards, Recipe())
    assert opened is not None and opened.fingerprint == first.fingerprint != second.fingerprint
    build_index(shards, Recipe(limits=Limits(image_pixels=10**6)))  # facts hold the limits
    assert sorted(scans) == names(shards)


def test_facts_that_do_not_fit_in_one_batch_are_not_kept_in_part(
    shards: list[str], scans: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow splits a column of more than 2 GiB of strings."""
    whole = FactsTable.arrow
    monkeypatch.setattr(FactsTable, "arrow", lambda self: pa.concat_tables([whole(self)[:3], whole(self)[3:]]))
    for tokens in (8, 9):  # where facts are kept, another recipe scans nothing
        assert build_index(shards, Recipe(image=ImagePreprocessor(max_tokens=tokens))).num_samples == 30
    assert sorted(scans) == sorted(2 * names(shards))


def test_open_index_finds_only_what_was_built(shards: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_index(shards, Recipe()) is None
    built = build_index(shards, Recipe())
    assert open_index(shards[::-1], Recipe()) is None
    assert open_index(shards[:2], Recipe()) is None
    assert open_index(shards, Recipe(audio=None)) is None
    monkeypatch.chdir(Path(shards[0]).parent)
    for url in shards:
        Path(url).unlink()  # no shard is read
    opened = open_index(names(shards), Recipe())
    assert opened is not None and opened.path == built.path


def test_bad_shards_and_samples_are_rows(tmp_path: Path, shards: list[str]) -> None:
    (tmp_path / "junk.tar").write_bytes(b"no tar at all" * 100)
    (tmp_path / "empty.tar").write_bytes(b"")
    (tmp_path / "broken.tar.gz").write_bytes(b"\x1f\x8b" + bytes(50))
    cut = tmp_path / "cut.tar"
    cut.write_bytes(Path(shards[0]).read_bytes()[:20_000])
    samples = [{"__key__": "ok", "txt": b"t"}, {"__key__": "mark", "txt": b"see <image>"}]
    urls = [str(tmp_path / name) for name in ("junk.tar", "empty.tar", "broken.tar.gz", "cut.tar")]
    urls.append(write_shard(tmp_path / "marks.tar", samples))
    for _ in range(2):  # also if everything is cached
        index = build_index(urls, Recipe())
        failures = [index.failure(int(row)) for row in index.bad_rows()]
        assert index.totals["bad"] == len(failures) == 5
        assert [(Path(failure.shard).name, failure.key) for failure in failures[:3]] == [
            ("junk.tar", ""),
            ("empty.tar", ""),
            ("broken.tar.gz", ""),
        ]
        assert "tar" in failures[0].reason and "empty" in failures[1].reason and "gzip" in failures[2].reason
        assert failures[4] == DataError(urls[-1], "mark", "txt", failures[4].reason)
        assert "<image> placeholder 1 of 1 has no image" in failures[4].reason
    good = np.setdiff1d(np.arange(len(index)), index.bad_rows())
    assert index.llm_tokens[good].min() > 0 and index.llm_tokens[index.bad_rows()].max() == 0
    order = Order(len(index), shuffle=None, seed=0, excluded=index.bad_rows())
    assert order.rows(0, 0, order.num_samples)[1].tolist() == good.tolist()


def test_a_missing_shard_is_an_error(tmp_path: Path, shards: list[str]) -> None:
    with pytest.raises(StorageError, match="absent.tar: cannot be opened: No such file"):
        build_index([*shards, str(tmp_path / "absent.tar")], Recipe())


def test_a_build_killed_before_its_rename_leaves_the_old_index(shards: list[str], tmp_path: Path) -> None:
    old = build_index(shards, Recipe())
    write_shard(Path(shards[0]), omni_samples(4, prefix="new"))
    code = (
        "import os, signal, sys\n"
        "from orchdata.loaders.index.build import build_index\n"
        "from orchdata.loaders.recipe import Recipe\n"
        "replace = os.replace\n"
        "def kill(source, target):\n"
        "    if os.path.basename(os.path.dirname(target)) == 'index':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return replace(source, target)\n"
        "os.replace = kill\n"
        "build_index(sys.argv[1:], Recipe())\n"
    )
    assert ForkedProgram(code, *shards, folder=tmp_path).finish().returncode == -9
    kept = open_index(shards, Recipe())
    assert kept is not None and kept.fingerprint == old.fingerprint and kept.num_samples == 30

    left = list(old.path.parent.glob(".*.tmp"))
    assert len(left) == 1
    days_ago = time.time() - 2 * 24 * 3600
    os.utime(left[0], (days_ago, days_ago))
    assert build_index(shards, Recipe()).num_samples == 24
    assert [path for path in old.path.parent.iterdir() if path.suffix != NOTE_SUFFIX] == [old.path]


def test_very_many_shards_are_taken_by_stretches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = [write_shard(tmp_path / f"{number:03d}.tar", [{"__key__": "k", "txt": b"t"}]) for number in range(130)]
    steps: list[BuildProgress] = []
    index = build_index(urls, Recipe(), num_threads=1, progress=steps.append)  # 130 // 64: two at a time
    assert [info.url for info in index.shards] == urls and index.num_samples == 130
    assert [step.done for step in steps] == list(range(1, 131)) and {step.url for step in steps} == set(urls)

    started: list[str] = []

    def failing(url: str, *_: object, **__: object) -> None:
        started.append(url)
        time.sleep(0.02)
        raise ValueError("disk on fire")

    monkeypatch.setattr(build, "load_facts", failing)
    with pytest.raises(ValueError, match="disk on fire"):
        build_index(urls, Recipe(), num_threads=1, force=True)
    assert len(started) < 20


def test_costs_of_earlier_versions_are_replaced(shards: list[str]) -> None:
    build_index(shards, Recipe())
    write_shard(Path(shards[0]), omni_samples(4, prefix="new"))
    build_index(shards, Recipe())
    assert len(list((CacheFolder().root / "costs").iterdir())) == 3


def test_what_killed_builders_left_goes_after_a_day(shards: list[str]) -> None:
    build_index(shards, Recipe())
    root = CacheFolder().root
    left = [root / kind / f".x.{name}.tmp" for kind in ("facts", "costs", "index") for name in ("old", "young")]
    for path in left:
        path.touch()
        if ".old." in path.name:
            os.utime(path, (0, 0))
    build_index(shards, Recipe())
    assert [path for path in left if path.exists()] == [path for path in left if ".young." in path.name]


def counting_words(failing: set[str]) -> Recipe:
    """A recipe with a tokenizer that fails on texts with one of these words."""

    def tokens(text: str) -> list[int]:
        if failing & set(text.split()):
            raise ValueError("a tokenizer out of order")
        return [1] * len(text.split())

    return Recipe(text=TextPreprocessor(tokens, id="words"))


def test_force_measures_and_merges_again(tmp_path: Path) -> None:
    url = write_shard(tmp_path / "a.tar", [{"__key__": key, "txt": f"one {key}".encode()} for key in "ab"])
    failing = {"b"}
    recipe = counting_words(failing)
    assert build_index([url], recipe).bad_rows().tolist() == [1]
    failing.clear()  # the cause is gone, and nothing on disk has changed
    assert build_index([url], recipe).bad_rows().tolist() == [1]
    assert build_index([url], recipe, force=True).llm_tokens.tolist() == [2, 2]
    opened = open_index([url], recipe)
    assert opened is not None and not opened.bad_rows().size


def test_a_forced_build_that_ended_before_its_merge_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = write_shard(tmp_path / "a.tar", [{"__key__": "b", "txt": b"one b"}])
    failing = {"b"}
    recipe = counting_words(failing)
    assert build_index([url], recipe).bad_rows().size == 1
    failing.clear()
    with monkeypatch.context() as patch:
        patch.setattr(build, "merge_tables", lambda *_, **__: None)  # leaves the old index
        build_index([url], recipe, force=True)
    assert build_index([url], recipe).bad_rows().size == 0


@pytest.mark.parametrize("number", ["VERDICTS", "COUNTS"])
def test_under_another_number_of_rules_all_is_scanned(
    shards: list[str], scans: list[str], monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    first = build_index(shards, Recipe())
    monkeypatch.setattr(recipes, number, 9)
    scans.clear()
    assert open_index(shards, Recipe()) is None
    second = build_index(shards, Recipe())
    assert sorted(scans) == names(shards)
    assert second.path != first.path and second.fingerprint != first.fingerprint


def test_an_index_that_is_written_in_several_turns_is_the_same(
    tmp_path: Path, shards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [{"__key__": "text", "txt": b"t"}, {"__key__": "broken", "jpg": b"no image"}]
    urls = [write_shard(tmp_path / "texts.tar", texts), *shards]
    at_once = build_index(urls, Recipe())
    monkeypatch.setattr(table, "_FLUSH_BYTES", 0)
    monkeypatch.setattr(build, "_IN_MEMORY_BYTES", 0)  # tables beyond what is held are read again
    assert content(build_index(urls, Recipe(), force=True)) == content(at_once)


def test_the_same_shard_under_two_paths_is_refused(tmp_path: Path, shards: list[str]) -> None:
    link, hard = tmp_path / "link.tar", tmp_path / "hard.tar"
    link.symlink_to(shards[1])
    hard.hardlink_to(shards[2])
    (tmp_path / "folder").symlink_to(tmp_path)
    for other, first in ((link, 1), (hard, 2), (tmp_path / "folder" / Path(shards[0]).name, 0)):
        with pytest.raises(ValueError, match="every sample would come twice") as raised:
            build_index([*shards, str(other)], Recipe())
        assert str(other) in str(raised.value) and shards[first] in str(raised.value)
    assert build_index([str(link), str(hard)], Recipe()).num_samples == 20  # once each


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("refusals", [1, 1000])
def test_a_link_that_cannot_be_looked_at_for_a_moment_is_one(
    tmp_path: Path, shards: list[str], monkeypatch: pytest.MonkeyPatch, refusals: int
) -> None:
    link = tmp_path / "link.tar"
    link.symlink_to(shards[1])
    looks = itertools.count()
    sound = os.lstat

    def lstat(path: str, **options: Any) -> os.stat_result:
        if path == str(link) and next(looks) < refusals:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), path)
        return sound(path, **options)

    monkeypatch.setattr(os, "lstat", lstat)
    error, message = (ValueError, "are the same file") if refusals == 1 else (StorageError, "cannot be looked at")
    with pytest.raises(error, match=message):
        build_index([*shards, str(link)], Recipe(), retry_seconds=0)


def test_equal_inodes_alone_are_no_reason(shards: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def with_inode(path: str) -> os.stat_result:
        values = list(os.stat(path))
        values[1:3] = 7, 7  # inode and device, as some network file systems repeat them
        values[6], values[8] = 100, 0  # equal sizes and times are common too
        return os.stat_result(values)

    monkeypatch.setattr(local, "status_at", with_inode)
    assert build_index(shards, Recipe()).num_samples == 30


def test_totals_of_many_shards_are_sums_for_any_names_of_fields(tmp_path: Path) -> None:
    for number, rows in enumerate((2, 3)):
        columns = {"text": ["a"] * rows, "score": [0.5] * rows, "max_score": [1.0] * rows}
        pq.write_table(pa.table(columns), tmp_path / f"{number}.parquet")
    totals = build_index([str(tmp_path / "0.parquet"), str(tmp_path / "1.parquet")], Recipe()).totals
    assert totals["ignored_fields"] == {"score": 5, "max_score": 5}
    assert (totals["samples"], totals["max_llm_tokens"]) == (5, 1)


class Waiting:
    """A tokenizer that waits in the middle of the texts until it may continue, and is slow from there."""

    def __init__(self) -> None:
        self.calls = 0
        self.continues = threading.Event()

    def __call__(self, text: str) -> list[int]:
        self.calls += 1
        if self.calls > 1500:
            self.continues.wait(60)
            time.sleep(0.001)
        return list(text.encode())


def test_one_large_file_shows_progress_and_ends_at_ctrl_c(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "{number}"}}\n' for number in range(4000)))
    tokenizer = Waiting()
    seen: list[tuple[float, int]] = []

    def interrupt(done: float, total: int) -> None:
        seen.append((done, total))
        if done > 0.5:  # it is scanned, and its samples are being measured
            tokenizer.continues.set()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index([str(path)], Recipe(text=TextPreprocessor(tokenizer, id="waiting")), under_way=interrupt)
    assert 0.5 < seen[-1][0] < 1 and seen[-1][1] == 1
    left = {each.name for each in threading.enumerate() if "orchdata" in each.name} - {"orchdata-requests"}
    assert tokenizer.calls < 4000 and not left

    steps: list[float] = []
    index = build_index([str(path)], Recipe(), under_way=lambda done, total: steps.append(done))
    assert index.num_rows == 4000 and steps == sorted(steps) and steps[-1] == 1


def test_ctrl_c_that_comes_just_as_the_build_begins_to_wait_is_heard(shards: list[str]) -> None:
    heard, given = threading.Event(), []

    def tokens(text: str) -> list[int]:
        if not given:
            time.sleep(0.1)
            _thread.interrupt_main()  # it does not end the wait either
            given.append(heard.wait(20))
        return [1]

    def interrupt(*_: object) -> None:
        heard.set()
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            build_index(shards[:1], Recipe(text=TextPreprocessor(tokens, id="interrupting")), num_threads=1)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert given == [True]


@pytest.mark.slow
def test_builders_at_the_same_time(shards: list[str], tmp_path: Path) -> None:
    code = (
        "import sys; from orchdata.loaders.index.build import build_index; from orchdata.loaders.recipe import Recipe\n"
        "print(build_index(sys.argv[1:], Recipe(), force=True).fingerprint)"
    )
    programs = [ForkedProgram(code, *shards, folder=tmp_path) for _ in range(3)]
    ended = [program.finish() for program in programs]
    assert [each.returncode for each in ended] == [0, 0, 0], ended
    assert {each.stdout.strip() for each in ended} == {build_index(shards, Recipe()).fingerprint}


# Costs of a shard: the members that are read, the rows, and the errors.


IMAGE, AUDIO = 1, 2

ROW = {"sample": 0, "key": "k", "field": "txt", "kind": TEXT, "offset": 0, "size": 0, "encoding": RAW, "error": None}
HEADERS = {"header0": 0, "header1": 0}


class FakeShard:
    """Bytes in memory that record how they are read."""

    url, version = "fake.tar", "1"

    def __init__(self, content: bytes, unreadable: range = range(0)) -> None:
        self.content = content
        self.size = len(content)
        self.unreadable = unreadable
        self.reads: list[tuple[int, int]] = []
        self.opened = self.closed = 0

    def open(self) -> FakeShard:
        self.opened += 1
        return self

    def facts(self) -> Facts:
        raise NotImplementedError

    def read(self, offset: int, size: int, encoding: int, field: str) -> bytes:
        self.reads.append((offset, size))
        if max(offset, self.unreadable.start) < min(offset + size, self.unreadable.stop):
            raise FieldError(field, "cut")
        data = self.content[offset : offset + size]
        return gzip.decompress(data) if encoding == GZIP else data

    def read_many(self, members: Any) -> list[bytes | memoryview]:
        return [self.read(*member) for member in members]

    def close(self) -> None:
        self.closed += 1


def facts(*rows: dict[str, Any]) -> Facts:
    table = pa.Table.from_pylist([{**ROW, **HEADERS, **row} for row in rows], schema=SCHEMA)
    return Facts(FactsTable.of_arrow(table), FactsMeta(url="fake.tar", size=3, version="1", checksum=""))


def measured_under(facts: Facts, opened: Callable[[], Any], recipe: Recipe) -> ShardCosts:
    return cost_shard(facts, opened, recipe, Probes(recipe, CacheFolder()))


def text_of(columns: Any, name: str, number: int) -> str:
    start, stop = getattr(columns, f"{name}_offsets")[number : number + 2]
    return bytes(getattr(columns, f"{name}_bytes")[start:stop]).decode()


def errors(costs: ShardCosts) -> dict[str, tuple[str, ...]]:
    columns = costs.columns
    return {
        text_of(columns, "key", row): tuple(text_of(columns, f"error_{name}", number) for name in ("field", "reason"))
        for number, row in enumerate(columns.bad_row.tolist())
    }


def test_neighbouring_texts_are_read_in_one_go() -> None:
    step, gap = 1024, 64 << 10
    rows = [
        {"sample": i, "key": f"k{i}", "offset": i * step + (gap if i >= 300 else 0), "size": 100} for i in range(600)
    ]
    shard = FakeShard(b"x" * (600 * step + gap))
    costs = measured_under(facts(*rows), shard.open, Recipe())
    assert costs.columns.llm_tokens.tolist() == [100] * 600
    assert shard.reads == [(0, 299 * step + 100), (300 * step + gap, 299 * step + 100)]


def test_a_read_ahead_that_fails_blames_the_right_sample() -> None:
    rows = [{"sample": i, "key": f"k{i}", "offset": 100 * i, "size": 50} for i in range(5)]
    costs = measured_under(facts(*rows), FakeShard(b"x" * 500, unreadable=range(210, 220)).open, Recipe())
    assert errors(costs) == {"k2": ("txt", "cut")}
    assert costs.columns.llm_tokens.tolist() == [50, 50, 0, 50, 50]


META = FactsMeta(url="fake.tar", size=3, version="1", checksum="sum", ignored={"pth": 2})


def test_a_table_of_the_same_size_is_not_the_one_that_was_measured(tmp_path: Path) -> None:
    path = str(tmp_path / "a.costs")
    rows = [{"sample": i, "key": f"kü{i}", "offset": i, "size": 1} for i in range(3)]
    costs = measured_under(facts(*rows), FakeShard(b"abc").open, Recipe())
    table = replace(costs.write(path, "fake.tar", META), packed=None)
    assert costs.write(path, "fake.tar", replace(META, version="2")).size == table.size
    with pytest.raises(StaleIndexError, match="measured by another build, during this one: build again"):
        table.body()
