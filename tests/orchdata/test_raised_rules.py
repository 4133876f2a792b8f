"""Runs survive an upgrade: rules judge otherwise in the middle of an epoch, and each sample still comes once.

What should come is worked out here from letters of texts, without the library.
"""

from __future__ import annotations

import itertools
import json
import random
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raised_rules import LETTERS, RuledData, Rules
from rank_loaders import Steps, steps_of

import orchdata as od
from orchdata.dataset.resume import rows as rows_module
from orchdata.dataset.resume.rows import ints_text, rows_text, text_ints, text_rows

pytestmark = pytest.mark.usefixtures("same_cache")

Name = tuple[str, int, str, str, int]
"""Source, pass, file, key and piece."""
SKIP = od.ErrorPolicy("skip", max_failures=10_000)
BEFORE = Rules(1, refused="bg", longer={"c": 2})
AFTER = Rules(2, refused="ad", longer={"e": 5, "c": 1})
STAGES = [(0, {"tars": 3, "others": 1}), (300, {"tars": 1, "others": 2})]


def alone(**options: Any) -> Callable[[RuledData], tuple[Any, dict[str, Any]]]:
    text = options.pop("text", {})
    return lambda data: (data.tars(**text), options)


def mixed(**options: Any) -> Callable[[RuledData], tuple[Any, dict[str, Any]]]:
    loader = {"global_batch_tokens": 150} | options.pop("loader", {})
    twice = options.pop("twice", False)

    def make(data: RuledData) -> tuple[Any, dict[str, Any]]:
        weights = {} if "stages" in options else {"weight": 2}
        sources = {"tars": od.Source(data.tars(), **weights), "others": od.Source(data.others())}
        if twice:
            sources["again"] = od.Source(data.tars())
        return od.Mixture(sources, **options), loader

    return make


