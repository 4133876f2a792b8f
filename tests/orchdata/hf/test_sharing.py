"""Whether ranks can share a model of transformers: verdicts of trials, and what a shared model does without teams."""

from __future__ import annotations

import copy
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import orchdata as od
from orchdata.hf import trials

transformers = pytest.importorskip("transformers")
SMALL = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
NARROW = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0}


@pytest.fixture(autouse=True)
def nothing_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """No verdict of another test's is at hand, in this process or on disk."""
    monkeypatch.setattr(trials, "_seen", {})


def config_of(kind: str, **settings: Any) -> Any:
    return transformers.AutoConfig.for_model(kind, **settings)


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
