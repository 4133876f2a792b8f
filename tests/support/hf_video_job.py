"""Run by test_video of Hugging Face: a family on some ranks, joint and per phase; how far from transformers' own.

hf_video_job.py NAME SHARD COUNT
"""

from __future__ import annotations

import hf_video
from hf_families.through_orchdata import errors, trained
from rank_jobs import run_rank
from torch import nn


def main(name: str, shard: str, count: str) -> dict[str, tuple[float, float]]:
    model: nn.Module = hf_video.model_of(name)
    expected = hf_video.reference(name, model, hf_video.chats(int(count)), labels_of(name, model, shard))
    found = {}
    for per_phase in (False, True):
        loader = hf_video.loader(name, model, shard, per_phase=per_phase)
        found["per phase" if per_phase else "joint"] = errors(trained(model, loader), expected)
    return found


def labels_of(name: str, model: nn.Module, shard: str) -> dict[str, list[int]]:
    """Of each sample, by its key, as our batches have them."""
    import orchdata as od

    dataset = od.ShardDataset(shard, recipe=hf_video.recipe_of(name))
    loader = od.DataLoader(dataset, global_batch_size=len(dataset.index()), num_threads=0, dp=(0, 1))
    found: dict[str, list[int]] = {}
    for batch in loader:
        bounds = batch.llm.cu_seqlens.tolist()
        for (_, key), start, stop in zip(batch.sample_ids, bounds, bounds[1:], strict=False):
            found[key] = batch.llm.labels[start:stop].tolist()
    return found


if __name__ == "__main__":
    run_rank(main)
