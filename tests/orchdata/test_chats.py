"""Chats from shards to batches under a model's own template: what arrives is what transformers makes of the rows."""

from __future__ import annotations

import dataclasses
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import CHATML, QWEN3, hf_tokenizer, untagged, with_generation
from chats import TOOL, reference, tool_chat

import orchdata as od

pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("kept_parquet_processes")


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def recipe_of(template: str) -> od.Recipe:
    tokenizer = hf_tokenizer(template)
    text = od.TextPreprocessor(tokenizer, template=od.ChatTemplate.from_jinja(tokenizer))
    return od.Recipe(text=text, image=None, audio=None)


def arrived(urls: str, recipe: od.Recipe) -> dict[str, tuple[list[int], list[int]]]:
    """key -> ids and loss of each sample of an epoch."""
    loader = od.DataLoader(od.ShardDataset(urls, recipe=recipe), batch_size=4, shuffle=True, drop_last=False, dp=(0, 1))
    by_key = {}
    for batch in loader:
        bounds = batch.llm.cu_seqlens.tolist()
        for (_, key), (start, stop) in zip(batch.sample_ids, pairwise(bounds), strict=True):
            ids, labels = batch.llm.input_ids[start:stop].tolist(), batch.llm.labels[start:stop].tolist()
            assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
            by_key[key] = ids, [int(label != -100) for label in labels]
    return by_key


@pytest.mark.slow
def test_rows_with_tools_and_reasoning(tmp_path):
    rows, expected = [], {}
    tokenizer, tagged = hf_tokenizer(), with_generation(QWEN3)
    for number in range(12):
        draw = random.Random(number)
        chat = tool_chat(draw)
        tools = [TOOL] if number % 2 else None
        rows.append({"id": str(number), "messages": chat, "tools": json.dumps(tools) if tools else None})
        expected[str(number)] = tuple(reference(tokenizer, tagged, chat, tools=tools))
    assert arrived(write(tmp_path / "chats.parquet", rows), recipe_of(QWEN3)) == expected


def test_samples_without_loss_are_counted(tmp_path):
    ask, answer = {"role": "user", "content": "Oslo?"}, {"role": "assistant", "content": "It rains.", "weight": 0}
    rows = [{"messages": json.dumps([ask, {**answer, "weight": weight}])} for weight in (0, 1, 0)]
    dataset = od.ShardDataset(write(tmp_path / "masked.parquet", rows), recipe=recipe_of(CHATML))
    assert dataset.index().totals["without_loss"] == 2


LLAVA = (
    "{% for m in messages %}{{ m.role.upper() }}: {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
OUTSIDE = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n{% endfor %}"
GLM = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "answer", "warns"),
    [
        (LLAVA, "A cat.", True),
        (OUTSIDE, "A cat.", True),
        (GLM, "A cat.", True),
        (GLM, "A cat.<|im_end|>", False),
        (CHATML, "A cat.", False),
        (untagged(CHATML), "A cat.", False),
        (LLAVA.replace("{{ m.content }} ", "{{ m.content }}; "), "A cat.", False),
    ],
)
def test_chats_that_never_learn_to_stop_are_said_and_an_end_token_is_appended_where_asked(
    tmp_path, template, answer, warns, recwarn
):
    chat = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": answer}]
    path = write(tmp_path / f"{hash(template + answer)}.parquet", [{"messages": json.dumps(chat * 2)}] * 3)
    plain = recipe_of(template)
    end = hf_tokenizer(template).convert_tokens_to_ids("<|im_end|>")
    (ids, loss), *_ = arrived(path, plain).values()
    assert any("never learn to stop" in str(each.message) for each in recwarn) == warns
    recwarn.clear()
    ended = dataclasses.replace(plain, text=dataclasses.replace(plain.text, eos_token_id=end))
    (ended_ids, ended_loss), *_ = arrived(path, ended).values()
    assert not any("never learn to stop" in str(each.message) for each in recwarn)
    last = len(loss) - 1 - loss[::-1].index(1)
    if not warns:
        assert (ended_ids, ended_loss) == (ids, loss)
    else:
        assert ended_loss == [*loss[: last + 1], 1, *loss[last + 1 :]][: len(ended_ids)]
        assert ended_ids[: last + 2] == [*ids[: last + 1], end] and ended_ids[last + 2 :].count(end) == 0


def test_chats_are_found_after_captions_and_learn_to_stop_before_a_last_question(tmp_path, recwarn):
    question = {"role": "user", "content": "What?"}
    chat = json.dumps([question, {"role": "assistant", "content": "A cat."}, question])
    path = write(tmp_path / "a.parquet", [{"text": "one", "messages": None}] * 30 + [{"messages": chat}] * 20)
    plain = recipe_of(LLAVA)
    ids, loss = arrived(path, plain)["30"]
    assert any("never learn to stop" in str(each.message) for each in recwarn)
    recwarn.clear()
    end = hf_tokenizer(LLAVA).convert_tokens_to_ids("<|im_end|>")
    ended = dataclasses.replace(plain, text=dataclasses.replace(plain.text, eos_token_id=end))
    at = len(loss) - loss[::-1].index(1)
    assert at < len(loss)
    assert arrived(path, ended)["30"] == ([*ids[:at], end, *ids[at:]], [*loss[:at], 1, *loss[at:]])
    assert not any("never learn to stop" in str(each.message) for each in recwarn)
