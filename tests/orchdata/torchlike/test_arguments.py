"""Arguments, attributes and errors as torch's loader has them; which arguments apply to which data and engine."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from shard_factory import RECIPE, omni_shards
from torch.utils.data import ChainDataset, DataLoader, RandomSampler, SequentialSampler

import orchdata as od
from orchdata.loop.planned import PlannedSource

DATA = list(range(10))
API = Path(__file__).parents[3] / "docs" / "api.md"


def test_every_argument_of_torchs_is_ours_in_its_place() -> None:
    theirs = inspect.signature(DataLoader.__init__).parameters
    ours = inspect.signature(od.DataLoader.__init__).parameters
    positional = [name for name, one in theirs.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert positional == [name for name, one in ours.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert set(theirs) <= set(ours)


ATTRIBUTES = (
    "dataset batch_size num_workers collate_fn pin_memory drop_last timeout worker_init_fn generator prefetch_factor "
    "persistent_workers multiprocessing_context in_order pin_memory_device"
)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 3, "shuffle": True, "drop_last": True, "in_order": False, "pin_memory_device": "cpu"},
        {"batch_size": None, "generator": torch.Generator()},
        {"batch_size": 1, "batch_sampler": [[1, 2], [3]]},
        {"sampler": [1, 2, 3], "collate_fn": list, "batch_size": 2},
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_attributes_are_torchs(options: dict[str, Any]) -> None:
    ours, theirs = od.DataLoader(DATA, **options), DataLoader(DATA, **options)  # type: ignore[arg-type]
    for name in ATTRIBUTES.split():
        assert getattr(ours, name) == getattr(theirs, name), name
    assert type(ours.sampler) is type(theirs.sampler) and type(ours.batch_sampler) is type(theirs.batch_sampler)
    assert list(ours.sampler) == list(theirs.sampler) or isinstance(theirs.sampler, RandomSampler)
    assert len(ours) == len(theirs)


# What torch's own tests look for in these errors.
TORCHS_WORDS = (
    "option should be non-negative",
    "multi-process loading (num_workers > 0), but got",
    "should specify a valid start method in",
    "option should be a valid context ",
    "option is mutually exclusive with",
    "batch_size=None option disables auto-batching and is mutually exclusive",
)


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": -1},
        {"timeout": -1},
        {"prefetch_factor": 2},
        {"persistent_workers": True},
        {"multiprocessing_context": "spawn"},
        {"num_workers": 1, "multiprocessing_context": "bad"},
        {"num_workers": 1, "multiprocessing_context": object()},
        {"batch_size": None, "drop_last": True},
        {"sampler": SequentialSampler(DATA), "shuffle": True},
        {"batch_sampler": [[1]], "sampler": [1], "shuffle": 3},
        {"batch_sampler": [[1]], "batch_size": 2},
        {"batch_sampler": [[1]], "shuffle": True},
        {"batch_sampler": [[1]], "drop_last": True},
        {"batch_size": 0},
        {"batch_size": -1},
        {"batch_size": 1.5},
        {"sampler": 3},
        {"generator": torch.Generator(), "batch_size": "2"},
    ],
    ids=lambda options: re.sub(r" at 0x\w+", "", str(options)),
)
def test_what_torch_refuses_is_refused_with_its_error(options: dict[str, Any]) -> None:
    def error_of(loader: type[Any]) -> Exception | None:
        try:
            list(iter(loader(DATA, **options)))
        except Exception as error:
            return error
        return None

    ours, theirs = error_of(od.DataLoader), error_of(DataLoader)
    assert type(ours) is type(theirs), (ours, theirs)
    for words in TORCHS_WORDS:
        assert words in str(ours) or words not in str(theirs)


OF_TORCH = ("batch_size", "sampler", "batch_sampler", "drop_last", "dataset")


@pytest.mark.parametrize("name", [*OF_TORCH, "collate_fn", "num_workers"])
def test_assigning_later_raises_as_torchs(name: str) -> None:
    for loader in (od.DataLoader(DATA), DataLoader(DATA))[: 1 + (name in OF_TORCH)]:  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"{name} attribute should not be set after DataLoader is initialized"):
            setattr(loader, name, None)
        loader.note = "free"


def test_it_is_no_instance_of_torchs_class() -> None:
    # Accelerate, Lightning and others take such an instance apart, and shard its data again.
    assert not isinstance(od.DataLoader(DATA), DataLoader)


@pytest.mark.filterwarnings("ignore:num_workers=1000")
def test_workers_beyond_the_cores_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="excessive worker creation might get DataLoader running slow or even freeze"):
        od.DataLoader(DATA, num_workers=1000)


class OwnEngine:
    def open(self, spec: Any, workers: Any) -> NoReturn:
        raise NotImplementedError


WORKER: dict[str, Any] = {"num_workers": 1}
COLUMNS: dict[str, dict[str, Any]] = {
    "shards": WORKER,
    "map-style, planned": WORKER | {"cost": int},
    "map-style": WORKER,
    "IterableDataset": WORKER,
} | {"inline": {"num_threads": 0}, "threads": {}, "workers": WORKER, "`engine=`": WORKER | {"engine": OwnEngine()}}
MODEL = od.CostModel(llm=od.TransformerCost(hidden=8, layers=1, ffn=16))
VALUES: dict[str, Any] = (
    {"batch_size": 2, "shuffle": True, "sampler": range(4), "batch_sampler": [[0, 1], [2, 3]], "num_workers": 1}
    | {"collate_fn": list, "pin_memory": True, "drop_last": True, "timeout": 60, "worker_init_fn": print}
    | {"multiprocessing_context": "fork", "generator": torch.Generator(), "prefetch_factor": 3, "in_order": False}
    | {"persistent_workers": True, "pin_memory_device": "", "num_threads": 1, "worker_memory": 1 << 40, "accumulate": 2}
    | {"global_batch_size": 4, "global_batch_tokens": 1 << 16, "seed": 3, "cost_id": "ones", "balance": "none"}
    | {"dp": (0, 1), "on_error": "skip", "quarantine": [], "index": "require", "engine": OwnEngine()}
)


@pytest.mark.filterwarnings("ignore")
def test_an_argument_applies_to_data_and_engines_as_the_table_says(tmp_path: Path, module_cache: Path) -> None:
    part = API.read_text().partition("### Which argument applies")[2].partition("\n## ")[0]
    (_, *columns), _, *rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("|")]
    table = {name.strip("`"): dict(zip(columns, cells, strict=True)) for name, *cells in rows}
    assert columns == list(COLUMNS)
    shards = od.ShardDataset(omni_shards(tmp_path, shards=1, samples=8), RECIPE)
    shards.index()
    others: dict[str, Any] = {"map-style, planned": DATA, "map-style": DATA, "IterableDataset": ChainDataset([])}
    cache = od.Cache(tmp_path / "copies", max_bytes=1 << 30)
    for column, name in ((column, each) for column in COLUMNS for each in (*VALUES, "cache", "cost")):
        given = VALUES | {"cache": cache, "cost": int if column.startswith("map-style") else MODEL}
        expected = table[name][column] if name in table else "yes"
        try:
            loader = od.DataLoader(others.get(column, shards), **COLUMNS[column] | {name: given[name]})
        except (ValueError, TypeError) as error:
            assert expected == "error", (column, name, error)
            continue
        is_planned = isinstance(loader._runtime._source, PlannedSource)
        assert expected != "error", (column, name)
        assert is_planned == (column not in ("map-style", "IterableDataset") or expected == "planned"), (column, name)
        loader.close()
    assert {"self", "dataset", "cache", "cost", *VALUES} == {*inspect.signature(od.DataLoader.__init__).parameters}


def test_two_orders_are_refused_before_a_value_of_one() -> None:
    for loader in (od.DataLoader, DataLoader):
        with pytest.raises(ValueError, match="sampler option is mutually exclusive with shuffle"):
            loader(DATA, sampler=[0], shuffle=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shuffle must be True"):
        od.DataLoader(DATA, shuffle=3)  # type: ignore[arg-type]
