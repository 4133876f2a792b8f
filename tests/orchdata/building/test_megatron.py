"""A packed batch in Megatron-LM's terms says the same as the batch."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from shard_factory import RECIPE, omni_shards

import orchdata as od

pytestmark = pytest.mark.usefixtures("same_cache")

LAYOUTS = {
    "packed": od.Packed(),
    "aligned": od.Packed(multiple_of=16),
    "one length": od.Packed(multiple_of=16, length=1600),
    "mrope": od.Packed(multiple_of=8, positions="mrope"),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> od.ShardDataset:
    dataset = od.ShardDataset(omni_shards(tmp_path_factory.mktemp("omni"), shards=2, samples=10), RECIPE)
    dataset.index()
    return dataset


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
