from __future__ import annotations

import gzip
import json
import re
import shutil
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from map_dataset import Numbers
from shard_factory import jpeg, omni_shards, write_shard

import orchdata as od
from orchdata import notices
from orchdata.dataset.prepared import PreparedDataset, check_allowed, restore
from orchdata.delivery.policy import Stats
from orchdata.loaders.errors import StateError
from orchdata.loaders.shards.columns import COLUMNS
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loop.loop import Position
from orchdata.loop.state import State
from orchdata.order.order import Order
from orchdata.order.steps import Begin, GlobalBatches, OrderedSteps, draw_of_cut
from orchdata.profiling.profile import profile

FINGERPRINT = {"dataset": "abc", "order": {"seed": 3, "shuffle": {"window": 64, "streams": 1}}, "global_batch_size": 24}

EPOCHS = OrderedSteps(batches=GlobalBatches(size=24), order=Order(240, shuffle=None, seed=0))


def dump_state(position: Position, fingerprint: dict[str, Any], steps: OrderedSteps) -> dict[str, Any]:
    location = steps.location(position.epoch, position.step, position.draw)
    return State(position=position, location=location, fingerprint=fingerprint).to_json()


def load_state(state: Any, fingerprint: dict[str, Any], steps: OrderedSteps, allow: tuple[str, ...] = ()) -> Position:
    spec: Any = SimpleNamespace(plan=SimpleNamespace(order=None, batches=None))
    prepared = PreparedDataset(spec=spec, fingerprint=fingerprint, failures=(), num_indexed=0, torch_steps=steps)
    return restore(prepared, State.from_json(state), allow, 0)[1]


def test_a_state_with_tuples_in_place_of_lists_loads() -> None:
    state = dump_state(Position(2, 5, left=(1, 3)), FINGERPRINT, EPOCHS)
    assert load_state({**state, "left": tuple(state["left"])}, FINGERPRINT, EPOCHS) == Position(2, 5, left=(1, 3))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 99}, "version 99"),
        ({"step": 11}, "step 11"),
        ({"step": -1}, "damaged: ValueError: step must be at least 0, got -1"),
        ({"step": 5, "position": 119}, "step 5 of epoch 0 begins after 119 samples in the state and 120 here"),
        ({"epoch": "x"}, "'x'"),
        ({"epoch": 10**30}, "damaged: ValueError: epoch must be below"),
        ({"fingerprint": None}, "damaged"),
        ({"left": 3}, "damaged"),
        ({"drawn": {"cut": "x"}}, "no draw of this loader's order"),
        ({"drawn": {"seed": 3}}, "no draw of this loader's order"),
    ],
    ids=str,
)
def test_impossible_states_raise_an_error(change: dict[str, object], reason: str) -> None:
    state = {**dump_state(Position(), FINGERPRINT, EPOCHS), **change}
    with pytest.raises(StateError, match=reason):
        load_state(state, FINGERPRINT, EPOCHS)


def test_a_dict_that_is_no_state_raises_an_error() -> None:
    with pytest.raises(StateError, match="not a state"):
        load_state({"_index": 3}, FINGERPRINT, EPOCHS)


def test_another_size_cuts_the_rest_again_if_that_is_allowed() -> None:
    state = dump_state(Position(2, 5), FINGERPRINT, EPOCHS)
    other = OrderedSteps(batches=GlobalBatches(size=50), order=Order(240, shuffle=None, seed=0))
    fingerprint = FINGERPRINT | {"global_batch_size": 50}
    with pytest.raises(StateError, match=r"allow=\('global_batch_size',\)"):
        load_state(state, fingerprint, other)
    loaded = load_state(state, fingerprint, other, ("global_batch_size",))
    assert loaded == Position(2, 5, draw_of_cut(Begin(5, 120)))
    steps = [other.batches.bounds(task.step, 240, 2, task.begin) for task in other.tasks(2, 5, loaded.draw, again=True)]
    assert steps == [(120, 170), (170, 220), (220, 240)]
    later = dump_state(Position(2, 6, loaded.draw), fingerprint, other)
    assert load_state(json.loads(json.dumps(later)), fingerprint, other) == Position(2, 6, loaded.draw)


def test_other_differences_cannot_be_allowed() -> None:
    with pytest.raises(ValueError, match="'global_batch_tokens'"):
        check_allowed(("seed",))


def test_a_state_of_another_order_format_names_the_way_out() -> None:
    state = dump_state(Position(), FINGERPRINT | {"order": {"format": 1}}, EPOCHS)
    with pytest.raises(StateError, match="finish the epoch with the orchdata that began it"):
        load_state(state, FINGERPRINT | {"order": {"format": 2}}, EPOCHS)


# Statistics of a loader: bytes read from storage, bytes that its samples use, and the balance of its steps.


MAGIC = 4  # bytes that tell a plain tar from a compressed one, read when a shard is opened
RECIPE = od.Recipe(image=od.ImagePreprocessor(max_tokens=64))


def loader(*paths: str, **options: Any) -> od.DataLoader:
    dataset = od.ShardDataset(list(paths), recipe=RECIPE)
    dataset.index()
    return od.DataLoader(dataset, **({"batch_size": 2, "shuffle": True, "num_threads": 0} | options))


def run_epoch(loader: od.DataLoader) -> dict[str, Any]:
    for _ in loader:
        pass
    return loader.stats()


@pytest.fixture
def one_image(tmp_path: Path) -> str:
    return write_shard(tmp_path / "one.tar", [{"__key__": "a", "jpg": jpeg(60, 60), "txt": b"ok"}])


