from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked_program import run_forked
from map_dataset import Numbers
from shard_factory import chat, jpeg, omni_shards, write_shard

import orchdata as od

FIRST_LOADER = """
import random, sys
import numpy as np
import orchdata as od
import torch

def states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()

random.seed(1), np.random.seed(2), torch.manual_seed(3)
before = states()
for options in ({"num_threads": 0}, {"num_threads": 2}, {"num_workers": 1}):
    loader = od.DataLoader(od.ShardDataset(sys.argv[1:]), global_batch_size=20, shuffle=True, **options)
    assert len(list(loader)) == 3
    assert states() == before, options
"""

RECIPE = od.Recipe(image=od.ImagePreprocessor(max_tokens=64, dtype="float32"))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return omni_shards(tmp_path_factory.mktemp("omni"), shards=3, samples=20)


@pytest.fixture
def dataset(shards: list[str]) -> od.ShardDataset:
    dataset = od.ShardDataset(shards, recipe=RECIPE)
    dataset.index()
    return dataset


def loader(dataset: Any, **options: Any) -> od.DataLoader:
    options = {"global_batch_size": 24, "shuffle": True, "num_threads": 2, "seed": 5} | options
    return od.DataLoader(dataset, **options)


def global_batches(dataset: od.ShardDataset, num_ranks: int, **options: Any) -> list[list[tuple[str, str]]]:
    """Keys of each step, sorted, gathered over all ranks."""
    ranks = [loader(dataset, dp=(rank, num_ranks), **options) for rank in range(num_ranks)]
    steps = zip(*(one.steps() for one in ranks), strict=True)
    return [
        sorted(key for microbatches in step for batch in microbatches for key in batch.sample_ids) for step in steps
    ]


def equal(one: od.Batch, other: od.Batch) -> bool:
    ours, theirs = one.model_inputs(), other.model_inputs()
    return (
        one.sample_ids == other.sample_ids
        and one.plan.hash == other.plan.hash
        and ours.keys() == theirs.keys()
        and all(
            torch.equal(value, theirs[name]) if torch.is_tensor(value) else value == theirs[name]
            for name, value in ours.items()
        )
    )


@pytest.mark.parametrize("drop_last", [True, False])
def test_global_batches_do_not_depend_on_the_number_of_ranks(dataset: od.ShardDataset, drop_last: bool) -> None:
    alone = global_batches(dataset, 1, drop_last=drop_last)
    assert len(alone) == (2 if drop_last else 3)  # 60 samples, 24 a step
    for num_ranks in (2, 3, 8):
        assert global_batches(dataset, num_ranks, drop_last=drop_last) == alone


@pytest.mark.parametrize("balance", ["none", "global"])
def test_every_sample_is_delivered_once(dataset: od.ShardDataset, balance: str) -> None:
    for num_ranks in (1, 2, 7):
        keys = [key for step in global_batches(dataset, num_ranks, balance=balance) for key in step]
        assert len(keys) == len(set(keys)) == 60


def test_fewer_samples_than_ranks_gives_every_rank_a_batch(dataset: od.ShardDataset) -> None:
    loaders = [loader(dataset, global_batch_size=3, dp=(rank, 8)) for rank in range(8)]
    assert {len(one) for one in loaders} == {20}
    batches = [next(iter(one)) for one in loaders]
    assert sum(len(batch.sample_ids) for batch in batches) == 3
    for batch in batches:
        inputs = batch.model_inputs()
        assert inputs["input_ids"].numel() >= 1
        assert inputs["image_patches"].shape[0] >= 1
        assert inputs["audio_features"].shape[0] >= 1


