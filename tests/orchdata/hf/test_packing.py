"""What trials of tiny models say: which keep packed samples apart, and which attention ranks can share."""

from __future__ import annotations

import copy
import json
import pickle
import random
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import numpy as np
import torch
import transformers

import orchdata as od
from orchdata.hf import models, trials
from orchdata.hf.trials import judged
from orchdata.ranks.agreement import account, check_accounts


@pytest.fixture(autouse=True)
def nothing_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """No verdict of another test's is at hand, in this process or on disk."""
    monkeypatch.setattr(trials, "_seen", {})


def config_of(kind: str, **settings: Any) -> Any:
    return transformers.AutoConfig.for_model(kind, **settings)


def vision_over(kind: str, text: str) -> Any:
    layers = {"layer_types": ["conv", "full_attention"] * 8, "num_hidden_layers": 16} if text == "lfm2" else {}
    return config_of(kind, text_config=config_of(text, **layers).to_dict())


def llama(**settings: Any) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaConfig(vocab_size=300, num_key_value_heads=1, **sizes, **settings)


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("a model was tried")


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "inside"),
    [
        ("gpt_oss", None),
        ("opt", None),
        ("bert", None),
        ("llava", "lfm2"),
        pytest.param("afmoe", None, marks=slow),
        pytest.param("mamba", None, marks=slow),
        pytest.param("llava", "gpt_oss", marks=slow),
        pytest.param("internvl", "gpt_oss", marks=slow),
    ],
)
def test_models_in_which_samples_see_each_other_are_padded_with_a_warning(kind: str, inside: str | None) -> None:
    config = config_of(kind) if inside is None else vision_over(kind, inside)
    with pytest.warns(UserWarning, match=f"batches of {kind} are padded.* lets packed samples see each other"):
        assert od.hf.Inputs(config).padded
    for options in ({"padded": False}, {"length": 64}):
        with pytest.raises(ValueError, match=r"packed rows.*see each other.*use od.hf.Inputs\(config, padded=True\)"):
            od.hf.Inputs(config, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        od.hf.Inputs(config, padded=True)


@pytest.mark.parametrize(
    ("kind", "inside"),
    [
        ("llama", None),
        ("gemma3", None),
        pytest.param("paligemma", None, marks=slow),
        pytest.param("qwen3_vl", None, marks=slow),
        pytest.param("deepseek_v3", None, marks=slow),
        pytest.param("mixtral", None, marks=slow),
        pytest.param("llava", "qwen3", marks=slow),
    ],
)
def test_models_that_keep_samples_apart_stay_packed(kind: str, inside: str | None) -> None:
    config = config_of(kind) if inside is None else vision_over(kind, inside)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inputs = od.hf.Inputs(config)
    assert not inputs.padded and inputs.verdict.packs and inputs.verdict.attention == "sdpa"


@pytest.mark.slow
def test_a_model_that_chooses_positions_by_scores_is_tried_without_ties_among_them() -> None:
    assert od.hf.Inputs(config_of("deepseek_v32")).verdict.packs
    # The control: of so few heads many positions get a score of 0, and their number decides which are chosen.
    with pytest.raises(ValueError, match="neither packed nor padded batches"):
        od.hf.Inputs(config_of("deepseek_v32", index_n_heads=2))


@pytest.mark.parametrize("kind", ["doge", "cpmant"])
def test_models_that_keep_not_even_padded_samples_apart_are_refused(kind: str) -> None:
    config = config_of(kind)
    with pytest.raises(ValueError, match="neither packed nor padded batches give samples of"):
        od.hf.Inputs(config)
    assert od.hf.Inputs(config, padded=True).padded  # as its message says


class PlantedConfig(transformers.LlamaConfig):  # type: ignore[misc]
    model_type = "planted_leak"
    sliding_window = 4096
    leaks = True


class PlantedForCausalLM(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Keeps samples apart within its window, and forgets to in a row that is longer."""

    config_class = PlantedConfig

    def forward(self, input_ids: Any = None, position_ids: Any = None, **arguments: Any) -> Any:
        if self.config.leaks and input_ids.shape[1] > 4 * self.config.sliding_window and position_ids is not None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        return super().forward(input_ids=input_ids, position_ids=position_ids, **arguments)


@pytest.fixture
def planted() -> Iterator[Any]:
    from transformers.models.auto import configuration_auto, modeling_auto

    transformers.AutoConfig.register("planted_leak", PlantedConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(PlantedConfig, PlantedForCausalLM, exist_ok=True)
    yield lambda **settings: PlantedConfig(**llama().to_dict() | {"model_type": "planted_leak"} | settings)
    configuration_auto.CONFIG_MAPPING._extra_content.pop("planted_leak", None)
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.pop(PlantedConfig, None)


def test_a_leak_past_the_window_alone_is_found(planted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="planted_leak are padded"):
        assert od.hf.Inputs(planted(sliding_window=4096, leaks=True)).padded
    assert not od.hf.Inputs(planted(sliding_window=4096, leaks=False)).padded
    # It is the shorter window that shows it.
    wide = tuple((roles, 4096) for roles, _ in models._FEW_OF_TEXT)
    monkeypatch.setattr(models, "_FEW_OF_TEXT", wide)
    assert not od.hf.Inputs(planted(sliding_window=4096, leaks=True)).padded


def test_a_verdict_on_code_without_a_version_is_not_kept(planted: Any, private_cache: Path) -> None:
    inputs = od.hf.Inputs(planted(leaks=False))
    assert inputs.verdict.packs and not (private_cache / "packing").exists() and not trials._seen
    assert trials.name_of(transformers.LlavaConfig(text_config=planted()), inputs.family, "sdpa") == ""
    assert trials.name_of(llama(), inputs.family, "sdpa")


def test_a_small_leak_is_distinguished_from_rounding() -> None:
    """One in ten thousand of what a sample sees is another's: above every bound."""
    assert judged(1e-4, 1e-4, noise=1e-6)[0] is False
    assert judged(2e-6, 9e-6, noise=1e-6)[0] is True
    packs, why = judged(1e-3, 1e-3, noise=1e-3)
    assert not packs and "other results in another batch" in why


def test_a_verdict_is_kept_for_other_runs(private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = od.hf.Inputs(llama()).verdict
    assert found.packs
    trials._seen.clear()
    with monkeypatch.context() as patch:
        patch.setattr(trials, "tiny_model", never)
        assert od.hf.Inputs(llama()).verdict == found
        assert od.hf.Inputs(llama(attn_implementation=found.attention)).verdict == found
        trials._seen.clear()
        with pytest.raises(AssertionError, match="was tried"):  # another configuration is another's
            od.hf.Inputs(llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5}))
    for content in (b"", b"{", b"[]", b'{"packs": false}', b"\xff", b"[" * 50_000):
        for entry in (private_cache / "packing").iterdir():
            entry.write_bytes(content)
        trials._seen.clear()
        assert od.hf.Inputs(llama()).verdict.packs
    assert all(json.loads(entry.read_text()) for entry in (private_cache / "packing").iterdir())


@pytest.mark.usefixtures("no_pauses")
def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("ORCHDATA_CACHE", str(tmp_path / "file"))
    assert od.hf.Inputs(llama()).verdict.packs


def test_a_process_that_gets_inputs_tries_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = pickle.dumps(od.hf.Inputs(llama()))
    for name in ("tiny_model", "_tried", "find"):
        monkeypatch.setattr(trials, name, never)
    got = pickle.loads(sent)
    assert got.verdict.packs and not got.padded and isinstance(got.layout, od.Packed)


def test_an_attention_that_cannot_run_here_is_tried_as_eager() -> None:
    config = llama()
    od.hf.Inputs(config)
    assert config._attn_implementation is None  # nothing is written into it
    config._attn_implementation = "flash_attention_2"
    with pytest.warns(UserWarning, match="flash_attention_2 does not run here, so eager attention was tried"):
        inputs = od.hf.Inputs(config)
    assert not inputs.padded and inputs.verdict.attention == "eager"
    assert inputs.scales_loss  # whether the loss follows has nothing to do with attention
    assert config._attn_implementation == "flash_attention_2"


def test_without_a_trial_rows_are_padded_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "tiny_model", never)
    assert od.hf.Inputs(llama(), probe=False).padded
    assert not od.hf.Inputs(llama(), probe=False, padded=False).padded
    with pytest.raises(ValueError, match=r"length=64.*was not tried on packed samples \(probe=False\)"):
        od.hf.Inputs(llama(), probe=False, length=64)
    with pytest.raises(ValueError, match="whisper is an encoder-decoder"):
        od.hf.Inputs(config_of("whisper"), probe=False, padded=False)


