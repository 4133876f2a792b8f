"""What a Batch says of itself: its names, where its samples lie, and errors for names of other libraries."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from map_dataset import Numbers
from own_modalities import Points, cloud
from shard_factory import RECIPE, omni_samples, omni_shards, write_shard

import orchdata as od
from orchdata.building.collate import takes_step
from orchdata.building.step import BufferPool, step_figures
from orchdata.order.steps import StepTask
from orchdata.planning.plan import make_plan
from orchdata.planning.sharing.packed import NoPadding

pytestmark = pytest.mark.usefixtures("same_cache")

TEXTS = {f"k{number}": b"sample"[: 3 + number] for number in range(3)}


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("batch") / "a.tar"
    return write_shard(path, [{"__key__": key, "txt": text} for key, text in TEXTS.items()])


@pytest.fixture(scope="module")
def batch(shard: str) -> Any:
    return next(iter(od.DataLoader(od.ShardDataset(shard), batch_size=3, shuffle=False)))


def model(**arguments: Any) -> Any:
    return arguments


def test_a_batch_is_not_a_mapping_and_says_where_to_look(batch: Any) -> None:
    assert [key for _, key in batch.sample_ids] == ["k0", "k1", "k2"]
    with pytest.raises(AttributeError, match=r"batch\.sample_ids"):
        batch.keys  # noqa: B018
    with pytest.raises(AttributeError, match=r"no 'input_ids'.*model_inputs\(\)"):
        batch.input_ids  # noqa: B018
    with pytest.raises(TypeError, match=r"'input_ids'.*model_inputs\(\)"):
        batch["input_ids"]
    with pytest.raises(TypeError, match=r"not a mapping.*model_inputs\(\)"):
        dict(batch)
    with pytest.raises(TypeError, match="must be a mapping, not Batch"):
        model(**batch)
    assert "input_ids" in model(**batch.model_inputs())


@pytest.mark.parametrize(
    "layout", [od.Packed(), od.Packed(multiple_of=8), od.Packed(length=64), od.Padded(multiple_of=8)], ids=str
)
def test_samples_says_where_the_tokens_of_each_sample_are(shard: str, layout: Any) -> None:
    for batch in od.DataLoader(od.ShardDataset(shard), batch_size=2, collate_fn=layout):
        assert len(batch.samples) == len(batch.sample_ids) <= batch.num_step_samples
        for (_, key), where in zip(batch.sample_ids, batch.samples, strict=True):
            assert bytes(batch.llm.input_ids[where].tolist()) == TEXTS[key]


def test_samples_of_a_rank_without_any_are_none(shard: str) -> None:
    dataset = od.ShardDataset(shard)
    dataset.index()
    steps = [list(od.DataLoader(dataset, 4, dp=(rank, 4), num_threads=0)) for rank in range(4)]
    (empty,) = [batch for (batch,) in steps if not batch.sample_ids]
    assert empty.samples == () and empty.num_step_samples == 3


# A collate_fn that asks for its step gets it: which one it is, and how to scale a loss.


def named(samples: list[Any], step: od.StepInfo) -> Any:
    return step


def keyword_only(samples: list[Any], *, step: od.StepInfo | None = None) -> Any:
    return step


def after_another(prefix: str, samples: list[Any], step: od.StepInfo) -> Any:
    return step


class Callable_:
    def __call__(self, samples: list[Any], step: od.StepInfo) -> Any:
        return step

    def method(self, samples: list[Any], /, *, step: od.StepInfo) -> Any:
        return step


@pytest.mark.parametrize(
    "collate_fn", [named, keyword_only, partial(after_another, "prefix"), Callable_(), Callable_().method]
)
def test_a_parameter_named_step_gets_it(collate_fn: Callable[..., Any]) -> None:
    for info in od.DataLoader(Numbers(4), batch_size=2, collate_fn=collate_fn):
        assert isinstance(info, od.StepInfo)


def bound(samples: list[Any], step: Any = "default") -> Any:
    return step


@pytest.mark.parametrize(
    ("collate_fn", "made"),
    [
        (partial(bound, step="bound"), "bound"),  # what the user gave stays
        (lambda step: len(step), 2),  # these are the samples
        (lambda samples, **options: options, {}),
        (list, [{"number": 0, "length": 1}, {"number": 1, "length": 2}]),
    ],
)
def test_whoever_does_not_ask_gets_none(collate_fn: Callable[..., Any], made: Any) -> None:
    assert next(iter(od.DataLoader(Numbers(4), batch_size=2, collate_fn=collate_fn))) == made
    assert not takes_step(collate_fn)


def test_shards_scale_a_sum_over_loss_tokens(tmp_path: Path) -> None:
    dataset = od.ShardDataset(omni_shards(tmp_path, shards=1, samples=15), recipe=RECIPE)
    dataset.index()

    def loss_tokens(samples: list[od.Sample], step: od.StepInfo) -> tuple[int, od.StepInfo]:
        return sum(int(part.loss.sum()) for sample in samples for part in sample.parts if hasattr(part, "loss")), step

    balance = od.Balance(max_tokens=150, oversize="own")
    options: dict[str, Any] = {"global_batch_size": 10, "balance": balance, "collate_fn": loss_tokens, "num_threads": 0}
    ranks = [list(od.DataLoader(dataset, dp=(rank, 3), **options).steps()) for rank in range(3)]
    for number, step in enumerate(zip(*ranks, strict=True)):
        counts = [count for rank in step for count, _ in rank]
        infos = [[info for _, info in rank] for rank in step]
        assert infos[0] == infos[1] == infos[2] and len(infos[0]) > 1
        for place, info in enumerate(infos[0]):
            expected = {"epoch": 0, "step": number, "microbatch": place, "num_microbatches": len(infos[0])}
            assert {name: getattr(info, name) for name in expected} == expected
            assert (info.dp_size, info.num_step_samples) == (3, (10, 5)[number])
            assert info.loss_tokens == sum(counts) and info.loss_scale == 3 / sum(counts)
    packed = [list(od.DataLoader(dataset, dp=(0, 3), **options | {"collate_fn": None}))]
    assert [batch.num_step_samples for batch in packed[0]] == [
        info.num_step_samples for step in ranks[0] for _, info in step
    ]
    assert [batch.loss_scale for batch in packed[0]] == [info.loss_scale for rank in ranks[0] for _, info in rank]


def test_map_style_data_scale_a_sum_over_samples() -> None:
    def scaled(samples: list[dict[str, Any]], step: od.StepInfo) -> float:
        assert step.loss_tokens == 0 and step.num_microbatches == 1
        assert step.loss_scale == 2 / step.num_step_samples
        return step.loss_scale * sum(sample["number"] for sample in samples)

    options: dict[str, Any] = {"global_batch_size": 7, "collate_fn": scaled, "cost": np.arange(1, 18)}
    ranks = [list(od.DataLoader(Numbers(17), dp=(rank, 2), **options)) for rank in range(2)]
    means = [sum(step) / 2 for step in zip(*ranks, strict=True)]  # as gradients are averaged over ranks
    assert means == pytest.approx([np.mean(range(7)), np.mean(range(7, 14)), np.mean(range(14, 17))])


# Figures of a step: of one rank alone, whose loads are sums.


@pytest.mark.parametrize("kind", ["shards", "costs", "equal", "empty"])
def test_figures_of_one_rank_alone_are_those_worked_out_in_full(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = od.CostModel(image=od.PhaseCost(2.0), audio=od.PhaseCost(1.0, 0.5), llm=od.PhaseCost(1.0))
    data, options = {
        "shards": (od.ShardDataset(omni_shards(tmp_path, shards=1, samples=12), recipe=RECIPE), {"cost": cost}),
        "costs": (Numbers(12), {"cost": list(range(12))}),
        "equal": (Numbers(12), {}),
        "empty": (Numbers(12), {}),
    }[kind]
    arguments: dict[str, Any] = options  # type: ignore[assignment]
    spec = od.DataLoader(data, batch_size=5, dp=(0, 1), **arguments)._runtime.prepared.spec.plan
    rows = {"equal": np.arange(5), "empty": np.arange(0), "costs": np.array([3, 0, 11])}.get(kind)
    plan = make_plan(spec, StepTask(0, 0, rows))
    alone = step_figures(spec, plan, 0, 0)
    monkeypatch.setattr(NoPadding, "adds_up", False)
    assert step_figures(spec, plan, 0, 0) == alone


LARGE = 4 << 20  # well above what malloc serves


def test_a_tensor_over_a_slice_keeps_the_memory() -> None:
    pool = BufferPool()
    array = pool.take(LARGE)
    array[:] = 7
    tensor = torch.from_numpy(array)[4:12].view(torch.int32).view(torch.uint8)
    del array
    gc.collect()
    assert pool.free_bytes() == 0
    pool.take(LARGE)[:] = 0
    assert tensor.eq(7).all()
    del tensor
    gc.collect()
    assert pool.free_bytes() > 0


def test_collecting_an_array_calls_no_function_of_pythons() -> None:
    # What a signal raises there would be forgotten.
    pool = BufferPool()
    array = pool.take(4 << 20)
    called: list[str] = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    del array
    sys.setprofile(None)
    assert called == []
    assert pool.free_bytes() == 4 << 20


# A packed batch in Megatron-LM's terms says the same as the batch.


LAYOUTS = {
    "packed": od.Packed(),
    "aligned": od.Packed(multiple_of=16),
    "one length": od.Packed(multiple_of=16, length=1600),
    "mrope": od.Packed(multiple_of=8, positions="mrope"),
}


OMNI = {"shards": 2, "samples": 10}


def batches(dataset: Any, layout: Any) -> list[od.Batch]:
    return list(od.DataLoader(dataset, global_batch_size=4, num_threads=0, collate_fn=layout))


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_sequence_has_its_own_tokens_and_the_padding_after_them(dataset: od.ShardDataset, name: str) -> None:
    index = dataset.index()
    padded = 0
    for batch in batches(dataset, LAYOUTS[name]):
        found = od.megatron_packed(batch)
        own, starts = found["cu_seqlens"].diff().tolist(), found["cu_seqlens_padded"].tolist()
        assert own[: len(batch.sample_ids)] == [int(index.llm_tokens[index.find(*key)]) for key in batch.sample_ids]
        assert starts[-1] == len(found["tokens"]) == len(found["labels"]) == len(found["loss_mask"])
        assert found["position_ids"].shape[-1] == starts[-1]
        for tokens, (start, stop) in zip(own, pairwise(starts), strict=True):
            expected = [False] * tokens + [True] * (stop - start - tokens)
            assert found["padding_mask"][start:stop].tolist() == expected
            assert not found["tokens"][start + tokens : stop].any()
            assert not found["loss_mask"][max(start, start + tokens - 1) : stop].any()  # nothing follows
        padded += int(found["padding_mask"].sum())
        assert found["max_seqlen"] >= max(stop - start for start, stop in pairwise(starts))
        assert {found[each].dtype for each in ("cu_seqlens", "cu_seqlens_padded")} == {torch.int32}
    assert (padded > 0) == (name != "packed")


def test_labels_are_of_the_next_token_and_count_what_the_batch_says(dataset: od.ShardDataset) -> None:
    for batch in batches(dataset, od.Packed(multiple_of=16)):
        found, labels = od.megatron_packed(batch), batch.llm.labels
        has_loss = found["loss_mask"] == 1
        assert int(found["loss_mask"].sum()) == batch.loss_tokens == int((labels != -100).sum())
        places = has_loss.nonzero()[:, 0]
        assert torch.equal(found["labels"][places], batch.llm.input_ids[places + 1])
        assert not found["labels"][~has_loss].any()


def test_the_arguments_of_packed_seq_params(dataset: od.ShardDataset) -> None:
    (batch, *_) = batches(dataset, od.Packed(multiple_of=16))
    found = od.megatron_packed(batch)
    given = found["packed_seq_params"]
    assert given.pop("qkv_format") == "thd"
    assert given.keys() == {
        f"{name}_{side}{end}"
        for side in ("q", "kv")
        for name, end in (("cu_seqlens", ""), ("cu_seqlens", "_padded"), ("max_seqlen", ""))
    }
    for side in ("q", "kv"):
        assert given[f"cu_seqlens_{side}"] is found["cu_seqlens"]
        assert given[f"cu_seqlens_{side}_padded"] is batch.llm.cu_seqlens
        assert given[f"max_seqlen_{side}"] == batch.llm.max_seqlen


def test_loss_weights_of_sources_are_in_the_mask(dataset: od.ShardDataset) -> None:
    mixture = od.Mixture({"half": od.Source(dataset, loss_weight=0.5), "whole": od.Source(dataset)})
    weighed = 0.0
    for batch in od.DataLoader(mixture, global_batch_size=8, num_threads=0):
        found = od.megatron_packed(batch)
        weighed += float(found["loss_mask"].sum())
        assert float(found["loss_mask"].sum()) == pytest.approx(batch.global_loss_tokens)
        assert set(found["loss_mask"].tolist()) <= {0.0, 0.5, 1.0}
    assert weighed


def test_a_padded_batch_is_refused(dataset: od.ShardDataset) -> None:
    (batch, *_) = batches(dataset, od.Padded())
    with pytest.raises(ValueError, match="takes packed batches"):
        od.megatron_packed(batch)
    assert batch.llm.lengths.tolist() == batch.llm.cu_seqlens.diff().tolist()


# Positions of packed and padded batches against their definition: those of each sample alone.


MROPE_LAYOUTS = [
    od.Packed(positions="mrope"),
    od.Packed(positions="mrope", multiple_of=8),
    od.Packed(positions="mrope", empty="zero"),
    od.Padded(positions="mrope"),
    od.Padded(positions="mrope", multiple_of=8, encoders="padded"),
]


def rows(batch: od.Batch, values: torch.Tensor) -> list[torch.Tensor]:
    """(..., T) or (..., num_samples, L) as a tensor a sample, its padding included."""
    if batch.llm.attention_mask is not None:
        return list(values.unbind(-2))
    return list(values.split(batch.llm.cu_seqlens.diff().tolist(), dim=-1))


@pytest.fixture(scope="module")
def twelve(tmp_path_factory: pytest.TempPathFactory) -> od.ShardDataset:
    path: Path = tmp_path_factory.mktemp("shards") / "a.tar"
    return od.ShardDataset(write_shard(path, omni_samples(12)), recipe=RECIPE)


def batches_in(twelve: od.ShardDataset, size: int, layout: od.Packed | od.Padded) -> list[od.Batch]:
    return list(od.DataLoader(twelve, batch_size=size, collate_fn=layout, num_threads=0))


@pytest.mark.parametrize("layout", MROPE_LAYOUTS)
def test_each_sample_has_the_positions_it_has_alone(twelve: od.ShardDataset, layout: od.Packed | od.Padded) -> None:
    alone = {batch.sample_ids[0]: batch.llm for batch in batches_in(twelve, 1, od.Packed(positions="mrope"))}
    lengths = {key: int(llm.cu_seqlens[1]) for key, llm in alone.items()}
    for batch in batches_in(twelve, 5, layout):
        llm = batch.llm
        assert llm.restart_position_ids.shape == llm.input_ids.shape
        assert llm.position_ids.shape == (3, *llm.input_ids.shape)
        assert "restart_position_ids" not in batch.model_inputs()
        restart, mrope = rows(batch, llm.restart_position_ids), rows(batch, llm.position_ids)
        assert len(restart) == len(mrope) == len(batch.sample_ids) + bool(llm.dummies)
        for key, counted, turned in zip(batch.sample_ids, restart, mrope, strict=False):
            length = lengths[key]
            assert torch.equal(counted, torch.arange(len(counted)))  # padding counts on
            assert torch.equal(alone[key].restart_position_ids[:length], torch.arange(length))
            assert torch.equal(turned[:, :length], alone[key].position_ids[:, :length])
            rest = len(counted) - length
            assert torch.equal(
                turned[:, length:], turned[:, length - 1 : length].amax() + 1 + torch.arange(rest).expand(3, -1)
            )


def test_a_rank_without_samples_has_them_too(twelve: od.ShardDataset) -> None:
    batches_in(twelve, 1, od.Packed())  # builds the index
    loader = od.DataLoader(
        twelve, global_batch_size=1, collate_fn=od.Packed(positions="mrope", multiple_of=4), dp=(1, 2), num_threads=0
    )
    batch = next(batch for batch in loader if not batch.sample_ids)
    assert batch.llm.restart_position_ids.tolist() == [0, 1, 2, 3]
    assert batch.llm.position_ids.tolist() == [[0, 1, 2, 3]] * 3


# Parts with text between their tokens, as tiles have: where features go, and what the sequence says around them.


MARK, GROUP = 300, 2


@dataclass(frozen=True, kw_only=True)
class Rows(Points):
    """Every two tokens are a row of their own; what is left over makes the last."""

    slot = od.Slot(mark="<points>", token_id=MARK)
    lost: int = 0

    def expand(self, size: od.PartSize) -> tuple[str | int, ...]:
        whole, rest = divmod(size.tokens - self.lost, 2)
        rows = [2] * whole + [rest] * (rest > 0)
        return tuple(piece for number, row in enumerate(rows) for piece in (f"[{number}", row, "]"))


def batch_of(folder: Path, recipe: od.Recipe, layout: od.Packed | od.Padded = od.Packed()) -> od.Batch:  # noqa: B008
    samples = [
        {"__key__": "0", "txt": b"a<points>b", "npy": cloud(GROUP * 5)},
        {"__key__": "1", "txt": b"c", "npy": cloud(GROUP * 2, seed=1)},
    ]
    shard = write_shard(folder / "a.tar", samples)
    twelve = od.ShardDataset(shard, recipe=recipe)
    (batch,) = od.DataLoader(twelve, batch_size=2, collate_fn=layout)
    return batch


def test_a_part_stands_where_its_pieces_do(tmp_path: Path) -> None:
    batch = batch_of(tmp_path, od.Recipe(points=Rows(group=GROUP)))
    text = "".join("." if token == MARK else chr(token) for token in batch.llm.input_ids.tolist())
    assert text == "a[0..][1..][2.]b[0..]c"
    assert (batch.llm.labels[batch.llm.input_ids == ord("[")] == -100).all()
    features = torch.arange(1.0, 8.0)[:, None].expand(7, 3)
    merged = batch.merge(torch.zeros(len(batch.llm.input_ids), 3), {"points": features})[:, 0]
    assert merged[batch.llm.input_ids == MARK].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert merged.count_nonzero() == 7


def test_custom_collate_functions_get_the_same_sequence(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.tar", [{"__key__": "0", "txt": b"a<points>b", "npy": cloud(GROUP * 3)}])
    twelve = od.ShardDataset(shard, recipe=od.Recipe(points=Rows(group=GROUP)))
    (samples,) = od.DataLoader(twelve, collate_fn=lambda samples: samples)
    (sample,) = samples
    texts = [bytes(part.token_ids.tolist()).decode() for part in sample.parts if hasattr(part, "token_ids")]
    assert texts == ["a", "[0", "][1", "]", "b"]
    assert sum(hasattr(part, "modality") for part in sample.parts) == 1


def test_numbers_that_do_not_add_up_are_refused(tmp_path: Path) -> None:
    with pytest.raises(od.DataError, match=r"expand\(\) of points gives 4 tokens"):
        batch_of(tmp_path, od.Recipe(points=Rows(group=GROUP, lost=1)))
