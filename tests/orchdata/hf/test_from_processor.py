"""A processor as a recipe: what is asked of the caller, and what is refused."""

from __future__ import annotations

import copy
import json
import pickle
from itertools import pairwise
from pathlib import Path

import pytest
from shard_factory import jpeg, write_shard

import orchdata as od

pytest.importorskip("transformers")

from hf_families.families import FAMILIES


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
