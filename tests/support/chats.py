"""Chats of every shape, made up from a seed, and what transformers makes of them."""

from __future__ import annotations

import json
import random
import re
from typing import Any, NamedTuple

from orchdata.loaders.modalities.builtin import TEXT
from orchdata.loaders.modalities.modality import PartSize
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.compose import composition_of, text_members
from orchdata.loaders.samples.members import Member
from orchdata.loaders.samples.spans import TextSpan

PIECES = (
    "What is in the picture?",
    "A cat is on the mat",
    "  two blanks, ",
    "line\n\nbreak",
    "\ttab",
    "d\u00e9j\u00e0 vu",
    "\U0001f600\U0001f468\u200d\U0001f469",
    "\u4f60\u597d",
    "e\u0301",
    "\u202eright",
    "x = {'a': 1} % 2 {{ b }}",
    "</s>",
    "1.5",
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city \u2602",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TOKENS = {"image": 4}


class Tokens(NamedTuple):
    """Ids of a sample, and which of them carry loss (0 or 1)."""

    ids: list[int]
    loss: list[int]


def composed(recipe: Recipe, record: object, images: int = 0, **fields: str) -> Tokens:
    """What the library makes of a chat in JSON, with images of four tokens each."""
    texts = {0: record if isinstance(record, bytes) else json.dumps(record).encode()} if record is not None else {}
    members = [Member("json", TEXT, size=len(texts[0]))] if texts else []
    for name, value in fields.items():
        texts[len(members)] = value.encode()
        members.append(Member(name, TEXT, size=len(texts[len(members)])))
    members += [Member(f"{number}.jpg", 1, (56, 56), 9) for number in range(images)]
    wanted = {index: texts[index] for index in text_members(members, recipe)}
    asked: list[int] = []

    def size_of(modality: str, member: int) -> PartSize:
        asked.append(member)
        return PartSize(4 * TOKENS[modality], TOKENS[modality], 4 * TOKENS[modality])

    ids: list[int] = []
    loss: list[int] = []
    for span in composition_of(members, wanted, recipe).spans(recipe, size_of):
        if isinstance(span, TextSpan):
            ids += span.token_ids.tolist()
            loss += [int(span.loss)] * len(span.token_ids)
        else:
            ids += [recipe.slots[span.modality].token_id] * span.tokens
            loss += [0] * span.tokens
    assert asked == sorted(asked)
    return Tokens(ids, loss)


def reference(
    tokenizer: Any,
    template: str,
    messages: list[dict[str, Any]],
    *,
    masked: tuple[int, ...] = (),
    marks: dict[str, str] | None = None,
    **inputs: Any,
) -> Tokens:
    """What transformers makes of it; the answers numbered `masked` go without loss."""
    if not masked and not marks:
        found = tokenizer.apply_chat_template(
            messages,
            chat_template=template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **inputs,
        )
        return Tokens(found["input_ids"], found["assistant_masks"])
    from transformers.utils.chat_template_utils import render_jinja_template

    known = {**tokenizer.special_tokens_map, **inputs}
    (text,), (spans,) = render_jinja_template(
        [messages], chat_template=template, return_assistant_tokens_mask=True, **known
    )
    # As `_adjust_assistant_masks_indices` of transformers' processors, whose module takes ten seconds to import.
    pieces = re.split(f"({'|'.join(map(re.escape, marks or {chr(0): ''}))})", text)
    expanded = "".join((marks or {}).get(piece, piece) for piece in pieces)
    encoded = tokenizer(expanded, add_special_tokens=False, return_offsets_mapping=True)
    kept = [
        tuple(len("".join((marks or {}).get(piece, piece) for piece in _cut(pieces, at))) for at in span)
        for number, span in enumerate(spans)
        if number not in masked
    ]
    loss = [int(any(start < last and end > first for first, last in kept)) for start, end in encoded["offset_mapping"]]
    return Tokens(encoded["input_ids"], loss)


def _cut(pieces: list[str], characters: int) -> list[str]:
    """The pieces that the first characters of all of them are."""
    found = []
    for piece in pieces:
        found.append(piece[:characters])
        characters -= len(found[-1])
    return found


def text(draw: random.Random, *, blank: bool = True) -> str:
    """A few pieces; perhaps nothing but blanks."""
    if blank and draw.random() < 0.1:
        return draw.choice(["", " ", "\n"])
    return draw.choice(["", " ", "\n"]).join(draw.choices(PIECES, k=draw.randint(1, 4))) + draw.choice(
        ["", ".", " ", "\n"]
    )


def plain_chat(draw: random.Random, *, system: bool = True) -> list[dict[str, Any]]:
    """System prompt or none, then turns of user and assistant."""
    turns = [{"role": "system", "content": text(draw)}] if system and draw.random() < 0.4 else []
    for _ in range(draw.randint(1, 4)):
        turns += [
            {"role": "user", "content": text(draw)},
            {"role": "assistant", "content": text(draw, blank=False)},
        ]
    return turns


def tool_chat(draw: random.Random) -> list[dict[str, Any]]:
    """With reasoning, calls of tools and their results."""
    turns: list[dict[str, Any]] = plain_chat(draw)[: -2 if draw.random() < 0.5 else None]
    for _ in range(draw.randint(1, 2)):
        turns.append({"role": "user", "content": text(draw)})
        for number in range(draw.randint(0, 2)):
            arguments = {"city": draw.choice(PIECES), "days": draw.randint(1, 9)}
            call = {"id": f"call_{number}", "type": "function", "function": {"name": "weather", "arguments": arguments}}
            turn = {"role": "assistant", "content": draw.choice(["", "Let me see."]), "tool_calls": [call]}
            if draw.random() < 0.5:
                turn["reasoning_content"] = text(draw, blank=False).strip()
            turns += [turn, {"role": "tool", "tool_call_id": f"call_{number}", "content": text(draw, blank=False)}]
        answer = {"role": "assistant", "content": text(draw, blank=False)}
        if draw.random() < 0.5:
            answer["reasoning_content"] = text(draw, blank=False).strip()
        turns.append(answer)
    return turns


def media_chat(draw: random.Random, images: int) -> list[dict[str, Any]]:
    """Images in turns of the user, among text."""
    turns = plain_chat(draw, system=False)
    asked = [turn for turn in turns if turn["role"] == "user"]
    for turn in turns:
        turn["content"] = [{"type": "text", "text": turn["content"]}]
    for _ in range(images):
        content = draw.choice(asked)["content"]
        content.insert(draw.randint(0, len(content)), {"type": "image"})
    return turns
