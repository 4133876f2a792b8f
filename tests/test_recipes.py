"""The docs' recipes for models and trainers run as written, on real models; noise for pixels changes their losses."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from doc_pages import recipe_of
from shard_factory import RECIPE, omni_shards

import orchdata as od

pytest.importorskip("transformers")

import transformers
from hf_families.families import FAMILIES
from hf_families.samples import made_up, write_samples

COUNT = 6

pytestmark = [
    pytest.mark.usefixtures("same_cache"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:accelerate.*"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning"),  # Lightning's, of torch
]


class VL:
    """A tiny Qwen2.5-VL, its processor, and shards of chats with images."""

    def __init__(self, folder: Path) -> None:
        self.family = FAMILIES["qwen2_5_vl"]
        self.processor, _ = self.family.build()
        self.shards = write_samples(self.family, made_up(self.family, COUNT), folder)

    def model(self) -> Any:
        """With the losses that its forwards had in `model.losses`."""
        model = self.family.build()[1]
        model.losses = []
        model.register_forward_hook(lambda _, __, outputs: model.losses.append(outputs.loss.item()))
        return model

    def loader(self, *_: Any, **options: Any) -> od.DataLoader:
        """What `...` stands for in a recipe."""
        config = self.family.build()[1].config
        given = {"global_batch_size": COUNT, "collate_fn": od.hf.Inputs(config), "num_threads": 0}
        return od.DataLoader(self.dataset(), **(given | options))

    def dataset(self) -> od.ShardDataset:
        return od.ShardDataset(list(self.shards), recipe=od.hf.recipe(self.processor))


@pytest.fixture(scope="module")
def vl(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> VL:
    return VL(tmp_path_factory.mktemp("vl"))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, module_cache: Path) -> list[str]:
    shards = omni_shards(tmp_path_factory.mktemp("omni"), shards=1, samples=20)
    od.ShardDataset(shards, recipe=RECIPE).index()
    return shards


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@contextlib.contextmanager
def noise() -> Iterator[None]:
    """Pixels are noise, wherever a model's arguments are made."""
    media = od.hf.Inputs._media

    def noisy(inputs: Any, held: Any, *, is_dummy: bool) -> Any:
        generator = torch.Generator().manual_seed(0)
        made = media(inputs, held, is_dummy=is_dummy)
        pixels = made["pixel_values"]
        return made | {"pixel_values": torch.randn(pixels.shape, generator=generator, dtype=pixels.dtype)}

    with mock.patch.object(od.hf.Inputs, "_media", noisy):
        yield


def plain_loss(vl: VL) -> float:
    model = vl.model()
    return sum(od.hf.loss(model(**batch.model_inputs()), batch).item() for batch in vl.loader())


def check(run: Callable[[], list[float]], expected: float) -> None:
    """The summed losses of a step are the plain loop's, and others where pixels are noise."""
    assert sum(run()) == pytest.approx(expected, rel=1e-5)
    with noise():
        assert abs(sum(run()) / expected - 1) > 1e-3


def test_the_first_recipe_of_hugging_face_models(vl: VL, monkeypatch: pytest.MonkeyPatch) -> None:
    shard_dataset = od.ShardDataset
    monkeypatch.setattr(od, "ShardDataset", lambda _, **options: shard_dataset(list(vl.shards), **options))
    monkeypatch.setattr(od.Batch, "to", lambda batch, device: batch if device == "cuda" else pytest.fail(str(device)))
    made: list[Any] = []

    def run() -> list[float]:
        def make(name: str, **options: Any) -> Any:
            made.append(vl.model())
            return made[-1]

        with (
            mock.patch.object(transformers.AutoProcessor, "from_pretrained", lambda _: vl.processor),
            mock.patch.object(transformers.AutoModelForImageTextToText, "from_pretrained", make),
        ):
            exec(recipe_of("huggingface.md", "from_pretrained"), {})
        assert any(parameter.grad.any() for parameter in made[-1].model.visual.parameters())
        return made[-1].losses

    check(run, plain_loss(vl))


def test_the_recipe_of_special_tokens(vl: VL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "a <box> b </box>"}\n')
    shard_dataset = od.ShardDataset
    monkeypatch.setattr(od, "ShardDataset", lambda _, **options: shard_dataset(str(path), **options))
    processor, size = copy.deepcopy(vl.processor), len(vl.processor.tokenizer)  # others have this tokenizer too
    model, small = vl.family.build()[1], vl.family.build()[1]
    names: dict[str, Any] = {"od": od, "processor": processor, "model": model}
    exec(recipe_of("huggingface.md", "add_special_tokens("), names)
    (batch,) = od.DataLoader(names["dataset"], global_batch_size=1, collate_fn=names["collate_fn"])
    inputs = batch.model_inputs()
    assert [each for each in inputs["input_ids"].flatten().tolist() if each >= size] == [size, size + 1]
    assert model(**inputs).loss.isfinite()
    with pytest.raises(IndexError):  # as the page says
        small(**inputs)


