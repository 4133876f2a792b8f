"""Parquet files measured in child processes: files that crash one, children killed from outside, no leftovers."""

from __future__ import annotations

import base64
import errno
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest

import orchdata as od
import orchdata.loaders.index.build
from orchdata.loaders.errors import StaleIndexError, StorageError
from orchdata.loaders.index.build import build_index
from orchdata.loaders.index.facts import load_facts
from orchdata.loaders.limits import Limits
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards import children as measuring_process
from orchdata.loaders.shards.children import measuring
from orchdata.loaders.shards.columns import ParquetShard
from orchdata.loaders.shards.shard import Facts, FactsTable
from orchdata.loaders.storage.local import LocalFile


def write(path: Path, texts: Sequence[str] = ("one", "two", "three"), **options: object) -> Path:
    pq.write_table(pa.table({"text": list(texts)}), path, **options)
    return path


def write_aborting(path: Path) -> Path:
    """An encrypted file without the signature by which it is known to be one: the C++ library ends the process."""
    data = write_encrypted(path).read_bytes()
    size = int.from_bytes(data[-8:-4], "little") - 28
    path.write_bytes(data[:-36] + size.to_bytes(4, "little") + b"PAR1")
    return path


def write_encrypted(path: Path) -> Path:
    """A file with an encrypted text column, and a plain footer."""

    class Keys(pe.KmsClient):  # type: ignore[misc]
        def __init__(self, _: object) -> None:
            super().__init__()

        def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
            return base64.b64encode(key_bytes)

        def unwrap_key(self, wrapped_key: bytes, master_key_identifier: str) -> bytes:
            return base64.b64decode(wrapped_key)

    keys = pe.EncryptionConfiguration(footer_key="f", column_keys={"k": ["text"]}, plaintext_footer=True)
    properties = pe.CryptoFactory(Keys).file_encryption_properties(pe.KmsConnectionConfig(), keys)
    table = pa.table({"text": ["a", "b"]})
    with pq.ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    return path


def facts(path: Path, limits: Limits | None = None) -> FactsTable:
    return ParquetShard(str(path), LocalFile(path), limits=limits or Limits()).facts().table


def errors(path: Path, limits: Limits | None = None) -> list[str]:
    return list(facts(path, limits).errors.values())


def children() -> list[int]:
    """Return the children that measure, without the fork server of worker processes, which other tests start."""
    listed = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True
    )
    return [
        int(line.split()[0]) for line in listed.stdout.splitlines() if "shards.children" in line or "defunct" in line
    ]


def busy_child() -> int:
    (child,) = measuring_process._pool._busy
    return child._process.pid


class Hooked(LocalFile):
    """A file that does something at each read of the measuring parent."""

    def __init__(self, path: Path, hook: Callable[[], None]) -> None:
        super().__init__(path)
        self._hook = hook

    def read_into(self, offset: int, buffer: memoryview) -> int:
        self._hook()
        return super().read_into(offset, buffer)

    def read(self, offset: int, size: int) -> bytes:
        self._hook()
        return super().read(offset, size)


