"""A DataLoader in an Accelerate loop: on its device, in its state, and never sharded a second time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from map_dataset import Numbers
from rank_jobs import run_ranks
from shard_factory import RECIPE, omni_shards

import orchdata as od

accelerate = pytest.importorskip("accelerate")

pytestmark = [pytest.mark.usefixtures("same_cache"), pytest.mark.filterwarnings("ignore::FutureWarning:accelerate.*")]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> od.ShardDataset:
    dataset = od.ShardDataset(omni_shards(tmp_path_factory.mktemp("omni"), shards=2, samples=20), RECIPE)
    dataset.index()
    return dataset


@pytest.fixture
def accelerator() -> Any:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    yield accelerate.Accelerator(cpu=True)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def make(dataset: Any, **options: Any) -> od.DataLoader:
    given = {
        "global_batch_size": 8,
        "num_threads": 0,
        "shuffle": True,
        "balance": od.Balance(max_tokens=400, oversize="own"),
    }
    return od.DataLoader(dataset, **(given | options))


def keys_of(item: Any) -> list[Any]:
    return [batch.sample_ids for batch in (item if isinstance(item, list) else [item])]


@pytest.mark.parametrize("steps", [False, True])
def test_items_are_those_of_the_loader_on_the_accelerators_device(
    dataset: od.ShardDataset, accelerator: Any, steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = make(dataset)
    expected = [keys_of(item) for item in (loader.steps() if steps else loader)]
    given = make(dataset)
    prepared = od.hf.accelerate(given.steps() if steps else given, accelerator)
    monkeypatch.setattr(type(accelerator), "device", property(lambda _: torch.device("meta")))
    found = []
    for item in prepared:
        found.append(keys_of(item))
        batch = item[0] if steps else item
        assert batch.llm.input_ids.device.type == batch.model_inputs()["image_patches"].device.type == "meta"
    assert found == expected
    if steps:
        assert len(prepared) == len(found) == 5


def test_prepare_leaves_it_as_it_is(dataset: od.ShardDataset, accelerator: Any) -> None:
    prepared = od.hf.accelerate(make(dataset), accelerator)
    assert accelerator.prepare(prepared) is prepared
    assert accelerator.prepare_data_loader(prepared) is prepared
    assert accelerator._dataloaders == [prepared]


def test_a_loader_that_accelerate_would_build_again_is_refused(dataset: od.ShardDataset, accelerator: Any) -> None:
    with pytest.raises(TypeError, match="without plan or state: use od.hf.accelerate"):
        accelerator.prepare_data_loader(make(dataset))


def test_the_loaders_place_is_in_the_accelerators_state(
    dataset: od.ShardDataset, accelerator: Any, tmp_path: Path
) -> None:
    prepared = od.hf.accelerate(make(dataset).steps(), accelerator)
    iterator = iter(prepared)
    for _ in range(2):
        next(iterator)
    accelerator.save_state(str(tmp_path))
    rest = [keys_of(item) for item in iterator]
    prepared.set_epoch(3)
    accelerator.load_state(str(tmp_path))
    assert prepared.state_dict()["step"] == 2
    assert [keys_of(item) for item in prepared] == rest and len(rest) == 3


def test_what_would_divide_or_shard_twice_is_refused(dataset: od.ShardDataset, accelerator: Any) -> None:
    with pytest.raises(TypeError, match="takes an od.DataLoader or its steps.., got DataLoader: accelerator.prepare"):
        od.hf.accelerate(torch.utils.data.DataLoader(Numbers(4)), accelerator)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of 2 data-parallel ranks and the accelerator of 1"):
        od.hf.accelerate(make(dataset, dp=(0, 2)), accelerator)
    accelerator.gradient_accumulation_steps = 2
    with pytest.raises(ValueError, match="gradient_accumulation_steps=2"):
        od.hf.accelerate(make(dataset), accelerator)


def test_accumulating_by_microbatches_is_refused(dataset: od.ShardDataset, accelerator: Any) -> None:
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    loader = od.hf.accelerate(make(dataset), accelerator)
    with pytest.raises(ValueError, match="was not the last of its step"):
        for _ in loader:
            with accelerator.accumulate(model):
                pass
    for _ in od.hf.accelerate(make(dataset).steps(), accelerator):  # whole steps are what it takes them for
        with accelerator.accumulate(model):
            pass


def synced(accelerator: Any, loader: Any, epochs: int = 2) -> tuple[str, list[float]]:
    """After which batches the gradients were synchronized, and the weights in the end."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), loader)
    flags = []
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch["number"][:, None].float()).sum())
                optimizer.step()
                optimizer.zero_grad()
            flags.append(str(int(accelerator.sync_gradients)))
        flags.append(" ")
    return "".join(flags), [weight.item() for weight in model.parameters()]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("wrap", [lambda loader, _: loader, od.hf.accelerate], ids=["plain", "wrapped"])
