"""Augmentation is reproducible: a part is augmented equally by any engine and rank, after resume and in replay."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from augmentations import recipe
from digests import digest
from rank_loaders import loaders, steps_of
from shard_factory import omni_shards

import orchdata as od

pytestmark = pytest.mark.usefixtures("same_cache")

EPOCHS = 2


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> od.ShardDataset:
    dataset = od.ShardDataset(omni_shards(tmp_path_factory.mktemp("omni"), samples=10), recipe())
    dataset.index()
    return dataset


def one(dataset: Any, **options: Any) -> Any:
    return loaders(dataset, 1, **options)[0]


def epochs_of(loader: Any) -> list[list[str]]:
    """Digests of all batches of the first epochs."""
    return [[digest(batch) for batch in loader] for _ in range(EPOCHS)]


def images_of(batches: Iterable[Any]) -> Counter[str]:
    """Digests of the images in batches, without dummies."""
    found: Counter[str] = Counter()
    for batch in batches:
        patches, ends = batch.image.patches.numpy(), batch.image.cu_seqlens.tolist()
        for start, stop in pairwise(ends):
            if patches[start:stop].any():
                found[hashlib.blake2b(patches[start:stop].tobytes()).hexdigest()] += 1
    return found


def of_epoch(ours: Any, epoch: int = 0) -> Counter[str]:
    """Images of all ranks in an epoch."""
    for loader in ours:
        loader.set_epoch(epoch)
    return images_of(batch for shares in steps_of(ours) for share in shares for batch in share)


@pytest.fixture(scope="module")
def inline(dataset: od.ShardDataset) -> list[list[str]]:
    return epochs_of(one(dataset))


@pytest.mark.parametrize("engine", [{"num_threads": 3}, {"num_workers": 2, "num_threads": 2}])
def test_engines_give_the_same_to_the_bit(dataset: od.ShardDataset, inline: Any, engine: dict[str, int]) -> None:
    assert epochs_of(one(dataset, **engine)) == inline
    assert inline[0] != inline[1]


def test_resumed_and_replayed_steps_are_the_same_to_the_bit(dataset: od.ShardDataset, inline: Any) -> None:
    run = one(dataset)
    epochs_of(run)
    for epoch, given in enumerate(inline):
        assert [digest(batch) for step in range(len(given)) for batch in run.step_at(epoch, step)] == given
    cut = one(dataset)
    next(iterator := iter(cut))
    state = json.loads(json.dumps(cut.state_dict()))
    iterator.close()
    assert [digest(batch) for batch in loaders(dataset, 1, state)[0]] == inline[0][1:]


def test_ranks_and_assignments_give_the_same_images(dataset: od.ShardDataset) -> None:
    alone = [of_epoch([one(dataset)], epoch) for epoch in range(EPOCHS)]
    assert sum(alone[0].values()) == sum(alone[1].values()) == 3 * 8  # 8 images in the 10 samples of a shard
    assert not alone[0] & alone[1]
    assert set(alone[0].values()) == {1}  # of equal pictures too, in other shards
    for options in ({}, {"balance": od.Balance(assignment="per_phase")}, {"collate_fn": od.Padded()}):
        assert [of_epoch(loaders(dataset, 2, **options), epoch) for epoch in range(EPOCHS)] == alone
    assert of_epoch([one(dataset, shuffle=False)]) == alone[0]
    assert not of_epoch([one(dataset, seed=8)]) & alone[0]


def test_sources_of_a_mixture_and_their_passes_differ(dataset: od.ShardDataset) -> None:
    both = od.Mixture(
        {"a": od.Source(dataset, weight=1), "b": od.Source(dataset, weight=1)}, stop="repeat", epoch_samples=120
    )
    options = {"global_batch_tokens": None, "global_batch_size": 10}
    alone = of_epoch([one(both, **options)])
    assert set(alone.values()) == {1}  # two passes through each of two sources
    assert sum(alone.values()) == 4 * 24
    assert of_epoch(loaders(both, 2, **options)) == alone
    plain = od.Mixture({"a": od.Source(dataset, weight=1), "b": od.Source(plain_dataset(dataset), weight=1)})
    assert 0 < sum((of_epoch([one(plain, **options)]) & alone).values()) < 48


def plain_dataset(dataset: od.ShardDataset) -> od.ShardDataset:
    return od.ShardDataset(dataset.urls, recipe(None))


def test_a_state_of_another_seed_is_refused_only_where_decoding_draws(dataset: od.ShardDataset) -> None:
    options: dict[str, Any] = {"shuffle": False}
    state = one(dataset, seed=1, **options).state_dict()
    assert state["fingerprint"]["draws"] == {"seed": 1}
    with pytest.raises(od.StateError, match="draws"):
        loaders(dataset, 1, state, seed=2, **options)
    plain = plain_dataset(dataset)
    state = one(plain, seed=1, **options).state_dict()
    assert "draws" not in state["fingerprint"]
    loaders(plain, 1, state, seed=2, **options)