@pytest.mark.slow_cases("encode")
@pytest.mark.parametrize("call", ["od.hf.encode(model, batch)", "od.hf.rounds(model, step)"])
def test_the_recipe_of_encoders_balanced_apart(vl: VL, call: str) -> None:
    def run() -> list[float]:
        model = vl.model()
        names = SimpleNamespace(DataLoader=vl.loader, Balance=od.Balance, hf=od.hf)
        exec(recipe_of("huggingface.md", call), {"od": names, "model": model})
        return model.losses

    check(run, plain_loss(vl))


@pytest.mark.slow
def test_the_recipe_of_the_trainer_goes_on_where_it_stopped(vl: VL, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    block = recipe_of("trainers.md", "TrainerMixin, transformers")
    sizes = {"global_batch_size": 2, "shuffle": True}

    def train(folder: Path, steps: int, *, resumes: bool) -> list[float]:
        model = vl.model()
        arguments = transformers.TrainingArguments(
            str(folder),
            max_steps=steps,
            learning_rate=0.01,
            optim="sgd",
            lr_scheduler_type="constant",
            save_steps=2,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        names = {"od": od, "transformers": transformers, "model": model, "arguments": arguments}
        names |= {"loader": vl.loader(**sizes), "eval_loader": vl.loader()}
        exec(block if resumes else block.replace("resume_from_checkpoint=True", ""), names)
        assert names["trainer"].evaluate()["eval_loss"] > 0
        return model.losses[:-1]

    whole = train(tmp_path / "whole", 4, resumes=False)
    assert train(tmp_path / "part", 2, resumes=False) == whole[:2]
    assert train(tmp_path / "part", 4, resumes=True) == whole[2:]
    with noise():
        noisy = train(tmp_path / "noise", 1, resumes=False)
    assert abs(noisy[0] / whole[0] - 1) > 1e-3


@pytest.mark.parametrize("collate_fn", [None, od.Packed(), od.Packed(empty="zero"), od.Padded()], ids=str)
@pytest.mark.parametrize("assignment", ["joint", "per_phase"])
def test_a_layout_that_hides_media_from_a_processor_s_model_is_refused(
    vl: VL, assignment: Any, collate_fn: Any
) -> None:
    """Names that a model does not know end in its **kwargs: it would train without images, and nothing would raise."""
    vl.dataset().index()
    options = {"global_batch_size": 2, "dp": (0, 2), "balance": od.Balance(assignment=assignment)}
    seen = set()
    for batch in vl.loader(collate_fn=collate_fn, **options):
        assert not [name for name in batch.model_inputs(media=False) if name.startswith("image")]
        tokens = int((batch.llm.input_ids == vl.processor.image_token_id).sum())
        is_encoded = assignment == "per_phase" and len(batch.image.valid) > 0
        has_image = is_encoded or tokens > batch.llm.dummies.get("image", 0)
        seen.add(has_image)
        refused = pytest.raises(ValueError, match=r"not see image .*od\.hf\.Inputs\(model\.config\).*\(media=False\)")
        with refused if has_image else contextlib.nullcontext():
            batch.to("cpu").model_inputs()
    assert seen == {True, False}


def small(shards: list[str], **options: Any) -> tuple[Any, od.DataLoader]:
    from examples.model import ModelConfig, MultimodalLM, Sizes, fit_to_recipe

    sizes = Sizes(hidden=32, layers=1, ffn=64)
    torch.manual_seed(0)
    model = MultimodalLM(fit_to_recipe(ModelConfig(llm=sizes, image=sizes, audio=sizes), RECIPE))
    given = {"global_batch_size": 10, "num_threads": 0, "balance": od.Balance(max_tokens=500, oversize="own")}
    return model, od.DataLoader(od.ShardDataset(shards, recipe=RECIPE), **(given | options))


def trained(shards: list[str]) -> dict[str, torch.Tensor]:
    """Weights after an epoch of the plain loop."""
    model, loader = small(shards)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in loader:
        (model(**batch.model_inputs()).loss_sum * batch.loss_scale).backward()
        if batch.is_last_microbatch:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, weights in expected.items():
        torch.testing.assert_close(found[name], weights, rtol=1e-5, atol=1e-6)


def test_the_recipe_of_accelerate(shards: list[str]) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, loader = small(shards)
    names = {"od": od, "contextlib": contextlib, "accelerator": accelerate.Accelerator(cpu=True), "loader": loader}
    names |= {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    exec(recipe_of("trainers.md", "od.hf.accelerate(loader"), names)
    same(model.state_dict(), trained(shards))


@pytest.mark.slow
def test_the_recipe_of_lightning(shards: list[str]) -> None:
    lightning = pytest.importorskip("lightning")
    model, loader = small(shards)
    names: dict[str, Any] = {}
    made = [loader]
    exec(recipe_of("trainers.md", "lightning.LightningModule").partition("\n\nmodule = ")[0], names)

    class Module(names["Module"]):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def train_dataloader(self) -> Any:
            return made[-1].steps()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_epochs=1, **quiet)
    trainer.fit(Module())
    assert trainer.global_step == 2  # of 10 samples, each of several microbatches
    same(model.state_dict(), trained(shards))
    made.append(SimpleNamespace(steps=lambda: loader))  # microbatches, given as if they were steps
    with pytest.raises(ValueError, match="lightning takes len"):
        lightning.Trainer(accelerator="cpu", devices=1, max_epochs=1, **quiet).fit(Module())


@pytest.mark.slow
def test_the_recipe_of_fabric(shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lightning = pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    model, loader = small(shards)
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    names = {"fabric": fabric, "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    exec(recipe_of("trainers.md", "fabric.setup(model"), names | {"loader": loader})
    same(model.state_dict(), trained(shards))
    _, fresh = small(shards)
    fabric.load("state.ckpt", {"loader": fresh})
    assert fresh.state_dict() == loader.state_dict() and fresh.state_dict()["epoch"] == 1
    with pytest.raises(TypeError, match="Only PyTorch DataLoader"):
        fabric.setup_dataloaders(fresh)


@pytest.mark.usefixtures("alone")
def test_the_line_of_ddp(shards: list[str]) -> None:
    plain, loader = small(shards)
    model = torch.nn.parallel.DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {"loader": loader, "model": model, "optimizer": optimizer, "contextlib": contextlib}
    exec(recipe_of("training.md", "model.no_sync()", "sync ="), names)
    same(plain.state_dict(), trained(shards))


def test_the_model_of_encoders_balanced_apart(shards: list[str]) -> None:
    definition, loop = recipe_of("encoders_apart.md", "class Model(nn.Module)").split("\n\n\n")
    names: dict[str, Any] = {"nn": torch.nn, "od": od, "dp_group": None}
    exec(definition.replace("        ...", "        return SimpleNamespace(loss_sum=self.tail(x, labels))"), names)
    names["SimpleNamespace"] = SimpleNamespace
    torch.manual_seed(0)
    model = names["Model"]()
    side = RECIPE.image.patch_size**2 * 3
    model.embed, model.project = torch.nn.Embedding(260, 8), torch.nn.Linear(4 * side, 8)
    model.vision = lambda patches, _: model.project(patches.unflatten(0, (-1, 4)).flatten(1))
    seen: list[float] = []
    model.tail = lambda x, labels: x[labels != -100].square().sum() + x.sum()
    model.register_forward_hook(lambda _, __, outputs: seen.append(outputs.loss_sum.item()))

    def run(**options: Any) -> list[float]:
        def make(*_: Any, **given: Any) -> od.DataLoader:
            return small(shards, **(given | options))[1]

        seen.clear()
        exec(loop, {"od": SimpleNamespace(DataLoader=make, Balance=od.Balance), "wrapped": model, "dataset": None})
        return list(seen)

    apart = run()
    assert model.project.weight.grad.any()
    assert sum(apart) == pytest.approx(sum(run(balance=od.Balance(max_tokens=16_384))), rel=1e-5)
    with torch.no_grad():
        model.project.weight.normal_()
    assert abs(sum(run()) / sum(apart) - 1) > 1e-3


def test_the_loop_of_rounds(shards: list[str]) -> None:
    layers = torch.nn.ModuleDict({"image": torch.nn.Linear(192, 8), "audio": torch.nn.Linear(16, 8)})
    embed, calls = torch.nn.Embedding(260, 8), []

    def encode(name: str, media: Any) -> torch.Tensor:
        calls.append(name)
        (inputs,) = (media.arrays[each] for each in ("patches", "features") if each in media.arrays)
        return layers[name](inputs).unflatten(0, (media.num_tokens or 1, -1)).mean(1)

    def model(batch: od.Batch, features: Any) -> Any:
        return SimpleNamespace(loss_sum=batch.merge(embed(batch.llm.input_ids), features).square().sum())

    balance = od.Balance(assignment="per_phase", max_tokens=150, oversize="own", encode="step")
    ours = SimpleNamespace(exchange=od.exchange, rounds=od.rounds, Balance=od.Balance)
    ours.DataLoader = lambda *_, **__: small(shards, balance=balance)[1]
    names = {"od": ours, "encode": encode, "model": model, "dp_group": None, "dataset": None}
    exec(recipe_of("encoders_apart.md", "**options"), names | {"options": {}, "no_sync": contextlib.nullcontext})
    assert calls == ["image", "audio"] * 2  # steps
    assert layers["image"].weight.grad.any()


def test_the_sum_of_the_loss(shards: list[str]) -> None:
    model, _ = small(shards)
    seen: list[torch.Tensor] = []
    model.head.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    (batch,) = next(iter(small(shards, balance="global")[1].steps()))
    expected = model(**batch.model_inputs()).loss_sum
    labels = batch.llm.labels
    logits = torch.zeros(len(labels), model.config.vocab_size)
    logits[:-1][labels[1:] != -100] = model.head(seen[0])
    names = {"torch": torch, "logits": logits.requires_grad_(), "labels": labels, "batch": batch}
    exec(recipe_of("training.md", "loss_sum = torch.nn.functional.cross_entropy"), names)
    assert names["loss_sum"].item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.slow
def test_the_recipe_of_one_length(shards: list[str]) -> None:
    from examples.model import make_cost

    model, _ = small(shards)
    names: dict[str, Any] = {"od": od, "cost": make_cost(model.config)}
    names["dataset"] = od.ShardDataset(shards, recipe=RECIPE)
    exec(recipe_of("batches.md", "od.Packed(length=16_384)", "cost=cost"), names)
    for batch in names["loader"]:
        assert batch.model_inputs()["input_ids"].shape == (16_384,)
        assert torch.isfinite(model(**batch.model_inputs()).loss_sum)


def test_the_evaluation_of_the_page_takes_a_model_of_transformers(vl: VL) -> None:
    names: dict[str, Any] = {}
    exec(recipe_of("training.md", "def evaluate(model, loader)"), names)
    assert names["evaluate"](vl.model(), vl.loader()) == pytest.approx(plain_loss(vl), rel=1e-5)


def test_lightning_goes_on_with_the_next_epoch_where_its_checkpoint_ends_one(shards: list[str], tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.keys = torch.nn.Linear(1, 1), []

        def train_dataloader(self) -> Any:
            return small(shards, shuffle=True, seed=1)[1].steps()

        def training_step(self, microbatches: Any, step: int) -> torch.Tensor:
            self.keys.append(sorted(key for batch in microbatches for _, key in batch.sample_ids))
            return self.model(torch.ones(1)).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def train(folder: Path, epochs: int, path: Any = None, **options: Any) -> list[list[str]]:
        module, kept = Module(), ModelCheckpoint(folder, save_last=True)  # by default at the end of each epoch
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=epochs, callbacks=[kept], **(quiet | options)
        )
        trainer.fit(module, ckpt_path=path)
        return module.keys

    for number, options in enumerate(({}, {"limit_train_batches": 1})):
        whole = train(tmp_path / f"whole-{number}", 2, **options)
        cut = tmp_path / f"cut-{number}"
        begun = train(cut, 1, **options)
        assert whole[0] != whole[len(begun)]
        assert begun + train(cut, 2, cut / "last.ckpt", **options) == whole


def test_a_collate_fn_of_ones_own_scales_as_the_batch_does(shards: list[str]) -> None:
    names: dict[str, Any] = {"od": od, "my_tensors": lambda samples: {"keys": [sample.key for sample in samples]}}
    exec(recipe_of("training.md", "step: od.StepInfo"), names)
    _, loader = small(shards)
    expected = [(batch.loss_scale, sorted(key for _, key in batch.sample_ids)) for batch in loader]
    _, own = small(shards, collate_fn=names["collate"])
    assert [(found["loss_scale"], sorted(found["keys"])) for found in own] == expected


def test_the_recipe_of_a_route(shards: list[str]) -> None:
    ranks = np.zeros(3, np.int64)
    names: dict[str, Any] = {"od": od, "rank": 0, "num_ranks": 1, "encoder_rank": ranks, "llm_rank": ranks}
    names |= {"tokens": np.array([2, 1, 3]), "encoder": torch.nn.Identity(), "patches": torch.randn(6, 4)}
    names["flags"] = torch.tensor([1, 0, 1], dtype=torch.uint8)
    exec(recipe_of("encoders_apart.md", "od.make_route(rank"), names)
    assert torch.equal(names["features"], names["patches"]) and torch.equal(names["valid"], names["flags"])


def test_a_model_that_gets_encoded_media_leaves_them_out_by_itself(vl: VL) -> None:
    (batch,) = vl.loader()
    given = batch.model_inputs()
    without = batch.model_inputs(media=False)
    assert given.keys() - without.keys() == {"pixel_values", "image_grid_thw"}
    own = od.Recipe(image=od.ImagePreprocessor(patch_size=14, max_tokens=64), audio=None)
    dataset = od.ShardDataset(list(vl.shards), recipe=own)
    (batch,) = od.DataLoader(dataset, global_batch_size=COUNT, num_threads=0)
    assert "image_patches" in batch.model_inputs()  # of no processor: the names of a model of one's own