def test_gaps_between_members_that_are_read_together_count_as_reads(one_image: str) -> None:
    with tarfile.open(one_image) as tar:
        first, last = sorted(tar.getmembers(), key=lambda member: member.offset_data)
    stats = run_epoch(loader(one_image))
    used = first.size + last.size
    together = last.offset_data + last.size - first.offset_data
    assert together > used
    assert stats["reads"] == {"storage_bytes": MAGIC + together, "cache_bytes": 0, "used_bytes": used}
    assert stats["read_amplification"] == (MAGIC + together) / used


@pytest.mark.parametrize("collate_fn", [None, list])
@pytest.mark.parametrize("num_threads", [0, 4])
def test_an_epoch_reads_what_the_profile_predicts(tmp_path: Path, num_threads: int, collate_fn: Any) -> None:
    paths = omni_shards(tmp_path, shards=3, samples=20)
    made = loader(*paths, num_threads=num_threads, collate_fn=collate_fn)
    predicted = profile(made.dataset.index(), ranks=(1,)).read_amplification.by_range
    assert predicted is not None
    for epoch in (1, 2):
        reads = run_epoch(made)["reads"]
        used = reads["used_bytes"]
        assert used == epoch * made.dataset.index().totals["bytes"]
        assert reads["storage_bytes"] == round(predicted * used) + 3 * MAGIC  # shards stay open


def test_a_compressed_shard_is_read_once_and_not_while_the_cache_has_it(tmp_path: Path, one_image: str) -> None:
    path = tmp_path / "packed.tar.gz"
    path.write_bytes(gzip.compress(Path(one_image).read_bytes()))
    kept = run_epoch(loader(str(path)))  # indexing has decompressed it
    assert kept["reads"]["storage_bytes"] < 64
    assert kept["reads"]["cache_bytes"] > kept["reads"]["used_bytes"]
    shutil.rmtree(CacheFolder().root / "shards")
    made = loader(str(path))
    for _ in range(2):
        pulled = run_epoch(made)["reads"]["storage_bytes"]
        assert path.stat().st_size <= pulled < path.stat().st_size + 64


@pytest.mark.slow
def test_parquet_cells_are_read_with_the_rest_of_their_column_chunk(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"image": [jpeg(60, 60, seed) for seed in range(8)], "caption": [f"one {i}" for i in range(8)]})
    pq.write_table(table, path, compression="none", row_group_size=4)
    made = loader(str(path), batch_size=1)
    next(iter(made))
    first = made.stats()
    assert first["read_amplification"] > 3  # one cell of four
    whole = run_epoch(made)["reads"]
    again = run_epoch(made)["reads"]
    assert again["used_bytes"] == whole["used_bytes"] + made.dataset.index().totals["bytes"]
    assert again["storage_bytes"] == whole["storage_bytes"]  # decoded columns are kept


def test_map_style_data_sets_are_not_in_shards() -> None:
    stats = run_epoch(od.DataLoader(Numbers(4)))
    assert stats["read_amplification"] is None
    assert stats["reads"] is None
    assert Stats().as_dict()["reads"] is None


@pytest.mark.parametrize("package", ["torch.utils.tensorboard", "wandb"])
def test_the_lines_of_the_page_log_every_number(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "stats.md").read_text()
    (block,) = re.findall(rf"^```python\n((?:import|from) {package}\b.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(block.strip().replace("\n\n", "\n").splitlines()) <= 4
    logged: dict[str, Any] = {}
    writer = SimpleNamespace(add_scalar=lambda name, value, step: logged.update({name: (value, step)}))
    run = SimpleNamespace(log=lambda values, step: logged.update({name: (each, step) for name, each in values.items()}))
    stub = SimpleNamespace(SummaryWriter=lambda folder: writer, init=lambda project: run)
    monkeypatch.setitem(sys.modules, package, stub)  # type: ignore[arg-type]
    made = loader(*omni_shards(tmp_path, shards=1, samples=8))
    nested = run_epoch(made)
    exec(block, {"loader": made, "step": 7})
    assert all(type(value) in (int, float) and step == 7 for value, step in logged.values())
    for names in (("steps",), ("milliseconds", "waiting"), ("phases", "llm", "imbalance"), ("failures", "count")):
        value: Any = nested
        for name in names:
            value = value[name]
        assert logged["/".join(names)] == (value, 7)
    assert nested["fill"] is None and "fill" not in logged and "since" not in logged
    assert made.stats(flat=True)["steps"] == 0  # it was reset


@pytest.mark.slow
def test_padding_and_repeated_reads_are_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed batches, and columns that stay in memory, are the controls."""
    for name in "ab":
        pq.write_table(pa.table({"text": ["ab", "b" * 99] * 30}), tmp_path / f"{name}.parquet", use_dictionary=False)
    dataset, said, counts = od.ShardDataset(str(tmp_path / "*.parquet")), [], []
    monkeypatch.setattr(notices, "_warned", set())
    monkeypatch.setattr(notices, "warn_user", said.append)
    for layout, kept in ((od.Packed(), 1 << 29), (od.Padded(), 1 << 29), (od.Packed(), 0)):
        monkeypatch.setattr(COLUMNS, "max_bytes", kept)
        run_epoch(od.DataLoader(dataset, batch_size=2, shuffle=True, num_threads=0, collate_fn=layout))
        counts.append(len(said))
    assert counts == [0, 1, 2] and "positions so far are padding" in said[0] and "this rank has read" in said[1]