def test_packed_layout(dataset: od.ShardDataset) -> None:
    for batch in loader(dataset, drop_last=True):
        llm, image, audio_ = batch.llm, batch.image, batch.audio
        assert image is not None and audio_ is not None
        assert llm.cu_seqlens.dtype == image.cu_seqlens.dtype == audio_.cu_seqlens.dtype == torch.int32
        assert len(llm.cu_seqlens) == len(batch.sample_ids) + 1
        assert llm.cu_seqlens[-1] == llm.input_ids.numel() == llm.labels.numel() == llm.position_ids.numel()
        assert llm.max_seqlen == int(llm.cu_seqlens.diff().max())
        starts = llm.cu_seqlens[:-1].long()
        assert (llm.labels[starts] == -100).all()
        assert (llm.position_ids[starts] == 0).all()
        assert image.patches.shape == (int(image.grid_hw.prod(1).sum()), 3 * 14 * 14)
        assert torch.equal(image.cu_seqlens.diff(), image.grid_hw.prod(1).int())
        assert llm.image_positions is not None and llm.audio_positions is not None
        assert len(llm.image_positions) == image.num_tokens == image.patches.shape[0] // 4  # merged 2x2
        assert (llm.input_ids[llm.image_positions] == RECIPE.text.image_token_id).all()
        assert (llm.input_ids[llm.audio_positions] == RECIPE.text.audio_token_id).all()
        where = torch.cat([llm.image_positions, llm.audio_positions])
        assert len(where.unique()) == len(where)
        assert batch.text.input_ids.numel() == llm.input_ids.numel() - len(where)
        assert batch.loss_tokens == int((llm.labels != -100).sum())
        assert (llm.labels[where] == -100).all()
        kept = llm.labels != -100
        assert torch.equal(llm.labels[kept], llm.input_ids[kept])


def test_loss_tokens_are_planned_exactly(dataset: od.ShardDataset) -> None:
    loaders = [loader(dataset, dp=(rank, 3), balance=od.Balance(max_tokens=400)) for rank in range(3)]
    for step in zip(*(one.steps() for one in loaders), strict=True):
        batches = [batch for microbatches in step for batch in microbatches]
        assert len({len(microbatches) for microbatches in step}) == 1
        total = sum(batch.loss_tokens for batch in batches)
        for batch in batches:
            assert batch.global_loss_tokens == total
            assert batch.loss_scale == 3 / total


def test_microbatches_respect_max_tokens(dataset: od.ShardDataset) -> None:
    one = loader(dataset, balance=od.Balance(max_tokens={"llm": 400, "image": 600}))
    for microbatches in one.steps():
        assert len(microbatches) > 1
        assert [batch.microbatch for batch in microbatches] == list(range(len(microbatches)))
        assert [batch.is_last_microbatch for batch in microbatches][-1]
        for batch in microbatches:
            dummies = batch.llm.dummies  # caps do not count them
            assert batch.llm.input_ids.numel() - sum(dummies.values()) <= 400
            assert "image" in dummies or batch.image.patches.shape[0] <= 600


def test_oversize_samples(tmp_path: Path) -> None:
    samples = [{"__key__": f"k{i}", "txt": b"x" * (10 if i else 500)} for i in range(8)]
    dataset = od.ShardDataset(write_shard(tmp_path / "a.tar", samples))
    with pytest.raises(ValueError, match=r"'k0' has 500 llm positions, max_tokens allows 64"):
        od.DataLoader(dataset, batch_size=4, balance=od.Balance(max_tokens=64))
    own = od.DataLoader(dataset, batch_size=8, balance=od.Balance(max_tokens=64, oversize="own"), num_threads=0)
    assert [("k0" in [key for _, key in batch.sample_ids], len(batch.sample_ids)) for batch in own].count(
        (True, 1)
    ) == 1
    drop = od.DataLoader(dataset, batch_size=7, balance=od.Balance(max_tokens=64, oversize="drop"), num_threads=0)
    assert sorted(key for batch in drop for _, key in batch.sample_ids) == [f"k{i}" for i in range(1, 8)]


@pytest.mark.parametrize("options", [{}, {"balance": od.Balance(max_tokens=500)}], ids=["whole", "microbatches"])
def test_resume_at_every_step_continues_identically(dataset: od.ShardDataset, options: dict[str, Any]) -> None:
    options = {"global_batch_size": 10, "dp": (1, 2)} | options
    whole = loader(dataset, **options)
    expected, states = [], [whole.state_dict()]
    for batch in whole:
        expected.append(batch)
        states.append(whole.state_dict())
    for delivered, state in enumerate(states):
        resumed = loader(dataset, **options)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        step = state["step"]
        rest = [batch for batch in expected if batch.step >= step]
        assert delivered <= 1 or step <= expected[delivered - 1].step + 1
        got = list(resumed)
        assert len(got) == len(rest)
        assert all(equal(a, b) for a, b in zip(got, rest, strict=True))


