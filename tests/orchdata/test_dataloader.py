from __future__ import annotations

import copy
import itertools
import json
import pickle
import re
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from children import in_a_child
from forked_program import run_forked
from map_dataset import Numbers
from shard_factory import omni_shards, write_shard
from torch import Tensor
from torch.utils.data import default_collate, default_convert

import orchdata as od

pytestmark = pytest.mark.usefixtures("same_cache")


RECIPE = od.Recipe(image=od.ImagePreprocessor(max_tokens=64, dtype="float32"))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return omni_shards(tmp_path_factory.mktemp("omni"), shards=3, samples=20)


@pytest.fixture(scope="module")
def dataset(shards: list[str], module_cache: Path) -> od.ShardDataset:
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


@pytest.mark.parametrize("drop_last", [True, False])
def test_global_batches_do_not_depend_on_the_number_of_ranks(dataset: od.ShardDataset, drop_last: bool) -> None:
    alone = global_batches(dataset, 1, drop_last=drop_last)
    assert len(alone) == (2 if drop_last else 3)  # 60 samples, 24 a step
    for num_ranks in (2, 3, 8):
        assert global_batches(dataset, num_ranks, drop_last=drop_last) == alone


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


def test_oversize_samples(tmp_path: Path) -> None:
    samples = [{"__key__": f"k{i}", "txt": b"x" * (10 if i else 500)} for i in range(8)]
    dataset = od.ShardDataset(write_shard(tmp_path / "a.tar", samples))
    with pytest.raises(ValueError, match=r"'k0' has 500 llm positions, max_tokens allows 64"):
        od.DataLoader(dataset, batch_size=4, balance=od.Balance(max_tokens=64))
    own = od.DataLoader(dataset, batch_size=8, balance=od.Balance(max_tokens=64, oversize="own"), num_threads=0)
    assert [keys for keys in ([key for _, key in batch.sample_ids] for batch in own) if "k0" in keys] == [["k0"]]
    drop = od.DataLoader(dataset, batch_size=7, balance=od.Balance(max_tokens=64, oversize="drop"), num_threads=0)
    assert sorted(key for batch in drop for _, key in batch.sample_ids) == [f"k{i}" for i in range(1, 8)]


def test_resume_reads_no_skipped_sample(dataset: od.ShardDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    from orchdata.loaders.index.stored import StoredSample

    one = loader(dataset, global_batch_size=10)
    for _ in zip(range(4), one.steps(), strict=False):
        pass
    state = one.state_dict()
    resumed = loader(dataset, global_batch_size=10)
    read: list[tuple[str, str]] = []
    original = StoredSample.read

    def noted(self: StoredSample, *args: Any, **kw: Any) -> Any:
        read.append((self.shard, self.key))
        return original(self, *args, **kw)

    monkeypatch.setattr(StoredSample, "read", noted)
    resumed.load_state_dict(state)
    delivered = [key for batch in resumed for key in batch.sample_ids]
    assert sorted(read) == sorted(delivered)
    assert len(read) == 20


def test_state_inside_a_step_points_at_its_start(dataset: od.ShardDataset) -> None:
    one = loader(dataset, balance=od.Balance(max_tokens=400))
    for batch in one:
        assert one.state_dict()["step"] == batch.step + batch.is_last_microbatch


def test_the_next_steps_are_built_while_the_caller_works() -> None:
    loaded: list[int] = []

    class Noting(Numbers):
        def __getitem__(self, number: int) -> dict[str, int]:
            loaded.append(number)
            return super().__getitem__(number)

    for prefetch_factor in (1, 3):
        loaded.clear()
        for _ in od.DataLoader(Noting(20), prefetch_factor=prefetch_factor, num_threads=1, cost=[1] * 20):
            deadline = time.monotonic() + 120
            while len(loaded) <= prefetch_factor and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.05)
            break
        assert sorted(loaded) == list(range(prefetch_factor + 1))  # the one in use, and no more than these ahead
    loaded.clear()
    next(iter(od.DataLoader(Noting(20), num_threads=0, cost=[1] * 20)))
    assert loaded == [0]


@pytest.mark.slow_cases("num_workers")
@pytest.mark.parametrize("how", ["num_threads=3, cost=[1] * 1000", "num_workers=1, cost=[1] * 1000", "num_workers=1"])
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


