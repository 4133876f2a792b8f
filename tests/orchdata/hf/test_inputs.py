"""Recipes of processors, and what a model's forward is given: samples kept apart, losses scaled, what is refused."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from hf_families.families import FAMILIES
from shard_factory import jpeg, write_shard

import orchdata as od
from orchdata.hf.models import READ_PADDING, family_of, model_class

TEXTS = ["one", "a second text", "x", "and the last of them all, by far the longest"]


def llama(**options: Any) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaConfig(vocab_size=300, num_key_value_heads=1, **sizes, **options)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(llama()).double()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> od.ShardDataset:
    samples = [{"__key__": str(number), "txt": text.encode()} for number, text in enumerate(TEXTS)]
    shard = write_shard(tmp_path_factory.mktemp("texts") / "a.tar", samples)
    return od.ShardDataset(shard, recipe=od.Recipe(image=None, audio=None))


@pytest.fixture(scope="module")
def expected(model: Any) -> torch.Tensor:
    """The mean over all tokens, each text alone."""
    losses = []
    for text in TEXTS:
        ids = torch.tensor([list(text.encode())])
        losses.append(torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none"))
    return torch.cat(losses).mean()


def only_batch(dataset: od.ShardDataset, inputs: od.hf.Inputs, **options: Any) -> od.Batch:
    (batch,) = od.DataLoader(dataset, batch_size=len(TEXTS), collate_fn=inputs, num_threads=0, **options)
    return batch


@pytest.mark.parametrize("attention", ["document", "window"])
def test_windows_of_documents_are_rows_with_the_loss_of_their_parts(
    dataset: od.ShardDataset, model: Any, attention: Any
) -> None:
    inputs = od.hf.Inputs(model.config, length=20, concatenate=True, attention=attention)
    windows = list(od.DataLoader(dataset, global_batch_size=3, collate_fn=inputs, num_threads=0, dp=(0, 1)))
    ids = torch.tensor(list("".join(TEXTS).encode()[:60]))
    assert torch.equal(torch.cat([batch.llm.input_ids for batch in windows]), ids)
    assert windows[0].loss_scale == 1 / sum(batch.loss_tokens for batch in windows)
    for batch in windows:
        losses = []
        parts = batch.samples if attention == "document" else [slice(0, 20)]
        for part in parts:
            own, labels = batch.llm.input_ids[part][None], batch.llm.labels[part]
            logits = model(own).logits[0, :-1]
            losses.append(torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum", ignore_index=-100))
        outputs = model(**batch.model_inputs())
        assert outputs.logits.shape[:2] == (1, 20)
        assert torch.allclose(od.hf.loss(outputs, batch), torch.stack(losses).sum() * batch.loss_scale, rtol=1e-12)


@pytest.mark.parametrize(
    "options", [{}, {"padded": True}, {"multiple_of": 8}, {"padded": True, "multiple_of": 64}, {"length": 128}]
)
def test_samples_are_kept_apart_and_the_loss_is_their_mean(
    dataset: od.ShardDataset, model: Any, expected: torch.Tensor, options: dict[str, Any]
) -> None:
    batch = only_batch(dataset, od.hf.Inputs(model.config, **options))
    inputs = batch.model_inputs()
    outputs = model(**inputs)
    assert torch.allclose(od.hf.loss(outputs, batch), expected, rtol=1e-12)
    assert torch.allclose(outputs.loss.double(), expected, rtol=1e-6)  # transformers sums in float32
    if not options.get("padded"):
        del inputs["position_ids"]  # what keeps them apart
        assert not torch.allclose(od.hf.loss(model(**inputs), batch), expected, rtol=1e-6)


def test_bounds_are_given_to_flash_attention(dataset: od.ShardDataset) -> None:
    config = llama()
    config._attn_implementation = "flash_attention_2"
    with pytest.warns(UserWarning, match="flash_attention_2 does not run here"):
        inputs = only_batch(dataset, od.hf.Inputs(config)).model_inputs()
    ends = [0]
    for text in TEXTS:
        ends.append(ends[-1] + len(text))
    assert inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist() == ends
    assert inputs["max_length_q"] == inputs["max_length_k"] == max(map(len, TEXTS))
    assert "attention_mask" not in inputs and inputs["use_cache"] is False


def test_rotary_positions_that_a_long_sample_would_change_are_an_error(dataset: od.ShardDataset) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.warns(UserWarning, match="a sample of more than 20 tokens changes those of the other samples"):
        inputs = od.hf.Inputs(llama(max_position_embeddings=20, rope_parameters=rope), padded=True)
        loader = od.DataLoader(dataset, batch_size=len(TEXTS), collate_fn=inputs, num_threads=0)
    with pytest.raises(ValueError, match=r"changes those of the other samples.*max_samples=1"):
        next(iter(loader)).model_inputs()
    alone = od.DataLoader(dataset, batch_size=1, collate_fn=inputs, num_threads=0)
    assert len([batch.model_inputs() for batch in alone]) == len(TEXTS)


def test_a_family_that_cannot_be_packed_is_padded_or_refused() -> None:
    whisper = transformers.WhisperConfig()
    assert od.hf.Inputs(whisper).padded
    with pytest.raises(ValueError, match="whisper is an encoder-decoder: use od.hf.Inputs"):
        od.hf.Inputs(whisper, padded=False)
    unknown = transformers.Gemma3nConfig()  # positions of its media are not known here
    assert family_of(unknown) is None
    with pytest.warns(UserWarning, match="batches of gemma3n are padded"):
        assert od.hf.Inputs(unknown).padded
    assert od.hf.Inputs(unknown, padded=True).padded
    with pytest.raises(ValueError, match="how their positions are packed is not known here"):
        od.hf.Inputs(unknown, padded=False)


def test_media_that_the_model_would_not_see_are_refused() -> None:
    hears, sees = transformers.Qwen2AudioConfig(), transformers.Qwen2VLConfig()
    with pytest.raises(ValueError, match="qwen2_audio takes no features, which the recipe makes of audio"):
        od.hf.Inputs(hears, probe=False).check(od.Recipe(image=None), ("audio",), od.Balance())
    with pytest.raises(ValueError, match="qwen2_vl looks for image where the token 151655 stands.* writes 256"):
        od.hf.Inputs(sees, probe=False).check(od.Recipe(audio=None), ("image",), od.Balance())
    plain = od.Recipe(audio=None, video=od.VideoPreprocessor())
    with pytest.raises(ValueError, match="qwen2_vl takes no patches, which the recipe makes of video"):
        od.hf.Inputs(sees, probe=False).check(plain, ("video",), od.Balance())
    text = od.TextPreprocessor(lambda text: [len(text)], id="lengths", image_token_id=151655)
    recipe = od.Recipe(audio=None, text=text)
    for assignment in ("joint", "per_phase"):
        # Its patches are of one picture, where the model's are of two: only what is said of them is compared here.
        od.hf.Inputs(sees, probe=False).check(recipe, ("image",), od.Balance(assignment=assignment))
    with pytest.raises(ValueError, match="llama takes no pixel_values"):
        od.hf.Inputs(llama(), probe=False).check(recipe, ("image",), od.Balance())


@pytest.mark.parametrize("kind", READ_PADDING)
def test_models_that_read_the_padding_of_other_samples_are_refused(kind: str) -> None:
    inputs = od.hf.Inputs(transformers.AutoConfig.for_model(kind), padded=True)
    recipe = od.Recipe(image=None, audio=Frames())
    reads = READ_PADDING[kind]
    with pytest.raises(ValueError, match=f"{kind} reads the padding of {reads}.*max_samples=1.*probe=False"):
        inputs.check(recipe, ("audio",) if reads == "audio" else (), od.Balance())
    if reads == "audio":
        inputs.check(recipe, (), od.Balance())  # texts alone


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


@dataclass(frozen=True, kw_only=True)
class Frames(od.Modality):
    """Audio without places in the text, and without arrays: what any model takes."""

    places = False
    slot = od.Slot(mark="<audio>", token_id=300)

    def arrays(self) -> dict[str, od.ArraySpec]:
        return {}


@dataclass(frozen=True, kw_only=True)
class Heard(od.Modality):
    """Audio as Qwen2-Audio's processor calls it."""

    slot = od.Slot(mark="<|AUDIO|>", token_id=151646)

    def arrays(self) -> dict[str, od.ArraySpec]:
        return {"input_features": od.ArraySpec((128, 3000), "float32", "part")}


