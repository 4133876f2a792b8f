"""torchtitan's loop over a DataLoader takes the plain loop's steps, and goes on where it stopped."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from shard_factory import omni_shards
from titan import Bare, make_model, titan, token_losses

import orchdata as od
from orchdata.torchtitan.loader import DataLoader

pytestmark = [
    pytest.mark.usefixtures("same_cache"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.checkpoint.*"),  # one process, it says
]

RECIPE = od.Recipe(image=None, audio=None)
LENGTH, SIZE = 400, 5
ROWS = {"tokenizer": None, "seq_len": LENGTH, "local_batch_size": 1}
FLAT = {"tokenizer": None, "max_context_length": LENGTH, "num_tokens_per_batch": LENGTH}


class Ours(od.torchtitan.TrainerMixin, Bare):
    pass


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> od.ShardDataset:
    shards = omni_shards(tmp_path_factory.mktemp("omni"), shards=2, samples=20)
    dataset = od.ShardDataset(shards, recipe=RECIPE).filter(f"not bad and tokens < {LENGTH // 2}")
    dataset.index()
    return dataset


def loader(dataset: Any, dp: tuple[int, int] = (0, 1), **options: Any) -> od.DataLoader:
    given = {"global_batch_size": SIZE, "shuffle": True, "seed": 1, "drop_last": True, "num_threads": 0}
    return od.DataLoader(dataset, **(given | {"collate_fn": od.Packed(length=LENGTH)} | options), dp=dp)


def make(
    dataset: Any,
    kind: Any = Ours,
    dp: tuple[int, int] = (0, 1),
    runtime: Any = ROWS,
    accumulation: int = 1,
    at_a_time: int = 1,
    graphs: bool = True,
    config: Any = None,
    **options: Any,
) -> Any:
    chosen = DataLoader.Config(
        make=lambda *, dp_rank, dp_world_size, **_: loader(dataset, (dp_rank, dp_world_size), **options),
        **(config or {}),
    )
    return kind(
        SimpleNamespace(
            dataloader=chosen,
            runtime={"dp_rank": dp[0], "dp_world_size": dp[1], **runtime},
            accumulation=accumulation,
            at_a_time=at_a_time,
            training=SimpleNamespace(disable_cuda_graphs=not graphs, max_norm=1e9),
        )
    )


def plain(dataset: Any, num_steps: int) -> tuple[dict[str, torch.Tensor], list[list[int]]]:
    """Weights after that number of steps of the plain loop, and the tokens of each step, sorted."""
    model, given, tokens = make_model(), loader(dataset), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while len(tokens) < num_steps:
        for microbatches in given.steps():
            for batch in microbatches:
                logits = model(batch.llm.input_ids)[:-1]
                (token_losses(logits, batch.llm.labels[1:]) * batch.loss_scale).backward()
            optimizer.step()
            optimizer.zero_grad()
            tokens.append(sorted(torch.cat([batch.llm.input_ids for batch in microbatches]).tolist()))
            if len(tokens) == num_steps:
                break
    return model.state_dict(), tokens


def tokens_of(seen: list[Any]) -> list[int]:
    return sorted(token for given, _ in seen for token in given["input"].flatten().tolist())


@pytest.mark.parametrize("runtime", [ROWS, FLAT], ids=["rows", "flat"])
def test_its_steps_are_the_plain_loop_s_over_epochs(dataset: od.ShardDataset, runtime: Any) -> None:
    trainer = make(dataset, runtime=runtime)
    num_steps = len(loader(dataset).steps()) + 2
    trainer.run(num_steps)
    weights, tokens = plain(dataset, num_steps)
    assert [tokens_of(step) for step in trainer.seen] == tokens
    assert len({len(step) for step in trainer.seen}) > 1  # microbatches, as many as a step needs
    for name, expected in weights.items():
        torch.testing.assert_close(trainer.model.state_dict()[name], expected)
    given, labels = trainer.seen[0][0]
    assert given["input"].shape == given["positions"].shape == labels.shape
    assert labels.shape == ((1, LENGTH) if runtime is ROWS else (LENGTH,))
    shifted = labels.flatten()[:-1]
    has_loss = shifted != -100
    assert torch.equal(given["input"].flatten()[1:][has_loss], shifted[has_loss])


def test_its_checkpoint_goes_on_on_other_ranks(dataset: od.ShardDataset, tmp_path: Path) -> None:
    trainer = make(dataset)
    trainer.run(3)
    dcp.save({"dataloader": trainer.dataloader}, checkpoint_id=tmp_path)
    found: list[list[int]] = [[], []]
    for rank in range(3):
        other = make(dataset, dp=(rank, 3))
        dcp.load({"dataloader": other.dataloader}, checkpoint_id=tmp_path)
        other.run(2)
        for step in range(2):
            found[step] += [token for token in tokens_of(other.seen[step]) if token]  # padding is 0
    _, expected = plain(dataset, 5)
    assert [sorted(step) for step in found] == [[token for token in step if token] for step in expected[3:]]
    with pytest.raises(od.StateError, match=r"order\.seed"):
        dcp.load({"dataloader": make(dataset, seed=2).dataloader}, checkpoint_id=tmp_path)


def test_a_pipeline_s_microbatches_are_filled_up_without_loss(dataset: od.ShardDataset) -> None:
    trainer = make(dataset, at_a_time=4)
    trainer.run(2)
    assert all(len(step) % 4 == 0 for step in trainer.seen)
    assert any((labels == -100).all() for step in trainer.seen for _, labels in step)
    weights, _ = plain(dataset, 2)
    for name, expected in weights.items():
        torch.testing.assert_close(trainer.model.state_dict()[name], expected)


def test_one_epoch_ends_as_torchtitan_wants(dataset: od.ShardDataset) -> None:
    for name in ("repeat", "infinite"):
        trainer = make(dataset, config={name: False})
        trainer.run(100)
        assert len(trainer.seen) == len(loader(dataset).steps())


def test_torchtitan_s_own_trainer_is_refused_inside_a_step_and_a_validator_is_not(dataset: od.ShardDataset) -> None:
    with pytest.raises(ValueError, match="od.torchtitan.TrainerMixin"):
        make(dataset, kind=Bare).run(10)
    config = {"for_validation": True, "repeat": False}
    items = list(make(dataset, kind=Bare, config=config).dataloader)
    assert len(items) == sum(len(step) for step in loader(dataset).steps())


def test_slices_have_labels_that_were_shifted_before_the_cut(dataset: od.ShardDataset) -> None:
    given: dict[str, Any] = {"collate_fn": od.Packed(), "balance": od.Balance(teams=od.Teams(largest=2, gain=0.0))}
    shared = 0
    for dp in ((0, 2), (1, 2)):
        items = make(dataset, dp=dp, graphs=False, **given).dataloader.optimizer_steps()
        for batch, ((inputs, labels), *_) in zip(loader(dataset, dp, **given), items, strict=False):
            assert torch.equal(labels[0], batch.llm.shift_labels)
            shared += sum(team.size > 1 for team in inputs["teams"])
            inputs["teams"][0].use.mark()
    assert shared
    with pytest.raises(ValueError, match=r"configured for sequences of 20: "):
        make(dataset, graphs=False, runtime=ROWS | {"seq_len": 20}, **given).run(1)


def test_what_would_be_another_step_is_refused(dataset: od.ShardDataset) -> None:
    with pytest.raises(ValueError, match="makes 2 gradient accumulation steps"):
        make(dataset, accumulation=2)
    with pytest.raises(ValueError, match="captures CUDA graphs"):
        make(dataset, collate_fn=od.Packed())
    with pytest.raises(ValueError, match="of 1 data-parallel ranks and torchtitan of 2"):
        DataLoader.Config(make=lambda **_: loader(dataset)).build(dp_rank=0, dp_world_size=2)
    with pytest.raises(ValueError, match="torchtitan trains whole sequences"):
        make(dataset, collate_fn=od.Packed(), balance=od.Balance(teams=od.Teams(largest=2, cut="trainer")))
    with pytest.raises(TypeError, match="make gives an od.DataLoader, got list"):
        DataLoader.Config(make=lambda **_: []).build(dp_rank=0, dp_world_size=1)
    with pytest.raises(ValueError, match="takes packed batches"):
        make(dataset, collate_fn=od.Padded(), graphs=False).run(1)
    with pytest.raises(TypeError, match="convert"):
        make(dataset, collate_fn=lambda samples: samples, graphs=False).run(1)
    with pytest.raises(ValueError, match=r"configured for sequences of 20: .*max_tokens=20"):
        make(dataset, runtime=ROWS | {"seq_len": 20}).run(1)
    weighted = od.Mixture({"a": od.Source(dataset, loss_weight=2.0)})
    with pytest.raises(ValueError, match="loss_weight"):
        make(weighted).run(1)


def test_the_recipe_of_torchtitan(dataset: od.ShardDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "megatron_torchtitan.md").read_text()
    *_, block = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    cost = od.CostModel(llm=od.PhaseCost(linear=1))
    names: dict[str, Any] = {"recipe": RECIPE, "cost": cost}
    monkeypatch.setattr(od, "ShardDataset", lambda *_, **__: dataset)
    made, _, config = block.partition("config = ")
    exec(made.replace("length=256", "length=16_384"), names)  # room for padding longer than any sequence
    assert issubclass(names["Trainer"], titan.Trainer) and names["Trainer"].Config._owner is names["Trainer"]
    assert "dataloader=od.torchtitan.DataLoader.Config(make=make_loader)" in config
    chosen = od.torchtitan.DataLoader.Config(make=names["make_loader"])
    built = chosen.build(dp_rank=1, dp_world_size=2, **FLAT)
    (given, labels), *_ = next(built.optimizer_steps())
    assert isinstance(built, titan.BaseDataLoader) and labels.shape == given["input"].shape == (16_384,)
    assert int(given["positions"].max()) < LENGTH  # of padding too: no more than what torchtitan has room for