def test_gradients_are_accumulated_as_with_torchs_loader(accelerator: Any, wrap: Any, workers: int) -> None:
    accelerator.gradient_accumulation_steps = 4
    expected = synced(accelerator, torch.utils.data.DataLoader(Numbers(12), batch_size=2))
    assert expected[0] == "000101 000101 "
    loader = od.DataLoader(Numbers(12), batch_size=2, num_workers=workers)
    assert synced(accelerator, wrap(loader, accelerator)) == expected
    assert accelerator.gradient_state.active_dataloader is None
    # The control: registered by nothing, the tail of an epoch is added to the next one.
    unregistered = ({"number": torch.tensor([2 * step, 2 * step + 1])} for step in range(6)).__iter__
    assert "1" in synced(accelerator, list(unregistered()))[0] and synced(accelerator, list(unregistered())) != expected


def test_accumulating_over_microbatches_of_a_loader_is_refused(dataset: od.ShardDataset, accelerator: Any) -> None:
    accelerator.gradient_accumulation_steps = 4
    loader = make(dataset)
    with pytest.raises(ValueError, match="gradient_accumulation_steps at 1, accumulate by DataLoader"):
        iter(loader)
    with pytest.raises(ValueError, match="gradient_accumulation_steps at 1"):
        iter(loader.steps())
    with torch.no_grad():
        assert len(list(loader.steps())) == 5


class Endless(torch.utils.data.IterableDataset[dict[str, int]]):
    def __iter__(self) -> Any:
        return ({"number": number} for number in range(12))


def test_accumulating_over_an_epoch_of_unknown_length_is_refused(accelerator: Any) -> None:
    accelerator.gradient_accumulation_steps = 4
    with pytest.raises(ValueError, match="sync_with_dataloader=False"):
        iter(od.DataLoader(Endless(), batch_size=2))
    accelerator.gradient_state.plugin_kwargs["sync_with_dataloader"] = False
    expected = synced(accelerator, torch.utils.data.DataLoader(Endless(), batch_size=2))
    accelerator.step = 0
    assert expected[0] == "000100 010001 "
    assert synced(accelerator, od.DataLoader(Endless(), batch_size=2)) == expected


@pytest.mark.parametrize(("length", "words"), [(4, "more batches"), (8, "fewer batches")])
def test_a_sampler_with_a_wrong_length_is_an_error_of_accumulation(accelerator: Any, length: int, words: str) -> None:
    class Sampler(list[list[int]]):
        def __len__(self) -> int:
            return length

    accelerator.gradient_accumulation_steps = 4
    loader = od.DataLoader(Numbers(12), batch_sampler=Sampler([2 * step, 2 * step + 1] for step in range(6)))
    with pytest.raises(RuntimeError, match=words):
        synced(accelerator, loader)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_each_sample_is_gathered_once_and_other_shapes_are_an_error_that_names_the_way(
    num_ranks: int, tmp_path: Path
) -> None:
    job = Path(__file__).parents[2] / "support" / "gather_job.py"
    found = run_ranks(str(job), num_ranks=num_ranks, folder=tmp_path)
    for each in found:
        assert each["wrong"] == []
        assert each["plain"] == [4, 1]
        assert "use_gather_object=True" in each["error"]
        assert each["whole"] == [number for other in range(num_ranks) for number in range(other + 1)]


@pytest.mark.parametrize("options", [{"seed": 1}, {"dp": (0, 2)}])
def test_skip_first_batches_says_what_to_do(accelerator: Any, options: dict[str, Any]) -> None:
    loader = od.DataLoader(Numbers(8), 2, shuffle=True, **options)
    for each in (loader, loader.steps(), od.hf.accelerate(od.DataLoader(Numbers(8), 2), accelerator)):
        with pytest.raises(TypeError, match=r"accelerator\.load_state"):
            accelerate.skip_first_batches(each, 1)
    rest = accelerate.skip_first_batches(od.DataLoader(Numbers(8), 2), 1)  # one rank's, in batches of torch's
    assert [batch["number"].tolist() for batch in rest] == [[2, 3], [4, 5], [6, 7]]


def test_repeats_that_a_gather_keeps_are_said(recwarn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchdata.notices._warned", set())
    for count, size in ((4, None), (5, 1), (5, None)):
        od.DataLoader(Numbers(count), size, dp=(0, 2)).steps().even_tail()
        said = [str(each.message) for each in recwarn if "give batch_size=1" in str(each.message)]
        assert len(said) == (count == 5 and size is None)
        recwarn.clear()


def test_an_iterable_of_each_rank_is_given_another_way(accelerator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(accelerator), "num_processes", property(lambda _: 2))
    with pytest.raises(ValueError, match=r"iterate the loader itself.*state_dict\(\) for each rank"):
        od.hf.accelerate(od.DataLoader(Endless(), batch_size=2, dp=(0, 1)), accelerator)
