"""Before the first step each kind of sample that a recipe allows has gone through a forward of a tiny model."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import orchdata as od

transformers = pytest.importorskip("transformers")

from hf_families.families import FAMILIES  # noqa: E402
from hf_families.samples import made_up as made_up_samples  # noqa: E402
from hf_families.samples import write_samples  # noqa: E402

from orchdata import notices  # noqa: E402
from orchdata.hf.families import family_of, model_class  # noqa: E402
from orchdata.hf.forward import check, models, trial  # noqa: E402
from orchdata.hf.forward.made_up import kinds_of, made_up  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:chats never learn to stop")  # some templates write no end


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    check._known.clear()
    yield
    check._known.clear()


def family(name: str) -> tuple[od.Recipe, Any]:
    processor, model = FAMILIES[name].build()
    return od.hf.recipe(processor), model.config


def small_images(config: Any) -> Any:
    """The same model, of images of another size than its processor makes."""
    config.vision_config.image_size = 56
    return config


def test_each_kind_of_sample_is_made_by_the_way_of_real_ones() -> None:
    recipe, config = family("qwen2_5_omni")
    inputs = od.hf.Inputs(config)
    kinds = kinds_of(recipe, ("image", "audio"))
    assert [kind.name for kind in kinds] == [
        "samples of text alone",
        "samples with an image",
        "samples with several parts of image",
        "samples with a clip of audio",
        "samples with several parts of audio",
        "samples with image and audio together",
    ]
    found = []
    with made_up(recipe, kinds) as samples:
        for kind in kinds:
            batch = samples.batch(kind, ("image", "audio"), inputs.layout)
            assert batch is not None and len(batch.sample_ids) == 2 and batch.loss_tokens
            parts = {name: len(held.cu_seqlens) - 1 for name, held in batch.media.items()}
            found.append({name: count for name, count in parts.items() if name not in batch.llm.dummies})
            assert parts.keys() == {"image", "audio"}  # a dummy stands where there is none
    assert found == [{}, {"image": 2}, {"image": 2}, {"audio": 2}, {"audio": 2}, {"image": 1, "audio": 1}]


@pytest.mark.parametrize("name", ["llava", "qwen2_audio", "whisper", "llama"])
def test_models_that_take_their_samples_are_not_refused(name: str) -> None:
    recipe, config = family(name)
    assert trial.tried(od.hf.Inputs(config), recipe, tuple(recipe.modalities)) == trial.Verdict()


def test_what_the_forward_does_not_take_is_refused_when_the_loader_is_made(tmp_path: Path) -> None:
    recipe, config = family("llava")
    shards = write_samples(FAMILIES["llava"], made_up_samples(FAMILIES["llava"], 4), tmp_path)
    dataset = od.ShardDataset(shards, recipe=recipe)
    inputs = od.hf.Inputs(small_images(config))
    with pytest.raises(
        ValueError, match="llava fails in its forward on samples of text alone, for image that"
    ) as raised:
        od.DataLoader(dataset, batch_size=2, collate_fn=inputs, num_threads=0)
    for part in (
        "and on samples with an image",
        "ValueError: Input image size (112*112) doesn't match",
        "image=None",
        "version of transformers",
        "probe=False",
    ):
        assert part in str(raised.value)
    assert "padded=True" not in str(raised.value)  # which would not help
    od.DataLoader(dataset, batch_size=2, collate_fn=od.hf.Inputs(config, probe=False), num_threads=0)
    inputs.check(recipe, (), od.Balance())  # texts alone


class OnlyPadded(od.hf.Inputs):
    """Inputs of a model that takes no packed batches."""

    def arguments(self, batch: od.Batch) -> dict[str, Any]:
        if not self.padded:
            raise RuntimeError("one sample a row")
        return super().arguments(batch)


def test_a_refusal_says_where_padding_helps() -> None:
    recipe, config = family("llava")
    with pytest.raises(ValueError, match=r"RuntimeError: one sample a row.*use od.hf.Inputs\(config, padded=True\)"):
        OnlyPadded(config).check(recipe, ("image",), od.Balance())


def test_a_model_that_only_shrinking_breaks_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, config = family("llava")
    _, broken = family("llava")
    monkeypatch.setattr(models, "tiny_configs", lambda whole: iter((small_images(broken), whole)))
    assert trial.tried(od.hf.Inputs(config), recipe, ("image",)) == trial.Verdict()
    # Where the broken one is all that can be built, nothing is known.
    monkeypatch.setattr(models, "tiny_configs", lambda whole: iter((broken, transformers.CLIPConfig())))
    verdict = trial.tried(od.hf.Inputs(config), recipe, ("image",))
    assert not verdict.failed and "the one tiny model that can be built fails on samples of text" in verdict.untried


def test_what_cannot_be_tried_is_not_refused_and_one_warning_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, config = family("llava")
    monkeypatch.setattr(models, "tiny_configs", lambda _: iter((transformers.CLIPConfig(),)))  # which runs on no text
    monkeypatch.setattr(notices, "_warned", set())
    inputs = od.hf.Inputs(config)
    with pytest.warns(UserWarning, match="whether llava takes the batches of this recipe was not tried: no tiny model"):
        inputs.check(recipe, ("image",), od.Balance())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inputs.check(recipe, ("image",), od.Balance())


def test_a_recipe_with_a_function_for_records_is_tried() -> None:
    recipe, config = family("llava")
    recipe = replace(recipe, record=lambda record: record["words of its own"], record_id="v1")
    assert trial.tried(od.hf.Inputs(config), recipe, ("image",)) == trial.Verdict()


def test_random_state_is_untouched_and_the_verdict_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, config = family("llava")
    inputs = od.hf.Inputs(small_images(config))
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    with pytest.raises(ValueError, match="llava fails") as first:
        inputs.check(recipe, ("image",), od.Balance())
    assert torch.equal(torch.random.get_rng_state(), before)
    monkeypatch.setattr(check, "tried", lambda *_: pytest.fail("tried again"))
    check._known.clear()  # as in another process
    with pytest.raises(ValueError, match="llava fails") as again:
        inputs.check(recipe, ("image",), od.Balance())
    assert str(again.value) == str(first.value)
    with pytest.raises(pytest.fail.Exception, match="tried again"):  # of another layout nothing is known
        od.hf.Inputs(config, padded=True).check(recipe, ("image",), od.Balance())


@pytest.mark.parametrize(
    "change",
    [
        lambda held: [held],
        lambda held: {**held, "failed": [{}]},
        lambda held: {**held, "failed": [{**held["failed"][0], "modalities": ["unknown"]}]},
        lambda held: {**held, "failed": [{**held["failed"][0], "error": 3}]},
        lambda held: {**held, "reading": "image"},
        lambda held: {**held, "reading": [None]},
        lambda held: {**held, "differing": [{"kind": "x", "difference": "1", "modalities": []}]},
        lambda held: "[" * 50_000,
    ],
)
def test_a_stored_verdict_of_another_shape_is_determined_again(
    private_cache: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]
) -> None:
    failed = trial.Failed("samples", "an error", ("image",), is_dummy=False, padded=False)
    check._keep("x", trial.Verdict(failed=(failed,)))
    assert check._kept("x", ("image",)) == trial.Verdict(failed=(failed,))
    (path,) = (private_cache / "forwards").iterdir()
    held = change(json.loads(path.read_text()))
    path.write_text(held if isinstance(held, str) else json.dumps(held))
    assert check._kept("x", ("image",)) is None


def test_a_configuration_with_towers_is_no_text_family() -> None:
    assert family_of(transformers.Phi4MultimodalConfig()) is None
    with pytest.warns(UserWarning, match="batches of phi4_multimodal are padded") as warned:
        assert od.hf.Inputs(transformers.Phi4MultimodalConfig()).padded
    assert warned[0].filename == __file__  # where the user called
    assert model_class(transformers.AudioFlamingo3Config()).__name__ == "AudioFlamingo3ForConditionalGeneration"
    for config in (transformers.SamConfig(), transformers.Wav2Vec2Config()):
        with pytest.raises(ValueError, match="has no model for .* that reads and writes text"):
            od.hf.Inputs(config)


def test_a_processor_of_a_model_that_reads_no_text_is_refused_by_name() -> None:
    processor = transformers.SamProcessor.__new__(transformers.SamProcessor)
    with pytest.raises(TypeError, match="SamProcessor has no tokenizer: it is of a model that reads no text"):
        od.hf.recipe(processor)


def sees_neighbours(model: models.Sized) -> models.Sized:
    """A model of which each sample's logits depend on all samples of the microbatch."""

    def forward(**arguments: Any) -> Any:
        outputs = model.forward(**arguments)
        logits = outputs.logits
        outputs.logits = logits + 0.1 * logits.mean() * torch.arange(logits.shape[-1])
        return outputs

    return replace(model, forward=forward)