def patched(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Children that run `body` instead of scanning a file."""
    program = (
        "import json, os, signal, sys, time; given = json.loads(sys.argv[1]); sys.path[:] = given['path']\n"
        "import orchdata.loaders.shards.children as child\n"
        "scan_all = child.scan\n"
        f"def scan(reader, limits):\n    {body}\n"
        "child.scan = scan\n"
        "child.CPU_SECONDS = 5\n"
        "child.main(given['end'])"
    )
    monkeypatch.setattr(measuring_process, "_PROGRAM", program)


def test_a_file_that_aborts_the_library_costs_its_own_rows_only(tmp_path: Path) -> None:
    good = [write(tmp_path / f"{name}.parquet", [name] * 2) for name in "acd"]
    bad = write_aborting(tmp_path / "b.parquet")
    index = build_index([str(path) for path in [*good, bad]], Recipe(), num_threads=2)
    assert index.num_samples == 3 * 2 + 1
    (row,) = index.bad_rows()
    assert index.failure(int(row)).shard == str(bad)
    assert index.failure(int(row)).reason == "the Parquet library ended the process with SIGABRT"
    meta = ParquetShard(str(bad), LocalFile(bad), limits=Limits()).facts().meta
    assert meta.lost_samples == 2  # from the footer, although no page can be read
    assert meta.lost_bytes == bad.stat().st_size
    with pytest.warns(UserWarning, match=r"1 of 4 shards are damaged, and about 1 of their samples lost.*b\.parquet"):
        loader = od.DataLoader(
            od.ShardDataset([str(path) for path in [*good, bad]]),
            batch_size=2,
            on_error=od.ErrorPolicy("skip", max_failures=None),
        )
    assert sum(len(batch.sample_ids) for batch in loader) == 6
    assert loader.stats()["failures"]["count"] == 2
    assert children() == []


@pytest.mark.slow
def test_an_arrow_file_that_ends_its_process_costs_itself_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(tmp_path / "text.arrow"), str(tmp_path / "caption.arrow")]
    for path in paths:
        table = pa.table({Path(path).stem: ["one", "two"]})
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    body = "os.abort() if 'caption' in reader.schema.names else None; return scan_all(reader, limits)"
    patched(monkeypatch, body)
    index = build_index(paths, Recipe())
    failures = [index.failure(int(row)) for row in index.bad_rows()]
    found = [(failure.shard, failure.reason) for failure in failures]
    assert index.num_samples == 3 and found == [(paths[1], "the Arrow library ended the process with SIGABRT")]


@pytest.mark.slow
def test_a_file_that_never_ends_ends_the_build_and_time_makes_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched(monkeypatch, "while True: pass")
    with pytest.raises(
        StorageError, match=r"a\.parquet: .*too much processor time \(SIGXCPU\).* leave it out"
    ) as raised:
        errors(write(tmp_path / "a.parquet"))
    assert raised.value.errno == errno.ETIME


@pytest.mark.slow
def test_a_child_that_waits_for_ever_ends_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch, "signal.pause()")
    monkeypatch.setattr(measuring_process, "_SILENT_SECONDS", 1.0)
    monkeypatch.setattr(measuring_process, "cpu_seconds", lambda size, rows: 0.0)
    with pytest.raises(StorageError, match="the Parquet library gave no answer for 1 s"):
        errors(write(tmp_path / "a.parquet"))
    assert children() == []


def test_memory_above_the_limit_of_a_child_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch, "return bytearray(4 << 30)")
    (error,) = errors(write(tmp_path / "a.parquet"), Limits(member_bytes=1 << 20))
    # 2 GiB and four times a MiB
    assert error.startswith("takes more than 2151677952 bytes of memory to read") and "member_bytes=1048576" in error


@pytest.mark.slow
def test_a_child_that_was_killed_from_outside_is_no_word_about_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet")
    kills = iter([True])

    def once() -> None:
        if next(kills, False):
            os.kill(busy_child(), signal.SIGKILL)

    with measuring():
        table = ParquetShard(str(path), Hooked(path, once), limits=Limits()).facts().table
        assert not table.errors and len(table) == 3
        # Neither is one that was killed between two files.
        os.kill(measuring_process._pool._idle[0]._process.pid, signal.SIGKILL)
        assert errors(path) == []


@pytest.mark.slow
def test_children_that_are_killed_again_and_again_end_the_build_unrecorded(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet")
    opened = ParquetShard(str(path), Hooked(path, lambda: os.kill(busy_child(), signal.SIGKILL)), limits=Limits())
    with measuring(), pytest.raises(StorageError, match=r"was killed \(SIGKILL\), twice"):
        opened.facts()
    assert children() == []


def test_children_that_cannot_start_are_no_word_about_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring_process, "_PROGRAM", "import no_such_module")
    with pytest.raises(StorageError, match="cannot be started: ModuleNotFoundError: No module named 'no_such_module'"):
        build_index([str(write(tmp_path / "a.parquet"))], Recipe(), retry_seconds=0)


class FailingAt(Hooked):
    """A file that raises at its n-th read and all later ones."""

    def __init__(self, path: Path, n: int, error: Exception) -> None:
        reads = iter(range(n))

        def hook() -> None:
            if next(reads, None) is None:
                raise error

        super().__init__(path, hook)


@pytest.mark.slow
def test_nothing_is_left_after_an_error_in_a_build(tmp_path: Path) -> None:
    paths = [str(write(tmp_path / f"{i}.parquet")) for i in range(6)]

    at_work: list[int] = []

    def interrupt(_: object) -> None:
        at_work.extend(children())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index(paths, Recipe(), num_threads=2, progress=interrupt)
    assert at_work
    assert children() == []
    assert build_index(paths, Recipe(), num_threads=2).totals["bad"] == 0
    assert children() == []


PARENT = """
import sys, os
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_parquet_children import *
with pytest.MonkeyPatch.context() as monkeypatch, measuring():
    patched(monkeypatch, "os.write({ready}, b'x')\\n    signal.pause()")
    monkeypatch.setattr(measuring_process.subprocess, "Popen", partial_popen({ready}))
    facts(Path({path!r}))
"""


def partial_popen(inherited: int) -> Callable[..., subprocess.Popen[bytes]]:
    popen = subprocess.Popen

    def start(*args: object, pass_fds: Sequence[int], **options: object) -> subprocess.Popen[bytes]:
        return popen(*args, pass_fds=(*pass_fds, inherited), **options)  # type: ignore[call-overload]

    return start


@pytest.mark.slow
def test_a_busy_child_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet")
    ready, write_end = os.pipe()
    script = PARENT.format(tests=str(Path(__file__).parent), ready=write_end, path=str(path))
    parent = subprocess.Popen([sys.executable, "-c", script], pass_fds=[write_end])
    os.close(write_end)
    assert os.read(ready, 1) == b"x"  # the child waits for a message that never comes
    parent.kill()
    parent.wait()
    # The child had the other writing end: the pipe ends when it does.
    assert select.select([ready], [], [], 60)[0] and os.read(ready, 1) == b""
    os.close(ready)


def test_a_copy_is_read_and_a_copy_with_other_pages_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    path = write(folder / "a.parquet", ["first text", "second text"], compression="none", use_dictionary=False)
    dataset = od.ShardDataset(str(path))
    dataset.index()
    status = path.stat()

    def texts() -> str:
        (batch,) = od.DataLoader(dataset, batch_size=2, index="require")
        return bytes(batch.text.input_ids.tolist()).decode()

    shutil.copyfile(path, folder / "copy")
    (folder / "copy").replace(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))
    assert sorted(texts()) == sorted("first textsecond text")
    damaged = path.read_bytes().replace(b"second", b"other.")
    path.write_bytes(damaged)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 2 * 10**9))
    with pytest.raises(StaleIndexError, match="other content"):
        texts()


@pytest.mark.slow_cases("x02", "~")
@pytest.mark.parametrize("claimed", [b"\x16\x0a", b"\x16\x02", b"\x16\x05", b"\x16\x7e"])  # 5, 1, -3, 63
def test_a_footer_that_counts_other_rows_fails_the_shard(tmp_path: Path, claimed: bytes) -> None:
    source = write(tmp_path / "a.parquet", ["one", "two", "thr"]).read_bytes()
    footer = source.index(b"PAR1", 4) if source.count(b"PAR1") > 2 else len(source) - 8
    length = int.from_bytes(source[-8:-4], "little")
    places = [at for at in range(footer - length, footer) if source[at : at + 2] == b"\x16\x06"]
    assert len(places) >= 2  # the rows of the file and of its row group, and values of its column
    refused = 0
    with measuring():
        for at in places:
            path = tmp_path / "b.parquet"
            path.write_bytes(source[:at] + claimed + source[at + 2 :])
            failures = errors(path)
            index = build_index([str(path)], Recipe())
            if failures:
                refused += 1
                assert index.totals["bad"] == index.num_samples == 1
            else:
                assert [index.key(row) for row in range(index.num_samples)] == ["0", "1", "2"]
    assert refused >= 2


@pytest.mark.slow
def test_an_encrypted_file_with_a_plain_footer_is_called_so(tmp_path: Path) -> None:
    assert errors(write(tmp_path / "plain.parquet")) == []
    (reason,) = errors(write_encrypted(tmp_path / "a.parquet"))
    assert reason.startswith("it is encrypted, with a plain footer")


@pytest.mark.parametrize(
    "error", [StorageError("a", "gone"), StaleIndexError("a", "changed"), MemoryError("none left")]
)
def test_what_a_storage_raises_while_a_cell_is_decoded_is_raised(tmp_path: Path, error: Exception) -> None:
    size = 700_000
    path = write(tmp_path / "a.parquet", ["x" * size] * 5, use_dictionary=False, compression="none")

    def read(n: int) -> None:
        assert ParquetShard(str(path), FailingAt(path, n, error), limits=Limits()).read(4, size, 3, "text")[:1] == b"x"

    for n in range(3):  # the footer, and the column chunk
        with pytest.raises(type(error)) as raised:
            read(n)
        assert raised.value is error
    read(100)


def test_a_file_that_changes_after_it_was_measured_is_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.parquet", ["first text"], compression="none", use_dictionary=False)

    def measured_then_changed(url: str, opened: Any, **options: Any) -> Facts:
        loaded = load_facts(url, opened, **options)
        status = path.stat()
        path.write_bytes(path.read_bytes().replace(b"first", b"other"))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))
        return loaded

    monkeypatch.setattr(orchdata.loaders.index.build, "load_facts", measured_then_changed)
    with pytest.raises(StaleIndexError, match=r"a\.parquet: was changed while it was open"):
        build_index([str(path)], Recipe(), retry_seconds=0)


def test_the_verdict_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = [str(write_aborting(tmp_path / "b.parquet"))]
    build_index(bad, Recipe())
    monkeypatch.setattr(measuring_process, "_PROGRAM", "raise SystemExit('no child is needed')")
    assert len(build_index(bad, Recipe()).bad_rows()) == 1
