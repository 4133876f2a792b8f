"""The budget of failures: 1 % by default, of what the index lists and of what fails later."""

from __future__ import annotations

import json
import typing
from dataclasses import fields, is_dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from map_dataset import Numbers

import orchdata as od
from orchdata.batch.batch import Batch
from orchdata.batch.tensors import TeamUse
from orchdata.delivery.policy import ErrorPolicy, FailureBudget, Stats
from orchdata.engines.processes.message import _BATCHES
from orchdata.engines.processes.message import revive as revive_of
from orchdata.loaders.errors import DataError
from orchdata.planning.plan import Plan
from orchdata.planning.route import Route
from orchdata.ranks.wire import WireError

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
    for path in (
        "data/a.jsonl",
        "./data/../data/a.jsonl",
        "data/a*.jsonl",
        "data/photos",
        f"file:{tmp_path}/data/a.jsonl",
    ):
        assert len(made(path, quarantine=[(path, "4"), (path, "5")], on_error="raise")) == 1
    with pytest.raises(ValueError, match="quarantine names sample '4' of shard 'data/b.jsonl'"):
        made("data/a.jsonl", quarantine=[("data/b.jsonl", "4")])


def test_a_missing_file_is_reported_with_the_folder_that_was_searched(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "other.txt").write_text("")
    (tmp_path / "a.jsonl").write_text('{"image": "0.png", "text": "a"}')
    dataset = od.ShardDataset(tmp_path / "a.jsonl", media_root=tmp_path / "images")
    with pytest.raises(od.DataError, match=f"'0.png': no such file below '{tmp_path}/images'"):
        od.DataLoader(dataset, batch_size=1)


@pytest.mark.parametrize("allowed", [None, 2, Fraction(2, 100), Fraction(1)])
def test_more_are_skipped_where_the_policy_says_so(tmp_path: Path, allowed: int | Fraction | None) -> None:
    loader = made(records(tmp_path / "a.jsonl", 98, 2), on_error=od.ErrorPolicy("skip", max_failures=allowed))
    assert sum(len(batch.sample_ids) for batch in loader) == 98


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
    with pytest.raises(
        od.TooManyFailures, match=r"2 of 20 samples failed, the policy allows 0 \(1 %\): 4 x damaged"
    ) as raised:
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
        (
            {"<class>": "Route", "fields": ROUTE | {"more": 1}},
            "Route has other fields than what a peer sent for it: 'more'",
        ),
        ({"<class>": "Route", "fields": {"rank": 0}}, "what a peer sent for it: 'adds', 'label', 'num_ranks'"),
        ([{"a": {"<class>": "Nothing", "fields": {}}}], "a peer sent 'Nothing'"),
    ],
)
def test_an_unknown_class_or_field_is_named(value: Any, message: str) -> None:
    with pytest.raises(WireError, match=message):
        revive(value)