def test_resume_on_another_number_of_ranks(dataset: od.ShardDataset) -> None:
    expected = global_batches(dataset, 2, global_batch_size=10)
    one = loader(dataset, global_batch_size=10, dp=(0, 2))
    steps = iter(one.steps())
    next(steps), next(steps)
    state = one.state_dict()
    ranks = [loader(dataset, global_batch_size=10, dp=(rank, 3)) for rank in range(3)]
    for rank in ranks:
        rank.load_state_dict(state)
    rest = [
        sorted(key for share in step for batch in share for key in batch.sample_ids)
        for step in zip(*(rank.steps() for rank in ranks), strict=True)
    ]
    assert rest == expected[2:]


def test_resume_reads_no_skipped_sample(dataset: od.ShardDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    from orchdata.loaders.index.stored import StoredSample

    one = loader(dataset, global_batch_size=10)
    for _ in zip(range(4), one.steps(), strict=False):
        pass
    state = one.state_dict()
    resumed = loader(dataset, global_batch_size=10)
    read: list[tuple[str, str]] = []
    original = StoredSample.read
    monkeypatch.setattr(
        StoredSample,
        "read",
        lambda self, *args, **kw: (read.append((self.shard, self.key)), original(self, *args, **kw))[1],
    )
    resumed.load_state_dict(state)
    delivered = [key for batch in resumed for key in batch.sample_ids]
    assert sorted(read) == sorted(delivered)
    assert len(read) == 20


def test_state_inside_a_step_points_at_its_start(dataset: od.ShardDataset) -> None:
    one = loader(dataset, balance=od.Balance(max_tokens=400))
    for batch in one:
        assert one.state_dict()["step"] == batch.step + batch.is_last_microbatch


def test_numpy_integers_are_integers(dataset: od.ShardDataset) -> None:
    one = loader(dataset, global_batch_size=np.int64(10), seed=np.int64(-3))
    one.set_epoch(np.int64(2))
    plain = loader(dataset, global_batch_size=10, seed=-3)
    plain.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert equal(next(iter(plain)), next(iter(one)))


def test_the_next_steps_are_built_while_the_caller_works() -> None:
    loaded: list[int] = []

    class Noting(Numbers):
        def __getitem__(self, number: int) -> dict[str, int]:
            loaded.append(number)
            return super().__getitem__(number)

    for prefetch_factor in (1, 3):
        loaded.clear()
        for _ in od.DataLoader(Noting(20), prefetch_factor=prefetch_factor, num_threads=1):
            deadline = time.monotonic() + 120
            while len(loaded) <= prefetch_factor and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.05)
            break
        assert sorted(loaded) == list(range(prefetch_factor + 1))  # the one in use, and no more than these ahead
    loaded.clear()
    next(iter(od.DataLoader(Noting(20), num_threads=0)))
    assert loaded == [0]


def test_a_delivered_batch_is_kept_by_the_caller_alone(dataset: od.ShardDataset) -> None:
    gone: list[int] = []
    for batch in loader(dataset, balance=od.Balance(max_tokens=400)):
        weakref.finalize(batch.llm.input_ids, gone.append, batch.microbatch)
        before = len(gone)
        del batch
        assert len(gone) == before + 1


def test_what_is_shown_of_batches_and_samples_are_counts_and_shapes(dataset: od.ShardDataset) -> None:
    batch = next(iter(loader(dataset)))
    patches = tuple(batch.media["image"].arrays["patches"].shape)
    assert f"24 samples; llm int64 {tuple(batch.llm.input_ids.shape)}, {batch.loss_tokens:,} tokens" in repr(batch)
    assert f"patches float32 {patches}" in repr(batch) and f"float32 {patches}" in repr(batch.image)
    assert "input_ids=int64" in repr(batch.llm)
    samples = [dataset[number] for number in range(len(dataset))]
    assert any("MediaPart(image, patches float32 (" in repr(sample) for sample in samples)
    for shown in (batch, batch.llm, batch.image, batch.text, *samples):
        assert len(repr(shown)) < 1000 and "\n" not in repr(shown)


