"""Loss and gradients through orchdata equal those of Hugging Face's own processor and model, sample by sample."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_jobs import run_ranks
from torch import Tensor

import orchdata as od

pytest.importorskip("transformers")

from hf_families.families import FAMILIES, Family
from hf_families.reference import Measured, Mode, distance, errors, make_loader, modes_of, reference, trained
from hf_families.samples import Sample, made_up, real, write_samples

# PaliGemma's processor makes arrays of its tensors, in a way that numpy warns of.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:chats never learn to stop"),  # llava_next's template writes no end
]

TOLERANCE = 1e-8
JOB = Path(__file__).parents[2] / "support" / "hf_parity_job.py"
EVERY_DAY = ("qwen2_5_vl",)


def slow_but(names: tuple[str, ...], some: Callable[[Family], bool] = lambda family: True) -> list[Any]:
    chosen = [name for name, family in FAMILIES.items() if some(family)]
    return [pytest.param(name, marks=() if name in names else pytest.mark.slow) for name in chosen]


@cache
def expected_of(name: str, count: int = 8, seed: int = 0) -> Measured:
    family = FAMILIES[name]
    processor, model = family.build()
    return reference(family, model, processor, made_up(family, count, seed))


def check_modes(family: Family, samples: list[Sample], expected: Measured, modes: list[Mode], folder: Path) -> None:
    processor, model = family.build()
    shards = write_samples(family, samples, folder)
    for mode in modes:
        found = errors(trained(model, make_loader(family, model, processor, shards, mode)), expected)
        assert max(found) < TOLERANCE, f"{mode}: loss and gradients are {found} off"


@pytest.mark.parametrize("name", slow_but(EVERY_DAY))
def test_packed_and_padded_equal_one_sample_at_a_time(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    check_modes(family, made_up(family), expected_of(name), modes_of(family, 1), tmp_path)


@pytest.mark.parametrize("name", slow_but(EVERY_DAY))
def test_ranks_that_have_dummies_alone_add_nothing(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    processor, model = family.build()
    dataset = od.ShardDataset(write_samples(family, made_up(family), tmp_path), recipe=od.hf.recipe(processor))
    count = dataset.index().num_samples
    inputs, loss, idle = od.hf.Inputs(model.config, multiple_of=16), 0.0, 0
    for rank in range(num_ranks := count + 3):
        loader = od.DataLoader(dataset, global_batch_size=count, collate_fn=inputs, num_threads=0, dp=(rank, num_ranks))
        part, gradients = trained(model, loader)
        loss += part / num_ranks
        if not part:
            idle += 1
            assert not any(gradient.any() for gradient in gradients.values())
    assert idle >= 3
    assert abs(loss / expected_of(name).loss - 1) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_equal_one_sample_at_a_time(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    shards = write_samples(family, made_up(family, 9, 1), tmp_path)
    od.ShardDataset(shards, recipe=od.hf.recipe(family.build()[0])).index()
    for rank in run_ranks(str(JOB), name, 1, 9, *shards, num_ranks=2, folder=tmp_path):
        assert rank.keys() == {str(mode) for mode in modes_of(family, 2)}
        assert not {mode: found for mode, found in rank.items() if max(found) >= TOLERANCE}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.media])
def test_real_images_and_clips_equal_one_sample_at_a_time(name: str, fixtures_dir: Path, tmp_path: Path) -> None:
    family = FAMILIES[name]
    samples = real(family, fixtures_dir)
    processor, model = family.build()
    check_modes(family, samples, reference(family, model, processor, samples), modes_of(family, 1)[::2], tmp_path)


@pytest.mark.parametrize("name", slow_but(EVERY_DAY, lambda family: family.per_phase))
def test_towers_that_run_once_a_round_train_as_those_that_run_in_each_micro_step(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    processor, model = family.build()
    shards, calls, found = write_samples(family, made_up(family), tmp_path), [], []
    model.get_image_features = (lambda own: lambda *a, **k: calls.append(1) or own(*a, **k))(model.get_image_features)
    for rounds in ("", "step"):
        calls.clear()
        mode = Mode(per_phase=True, microbatches=True, rounds=rounds)
        found.append(trained(model, make_loader(family, model, processor, shards, mode))[1])
        assert (len(calls) == 1) is bool(rounds)
    assert distance(found[1], found[0]) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_towers_of_a_wrapped_model_run_once_a_round(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    shards = write_samples(family, made_up(family, 9, 1), tmp_path)
    od.ShardDataset(shards, recipe=od.hf.recipe(family.build()[0])).index()
    for rank in run_ranks(str(JOB.with_name("hf_rounds_job.py")), name, *shards, num_ranks=2, folder=tmp_path):
        assert max(rank.values()) < 1e-12
    model = torch.nn.Module()
    model.find_unused_parameters = True
    with pytest.raises(ValueError, match="freeze what is never used"):
        next(od.hf.rounds(model, []))


def noisy(inputs: dict[str, Any]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: value + 0.01 * torch.randn(value.shape, generator=generator, dtype=value.dtype)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in inputs.items()
    }


def without_restart(inputs: dict[str, Any]) -> dict[str, Any]:
    positions = inputs["position_ids"]
    if positions.dim() == 3:
        return inputs | {"position_ids": positions[1:]}
    return inputs | {"position_ids": torch.arange(positions.shape[1])[None]}


def rows_exchanged(inputs: dict[str, Any]) -> dict[str, Any]:
    """The first two patches, tiles or clips change places."""
    name = "pixel_values" if "pixel_values" in inputs else "input_features"
    axis = 1 if inputs[name].dim() == 5 else 0
    first, second, *others = inputs[name].unbind(axis)
    return inputs | {name: torch.stack([second, first, *others], axis)}


@pytest.mark.parametrize("name", ["qwen2_5_vl", pytest.param("llava_next", marks=pytest.mark.slow)])
@pytest.mark.parametrize("change", [noisy, without_restart, rows_exchanged])
def test_what_is_wrong_is_seen(name: str, change: Any, tmp_path: Path) -> None:
    """Guards the comparison: each makes a difference far above the tolerance."""
    family = FAMILIES[name]
    processor, model = family.build()
    loader = make_loader(family, model, processor, write_samples(family, made_up(family), tmp_path), Mode())
    loss, gradients = errors(trained(model, loader, change), expected_of(name))
    assert loss > 1e3 * TOLERANCE and gradients > 1e3 * TOLERANCE