def test_state_of_another_loader_is_refused(dataset: od.ShardDataset) -> None:
    state = loader(dataset).state_dict()
    with pytest.raises(od.StateError, match="global_batch_size is 24 in the state and 12 here"):
        loader(dataset, global_batch_size=12).load_state_dict(state)
    with pytest.raises(od.StateError, match=r"order\.seed"):
        loader(dataset, seed=6).load_state_dict(state)
    other = od.ShardDataset(list(dataset.urls), recipe=od.Recipe())
    with pytest.raises(od.StateError, match=r"recipe\.image\.max_tokens is 64 in the state and 4096 here"):
        loader(other).load_state_dict(state)


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
        ({"batch_size": 4}, "batch_size and global_batch_size are given"),
        ({"global_batch_size": 0}, "global_batch_size must be at least 1"),
        ({"balance": "sideways"}, "balance must be one of"),
        ({"on_error": "ignore"}, "on_error must be"),
        ({"dp": (2, 2)}, "dp rank must be in 0..1, got 2"),
        ({"sampler": [1, 2]}, "its own order"),
        ({"cost": lambda sample: 1}, "od.CostModel"),
        ({"global_batch_size": "24"}, "global_batch_size must be an integer of at least 1, got '24'"),
        ({"shuffle": "yes"}, "shuffle must be True, False, an od.Shuffle or an array of rows, got 'yes'"),
        ({"seed": 1.5}, "seed must be an integer, got 1.5"),
        ({"batch_size": None, "global_batch_size": None}, "pass batch_size=1, or global_batch_size"),
        ({"worker_init_fn": print}, "worker_init_fn is for multi-process loading"),
        ({"multiprocessing_context": "spawn"}, "pass num_workers, or leave it out"),
        ({"num_threads": 0, "timeout": 5}, "timeout is for threads or workers"),
        ({"quarantine": ["s0-0003"]}, r"quarantine is \(shard, key\) pairs of strings, got 's0-0003'"),
        ({"dp": (0, 2), "balance": od.Balance(max_samples=11)}, "raise it to at least 12"),
        ({"balance": od.Balance(max_tokens={"video": 9})}, "max_tokens names phase 'video'"),
    ],
)
def test_bad_arguments(dataset: od.ShardDataset, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        loader(dataset, **options)


# Loaders without a step: a warning says why and what to change, and a filter that leaves nothing is an error.


def texts(folder: Path, name: str = "a") -> od.ShardDataset:
    path = folder / f"{name}.tar"
    if not path.exists():  # written once: a file with another time would be measured again
        write_shard(path, [{"__key__": f"{name}{number}", "txt": b"x" * (number + 1)} for number in range(20)])
    data = od.ShardDataset(path)
    data.index()  # which one rank of several would not build
    return data


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"batch_size": 50}, "20 usable rows of 20 samples, global_batch_size=50 over all ranks"),
        ({"batch_size": 5, "dp": (1, 8)}, "20 usable rows of 20 samples, global_batch_size=40 over all ranks"),
        ({"global_batch_tokens": 10**6}, "20 usable rows of 20 samples, global_batch_tokens=1000000 over all ranks"),
    ],
)
def test_a_batch_larger_than_the_data_warns_once(tmp_path: Path, options: dict[str, Any], size: str) -> None:
    with pytest.warns(UserWarning, match=f"no steps: {size}, drop_last=True: make the batch smaller, or leave out"):
        loader = od.DataLoader(texts(tmp_path), drop_last=True, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (len(loader), list(loader), list(loader)) == (0, [], [])


@pytest.mark.parametrize("ranks", [(0, 1), (2, 4)])
def test_a_choice_that_leaves_nothing_is_an_error_of_the_iteration(tmp_path: Path, ranks: tuple[int, int]) -> None:
    chosen = texts(tmp_path).filter("tokens > 900").split("train", 0.5)
    said = "no sample is chosen by filter='tokens > 900', split='train', fraction=0.5, seed=0"
    with pytest.warns(UserWarning, match=f"the loader has no steps: {said}"):
        loader = od.DataLoader(chosen, batch_size=2, dp=ranks)
    assert len(loader) == 0
    for iterate in (loader, loader.steps()):
        with pytest.raises(ValueError, match=f"{said}, so there is no step to iterate: choose other bounds"):
            iter(iterate)  # type: ignore[call-overload]


@pytest.mark.parametrize("collate", [default_collate, default_convert, partial(default_collate)])
def test_torchs_own_collate_fn_is_refused_for_shards(tmp_path: Path, collate: Any) -> None:
    dataset = texts(tmp_path)
    name = getattr(collate, "func", collate).__name__
    for data in (dataset, od.Mixture({"a": od.Source(dataset)})):
        with pytest.raises(TypeError, match=rf"collate_fn={name} takes tensors, .*pass od.Padded\(\)"):
            od.DataLoader(data, batch_size=2, collate_fn=collate)
    assert len(list(od.DataLoader([1, 2, 3, 4], batch_size=2, collate_fn=collate))) == 2


# The evaluation loop of docs/training.md gives the mean over all tokens, however samples are distributed.


PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"
WHOLE_BATCH = 100


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = torch.nn.Embedding(260, 8), torch.nn.Linear(8, 260)
        self.double()

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> SimpleNamespace:
        logits = self.head(self.embed(input_ids)).reshape(-1, 260)
        return SimpleNamespace(loss_sum=F.cross_entropy(logits[:-1], labels.flatten()[1:], reduction="sum"))


def evaluate(model: Model, loader: od.DataLoader, other_ranks: list[Tensor]) -> float:
    """Call the page's function as one of several ranks; appends this rank's sums to those of the others."""
    (block,) = re.findall(r"^```python\n([^`]*?def evaluate[^`]*?)^```", PAGE.read_text(), re.MULTILINE)

    def all_reduce(sums: Tensor) -> None:
        mine = sums.clone()
        for each in other_ranks:
            sums += each
        other_ranks.append(mine)

    names: dict[str, Any] = {}
    exec(block, names)
    names["dist"] = SimpleNamespace(is_initialized=lambda: True, all_reduce=all_reduce)
    return float(names["evaluate"](model, loader))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_loop_gives_the_mean_over_all_tokens(tmp_path: Path, num_ranks: int) -> None:
    samples = [{"__key__": f"s{n}", "txt": bytes(range(65, 68 + 7 * (n % 5)))} for n in range(13)]
    data = od.ShardDataset(write_shard(tmp_path / "a.tar", samples), recipe=od.Recipe(image=None, audio=None))
    model = Model()
    (whole,) = od.DataLoader(data, batch_size=WHOLE_BATCH)
    expected = model(**whole.model_inputs()).loss_sum.item() / whole.loss_tokens

    loaders = [
        od.DataLoader(data, batch_size=2, dp=(rank, num_ranks), balance=od.Balance(max_tokens=40))
        for rank in range(num_ranks)
    ]
    for _ in range(2):  # the second time from the first sample again
        sums: list[Tensor] = []
        found = [evaluate(model, loader, sums) for loader in loaders][-1]
        assert found == pytest.approx(expected, rel=1e-12)
        assert sum(int(each[1]) for each in sums) == whole.loss_tokens


# Where iterations begin: after an epoch, a break, an error, a state, and at the same time.


STEPS = 6  # of 10 samples


def by_ten(dataset: Any, **options: Any) -> od.DataLoader:
    return od.DataLoader(dataset, **({"global_batch_size": 10, "shuffle": True, "num_threads": 2, "seed": 5} | options))


def keys(one: od.DataLoader) -> list[tuple[str, str]]:
    return [key for batch in one for key in batch.sample_ids]


def position_of(batch: od.Batch) -> tuple[int, int]:
    return batch.plan.epoch, batch.step


def test_epochs_differ_and_follow_each_other(dataset: od.ShardDataset) -> None:
    one = by_ten(dataset)
    first, second = keys(one), keys(one)
    assert sorted(first) == sorted(second) and first != second
    again = by_ten(dataset)
    again.set_epoch(1)
    assert keys(again) == second
    assert again.state_dict()["epoch"] == 2


@pytest.mark.parametrize("steps", [False, True], ids=["microbatches", "steps"])
@pytest.mark.parametrize("persistent", [False, True])
def test_an_iteration_after_break_begins_the_next_epoch(
    dataset: od.ShardDataset, persistent: bool, steps: bool
) -> None:
    one = by_ten(dataset, persistent_workers=persistent)
    limited = []
    for _ in range(3):  # as a trainer that limits its batches does
        batches = (step[0] for step in one.steps()) if steps else iter(one)
        limited.append([position_of(batch) for batch in itertools.islice(batches, 2)])
    assert limited == [[(epoch, 0), (epoch, 1)] for epoch in range(3)]
    assert one.state_dict()["epoch"] == 2 and one.state_dict()["step"] == 2  # what was delivered, not what comes next
    one.close()


def test_an_error_in_the_body_of_the_loop_is_a_break(dataset: od.ShardDataset) -> None:
    one = by_ten(dataset)
    with pytest.raises(ZeroDivisionError):
        for batch in one:
            _ = 1 // (1 - batch.step)
    assert one.state_dict()["step"] == 2
    assert position_of(next(iter(one))) == (1, 0)


@pytest.mark.parametrize("delivered", [0, 3])
def test_after_an_error_of_its_own_the_next_iteration_goes_on_with_the_step_that_failed(delivered: int) -> None:
    bad = 4 * delivered + 1
    numbers = Numbers(40, bad=(bad,))
    one = od.DataLoader(numbers, batch_size=4)
    seen = []
    with pytest.raises(OSError, match="disk on fire"):
        for batch in one:
            seen += batch["number"].tolist()
    assert one.state_dict()["step"] == delivered
    with pytest.raises(OSError, match="disk on fire"):
        next(iter(one))
    numbers.bad = ()
    seen += [number for batch in one for number in batch["number"].tolist()]
    assert seen == list(range(40))
    assert one.state_dict()["epoch"] == 1


def test_set_epoch_keeps_a_restored_position_until_a_step_is_delivered(dataset: od.ShardDataset) -> None:
    one = by_ten(dataset)
    steps = iter(one.steps())
    next(steps)
    resumed = by_ten(dataset)
    resumed.load_state_dict(one.state_dict())
    for _ in range(2):
        resumed.set_epoch(0)
    assert position_of(next(iter(resumed))) == (0, 1)
    resumed.set_epoch(0)
    assert position_of(next(iter(resumed))) == (0, 0)


def test_set_epoch_inside_an_iteration_holds_for_the_next(dataset: od.ShardDataset) -> None:
    one = by_ten(dataset)
    for step, batch in enumerate(one):
        one.set_epoch(7)
        assert position_of(batch) == (0, step)
    assert one.state_dict()["epoch"] == 7
    assert position_of(next(iter(one))) == (7, 0)


@pytest.mark.parametrize("persistent", [False, True])
def test_two_iterations_at_once_are_independent(dataset: od.ShardDataset, persistent: bool) -> None:
    one = by_ten(dataset, persistent_workers=persistent)
    for step, (left, right) in enumerate(zip(one, one, strict=True)):
        assert position_of(left) == position_of(right) == (0, step)
        assert left.sample_ids == right.sample_ids
        assert one.state_dict()["step"] == step + 1
    assert one.state_dict()["epoch"] == 1
    left_one, right_one = iter(one), iter(one)
    next(left_one), next(right_one)
    left_one.close()  # type: ignore[attr-defined]
    assert len(list(right_one)) == STEPS - 1  # closing one must not take the other's threads
    one.close()


@pytest.mark.parametrize("name", ["__iter__", "steps"])
def test_an_iteration_that_failed_never_looks_like_the_end_of_the_epoch(name: str) -> None:
    numbers = Numbers(8, bad=(6,))
    one = od.DataLoader(numbers, batch_size=2, dp=(0, 2))
    steps = iter(getattr(one, name)())
    next(steps)
    with pytest.raises(OSError, match="disk on fire"):
        next(steps)
    numbers.bad = ()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ended with OSError.*a fresh iter.. of the loader continues"):
            next(steps)
    assert [batch["number"].tolist() for batch in one] == [[4, 6]]
    assert next(iter(one))["number"].tolist() == [0, 2]


def test_an_iteration_belongs_to_its_process() -> None:
    steps = iter(od.DataLoader(range(8), batch_size=2))
    next(steps)

    def go_on() -> None:
        with pytest.raises(RuntimeError, match=re.escape("begin a fresh iter()")):
            next(steps)

    in_a_child(go_on)
    assert next(steps).tolist() == [2, 3]


# Copies of a loader: the same arguments, the same position, and nothing that runs.


def sharded(dataset: od.ShardDataset) -> od.DataLoader:
    return od.DataLoader(dataset, global_batch_size=8, shuffle=True, seed=3, num_threads=0)


def seeded(dataset: od.ShardDataset) -> od.DataLoader:
    return od.DataLoader(Numbers(24), batch_size=4, shuffle=True, seed=5)


def drawn(dataset: od.ShardDataset) -> od.DataLoader:
    return od.DataLoader(Numbers(24), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(2))


def mixed(dataset: od.ShardDataset) -> od.DataLoader:
    sources = {"a": od.Source(dataset, weight=0.6), "b": od.Source(dataset.split("train", 0.5), weight=0.4)}
    return od.DataLoader(od.Mixture(sources, stop="all"), global_batch_size=8, shuffle=True, num_threads=0)


def contents(loader: od.DataLoader, epochs: int = 2) -> list[Any]:
    items = [item for _ in range(epochs) for item in loader]
    return [item.sample_ids if isinstance(item, od.Batch) else item["number"].tolist() for item in items]


def inside_an_epoch(loader: od.DataLoader) -> None:
    loader.load_state_dict(stopped_after(loader, 2).state_dict())


def stopped_after(loader: od.DataLoader, steps: int) -> od.DataLoader:
    iterator = iter(loader)
    for _ in range(steps):
        next(iterator)
    del iterator
    return loader


def broken_off(loader: od.DataLoader) -> None:
    stopped_after(loader, 2)


def at_a_set_epoch(loader: od.DataLoader) -> None:
    loader.set_epoch(7)


MOVES = [inside_an_epoch, broken_off, at_a_set_epoch]
WAYS = [(move, copy.deepcopy) for move in MOVES] + [(broken_off, lambda loader: pickle.loads(pickle.dumps(loader)))]


@pytest.mark.slow_cases("broken_off", "mixed")
@pytest.mark.parametrize(("move", "copied"), WAYS)
@pytest.mark.parametrize("make", [sharded, seeded, drawn, mixed])
def test_a_copy_goes_on_as_the_original(
    dataset: od.ShardDataset,
    make: Callable[[od.ShardDataset], od.DataLoader],
    move: Callable[[od.DataLoader], None],
    copied: Callable[[od.DataLoader], od.DataLoader],
) -> None:
    loader = make(dataset)
    move(loader)
    other = copied(loader)
    if make is not drawn:  # a state settles what torch's generators draw next, on the loader that is asked
        states = [each.state_dict() for each in (other, loader)]
        assert states[0] | {"base_seed": 0} == states[1] | {"base_seed": 0}
    first = contents(other)
    assert first == contents(loader)
    stays = make is drawn and move is at_a_set_epoch
    assert stays or first != contents(make(dataset))  # the control: a new loader stands elsewhere


def _iterated(number: int, loader: od.DataLoader, queue: Any) -> None:
    queue.put((number, contents(loader, 1)))


@pytest.mark.slow
def test_a_loader_is_an_argument_of_spawned_processes(dataset: od.ShardDataset) -> None:
    loader = od.DataLoader(dataset, global_batch_size=8, shuffle=True, num_workers=1)
    broken_off(loader)
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(_iterated, (loader, queue), nprocs=1)
    assert queue.get() == (0, contents(loader, 1))


def test_a_copy_on_another_rank_is_refused(dataset: od.ShardDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    pickled = pickle.dumps(sharded(dataset))
    from orchdata import dataloader
    from orchdata.ranks.parallel import Rank

    monkeypatch.setattr(dataloader, "resolve_rank", lambda dp: Rank(1, 2))
    with pytest.raises(ValueError, match="copied on rank 0 of 1, and this process is rank 1 of 2"):
        pickle.loads(pickled)


def test_copies_that_would_be_wrong_are_refused(dataset: od.ShardDataset) -> None:
    with pytest.raises(TypeError, match="iterator for sampler="):
        copy.deepcopy(od.DataLoader(Numbers(8), sampler=iter(range(8))))
    loader = od.DataLoader(dataset, global_batch_size=8, num_threads=0, dp=(1, 2))
    assert copy.deepcopy(loader)._runtime.rank.rank == 1
    loader._given["dp"] = object()  # as of a process group
    with pytest.raises(TypeError, match="over a process group or mesh cannot be copied"):
        copy.deepcopy(loader)