def test_samples_that_change_each_other_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, config = family("llava")
    shards = write_samples(FAMILIES["llava"], made_up_samples(FAMILIES["llava"], 4), tmp_path)
    dataset = od.ShardDataset(shards, recipe=recipe)
    inputs = od.hf.Inputs(config)

    def loader(**options: Any) -> od.DataLoader:
        return od.DataLoader(dataset, num_threads=0, **{"batch_size": 2, "collate_fn": inputs, **options})

    loader()  # the control: the same model as it is
    check._known.clear()
    monkeypatch.setenv("ORCHDATA_CACHE", str(tmp_path / "cache"))
    dataset = od.ShardDataset(shards, recipe=recipe)
    monkeypatch.setattr(trial, "models_of", lambda config: map(sees_neighbours, models.models_of(config)))
    with pytest.raises(
        ValueError, match="llava lets samples of a microbatch, or their padding, change each other"
    ) as raised:
        loader()
    for part in ("samples of text alone", "Balance(max_samples=1)", "probe=False"):
        assert part in str(raised.value)
    check._known.clear()
    with pytest.raises(ValueError, match="change each other"):
        loader()  # as it was kept
    loader(batch_size=1, balance=od.Balance(max_samples=1))
    loader(collate_fn=od.hf.Inputs(config, probe=False, padded=False))


@pytest.mark.parametrize("kind", ["doge", "cpmant"])
def test_models_that_keep_not_even_padded_samples_apart_are_refused(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind)
    with pytest.raises(ValueError, match="neither packed nor padded batches give samples of"):
        od.hf.Inputs(config)
    assert od.hf.Inputs(config, padded=True).padded  # as its message says