def test_a_model_that_cannot_be_built_is_padded_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="could not be tried on packed samples: no tiny model of llama runs: KeyError"):
        assert od.hf.Inputs(llama(hidden_act="no such activation")).padded


def test_ranks_whose_verdicts_differ_are_named() -> None:
    texts = {
        rank: account({"inputs": od.hf.Inputs(llama(), probe=False, padded=padded).describe()})
        for rank, padded in enumerate([False, False, True])
    }
    check_accounts({rank: texts[rank] for rank in (0, 1)})
    with pytest.raises(ValueError, match="inputs.packs is true on ranks 0, 1, false on rank 2"):
        check_accounts(texts)


def test_state_of_the_user_is_untouched() -> None:
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), torch.inference_mode():
            inputs = od.hf.Inputs(llama())
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert inputs.verdict.packs and inputs.scales_loss
    after = torch.random.get_rng_state(), np.random.get_state()[1], random.getstate()  # noqa: NPY002
    assert torch.equal(before[0], after[0]) and (before[1] == after[1]).all() and before[2] == after[2]


SMALL = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
NARROW = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0}


def verdict_on(config: Any) -> trials.Sharing:
    return od.hf.Inputs(config, padded=False, probe=False).sharing


@pytest.mark.parametrize(
    "config",
    [
        config_of("llama", **NARROW),
        config_of("mistral", **NARROW, sliding_window=4096),
        config_of("gpt2", vocab_size=300, n_embd=64, n_layer=2, n_head=4),
        pytest.param(config_of("gpt_neox", **SMALL, intermediate_size=48), marks=pytest.mark.slow),
        pytest.param(config_of("qwen2_5_vl"), marks=pytest.mark.slow),
        pytest.param(config_of("deepseek_v3"), marks=pytest.mark.slow),
    ],
    ids=lambda config: config.model_type,
)
def test_attention_that_is_looked_up_by_name_is_shared(config: Any) -> None:
    assert verdict_on(config).shares, verdict_on(config).why


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (config_of("bloom", vocab_size=300, hidden_size=64, n_layer=2, n_head=4), "look its attention up by a name"),
        (config_of("lfm2", **NARROW, layer_types=["conv", "full_attention"]), "trains otherwise in slices"),
        (config_of("gpt_oss"), "does not know s_aux"),
        (config_of("phi3", **NARROW, pad_token_id=0, rope_parameters=LONG), r"longest position .*\(longrope\)"),
        (config_of("gemma3"), "see ahead"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_what_cannot_be_shared_is_refused_with_the_reason(config: Any, why: str) -> None:
    found = verdict_on(config)
    assert not found.shares and re.search(why, found.why), found.why


def test_a_kernel_that_ignores_the_window_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = trials.sdpa_by_sequence
    monkeypatch.setattr(trials, "sdpa_by_sequence", lambda *given, scale, **_: kernel(*given, scale=scale))
    monkeypatch.setattr(trials, "keep", lambda *_: None)
    assert "trains otherwise in slices" in verdict_on(config_of("mistral", **NARROW, sliding_window=4097)).why


@pytest.mark.slow
def test_a_loader_refuses_a_model_that_cannot_be_shared(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "ab" * n}) + "\n" for n in range(3, 9)))
    data = od.ShardDataset(str(tmp_path / "a.jsonl"), od.Recipe(image=None, audio=None))

    def loader(config: Any) -> od.DataLoader:
        with warnings.catch_warnings(action="ignore"):  # that OPT is padded, without teams
            inputs = od.hf.Inputs(config)
        balance = od.Balance(teams=od.Teams(largest=2))
        return od.DataLoader(data, 2, collate_fn=inputs, cost=od.CostModel(llm=od.PhaseCost(1, 1)), balance=balance)

    with pytest.raises(ValueError, match="gpt_oss cannot share sequences, it takes no slices"):
        loader(config_of("gpt_oss"))
    shared = loader(config_of("llama", **NARROW))
    with pytest.raises(ValueError, match="this one is for LlamaConfig, the model of MistralConfig"):
        od.hf.share_attention(transformers.MistralForCausalLM(config_of("mistral", **NARROW)), shared)
    opt = config_of("opt", **SMALL, ffn_dim=48, word_embed_proj_dim=64, dropout=0.0)
    for config, loads in ((config_of("llama", **NARROW), shared), (opt, loader(opt))):
        model = transformers.AutoModelForCausalLM.from_config(config)
        other, evaluated = copy.deepcopy(model), loader(config)
        for each in (loads, evaluated, loads):  # a second call changes nothing
            od.hf.share_attention(model, each)
        averaged = copy.deepcopy(model)
        # One rank has no team to share with, and its model attends to each sample.
        for batch, unseen in zip(loads, evaluated, strict=True):
            for each in (batch, unseen):
                inputs = each.model_inputs()
                loss = od.hf.loss(model(**inputs), each)
                loss.backward()
                assert od.hf.loss(averaged(**inputs), each) == loss
            with pytest.raises(ValueError, match="for each model that gets them"):
                other(**inputs)
    attend = od.TeamAttention(shared)
    for batch in evaluated:  # of another loader than its own
        heads = torch.zeros(len(batch.model_inputs()["input_ids"][0]), 4, 8)
        attend(heads, heads, heads, batch.teams)


@pytest.mark.parametrize("own", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_without_teams_a_model_runs_its_own_attention(kind: str, own: str) -> None:
    torch.manual_seed(0)
    config = config_of(kind, **NARROW, head_dim=16, sliding_window=4, layer_types=["full_attention"] * 2)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=own).eval()
    ids = torch.randint(1, 300, (2, 9))
    padded = {"input_ids": ids, "attention_mask": (torch.arange(9) < torch.tensor([[9], [5]])).long()}
    packed = {"input_ids": ids[:1], "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]]), "use_cache": False}
    before = [model(**each).logits for each in (padded, packed)]
    trials.install(model, lambda *_, **__: pytest.fail("attention over teams was used"))
    assert trials.attention_of(model.config) == own
    for was, each in zip(before, (padded, packed), strict=True):
        assert torch.equal(model(**each).logits, was)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
def test_the_table_of_the_docs_is_that_of_this_version() -> None:
    from scripts.shared_models import main

    assert main(check=True)
