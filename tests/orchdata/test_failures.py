"""Samples that cannot be used: refused, or skipped, counted and listed; the plan stays as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist
from shard_factory import SKIP_ANY, jpeg, omni_samples, write_shard
from typer.testing import CliRunner

import orchdata as od
from orchdata.cli import app
from orchdata.loaders.errors import DataError, PackageError, StorageError
from orchdata.loaders.index.build import build_index
from orchdata.quarantine import read_quarantine, write_quarantine

RECIPE = od.Recipe(image=od.ImagePreprocessor(max_tokens=64, dtype="float32"))


def bad_shard(folder: Path) -> str:
    good = [{"__key__": f"good{i}", "jpg": jpeg(80, 60, i), "txt": b"fine"} for i in range(6)]
    broken = bytearray(jpeg(300, 200, 9))
    broken[len(broken) // 2 :] = b""  # the header is whole, the picture is cut
    bad = [
        {"__key__": "cut", "jpg": bytes(broken), "txt": b"text"},
        {"__key__": "lie", "wav": b"this is no audio at all", "txt": b"text"},
        {"__key__": "missing", "txt": b"an <image> that is not there"},
    ]
    return write_shard(folder / "bad.tar", [*good, *bad])


def test_bad_samples_refuse_to_start(tmp_path: Path) -> None:
    dataset = od.ShardDataset(bad_shard(tmp_path), recipe=RECIPE)
    with pytest.raises(od.DataError) as raised:
        od.DataLoader(dataset, batch_size=3)
    for part in ("bad.tar", "'lie'", "first of 2 bad samples"):
        assert part in str(raised.value)


@pytest.mark.parametrize("threads", [0, 2])
def test_skip_delivers_the_rest_and_lists_failures(tmp_path: Path, threads: int) -> None:
    dataset = od.ShardDataset(bad_shard(tmp_path), recipe=RECIPE)
    handled: list[od.DataError] = []
    one = od.DataLoader(
        dataset,
        batch_size=7,
        on_error=od.ErrorPolicy("skip", max_failures=None, handler=handled.append),
        num_threads=threads,
    )
    batches = list(one)
    keys = [key for batch in batches for _, key in batch.sample_ids]
    assert keys == [f"good{i}" for i in range(6)]
    # "cut" is planned (an image, then 4 bytes of text with loss), fails while decoding, and stays in the denominator
    assert sum(batch.loss_tokens for batch in batches) == batches[0].global_loss_tokens - 4
    failures = one.stats()["failures"]
    assert failures["count"] == 3 == len(handled)
    assert {row["key"] for row in failures["samples"]} == {"cut", "lie", "missing"}
    assert all(row["shard"].endswith("bad.tar") and row["reason"] for row in failures["samples"])
    assert "not audio: starts with '...'" in failures["by_reason"]  # by kind, with any first bytes


def test_a_microbatch_that_fails_whole_arrives_empty(tmp_path: Path) -> None:
    dataset = od.ShardDataset(bad_shard(tmp_path), recipe=RECIPE)
    one = od.DataLoader(dataset, batch_size=1, on_error=SKIP_ANY)
    batches = list(one)
    assert len(batches) == 7
    assert batches[-1].sample_ids == () and batches[-1].loss_tokens == 0
    assert batches[-1].image.patches.shape[0] == 4  # one dummy token: 2x2 patches


def test_failure_budget(tmp_path: Path) -> None:
    dataset = od.ShardDataset(bad_shard(tmp_path), recipe=RECIPE)
    with pytest.raises(od.TooManyFailures, match="policy allows 1"):
        od.DataLoader(dataset, batch_size=3, on_error=od.ErrorPolicy("skip", max_failures=1))
    one = od.DataLoader(dataset, batch_size=3, on_error=od.ErrorPolicy("skip", max_failures=Fraction(2, 9)))
    with pytest.raises(od.TooManyFailures, match="policy allows 2"):
        list(one)
    enough = od.DataLoader(dataset, batch_size=3, on_error=od.ErrorPolicy("skip", max_failures=3))
    for _ in range(3):  # the sample that fails in each epoch is one sample
        list(enough)
    assert enough.stats()["failures"]["count"] == 2 + 3


class Fickle:
    """A tokenizer that is changed, or disturbed, after the index was made: another number of ids, or of loss."""

    calm = True

    def __call__(self, text: str) -> list[int]:
        return list(range(len(text) if self.calm else len(text) - 1))


@pytest.mark.parametrize("collate_fn", [od.Packed(), list], ids=["packed", "collate_fn"])
def test_text_that_yields_other_counts_than_the_index_names_the_sample(tmp_path: Path, collate_fn: Any) -> None:
    tokenizer = Fickle()
    recipe = od.Recipe(image=RECIPE.image, text=od.TextPreprocessor(tokenizer, id="fickle"))
    sample = {"__key__": "a", "txt": b"four", "jpg": jpeg(56, 56)}
    one = od.DataLoader(
        od.ShardDataset(write_shard(tmp_path / "a.tar", [sample]), recipe=recipe), collate_fn=collate_fn, num_threads=0
    )
    assert len(list(one)) == 1
    tokenizer.calm = False
    with pytest.raises(od.DataError) as raised:
        list(one)
    said = "".join([str(raised.value), *raised.value.__notes__])
    for part in ("sample 'a', field 'txt'", "the index says 8 tokens", "tokenizer of the recipe's id changed"):
        assert part in said
    assert "several threads use it" in said and 'quarantine="bad.jsonl"' in said


def test_failures_are_gathered_over_ranks(tmp_path: Path) -> None:
    one = od.DataLoader(
        od.ShardDataset(bad_shard(tmp_path), recipe=RECIPE),
        batch_size=7,
        on_error=SKIP_ANY,
        dp=(0, 1),
    )
    list(one)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert [failure.key for failure in one.gather_failures()] == ["cut", "lie", "missing"]
    finally:
        dist.destroy_process_group()


def skipping_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> od.DataLoader:
    """Samples: an image with a decoder that raises `error`, and a text."""

    def fail(*_: object) -> None:
        raise error

    shard = write_shard(tmp_path / "a.tar", [{"__key__": "a", "jpg": jpeg(80, 60)}, {"__key__": "b", "txt": b"fine"}])
    loader = od.DataLoader(od.ShardDataset(shard, RECIPE), batch_size=2, on_error=SKIP_ANY, num_threads=0)
    monkeypatch.setattr("orchdata.loaders.modalities.image_decode.upright_pixels", fail)
    return loader


@pytest.mark.parametrize("error", [TypeError("odd"), RecursionError("deep"), IndexError("beyond")])
def test_an_exception_while_decoding_fails_the_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    loader = skipping_loader(tmp_path, monkeypatch, error)
    (batch,) = loader
    assert [key for _, key in batch.sample_ids] == ["b"]
    (failure,) = loader.gather_failures()
    assert (failure.key, failure.reason) == ("a", f"cannot be decoded: {type(error).__name__}: {error.args[0]}")


@pytest.mark.parametrize("error", [MemoryError("no room"), ImportError("no torchaudio")])
def test_what_says_nothing_about_the_data_ends_the_run_under_skip_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    loader = skipping_loader(tmp_path, monkeypatch, error)
    with pytest.raises(type(error)):
        list(loader)
    assert loader.stats()["failures"]["count"] == 0


# The list of samples to leave out: it appears whole, and a cut one is noticed.


FAILURES = [DataError("a.tar", f"s{n}", "jpg", "a reason,\n of two lines \u2028 or three") for n in range(5)]
PAIRS = [(failure.shard, failure.key) for failure in FAILURES]


@pytest.mark.parametrize("count", [1, 5])
def test_a_list_that_is_cut_anywhere_is_refused(tmp_path: Path, count: int) -> None:
    path = tmp_path / "bad.jsonl"
    write_quarantine(path, FAILURES[:count])
    data = path.read_bytes()
    assert data.count(b"\n") == count
    for size in range(1, len(data) - 1):  # without the last newline it is whole
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"jsonl(, line \d: expected| is cut after \d samples)"):
            read_quarantine(path)
    path.write_bytes(data[:-1])
    assert read_quarantine(path) == PAIRS[:count]


def test_samples_that_a_user_takes_out_are_no_cut_where_he_says_so(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    write_quarantine(path, FAILURES)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *lines[2:]]) + "\n")
    assert read_quarantine(path) == [PAIRS[0], *PAIRS[2:]]
    path.write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(ValueError, match="remove that blank too"):
        read_quarantine(path)
    path.write_text("\n".join(lines[:-1]).lstrip() + "\n")
    assert read_quarantine(path) == PAIRS[:-1]


@pytest.mark.parametrize("line", ['{"shard": "a", "key": 1}', '["shard", "key"]', "[" * 50_000, "5", '"x"'])
def test_a_line_that_is_no_sample_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "bad.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 1: expected"):
        read_quarantine(tmp_path / "bad.jsonl")


def test_a_write_that_fails_leaves_the_older_list(
    tmp_path: Path, no_pauses: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bad.jsonl"
    write_quarantine(path, FAILURES[:1])

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(StorageError, match=r"bad\.jsonl: cannot be written: No space left"):
            write_quarantine(path, FAILURES)
    assert read_quarantine(path) == PAIRS[:1] and os.listdir(tmp_path) == ["bad.jsonl"]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused_before_the_work(tmp_path: Path, make: object) -> None:
    path = tmp_path / "bad.jsonl"
    make(path)  # type: ignore[operator]
    for use in (lambda: read_quarantine(path), lambda: write_quarantine(path, FAILURES)):
        with pytest.raises(ValueError, match=r"bad\.jsonl is not a regular file"):
            use()
    shard = write_shard(tmp_path / "a.tar", omni_samples(2))
    result = CliRunner().invoke(app, ["verify", shard, "--out", str(path)])
    assert result.exit_code == 1 and "is not a regular file" in result.output
    assert not list(Path(os.environ["ORCHDATA_CACHE"]).rglob("*.index"))


# A package that is missing or broken is one clear error, and never a sample's failure: while indexing, loading and


SUPPORT = Path(__file__).resolve().parents[1] / "support"
REASONS = {"ImportError": "ImportError: planted", "RuntimeError": "RuntimeError: planted"}
PACKAGES = {
    "soundfile": "media",
    "simplejpeg": "media",
    "PIL": "media",
    "zstandard": "media",
    "numba": "media",
    "av": "video",
    "tokenizers": "chat",
    "jinja2": "chat",
    "transformers": "hf",
}
HEALTHY = [3, 0]
"""Samples, and failures."""


def run(folder: Path, *cases: tuple[str, str, str]) -> list[dict[str, Any]]:
    paths = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, SUPPORT / "broken_packages_job.py", folder, json.dumps(cases)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(outcome: dict[str, Any]) -> None:
    """Each attempt names the package and the cause, no sample is blamed, and the index is sound afterwards."""
    package, error, _ = outcome["case"]

    def is_named(value: Any) -> bool:
        return value[0] == "PackageError" and f"'{package}'" in value[1] and f"({REASONS[error]}): " in value[1]

    assert is_named(outcome["index"]), outcome
    attempts = {name: value for name, value in outcome["load"].items() if name != "verify"}
    assert len(attempts) == 6
    for name, value in attempts.items():
        assert is_named(value) and value[2] == 0, (name, value)
    assert is_named(outcome["load"]["verify"]), outcome
    assert outcome["after"] == HEALTHY


@pytest.mark.slow
def test_a_broken_package_is_one_error_and_no_bad_sample(tmp_path: Path) -> None:
    (said,) = run(tmp_path, ("soundfile", "RuntimeError", "media"))
    check(said)


@pytest.mark.slow
def test_so_is_each_package_that_is_missing(tmp_path: Path) -> None:
    for outcome in run(tmp_path, *((package, "ImportError", recipe) for package, recipe in PACKAGES.items())):
        check(outcome)


def test_what_the_process_that_measures_parquet_lacks_is_no_fault_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = pa.array(["some", "text", "some"]).dictionary_encode()
    shard = str(tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": words}), shard)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import sys\n"
        "class Broken:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'pyarrow.compute':\n"
        "            raise OSError('planted.so')\n"
        "sys.meta_path.insert(0, Broken())\n"
    )
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(broken))
        with pytest.raises(PackageError, match=r"'pyarrow', which reading Parquet needs, .*planted\.so"):
            build_index([shard], od.Recipe(), retry_seconds=0)
    index = build_index([shard], od.Recipe())
    assert (len(index), len(index.bad_rows())) == (3, 0)
