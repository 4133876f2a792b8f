"""Recipes of chat templates, what they make of a chat, and a chat."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from chat_templates import (
    HERMES,
    QWEN3,
    hf_tokenizer,
    trained,
    with_generation,
)
from chats import TOOL, composed

import orchdata as od
from orchdata.loaders.recipe import Recipe


@lru_cache
def recipe_of(template: str, bos: str | None = None, mark: str = "<|image_pad|>", **options: Any) -> Recipe:
    tokenizer = hf_tokenizer(template, bos=bos)
    rendered = od.ChatTemplate.from_jinja(tokenizer, **options)
    text = od.TextPreprocessor(
        tokenizer, template=rendered, image_placeholder=mark, image_token_id=trained().token_to_id(mark)
    )
    return Recipe(text=text)


def decoded(recipe: Recipe, record: Any, images: int = 0, **fields: str) -> tuple[str, str]:
    """A sample's text, and what of it carries loss."""
    ids, loss = composed(recipe, record, images, **fields)
    learned = [token for token, carries in zip(ids, loss, strict=True) if carries]
    return trained().decode(ids, skip_special_tokens=False), trained().decode(learned, skip_special_tokens=False)


ASK = {"role": "user", "content": "What is the weather in Oslo?"}
ANSWER = {"role": "assistant", "content": "It rains."}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}
TAGGED = {"qwen3": with_generation(QWEN3), "hermes": with_generation(HERMES)}


def openai() -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    return {
        "tools": [TOOL],
        "messages": [
            {"role": "system", "content": "You know the weather."},
            {"role": "user", "content": "Oslo?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "rain"},
            ANSWER,
        ],
    }