def test_per_phase_is_refused_where_a_model_takes_no_features() -> None:
    inputs = od.hf.Inputs(transformers.Qwen2AudioConfig(audio_token_id=151646), probe=False)
    recipe = od.Recipe(image=None, audio=Heard())
    inputs.check(recipe, ("audio",), od.Balance())
    with pytest.raises(ValueError, match="qwen2_audio takes none of audio ready made"):
        inputs.check(recipe, ("audio",), od.Balance(assignment="per_phase"))


def test_what_is_no_configuration_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match="LlamaForCausalLM is none: pass model.config"):
        od.hf.Inputs(model)


def test_loss_and_encode_refuse_batches_of_another_layout(dataset: od.ShardDataset, model: Any) -> None:
    (batch,) = od.DataLoader(dataset, batch_size=len(TEXTS), num_threads=0)
    for refused in (lambda: od.hf.loss(None, batch), lambda: od.hf.encode(model, batch)):
        with pytest.raises(ValueError, match=r"collate_fn=od.hf.Inputs\(config\)"):
            refused()
    batch = only_batch(dataset, od.hf.Inputs(model.config))
    with pytest.raises(ValueError, match="encode is for od.Balance"):
        od.hf.encode(model, batch)
    with pytest.raises(TypeError, match=r"got the class Inputs: create one, as in Inputs\(...\)"):
        od.DataLoader(dataset, collate_fn=od.hf.Inputs)  # type: ignore[arg-type]
    inputs = batch.model_inputs()
    del inputs["labels"]
    outputs = model(**inputs, logits_to_keep=1)
    with pytest.raises(ValueError, match="leave logits_to_keep out"):
        od.hf.loss(outputs, batch)


