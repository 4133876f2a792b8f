"""Loaders without a step: a warning says why and what to change, and a filter that leaves nothing is an error."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from shard_factory import write_shard
from torch.utils.data import default_collate, default_convert

import orchdata as od


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
