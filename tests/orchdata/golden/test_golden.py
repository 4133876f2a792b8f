"""What the library gives is what it gave when `golden.json` was stored: states, plans, batches and fingerprints.

`tests/support/golden_cases.py` makes the cases, and says how to store one again that changes on purpose.
"""

from __future__ import annotations

import json
import lzma
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from float_bounds import assert_log_mel_close, assert_standard_scores_close
from golden_batches import BatchCase, PlanCase, costed, floats
from golden_cases import CASES, PATH, as_text, read
from golden_data import GoldenData
from golden_indexes import DIGESTS, FOLDER, digest
from golden_states import STATES, StateCase, comparable, shards

from orchdata.loaders.errors import DamagedIndexError, StateError
from orchdata.loaders.index.index import Index

pytestmark = pytest.mark.usefixtures("same_cache")

GOLDEN = read()
WHOLE = [name for name in CASES if name != "floats" and not name.startswith("state, ")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> GoldenData:
    return GoldenData(tmp_path_factory.mktemp("golden"))


def test_the_file_has_exactly_the_cases_that_exist() -> None:
    assert list(GOLDEN) == list(CASES)
    assert PATH.read_text() == as_text(GOLDEN), "only golden_cases.py may write the file"


@pytest.mark.cpus
@pytest.mark.parametrize("name", WHOLE)
def test_a_value_is_as_it_was(name: str, data: GoldenData) -> None:
    assert CASES[name](data) == GOLDEN[name]


@pytest.mark.parametrize("name", STATES)
def test_a_loader_at_the_same_place_has_the_same_state_and_goes_on_the_same(name: str, data: GoldenData) -> None:
    found, stored = STATES[name].stored(data), GOLDEN[f"state, {name}"]
    assert comparable(found["state"]) == comparable(stored["state"])
    assert found["following"] == stored["following"]


@pytest.mark.parametrize("name", STATES)
def test_a_stored_state_goes_on_as_it_did(name: str, data: GoldenData) -> None:
    stored = GOLDEN[f"state, {name}"]
    assert STATES[name].following_of(stored["state"], data) == stored["following"]


@pytest.mark.parametrize("name", ["shards, in an epoch", "token steps, between epochs", "mixture, stages"])
@pytest.mark.parametrize("engine", [{"num_workers": 2, "multiprocessing_context": "fork"}, {"num_threads": 3}])
def test_a_stored_state_goes_on_the_same_by_any_engine(name: str, engine: dict[str, Any], data: GoldenData) -> None:
    stored = GOLDEN[f"state, {name}"]
    assert STATES[name].following_of(stored["state"], data, **engine) == stored["following"]


@pytest.mark.cpus
def test_floats_are_as_they_were_within_their_bounds(data: GoldenData) -> None:
    found = {name: np.array(values, np.float32) for name, values in floats(data).items()}
    stored = {name: np.array(values, np.float32) for name, values in GOLDEN["floats"].items()}
    assert found.keys() == stored.keys()
    assert_log_mel_close(found["log-mel"], stored["log-mel"])
    assert_standard_scores_close(found["normalised samples"], stored["normalised samples"])
    assert np.array_equal(found["normalised pixels"], stored["normalised pixels"])  # 256 values a channel


def test_another_seed_gives_other_values(data: GoldenData) -> None:
    """The comparisons above can fail."""
    assert PlanCase(make=costed(seed=8)).stored(data) != GOLDEN["plan, global"]
    assert PlanCase(make=costed()).stored(data) == GOLDEN["plan, global"]
    assert BatchCase(make=costed(seed=8), ranks=2).stored(data) != GOLDEN["batch, packed"]
    assert BatchCase(make=costed(), ranks=2).stored(data) == GOLDEN["batch, packed"]
    stored = GOLDEN["state, shards, in an epoch"]
    other = StateCase(make=shards(seed=8), steps=5, following=6).stored(data)
    assert other["state"] != stored["state"] and other["following"] != stored["following"]
    with pytest.raises(StateError, match=r"order\.seed is 7 in the state and 8 here"):
        StateCase(make=shards(seed=8), steps=6).following_of(stored["state"], data)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("shards, in an epoch", {"step": 4, "position": 20}),
        ("token steps, between epochs", {"epoch": 2}),
        ("map-style, shuffled by torch", {"drawn": {"seed": 1}}),
        ("sampler, with a state", {"sampler": {"sampler": {"epoch": 0, "place": 2}}}),
        ("data set with a state", {"workers": [{"dataset": {"given": 7}}]}),
        ("iterable, 0 workers", {"workers": [{"epoch": 0, "steps": 2}]}),
    ],
)
def test_another_state_goes_on_otherwise(name: str, change: dict[str, Any], data: GoldenData) -> None:
    stored = GOLDEN[f"state, {name}"]
    state = deepcopy(stored["state"])
    assert state.keys() >= change.keys() and state | change != state
    assert STATES[name].following_of(state | change, data) != stored["following"]


def test_a_name_of_the_data_is_no_folder(data: GoldenData, tmp_path: Path) -> None:
    """Shards in another folder have the same fingerprints, and no stored value has a path."""
    other = GoldenData(tmp_path / "elsewhere")
    assert CASES["fingerprints"](other) == GOLDEN["fingerprints"]
    assert str(tmp_path.parent) not in PATH.read_text()


# Indexes that an earlier release has written are opened, and say what they said.


KEPT = json.loads(DIGESTS.read_text())


def opened(name: str, folder: Path, *, changed: int | None = None) -> Index:
    content = bytearray(lzma.decompress((FOLDER / name).read_bytes()))
    if changed is not None:
        content[changed] ^= 1
    path = folder / "kept.index"
    path.write_bytes(content)
    return Index(path)


def test_all_files_have_a_digest() -> None:
    assert {path.name for path in FOLDER.glob("*.xz")} == KEPT.keys() and len(KEPT) >= 8


@pytest.mark.parametrize("name", KEPT)
def test_an_index_of_an_earlier_release_says_what_it_said(name: str, tmp_path: Path) -> None:
    index = opened(name, tmp_path)
    assert digest(index) == KEPT[name]
    assert index.num_samples == index.totals["samples"] > 0
    for row in range(0, index.num_rows, 5):
        assert index.key(row) and index.members(row) is not None


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(DamagedIndexError):
        opened(next(iter(KEPT)), tmp_path, changed=-20)