def test_a_tokenizer_is_a_recipe_of_text_alone() -> None:
    tokenizer = FAMILIES["llama"].build()[0]
    recipe = od.hf.recipe(tokenizer)
    assert not recipe.modalities
    again = pickle.loads(pickle.dumps(recipe))
    assert again == recipe and again.fingerprint() == recipe.fingerprint()
    assert od.hf.recipe(tokenizer, variables={"greeting": "hi"}).fingerprint() != recipe.fingerprint()


def test_what_is_no_argument_is_refused() -> None:
    tokenizer = FAMILIES["llama"].build()[0]
    with pytest.raises(ValueError, match="cannot be called date, roles"):
        od.hf.recipe(tokenizer, variables={"roles": 1, "date": "2020-01-01"})
    with pytest.raises(ValueError, match="long_clips must be one of error, cut, split, got 'drop'"):
        od.hf.recipe(tokenizer, long_clips="drop")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="dict is no processor"):
        od.hf.recipe({})


def test_chats_without_a_template_are_refused_and_texts_are_not(tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(FAMILIES["llama"].build()[0])
    tokenizer.chat_template = None
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    samples = [
        {"__key__": "text", "txt": b"one two"},
        {"__key__": "chat", "json": json.dumps({"messages": chat}).encode()},
    ]
    shard = write_shard(tmp_path / "a.tar", samples)
    index = od.ShardDataset(shard, recipe=od.hf.recipe(tokenizer)).index()
    (bad,) = [index.failure(int(row)) for row in index.bad_rows()]
    assert (
        bad.key == "chat" and "has no chat template: give one, od.hf.recipe(processor, chat_template=...)" in bad.reason
    )
    given = od.hf.recipe(
        tokenizer, chat_template="{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}"
    )
    assert not od.ShardDataset(shard, recipe=given).index().totals["bad"]


def test_completions_learn_to_stop_where_asked(tmp_path: Path) -> None:
    tokenizer = FAMILIES["llama"].build()[0]
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    samples = [
        {"__key__": "pair", "json": json.dumps({"prompt": "one ", "completion": "two"}).encode()},
        {"__key__": "text", "txt": b"one two"},
        {"__key__": "chat", "json": json.dumps({"messages": chat}).encode()},
    ]
    shard = write_shard(tmp_path / "a.tar", samples)
    found = []
    for append_eos in (False, True):
        dataset = od.ShardDataset(shard, recipe=od.hf.recipe(tokenizer, append_eos=append_eos))
        (batch,) = od.DataLoader(dataset, batch_size=3, num_threads=0)
        ends = batch.llm.cu_seqlens.tolist()
        rows = [batch.llm.labels[start:stop].tolist() for start, stop in pairwise(ends)]
        found.append({key: row for (_, key), row in zip(batch.sample_ids, rows, strict=True)})
    plain, ended = found
    assert ended == {
        "pair": [*plain["pair"], tokenizer.eos_token_id],
        "text": [*plain["text"], tokenizer.eos_token_id],
        "chat": plain["chat"],
    }


def test_a_model_of_prompts_refuses_plain_text(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.tar", [{"__key__": "a", "jpg": jpeg(40, 30), "txt": b"a caption"}])
    index = od.ShardDataset(shard, recipe=od.hf.recipe(FAMILIES["paligemma"].build()[0])).index()
    assert "reads a prompt and then its completion" in index.failure(0).reason
