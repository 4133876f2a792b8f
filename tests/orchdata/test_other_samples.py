"""A state belongs to the usable samples of its epoch: with others it is refused, or the next epoch begins."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_loaders import Steps, loaders, steps_of
from shard_factory import write_shard

import orchdata as od

pytestmark = pytest.mark.usefixtures("same_cache")

BY_SAMPLES = {"global_batch_tokens": None, "global_batch_size": 4}
SHARDS, SAMPLES = 3, 14
LEFT_OUT = [("t1.tar", "s1-05")]


@pytest.fixture(autouse=True)
def own_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests elsewhere that expect one."""
    monkeypatch.setattr("orchdata.notices._warned", set())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for shard in range(SHARDS):
        texts = [f"{n} {'word ' * (1 + (7 * n + shard) % 11)}".encode() for n in range(SAMPLES)]
        samples = [{"__key__": f"s{shard}-{n:02d}", "txt": text} for n, text in enumerate(texts)]
        write_shard(folder / f"t{shard}.tar", samples)
    write_shard(folder / "other.tar", [{"__key__": f"r{n}", "txt": b"more " * (1 + n % 5)} for n in range(17)])
    return folder


def texts(folder: Path, name: str = "t*.tar", **text: Any) -> od.ShardDataset:
    return od.ShardDataset(str(folder / name), od.Recipe(image=None, audio=None, text=od.TextPreprocessor(**text)))


def mixed(folder: Path, **options: Any) -> od.Mixture:
    sources = {"texts": od.Source(texts(folder), weight=2), "others": od.Source(texts(folder, "other.tar"))}
    return od.Mixture(sources, **options)


KINDS: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "samples": (texts, BY_SAMPLES),
    "tokens": (texts, {"global_batch_tokens": 150}),
    "pieces": (lambda folder: texts(folder, max_tokens=20, overflow="split"), {"global_batch_tokens": 100}),
    "windows": (texts, {**BY_SAMPLES, "collate_fn": od.Packed(length=32, concatenate=True)}),
    "filter": (lambda folder: texts(folder).filter("tokens > 20"), BY_SAMPLES),
    "own order": (texts, {**BY_SAMPLES, "shuffle": np.arange(41, 0, -2)}),
    "all": (lambda folder: mixed(folder, stop="all"), {"global_batch_tokens": 150}),
    "all by samples": (lambda folder: mixed(folder, stop="all", by="samples"), BY_SAMPLES),
    "repeat": (lambda folder: mixed(folder, stop="repeat", epoch_tokens=1100), {"global_batch_tokens": 150}),
}


def loaders_of(kind: str, folder: Path, ranks: int, state: Any = None, allow: Sequence[str] = (), **more: Any) -> Any:
    dataset, options = KINDS[kind]
    return loaders(dataset(folder), ranks, state, allow, **options, **more)