KINDS: dict[str, Callable[[RuledData], tuple[Any, dict[str, Any]]]] = {
    "samples": alone(global_batch_size=4),
    "samples in order": alone(global_batch_size=4, shuffle=False),
    "streams": alone(global_batch_size=4, shuffle=od.Shuffle(window=1, streams=3)),
    "tokens": alone(global_batch_tokens=150),
    "ramp": alone(global_batch_tokens=[(0, 100), (400, 160)]),
    "pieces": alone(global_batch_tokens=100, text={"max_tokens": 20, "overflow": "split"}),
    "counted microbatches": alone(global_batch_size=6, accumulate=2),
    "microbatches": alone(global_batch_size=6, balance=od.Balance(max_tokens=90)),
    "split": lambda data: (data.tars().split("train", 0.8), {"global_batch_size": 3}),
    "filter": lambda data: (data.tars().filter("tokens > 20"), {"global_batch_size": 3}),
    "own order": alone(global_batch_size=3, shuffle=np.arange(41, 0, -2)),
    "all": mixed(stop="all"),
    "first": mixed(stop="first"),
    "all by samples": mixed(stop="all", by="samples", loader={"global_batch_size": 4, "global_batch_tokens": None}),
    "repeat": mixed(stop="repeat", epoch_tokens=1100),
    "repeat by samples": mixed(stop="repeat", by="samples", epoch_samples=50),
    "stages": mixed(stop="repeat", epoch_tokens=900, stages=STAGES),
    "a source twice": mixed(stop="all", twice=True),
    "a source twice, repeated": mixed(stop="repeat", epoch_tokens=1300, twice=True),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> RuledData:
    return RuledData(tmp_path_factory.mktemp("ruled"))


def loaders(kind: str, data: RuledData, ranks: int, state: Any = None, allow: Sequence[str] = ()) -> list[Any]:
    dataset, options = KINDS[kind](data)
    for each in dataset.leaves if isinstance(dataset, od.Mixture) else ():
        each.dataset.index()
    if isinstance(dataset, od.ShardDataset):
        dataset.index()
    common = {"shuffle": True, "seed": 5, "num_threads": 0, "on_error": SKIP} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = [od.DataLoader(dataset, dp=(rank, ranks), **common) for rank in range(ranks)]
        for loader in ours if state is not None else ():
            loader.load_state_dict(json.loads(json.dumps(state)), allow=allow)
    states = [loader.state_dict() for loader in ours]
    assert all(each == states[0] for each in states), "equal on all ranks"
    return ours


def names(ours: Sequence[Any], steps: Steps) -> list[Name]:
    """Of what was planned, which is what all ranks got together."""
    index = ours[0]._runtime.prepared.spec.plan.costs.index
    found: list[Name] = []
    got: Counter[tuple[str, str, int]] = Counter()
    for shares in steps:
        plan = shares[0][0].plan
        sources = getattr(plan, "sources", None)
        passes = plan.passes if plan.passes is not None and sources else np.full(len(plan.row), plan.epoch)
        for source, number, row in zip(plan.source.tolist(), passes.tolist(), plan.row.tolist(), strict=True):
            at = np.array([row])
            name = sources[source] if sources else ""
            found.append((name, number, Path(index.shard_of(row).url).name, index.key(row), int(index.piece[at][0])))
        for share in shares:
            for batch in share:
                got.update(
                    (Path(shard).name, key, int(piece))
                    for (shard, key), piece in zip(batch.sample_ids, batch.pieces, strict=True)
                )
    assert got == Counter(name[2:] for name in found)
    return found


def check(kind: str, data: RuledData, walk: Sequence[tuple[Rules, list[Name]]], whole: set[tuple[str, int]]) -> None:
    """Nothing twice, nothing that is refused, and of each whole pass all that was always usable."""
    everything = [name for _, part in walk for name in part]
    assert len(everything) == len(set(everything)), "nothing comes twice"
    for rules, part in walk:
        assert {name[2:4] for name in part} <= data.usable(rules)
    for source, number in whole:
        mine = {name[2:4] for name in everything if name[:2] == (source, number)}
        files = {name[0] for name in data.usable(Rules(0))}
        files = {name for name in files if (name == "other.tar") == (source == "others")}
        always = set.intersection(*(data.usable(rules) for rules, _ in walk))
        assert {name for name in always if name[0] in files} <= mine, "nothing is lost"
    # A pass has only what was usable when it began.
    for source, number in {name[:2] for name in everything}:
        begun = next(rules for rules, part in walk if any(name[:2] == (source, number) for name in part))
        assert {name[2:4] for name in everything if name[:2] == (source, number)} <= data.usable(begun)


CHOOSING = ("split", "filter", "own order")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_each_sample_comes_once_over_two_changes_of_rules(kind: str, seed: int, data: RuledData) -> None:
    draw = random.Random(f"{kind} {seed}")
    rules = [
        Rules(
            100 * [*KINDS].index(kind) + 10 * seed + number,  # nothing kept is shared
            refused="".join(draw.sample(LETTERS, 2)),
            longer={letter: draw.randint(1, 6) for letter in draw.sample(LETTERS, 3)},
        )
        for number in range(10, 13)
    ]
    walk: list[tuple[Rules, list[Name]]] = []
    state, epoch = None, draw.randint(0, 2)
    for number, each in enumerate(rules):
        with each.applied():
            ours = loaders(kind, data, draw.randint(1, 3), state, ("rules",) if number else ())
            if not number:
                for loader in ours:
                    loader.set_epoch(epoch)
            if number < 2:
                steps = steps_of(ours, draw.randint(1, 3))
                walk.append((each, names(ours, steps)))
                state = ours[0].state_dict()
                # A state under the same rules goes on as the run does, on any number of ranks.
                again = loaders(kind, data, draw.randint(1, 3), state)
                rest = names(again, steps_of(again))
                assert rest == names(ours, [*steps_of(loaders(kind, data, 1, state))])
                if state["epoch"] != epoch:
                    break  # the epoch was over
            else:
                # To the end of the epoch, and the next one.
                walk.append((each, names(ours, steps_of(ours))))
                following = names(ours, steps_of(ours))
                walk.append((each, following))
    last = walk[-1][1]
    if kind.startswith(("first", "repeat", "stages")) or "repeated" in kind:
        found = {name[:2] for _, part in walk for name in part}
        whole = {(s, n) for s, n in found if (s, n + 1) in found} - {
            (s, n) for s, n in found if epoch and (s, n) == min(x for x in found if x[0] == s)
        }
        if kind.startswith("first"):
            whole = set()
        check(kind, data, walk, whole)
    elif kind in CHOOSING:
        check(kind, data, walk, set())
    else:
        check(kind, data, walk, {name[:2] for name in walk[0][1]} if len(walk) == 4 else set())
        if len(walk) == 4:
            is_mixed = "all" in kind or "twice" in kind
            present = {name for name in data.usable(rules[2]) if is_mixed or name[0] != "other.tar"}
            assert {name[2:4] for name in last} == present


def test_the_rest_of_an_epoch_keeps_its_order(data: RuledData) -> None:
    """What is usable before and after comes as it would have come."""
    with BEFORE.applied():
        ours = loaders("samples", data, 2)
        steps_of(ours, 3)
        state = ours[0].state_dict()
        old = names(ours, steps_of(loaders("samples", data, 1, state)))
    with AFTER.applied():
        new = loaders("samples", data, 3, state, ("rules",))
        rest = names(new, steps_of(new))
    assert rest == [name for name in old if name[2:4] in data.usable(AFTER)]
    assert len(rest) < len(old)


def test_a_change_that_touches_nothing_needs_no_consent(data: RuledData) -> None:
    """Other rules with the same verdicts; and, where steps go by samples, with other tokens."""
    with BEFORE.applied():
        ours = loaders("samples", data, 1)
        steps_of(ours, 2)
        state = ours[0].state_dict()
        by_tokens = loaders("tokens", data, 1)
        steps_of(by_tokens, 2)
        other = by_tokens[0].state_dict()
        rest = names(ours, steps_of(loaders("samples", data, 1, state)))
    with Rules(7, refused="bg", longer={"c": 9}).applied():
        again = loaders("samples", data, 1, state)
        assert names(again, steps_of(again)) == rest
        with pytest.raises(od.StateError, match="other numbers of tokens"):
            loaders("tokens", data, 1, other)


def test_a_refusal_says_versions_both_values_and_the_way_out(data: RuledData) -> None:
    with BEFORE.applied():
        ours = loaders("samples", data, 1)
        steps_of(ours, 2)
        state = ours[0].state_dict()
    with AFTER.applied():
        with pytest.raises(od.StateError) as error:
            loaders("samples", data, 1, state)
        message = str(error.value)
        assert (
            f"written by orchdata {od.__version__} under rules text 1001" in message
            and "under rules text 1002" in message
        )
        assert "samples that were usable when the state was written cannot be used now: t" in message
        assert "txt: rules 2 refuse 'd'" in message and "not usable then can be used now" in message
        assert "allow=('rules',)" in message and "loader.set_epoch(1)" in message
        assert not any(len(word) >= 16 and set(word) <= set("0123456789abcdef") for word in message.split())
        (fresh,) = loaders("samples", data, 1)
        with pytest.warns(UserWarning, match="epoch 0 ends in its old order"):
            fresh.load_state_dict(state, allow=("rules",))


def test_windows_cannot_continue_and_say_so(data: RuledData) -> None:
    layout = {"collate_fn": od.Packed(length=32, concatenate=True), "global_batch_size": 2, "on_error": SKIP}
    with BEFORE.applied():
        loader = od.DataLoader(data.tars(), num_threads=0, **layout)
        at_start = loader.state_dict()
        next(iter(loader.steps()))
        state = loader.state_dict()
    with AFTER.applied():
        loader = od.DataLoader(data.tars(), num_threads=0, **layout)
        with pytest.raises(od.StateError, match=r"begin the next epoch by loader\.set_epoch\(1\)"):
            loader.load_state_dict(state, allow=("rules",))
        with pytest.raises(
            od.StateError, match=r"begin epoch 0, of which nothing was delivered, by loader\.set_epoch\(0\)"
        ):
            loader.load_state_dict(at_start)
    with Rules(8, refused="bg", longer={"c": 2}).applied():
        loader = od.DataLoader(data.tars(), num_threads=0, **layout)
        loader.load_state_dict(state)


@pytest.mark.parametrize("kind", ["samples", "tokens", "pieces", "repeat"])
def test_rows_that_no_state_stores_come_from_the_index_of_then(
    kind: str, data: RuledData, monkeypatch: pytest.MonkeyPatch
) -> None:
    with BEFORE.applied():
        ours = loaders(kind, data, 1)
        steps_of(ours, 2)
        state = ours[0].state_dict()
        with monkeypatch.context() as patch:
            patch.setattr(rows_module, "MOST_TEXT", 0)
            ours = loaders(kind, data, 1, state)
            large = ours[0].state_dict()
    assert "too_large" in json.dumps(large) and "too_large" not in json.dumps(state)
    with AFTER.applied():
        first, second = (loaders(kind, data, 1, each, ("rules",)) for each in (state, large))
        assert names(first, steps_of(first)) == names(second, steps_of(second))


def test_without_the_index_of_then_the_next_epoch_is_offered(
    data: RuledData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with BEFORE.applied():
        ours = loaders("samples", data, 1)
        steps_of(ours, 2)
        with monkeypatch.context() as patch:
            patch.setattr(rows_module, "MOST_TEXT", 0)
            state = loaders("samples", data, 1, ours[0].state_dict())[0].state_dict()
    monkeypatch.setenv("ORCHDATA_CACHE", str(tmp_path))
    with AFTER.applied():
        with pytest.raises(od.StateError, match=r"no longer in the cache folder .*loader\.set_epoch\(1\)"):
            loaders("samples", data, 1, state, ("rules",))
        (loader,) = loaders("samples", data, 1)
        loader.set_epoch(1)
        assert loader.state_dict()["epoch"] == 1 and len(list(loader.steps())) > 0


def test_rows_of_samples_that_are_no_longer_found_are_not_called_too_large(
    data: RuledData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule of a container may find other samples in a shard."""
    with BEFORE.applied():
        ours = loaders("samples", data, 1)
        steps_of(ours, 2)
        state = ours[0].state_dict()
    state["rows"][0]["samples"] = "0" * 16
    monkeypatch.setenv("ORCHDATA_CACHE", str(tmp_path))
    with AFTER.applied(), pytest.raises(od.StateError, match=r"they are of other samples than .*set_epoch\(1\)"):
        loaders("samples", data, 1, state, ("rules",))


def test_a_state_of_the_first_samples_is_none_of_the_whole(data: RuledData) -> None:
    with BEFORE.applied():
        common = {"global_batch_size": 3, "num_threads": 0, "on_error": SKIP}
        part = od.DataLoader(data.tars().take(12), **common)
        next(iter(part))
        for other in (data.tars(), data.tars().take(13), data.tars()[1:13]):
            loader = od.DataLoader(other, **common)
            for allow in ((), ("rules",)):
                with pytest.raises(od.StateError, match="selection"):
                    loader.load_state_dict(part.state_dict(), allow=allow)
        od.DataLoader(data.tars().take(12), **common).load_state_dict(part.state_dict())


@pytest.mark.parametrize("chosen", [slice(0, 12), slice(5, None), slice(0, None, 2)])
def test_numbers_that_choose_other_samples_under_other_rules_offer_the_next_epoch(
    chosen: slice, data: RuledData
) -> None:
    common = {"global_batch_size": 4, "on_error": SKIP}
    with Rules(901).applied():
        before = od.DataLoader(data.tars()[chosen], **common)
        at_start = before.state_dict()
        next(iter(before))
        state = before.state_dict()
    with Rules(902, refused="c").applied():
        for allow in ((), ("rules",)):
            with pytest.raises(od.StateError, match=r"rules.*slices.*loader\.set_epoch\(1\)"):
                od.DataLoader(data.tars()[chosen], **common).load_state_dict(state, allow=allow)
        other = od.DataLoader(data.tars()[chosen], **common)
        with pytest.raises(od.StateError, match=r"slices.*epoch 0, of which nothing was delivered"):
            other.load_state_dict(at_start)
        other.set_epoch(1)
        assert sum(len(batch.sample_ids) for batch in other) == len(data.tars()[chosen])
    with Rules(901).applied(), pytest.raises(od.StateError) as raised:
        od.DataLoader(data.tars()[1:9], **common).load_state_dict(state)
    assert "set_epoch" not in str(raised.value)


def test_a_source_and_its_first_samples_are_two_entries_of_a_state(data: RuledData) -> None:
    """Both have one index, and with nothing left out the same excluded rows."""
    mixture = od.Mixture({"all": od.Source(data.tars()), "first": od.Source(data.tars().take(10))}, stop="all")
    common = {"global_batch_size": 4, "num_threads": 0}
    loader = od.DataLoader(mixture, **common)
    taken = [*itertools.islice(loader.steps(), 3)]
    state = json.loads(json.dumps(loader.state_dict()))
    assert [entry["num_usable"] for entry in state["rows"]] == [42, 10]
    again = od.DataLoader(mixture, **common)
    again.load_state_dict(state)
    assert sum(len(batch.sample_ids) for step in (*taken, *again.steps()) for batch in step) == 52


def test_where_nothing_of_an_epoch_was_delivered_it_is_offered(data: RuledData) -> None:
    """The next one would leave out an epoch."""
    with BEFORE.applied():
        ours = loaders("samples", data, 1)
        steps_of(ours)
        state = ours[0].state_dict()
        assert (state["epoch"], state["position"]) == (1, 0)
    with AFTER.applied():
        with pytest.raises(od.StateError, match=r"Nothing of epoch 1 was delivered: .* loader\.set_epoch\(1\)"):
            loaders("samples", data, 1, state)
        (loader,) = loaders("samples", data, 1)
        with pytest.warns(UserWarning, match="epoch 1 was delivered, so it begins with the samples that are usable"):
            loader.load_state_dict(state, allow=("rules",))
        found = {name[2:4] for name in names([loader], steps_of([loader]))}
        assert found == {name for name in data.usable(AFTER) if name[0] != "other.tar"}


WRAPPED = ints_text(np.array([0, 0, 0, 0, *4 * [1 << 62]]))
"""Rows whose numbers have a sum of 0 in 64 bits."""


DAMAGED: list[tuple[str, tuple[Any, ...], Any]] = [
    ("samples", ("rows", 0, "excluded"), WRAPPED),
    ("pieces", ("rows", 0, "pieces"), ints_text(np.array(42 * [1 << 62]))),
    ("samples", ("rows", 0, "usable"), None),
    ("samples", ("begun",), []),
    ("samples", ("begun", 0, "excluded"), WRAPPED),
    ("samples", ("begun", 0, "removed"), WRAPPED),
    ("pieces", ("begun", 0, "rows"), ints_text(np.array([-9, *81 * [0]]))),
    ("pieces", ("begun", 0, "tokens"), 1 << 63),
    ("pieces", ("begun", 0, "num_rows"), 10**30),
    ("repeat", ("begun", 0, "anchor"), 5),
    ("all", ("position",), 10**9),
    ("all", ("given", "now", "tokens"), [1 << 63, 1]),
]


@pytest.mark.parametrize(("kind", "at", "value"), DAMAGED, ids=[" ".join(map(str, at)) for _, at, _ in DAMAGED])
def test_damage_is_an_error_that_says_so(kind: str, at: tuple[Any, ...], value: Any, data: RuledData) -> None:
    """No crash of the process, and no search that does not end."""
    with BEFORE.applied():
        ours = loaders(kind, data, 1)
        steps_of(ours, 2)
        state = ours[0].state_dict()
    with AFTER.applied():
        ours = loaders(kind, data, 1, state, ("rules",))
        steps_of(ours, 1)
        state = json.loads(json.dumps(ours[0].state_dict()))
        *path, last = at
        inner = state
        for name in path:
            inner = inner[name]
        assert last in inner
        inner[last] = value
        if at[0] != "rows":  # under the same rules they are not read
            with pytest.raises(od.StateError, match="damaged"):
                loaders(kind, data, 1, state)
    with Rules(9, refused="f").applied(), pytest.raises(od.StateError, match="damaged"):
        loaders(kind, data, 1, state, ("rules",))


@pytest.mark.parametrize("rows", [[], [0], [3, 4, 5, 9], [*range(100), 1000, 70_000], [5]])
def test_rows_as_text_come_back(rows: list[int]) -> None:
    array = np.array(rows, np.int64)
    assert np.array_equal(text_rows(rows_text(array), 100_000), array)
    assert np.array_equal(text_ints(ints_text(-array)), -array)


@pytest.mark.parametrize(
    "text", ["", "1", "9abc", None, 3, "1AAAA", ints_text(np.array([5, 1])), "2" + ints_text(np.array([1]))[1:]]
)
def test_damaged_rows_are_an_error(text: Any) -> None:
    with pytest.raises(od.StateError, match="damaged"):
        text_rows(text, 5)
