"""Batches on a real GPU: copies that nothing waits for, views that copy nothing back, and the losses of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from shard_factory import RECIPE, omni_shards
from torch import Tensor

import orchdata as od
from benchmarks.train.lanes import make_model_config
from examples.model import MultimodalLM, fit_to_recipe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """CUDA calls that wait for the GPU raise."""
    torch.cuda.init()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def loader(folder: Path, **options: object) -> od.DataLoader:
    dataset = od.ShardDataset(omni_shards(folder, shards=1, samples=10), recipe=RECIPE)
    return od.DataLoader(dataset, batch_size=5, pin_memory=True, **options)  # type: ignore[arg-type]


def tensors(batch: od.Batch) -> dict[str, Tensor]:
    return {name: value for name, value in batch.model_inputs().items() if torch.is_tensor(value)}


@pytest.mark.parametrize("workers", [{"num_threads": 0}, {"num_threads": 2}, {"num_workers": 1}])
def test_pinned_batches_are_copied_without_a_wait(tmp_path: Path, no_waiting: None, workers: dict[str, int]) -> None:
    for batch in loader(tmp_path, **workers):
        held = tensors(batch)
        assert held and all(value.is_pinned() for value in held.values())
        moved = tensors(batch.to("cuda", non_blocking=True))
        torch.cuda.synchronize()
        assert all(value.is_cuda for value in moved.values())
        torch.cuda.set_sync_debug_mode("default")
        assert all(torch.equal(moved[name].cpu(), value) for name, value in held.items())
        torch.cuda.set_sync_debug_mode("error")


def test_a_view_of_a_batch_copies_nothing_from_the_gpu(tmp_path: Path, no_waiting: None) -> None:
    batch = next(iter(loader(tmp_path))).to("cuda", non_blocking=True)
    assert "cuda" in repr(batch)
    assert "cuda" in batch._repr_html_()
    with pytest.raises(RuntimeError, match="synchronizing"):
        batch.llm.input_ids.tolist()


def test_losses_and_gradients_are_those_of_the_cpu(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MultimodalLM(fit_to_recipe(make_model_config(RECIPE), RECIPE))
    found: dict[str, list[Tensor]] = {}
    for device in ("cpu", "cuda"):
        model.to(device)
        losses = []
        for batch in loader(tmp_path):
            out = model(**batch.to(device).model_inputs())
            (out.loss_sum * batch.loss_scale).backward()
            losses.append(out.loss_sum.detach().cpu())
        gradients = [weight.grad.cpu() for weight in model.parameters() if weight.grad is not None]
        found[device] = [torch.stack(losses), *gradients]
        model.zero_grad(set_to_none=True)
    assert len(found["cpu"]) == len(found["cuda"]) > 10
    for cpu, gpu in zip(found["cpu"], found["cuda"], strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=1e-3, atol=1e-4)
