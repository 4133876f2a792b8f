"""What a chat template would lose is refused by name, or may be lost where the recipe says so."""

from __future__ import annotations

import pytest
from chat_templates import CHATML, NAMED, QWEN2_VL, QWEN3, hf_tokenizer, untagged
from chats import TOOL, composed, reference
from jinja_chats import ANSWER, ASK, CALL, TAGGED, decoded, openai, recipe_of

from orchdata.loaders.errors import FieldError

DROPS_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}] {{ m.content }} {% endif %}{% endfor %}"
)


CUTS_THOUGHTS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"
    "</s>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


CALLS_OR_TEXT = "{% for m in messages %}{{ (m.tool_calls | tojson) if m.tool_calls else m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "record", "message"),
    [
        (QWEN3, [ASK, {**ANSWER, "name": "Anna"}], "turn 2 (assistant) has 'name', which the chat template does not"),
        (QWEN3, [ASK, {**ANSWER, "channel": "final"}], "ignore_keys=('channel',)"),
        (untagged(CHATML), [ASK, {**ANSWER, "reasoning_content": "I look outside."}], "'reasoning_content'"),
        (untagged(CHATML), {"messages": [ASK, ANSWER], "tools": [TOOL]}, "the conversation has 'tools'"),
        (QWEN3, {"messages": [ASK, ANSWER], "documents": [{"title": "Oslo", "text": "fog"}]}, "'documents'"),
        (QWEN3, {"messages": [ASK, ANSWER], "chat_template_kwargs": {"custom": "Be brief."}}, "'custom'"),
        (DROPS_SYSTEM, [{"role": "system", "content": "Be brief."}, ASK, ANSWER], "turn 1 (system) has 'content'"),
        (CALLS_OR_TEXT, [ASK, {**ANSWER, "tool_calls": [CALL]}], "turn 2 (assistant) has 'content'"),
        (
            CUTS_THOUGHTS,
            [ASK, {**ANSWER, "content": "<think>It is warm.</think>Sun."}],
            "turn 2 (assistant) has '<think>'",
        ),
        (NAMED["gemma"], [{"role": "system", "content": "Be brief."}, ASK, ANSWER], "No system role"),
        (QWEN3, {"messages": [ASK, ANSWER], "system": 1.5, "system_prompt": ["a"]}, "'system' next to the turns"),
        (QWEN3, {"messages": [{"role": "system", "content": "A."}, ASK, ANSWER], "system": "B."}, "two system prompts"),
        (QWEN3, {"messages": [ASK, ANSWER], "tools": "weather"}, "a string that is no JSON"),
        (QWEN3, {"prompt": "q", "chosen": "a", "rejected": "b"}, "a pair of answers, 'chosen' and 'rejected'"),
        (QWEN3, {"messages": [ASK, ANSWER], "rejected": "It snows."}, "'rejected'"),
        (QWEN3, [ASK, {"role": "assistant", "content": " "}], "says nothing"),
        (QWEN3, b'[{"role": "user", "content": "a", "content": "b"}]', "turn 1 has a key twice"),
        (QWEN3, [{**ASK, "weight": 1}, ANSWER], "turn 1 (user) has 'weight', a loss flag, which is not followed"),
        (QWEN3, [ASK, {"from": "function_call", "value": "weather()"}], "is no JSON"),
        (QWEN2_VL, [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}, ANSWER], "videos are not read"),
        (QWEN2_VL, [{"role": "user", "content": [{"type": "chart", "chart": "a"}]}, ANSWER], "'content'"),
        (QWEN2_VL, [{"role": "user", "content": "the mark <|image_pad|>"}, ANSWER], "its text holds <|image_pad|>"),
    ],
)
def test_what_would_be_lost_is_refused_by_name(template, record, message):
    with pytest.raises(FieldError) as caught:
        composed(recipe_of(template, "<bos>"), record)
    assert message in caught.value.reason


def test_documents_and_variables_of_a_sample_are_shown_to_the_template():
    titles = "{% for document in documents %}{{ document.title }}: {% endfor %}"
    texts = "{% for document in documents %}{{ document.text }} {% endfor %}"
    record = {"messages": [ASK, ANSWER], "documents": [{"title": "Oslo", "text": "fog"}]}
    assert decoded(recipe_of(titles + texts + untagged(CHATML)), record)[0].startswith("Oslo: fog <|im_start|>user")
    with pytest.raises(FieldError, match="the conversation has 'documents'"):
        composed(recipe_of(titles + untagged(CHATML)), record)
    quiet = {"messages": [ASK, ANSWER, ASK, ANSWER], "chat_template_kwargs": {"enable_thinking": False}}
    tagged = reference(hf_tokenizer(), TAGGED["qwen3"], quiet["messages"], enable_thinking=False)
    plain = composed(recipe_of(QWEN3), quiet)
    assert plain.ids == tagged.ids
    assert sum(tagged.loss) - sum(plain.loss) > 0  # with its prompt, the template writes the empty thought itself


def test_ignored_keys_may_be_lost():
    chat = [ASK, {**ANSWER, "channel": "final", "name": "Anna"}]
    expected = composed(recipe_of(QWEN3), [ASK, ANSWER])
    assert composed(recipe_of(QWEN3, ignore_keys=("channel", "name")), chat) == expected
    # Ids tie a chat together, and a tool's name is in its call: neither would be missed.
    record = openai()
    record["messages"][3] |= {"tool_call_id": "call_1", "name": "weather"}
    assert composed(recipe_of(QWEN3), record) == composed(recipe_of(QWEN3), openai())


def test_thoughts_that_a_template_cuts_out_may_be_lost():
    chat = [ASK, {**ANSWER, "content": "<think>It is warm.</think>Sun."}]
    assert decoded(recipe_of(CUTS_THOUGHTS, ignore_keys=("<think>",)), chat)[1] == "Sun.</s>"
    assert decoded(recipe_of(QWEN3), chat)[1].startswith("<think>\nIt is warm.")
    empty = [ASK, {**ANSWER, "content": "<think>\n\n</think>Sun."}]
    assert decoded(recipe_of(CUTS_THOUGHTS), empty)[1] == "Sun.</s>"
