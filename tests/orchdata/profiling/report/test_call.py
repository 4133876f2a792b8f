"""The call of a report is one that runs on the data that were profiled."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from shard_factory import RECIPE, jpeg, write_shard

import orchdata as od

LLM = od.CostModel(llm=od.PhaseCost(1.0))


def texts(folder: Path, recipe: od.Recipe, count: int = 8) -> od.ShardDataset:
    samples = [{"__key__": str(number), "txt": b"one two three " * (1 + number)} for number in range(count)]
    return od.ShardDataset(write_shard(folder / "texts.tar", samples), recipe=recipe)


def made(call: str, dataset: od.ShardDataset | od.Mixture, **names: Any) -> od.DataLoader:
    source = re.sub(r"#.*", "", call.removeprefix("loader = ")).replace("seed=0", "seed=0, num_threads=0")
    loader = eval(source, {"od": od, "dataset": dataset, **names})
    assert isinstance(loader, od.DataLoader)
    return loader


@pytest.mark.parametrize(
    ("name", "layout", "expected"),
    [
        ("llama", od.Packed(), "od.hf.Inputs(model.config)"),
        ("llama", od.Padded(multiple_of=8), "od.hf.Inputs(model.config, padded=True, multiple_of=8)"),
        ("llama", od.Packed(length=256), "od.hf.Inputs(model.config, length=256)"),
        ("llava", od.Packed(), "od.hf.Inputs(model.config)"),
    ],
)
def test_the_call_for_a_processor_feeds_its_model(
    tmp_path: Path, name: str, layout: od.Packed | od.Padded, expected: str
) -> None:
    pytest.importorskip("transformers")
    from hf_families.families import FAMILIES

    processor, model = FAMILIES[name].build()
    dataset = texts(tmp_path, od.hf.recipe(processor))
    profile = dataset.profile(ranks=(1,), batch_size=4, layout=layout)
    assert f"collate_fn={expected},  # the recipe is of a Hugging Face processor" in profile.call
    assert json.loads(json.dumps(profile.to_dict()))["is_of_processor"]
    batch = next(iter(made(profile.call, dataset, model=model)))
    assert bool(model(**batch.model_inputs()).loss.isfinite())


def test_a_source_of_a_processor_makes_the_mixture_one_of_it(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from hf_families.families import FAMILIES

    dataset = texts(tmp_path, od.hf.recipe(FAMILIES["llama"].build()[0]))
    mixture = od.Mixture({"one": od.Source(dataset, weight=1), "two": od.Source(dataset, weight=1)})
    assert "collate_fn=od.hf.Inputs(model.config)," in mixture.profile(ranks=(1,), batch_size=4).call


def test_the_call_for_another_recipe_is_packed(tmp_path: Path) -> None:
    samples = [{"__key__": str(number), "jpg": jpeg(40, 40), "txt": b"one"} for number in range(8)]
    dataset = od.ShardDataset(write_shard(tmp_path / "a.tar", samples), recipe=RECIPE)
    profile = dataset.profile(ranks=(1,), batch_size=4)
    assert not profile.is_of_processor
    assert "collate_fn=od.Packed(),  # padding of the LLM" in profile.call
