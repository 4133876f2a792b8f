"""Samples that cannot be used: refused, or skipped, counted and listed; the plan stays as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import typing
from dataclasses import fields, is_dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist
from map_dataset import Numbers
from shard_factory import SKIP_ANY, jpeg, omni_samples, write_shard
from typer.testing import CliRunner

import orchdata as od
from orchdata.batch.batch import Batch
from orchdata.batch.tensors import TeamUse
from orchdata.cli import app
from orchdata.delivery.policy import ErrorPolicy, FailureBudget, Stats
from orchdata.engines.processes.message import _BATCHES
from orchdata.engines.processes.message import revive as revive_of
from orchdata.loaders.errors import DataError, PackageError, StorageError
from orchdata.loaders.index.build import build_index
from orchdata.planning.plan import Plan
from orchdata.planning.route import Route
from orchdata.quarantine import sample_names, write_quarantine
from orchdata.ranks.wire import WireError

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
    one = od.DataLoader(od.ShardDataset(bad_shard(tmp_path), recipe=RECIPE), batch_size=7, on_error=SKIP_ANY, dp=(0, 1))
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
            sample_names(path, "quarantine")
    path.write_bytes(data[:-1])
    assert sample_names(path, "quarantine") == PAIRS[:count]


def test_samples_that_a_user_takes_out_are_no_cut_where_he_says_so(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    write_quarantine(path, FAILURES)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *lines[2:]]) + "\n")
    assert sample_names(path, "quarantine") == [PAIRS[0], *PAIRS[2:]]
    path.write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(ValueError, match="remove that blank too"):
        sample_names(path, "quarantine")
    path.write_text("\n".join(lines[:-1]).lstrip() + "\n")
    assert sample_names(path, "quarantine") == PAIRS[:-1]


@pytest.mark.parametrize("line", ['{"shard": "a", "key": 1}', '["shard", "key"]', "[" * 50_000, "5", '"x"'])
def test_a_line_that_is_no_sample_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "bad.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 1: expected"):
        sample_names(tmp_path / "bad.jsonl", "quarantine")


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
    assert sample_names(path, "quarantine") == PAIRS[:1] and os.listdir(tmp_path) == ["bad.jsonl"]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused_before_the_work(tmp_path: Path, make: object) -> None:
    path = tmp_path / "bad.jsonl"
    make(path)  # type: ignore[operator]
    for use in (lambda: sample_names(path, "quarantine"), lambda: write_quarantine(path, FAILURES)):
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
def test_a_broken_package_and_each_that_is_missing_is_one_error_and_no_bad_sample(tmp_path: Path) -> None:
    missing = [(package, "ImportError", recipe) for package, recipe in PACKAGES.items()]
    for outcome in run(tmp_path, ("soundfile", "RuntimeError", "media"), *missing):
        check(outcome)


@pytest.mark.slow
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


# The budget of failures: 1 % by default, of what the index lists and of what fails later.


SKIP = ErrorPolicy("skip")


def records(path: Path, good: int, bad: int) -> str:
    lines = [{"text": f"text {number}"} for number in range(good)] + [{"text": 5}] * bad
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


def failure(key: object, reason: str = "damaged") -> DataError:
    return DataError("a.tar", str(key), "jpg", reason)


def made(path: str, **options: Any) -> od.DataLoader[Any]:
    defaults = {"on_error": "skip", "dp": (0, 1), "batch_size": 50, "num_threads": 0}
    return od.DataLoader(od.ShardDataset(path), **defaults | options)


def test_one_percent_of_what_the_index_lists_is_skipped(tmp_path: Path) -> None:
    one_percent = records(tmp_path / "a.jsonl", 99, 1)
    with pytest.warns(UserWarning, match="1 of 100 samples are left out"):
        assert made(one_percent).stats()["failures"]["count"] == 1
    with pytest.raises(od.TooManyFailures) as raised:
        made(records(tmp_path / "b.jsonl", 98, 2))
    for part in (
        "2 of 100 samples cannot be used, the policy allows 1 (1 %): 2 x '...' is the int N, not a string",
        "b.jsonl: sample '98'",
        "quarantine=",
        'od.ErrorPolicy("skip", max_failures=Fraction(2, 100))',
    ):
        assert part in str(raised.value)


def test_a_quarantine_names_a_shard_as_its_data_set_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data" / "photos").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    records(Path("data/a.jsonl"), 4, 2)
    records(Path("data/photos/metadata.jsonl"), 4, 2)
    a = "data/a.jsonl"
    for path in (a, f"./data/../{a}", "data/a*.jsonl", "data/photos", f"file:{tmp_path}/{a}"):
        assert len(made(path, quarantine=[(path, "4"), (path, "5")], on_error="raise")) == 1
    with pytest.raises(ValueError, match="quarantine names sample '4' of shard 'data/b.jsonl'"):
        made(a, quarantine=[("data/b.jsonl", "4")])


def test_a_missing_file_is_reported_with_the_folder_that_was_searched(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "other.txt").write_text("")
    (tmp_path / "a.jsonl").write_text('{"image": "0.png", "text": "a"}')
    dataset = od.ShardDataset(tmp_path / "a.jsonl", media_root=tmp_path / "images")
    with pytest.raises(od.DataError, match=f"'0.png': no such file below '{tmp_path}/images'"):
        od.DataLoader(dataset, batch_size=1)


def test_what_the_user_leaves_out_does_not_count(tmp_path: Path) -> None:
    path = records(tmp_path / "a.jsonl", 20, 2)
    named = [("a.jsonl", "20"), ("a.jsonl", "21")]
    assert len(made(path, quarantine=named)) == 1
    with pytest.raises(od.TooManyFailures, match="1 of 22"):
        made(path, quarantine=named[:1])
    dataset = od.ShardDataset(path).filter("not bad")
    assert len(od.DataLoader(dataset, batch_size=50, dp=(0, 1), on_error="skip")) == 1


def test_a_share_is_of_each_source_and_a_count_of_all(tmp_path: Path) -> None:
    small, large = records(tmp_path / "a.jsonl", 9, 1), records(tmp_path / "b.jsonl", 99, 1)
    sources = {name: od.Source(od.ShardDataset(path)) for name, path in (("small", small), ("large", large))}
    options: dict[str, Any] = {"global_batch_size": 4, "dp": (0, 1)}
    with pytest.raises(od.TooManyFailures, match="1 of 10 samples of source 'small' cannot be used"):
        od.DataLoader(od.Mixture(sources), on_error="skip", **options)
    with pytest.raises(od.TooManyFailures, match="2 of 110 samples cannot be used, the policy allows 1:"):
        od.DataLoader(od.Mixture(sources), on_error=od.ErrorPolicy("skip", max_failures=1), **options)
    for allowed in (Fraction(1, 10), 2):
        od.DataLoader(od.Mixture(sources), on_error=od.ErrorPolicy("skip", max_failures=allowed), **options)


def test_items_that_fail_for_their_costs_count_as_what_an_index_lists() -> None:
    with pytest.raises(od.TooManyFailures, match=r"1 of 20 samples cannot be used.*disk on fire"):
        od.DataLoader(Numbers(20, bad=(3,)), on_error="skip", cost=len)
    assert len(od.DataLoader(Numbers(100, bad=(3,)), on_error="skip", cost=len)) == 99


def test_one_later_failure_never_ends_a_run_and_a_second_one_does_above_the_share() -> None:
    small = FailureBudget(SKIP, Stats(), num_samples=20)
    for epoch in range(3):
        small.count([failure("a")], epoch)
    with pytest.raises(od.TooManyFailures, match=r"2 of 20 samples failed, .* allows 0 \(1 %\): 4 x damaged") as raised:
        small.count([failure("b")], 3)
    assert "sample 'b'" in str(raised.value) and "Fraction(10, 100)" in str(raised.value)
    strict = FailureBudget(od.ErrorPolicy("skip", max_failures=Fraction(0)), Stats(), num_samples=20)
    with pytest.raises(od.TooManyFailures):
        strict.count([failure("a")], 0)


def test_a_rank_may_have_its_part_of_the_share_in_an_epoch() -> None:
    # 1 % of 40,000 over 4 ranks is 100 each, and 4 standard deviations of 10 are room for chance.
    rank = FailureBudget(SKIP, Stats(), num_samples=40_000, num_ranks=4)
    rank.count([failure(number) for number in range(141)], 0)
    rank.count([failure(number) for number in range(100, 241)], 1)  # of a new epoch
    with pytest.raises(od.TooManyFailures, match="142 samples of this rank failed in epoch 1"):
        rank.count([failure("one more")], 1)


def test_of_data_without_a_length_a_share_is_of_what_was_delivered() -> None:
    stats = Stats()
    budget = FailureBudget(SKIP, stats, num_samples=0)
    budget.count([failure(number) for number in range(10)], 0)
    with pytest.raises(od.TooManyFailures, match="11 samples failed, the policy allows a share"):
        budget.count([failure("eleventh")], 0)


@pytest.mark.parametrize("bad", [1, 2])
def test_skip_is_offered_only_where_it_allows_as_many(tmp_path: Path, bad: int) -> None:
    path = records(tmp_path / "a.jsonl", 100 - bad, bad)
    with pytest.raises(od.DataError) as raised:
        made(path, on_error="raise")
    assert ("on_error='skip'" in str(raised.value)) == (bad == 1)
    assert '`orchdata verify PATHS --out bad.jsonl` lists them all, and quarantine="bad.jsonl"' in str(raised.value)
    if bad == 1:
        made(path, on_error="skip")


def test_every_rank_gives_the_same_verdict(tmp_path: Path) -> None:
    path = records(tmp_path / "a.jsonl", 98, 2)
    od.ShardDataset(path).index()
    texts = []
    for rank in range(3):
        with pytest.raises(od.TooManyFailures) as raised:
            made(path, dp=(rank, 3))
        texts.append(str(raised.value))
    assert len(set(texts)) == 1


# A reader's message creates batches on its peers, and nothing else.


ROUTE = {field.name: None for field in fields(Route)}


def classes_of(annotation: Any) -> set[type]:
    """Return the dataclasses that a value of this type may contain."""
    classes: set[type] = set()
    waiting = [annotation]
    while waiting:
        one = waiting.pop()
        waiting += typing.get_args(one)
        if isinstance(one, type) and is_dataclass(one) and one not in classes:
            classes.add(one)
            waiting += typing.get_type_hints(one).values()
    return classes


def test_all_classes_in_a_batch_can_be_sent_and_no_others() -> None:
    within = classes_of(Batch)
    assert Plan in within
    # Each loader has a TeamUse of its own, which its batches get when they are delivered.
    assert set(_BATCHES.values()) == within - classes_of(Plan) - {TeamUse}


def revive(value: Any) -> Any:
    return revive_of(value, object())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"<class>": "subprocess:Popen", "fields": {"args": ["true"]}}, "Route, and a peer sent 'subprocess:Popen'"),
        ({"<class>": "orchdata.batch.batch:Batch", "fields": {}}, "a peer sent 'orchdata.batch.batch:Batch'"),
        ({"<class>": ["Route"], "fields": ROUTE}, r"a peer sent \['Route'\]"),
        ({"<class>": "Route", "fields": [1]}, "a peer sent 'Route'"),
        ({"<class>": "Route"}, "a peer sent 'Route'"),
        ({"<class>": "Route", "fields": ROUTE | {"more": 1}}, "Route has other fields than what a peer sent.*: 'more'"),
        ({"<class>": "Route", "fields": {"rank": 0}}, "what a peer sent for it: 'adds', 'label', 'num_ranks'"),
        ([{"a": {"<class>": "Nothing", "fields": {}}}], "a peer sent 'Nothing'"),
    ],
)
def test_an_unknown_class_or_field_is_named(value: Any, message: str) -> None:
    with pytest.raises(WireError, match=message):
        revive(value)