def names(steps: Steps) -> Counter[tuple[str, str, int]]:
    return Counter(
        (*sample, int(piece))
        for shares in steps
        for share in shares
        for batch in share
        for sample, piece in zip(batch.sample_ids, batch.pieces, strict=True)
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_other_samples_is_refused_and_the_next_epoch_begins_by_consent(kind: str, folder: Path) -> None:
    ours = loaders_of(kind, folder, 1)
    first = steps_of(ours, 2)
    state = ours[0].state_dict()
    assert (state["epoch"], state["step"]) == (0, 2)

    # Refused, with both numbers, the shards of the first run that differs, and the way out.
    usable = next(each["num_usable"] for each in state["rows"] if each["num_usable"] > 17)
    called = "source 'texts'" if "others" in str(state) else "the data set"
    with pytest.raises(od.StateError) as error:
        loaders_of(kind, folder, 2, state, quarantine=LEFT_OUT)
    words = str(error.value)
    assert f"of {called} are others: {usable} in the state and " in words and "first in t1.tar" in words
    assert "allow=('samples',)" in words and "begins epoch 1" in words

    # The next epoch, whole, and what comes after it goes on exactly once, without consent and on other ranks.
    with pytest.warns(UserWarning, match="epoch 1 begins with the samples that are usable now"):
        later = loaders_of(kind, folder, 1, state, ("samples",), quarantine=LEFT_OUT)
    fresh = loaders_of(kind, folder, 1, quarantine=LEFT_OUT)
    fresh[0].set_epoch(1)
    assert later[0].state_dict() == fresh[0].state_dict()
    whole = names(steps_of(fresh))
    begun = steps_of(later, 2)
    rest = steps_of(loaders_of(kind, folder, 3, later[0].state_dict(), quarantine=LEFT_OUT))
    assert names([*begun, *rest]) == whole
    assert not any(key == LEFT_OUT[0][1] for _, key, _ in whole)

    # With the same samples the state goes on, also with consent.
    epoch = names(steps_of(loaders_of(kind, folder, 1)))
    for allow in ((), ("samples",)):
        assert names([*first, *steps_of(loaders_of(kind, folder, 2, state, allow))]) == epoch


def test_other_numbers_of_tokens_are_refused_where_steps_go_by_them(folder: Path) -> None:
    for kind, entry in (("tokens", 0), ("pieces", 0), ("windows", 0), ("all", 1), ("samples", 0)):
        ours = loaders_of(kind, folder, 1)
        steps_of(ours, 1)
        state = ours[0].state_dict()
        assert ("tokens" in state["rows"][entry]) == (kind != "samples")
        if kind != "samples":
            state["rows"][entry]["tokens"] = "0" * 16
            with pytest.raises(od.StateError, match=r"other numbers of tokens than in the state.*'samples'"):
                loaders_of(kind, folder, 1, state)
            with pytest.warns(UserWarning, match="other numbers of tokens"):
                assert loaders_of(kind, folder, 1, state, ("samples",))[0].state_dict()["epoch"] == 1


def test_an_epoch_of_which_nothing_was_delivered_is_not_left_out(folder: Path) -> None:
    ours = loaders_of("samples", folder, 1)
    steps_of(ours)
    state = ours[0].state_dict()
    assert (state["epoch"], state["step"]) == (1, 0)
    with pytest.raises(od.StateError, match="begins epoch 1, of which nothing was delivered, with"):
        loaders_of("samples", folder, 1, state, quarantine=LEFT_OUT)
    with pytest.warns(UserWarning, match="epoch 1, of which nothing was delivered, begins"):
        later = loaders_of("samples", folder, 1, state, ("samples",), quarantine=LEFT_OUT)
    assert later[0].state_dict()["epoch"] == 1 and len(names(steps_of(later))) == SHARDS * SAMPLES - 1


def test_consent_to_other_samples_is_none_to_another_loader(folder: Path) -> None:
    ours = loaders_of("samples", folder, 1)
    steps_of(ours, 1)
    state = ours[0].state_dict()
    with pytest.raises(od.StateError, match=r"order\.seed is 7 in the state and 8 here"):
        loaders(texts(folder), 1, state, ("samples",), **BY_SAMPLES, seed=8, quarantine=LEFT_OUT)
    with pytest.raises(od.StateError, match="the list of shards"):
        loaders(texts(folder, "other.tar"), 1, state, ("samples",), **BY_SAMPLES)
    for other in (texts(folder).take(12), texts(folder)[1:]):
        with pytest.raises(od.StateError, match="selection"):
            loaders(other, 1, state, ("samples",), **BY_SAMPLES)


def test_a_source_and_its_first_samples_are_two_entries_of_a_state(folder: Path) -> None:
    """Both have one index, and with nothing left out the same excluded rows."""
    sources = {"all": od.Source(texts(folder)), "first": od.Source(texts(folder).take(10))}
    mixture = od.Mixture(sources, stop="all")
    (loader,) = loaders(mixture, 1, **BY_SAMPLES)
    taken = [*itertools.islice(loader.steps(), 3)]
    state = json.loads(json.dumps(loader.state_dict()))
    assert [entry["num_usable"] for entry in state["rows"]] == [SHARDS * SAMPLES, 10]
    (again,) = loaders(mixture, 1, state, **BY_SAMPLES)
    assert sum(len(batch.sample_ids) for step in (*taken, *again.steps()) for batch in step) == 52


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_usable", -1), ("num_usable", 10**30), ("usable", None), ("runs", 3), ("runs", "no base64"), ("runs", "")],
)
def test_damage_is_an_error_that_says_so(name: str, value: Any, folder: Path) -> None:
    ours = loaders_of("samples", folder, 1)
    steps_of(ours, 1)
    state = ours[0].state_dict()
    state["rows"][0]["usable"] = "0" * 16  # the runs are read where something differs
    state["rows"][0][name] = value
    with pytest.raises(od.StateError, match="damaged" if value != "" else "first in t0.tar"):
        loaders_of("samples", folder, 1, state)
    with pytest.raises(od.StateError, match="damaged: its 'rows'"):
        loaders_of("samples", folder, 1, state | {"rows": []})