@pytest.mark.parametrize("how", ["num_threads=3", "num_workers=1"])
def test_an_iterator_that_is_open_at_exit_is_silent(how: str, tmp_path: Path) -> None:
    program = (
        "import orchdata as od\n"
        "if __name__ == '__main__':\n"
        f"    steps = iter(od.DataLoader(list(range(1000)), batch_size=2, {how}))\n"
        "    next(steps)\n"
    )
    assert run_forked(program, folder=tmp_path, to_the_end=True).stderr == ""


def test_a_launcher_without_process_group_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.warns(UserWarning, match="WORLD_SIZE is 4, but torch.distributed is not initialized"):
        od.DataLoader(Numbers(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        od.DataLoader(Numbers(4), dp=(1, 4))


@pytest.mark.slow
def test_the_first_loader_of_a_process_draws_nothing_at_random(shards: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_LOADER, *shards], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_state_of_another_loader_is_refused(dataset: od.ShardDataset) -> None:
    state = loader(dataset).state_dict()
    with pytest.raises(od.StateError, match="global_batch_size is 24 in the state and 12 here"):
        loader(dataset, global_batch_size=12).load_state_dict(state)
    with pytest.raises(od.StateError, match=r"order\.seed"):
        loader(dataset, seed=6).load_state_dict(state)
    other = od.ShardDataset(list(dataset.urls), recipe=od.Recipe())
    with pytest.raises(od.StateError, match=r"recipe\.image\.max_tokens is 64 in the state and 4096 here"):
        loader(other).load_state_dict(state)


def test_nothing_runs_on_after_break(dataset: od.ShardDataset) -> None:
    before = set(threading.enumerate())  # some of which may be about to end
    batches = iter(loader(dataset, num_threads=3))
    next(batches)
    assert set(threading.enumerate()) - before
    del batches
    gc.collect()
    assert not set(threading.enumerate()) - before
    for _ in loader(dataset, num_threads=3):
        break
    gc.collect()
    assert not set(threading.enumerate()) - before


def test_custom_collate_gets_decoded_samples(dataset: od.ShardDataset) -> None:
    one = loader(dataset, collate_fn=lambda samples: samples)
    samples = [sample for batch in one for sample in batch]
    assert len(samples) == 60
    assert all(isinstance(sample, od.Sample) for sample in samples)


def test_mrope_positions(tmp_path: Path) -> None:
    sample = {"__key__": "a", "jpg": jpeg(112, 84), "json": chat("ab<image>cd", "e")}
    dataset = od.ShardDataset(write_shard(tmp_path / "a.tar", [sample]), recipe=RECIPE)
    batch = next(iter(od.DataLoader(dataset, collate_fn=od.Packed(positions="mrope"), num_threads=0)))
    positions, where = batch.llm.position_ids, batch.llm.image_positions
    assert positions.shape == (3, batch.llm.input_ids.numel())
    first = int(where[0])
    assert torch.equal(positions[:, :first], torch.arange(first).expand(3, -1))
    # 112x84 at patch 14 merged 2x2: 3 rows of 4 tokens
    assert positions[0, where].tolist() == [first] * 12
    assert positions[1, where].tolist() == [first + row for row in (0, 1, 2) for _ in range(4)]
    assert positions[2, where].tolist() == [first + column for _ in range(3) for column in range(4)]
    after = int(where[-1]) + 1
    rest = positions[:, after:]
    assert torch.equal(rest, (torch.arange(rest.shape[1]) + first + 4).expand(3, -1))


def test_multiple_of_pads_each_sequence(dataset: od.ShardDataset) -> None:
    for batch in loader(dataset, collate_fn=od.Packed(multiple_of=16)):
        assert (batch.llm.cu_seqlens % 16 == 0).all()
        assert batch.loss_tokens == int((batch.llm.labels != -100).sum())


def test_empty_zero_gives_tensors_of_zero_length(tmp_path: Path) -> None:
    samples = [{"__key__": "a", "jpg": jpeg(56, 56), "txt": b"x"}, {"__key__": "b", "txt": b"only text"}]
    dataset = od.ShardDataset(write_shard(tmp_path / "a.tar", samples), recipe=RECIPE)
    batches = list(od.DataLoader(dataset, batch_size=1, collate_fn=od.Packed(empty="zero"), num_threads=0))
    assert batches[1].image.patches.shape == (0, 588)
    assert batches[1].image.cu_seqlens.tolist() == [0]
    assert batches[1].audio is None  # neither data set nor cost model has audio


def test_to_takes_a_device_and_no_dtype(dataset: od.ShardDataset) -> None:
    batch = next(iter(loader(dataset)))
    assert equal(batch.to("cpu"), batch)
    with pytest.raises(TypeError):
        batch.to(torch.float16)  # would turn token ids into floats


def test_merge_puts_dummies_where_no_loss_is(dataset: od.ShardDataset) -> None:
    batch = next(iter(loader(dataset, global_batch_size=2, dp=(5, 8))))
    assert not batch.sample_ids
    embeds = torch.zeros(batch.llm.input_ids.numel(), 4)
    features = {name: torch.ones(1, 4, requires_grad=True) for name in ("image", "audio")}
    merged = batch.merge(embeds, features)
    assert merged.tolist() == [[1.0] * 4] * 2 and batch.llm.labels.tolist() == [-100] * 2
    merged[batch.llm.labels != -100].sum().backward()
    for feature in features.values():
        assert feature.grad is not None and not feature.grad.any()


def test_merge_puts_features_in_place_and_checks_them(dataset: od.ShardDataset) -> None:
    batch = next(iter(loader(dataset)))
    embeds = torch.zeros(1, batch.llm.input_ids.numel(), 2)
    features = {
        name: torch.arange(2.0 * getattr(batch, name).num_tokens).reshape(-1, 2) + 1 for name in ("image", "audio")
    }
    merged = batch.merge(embeds, features)
    for name, feature in features.items():
        assert torch.equal(merged[0, getattr(batch.llm, f"{name}_positions")], feature)
    with pytest.raises(ValueError, match="no features of it were given"):
        batch.merge(embeds, {"image": features["image"]})
    with pytest.raises(ValueError, match=r"\d+ image tokens"):
        batch.merge(embeds, {**features, "image": features["image"][1:]})


def test_unknown_quarantine_is_refused(dataset: od.ShardDataset) -> None:
    with pytest.raises(ValueError, match="quarantine names sample 'no-key'"):
        loader(dataset, quarantine=[(dataset.urls[0], "no-key")])


@pytest.mark.parametrize(
    "line", ["hello", '{"key": "s0-0003"}', '["s0.tar", "s0-0003"]', '{"shard": "s0.tar", "key": 3}']
)
def test_a_quarantine_file_names_its_bad_line(dataset: od.ShardDataset, tmp_path: Path, line: str) -> None:
    listed = tmp_path / "quarantine.jsonl"
    listed.write_text(f"\n{line}\n")
    with pytest.raises(ValueError, match=r"quarantine\.jsonl, line 2: expected"):
        loader(dataset, quarantine=listed)


def test_quarantine_from_a_file(dataset: od.ShardDataset, tmp_path: Path) -> None:
    listed = tmp_path / "quarantine.jsonl"
    listed.write_text(json.dumps({"shard": dataset.urls[0], "key": "s0-0003"}) + "\n")
    listed.write_text(f"\ufeff{listed.read_text()}", encoding="utf-8")
    pairs = ((url, key) for url, key in [(dataset.urls[0], "s0-0003")])
    for quarantine in (listed, pairs):
        one = loader(dataset, quarantine=quarantine)
        keys = {key for batch in one for _, key in batch.sample_ids}
        assert len(keys) == 59 and "s0-0003" not in keys


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"batch_size": 0, "global_batch_size": None}, "batch_size must be at least 1, got 0"),
        ({"batch_size": 4}, "batch_size=4 and global_batch_size=24 both given"),
        ({"global_batch_size": 0}, "global_batch_size must be at least 1"),
        ({"num_workers": -1}, "num_workers must be at least 0"),
        ({"prefetch_factor": 0}, "prefetch_factor must be at least 1"),
        ({"balance": "sideways"}, "balance must be one of"),
        ({"on_error": "ignore"}, "on_error must be"),
        ({"dp": (2, 2)}, "dp rank must be in 0..1, got 2"),
        ({"sampler": [1, 2]}, "its own order"),
        ({"cost": lambda sample: 1}, "od.CostModel"),
        ({"batch_size": 2.5, "global_batch_size": None}, "batch_size must be an integer of at least 1, got 2.5"),
        ({"global_batch_size": "24"}, "global_batch_size must be an integer of at least 1, got '24'"),
        ({"num_threads": "2"}, "num_threads must be an integer of at least 0, got '2'"),
        ({"shuffle": "yes"}, "shuffle must be True, False, an od.Shuffle or an array of rows, got 'yes'"),
        ({"seed": 1.5}, "seed must be an integer, got 1.5"),
        ({"timeout": None}, "timeout is a number of seconds"),
        ({"batch_size": None, "global_batch_size": None}, "pass batch_size=1, or global_batch_size"),
        ({"worker_init_fn": print}, "it would seed the training process's random state"),
        ({"multiprocessing_context": "spawn"}, "leave it out, or pass num_workers"),
        ({"num_threads": 0, "timeout": 5}, "timeout needs threads or workers"),
        ({"num_threads": 0, "prefetch_factor": 2}, "prefetch_factor needs threads or workers"),
        ({"num_threads": 0, "persistent_workers": True}, "persistent_workers needs threads or workers"),
        ({"dp": ("0", 2)}, "dp rank must be an integer"),
        ({"quarantine": ["s0-0003"]}, r"quarantine is \(shard, key\) pairs of strings, got 's0-0003'"),
        ({"quarantine": [("s0.tar", 3)]}, r"quarantine is \(shard, key\) pairs of strings, got \('s0.tar', 3\)"),
        ({"quarantine": [3]}, r"quarantine is \(shard, key\) pairs of strings, got 3"),
        ({"dp": (0, 2), "balance": od.Balance(max_samples=11)}, "raise it to at least 12"),
        ({"balance": od.Balance(max_tokens={"video": 9})}, "max_tokens names phase 'video'"),
    ],
)
def test_bad_arguments(dataset: od.ShardDataset, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        loader(dataset, **options)


@pytest.mark.parametrize("name", ["dp", "generator", "worker_init_fn", "collate_fn"])
def test_arguments_of_a_wrong_kind(dataset: od.ShardDataset, name: str) -> None:
    with pytest.raises(TypeError, match=name):
        loader(dataset, seed=None, **{name: "nonsense"})


def test_more_than_one_rank_needs_an_index(shards: list[str]) -> None:
    dataset = od.ShardDataset(shards[:1], recipe=RECIPE)
    with pytest.raises(od.MissingIndexError, match="orchdata index"):
        od.DataLoader(dataset, batch_size=2, dp=(0, 2))
    pattern = str(Path(shards[0]).parent / "*.tar")
    with pytest.raises(od.MissingIndexError, match=re.escape(f"orchdata index '{pattern}' --recipe")):
        od.ShardDataset(pattern, recipe=RECIPE).index(num_ranks=2)  # as it was given, however many shards that is


def test_stats(dataset: od.ShardDataset) -> None:
    cost = od.CostModel(image=od.PhaseCost(1.0), audio=od.PhaseCost(1.0), llm=od.PhaseCost(1.0))
    one = loader(dataset, dp=(0, 4), cost=cost, drop_last=True)
    list(one)
    stats = one.stats()
    json.dumps(stats)
    assert stats["steps"] == 2
    assert set(stats["phases"]) == {"image", "audio", "llm"}
    for phase in stats["phases"].values():
        assert phase["imbalance"] >= 1.0 and phase["lower_bound_over_mean"] >= 1.0
    llm = stats["phases"]["llm"]
    assert llm["imbalance"] < llm["imbalance_unbalanced"]
    assert 0 < stats["padding_if_padded"] < 1
    assert stats["milliseconds"]["decoding"] > 0
    assert stats["failures"]["count"] == 0
