"""Chats under models' own templates: ids and masks are those of transformers, and what a template loses is refused."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from chat_templates import CHATML, HERMES, NAMED, QWEN2_VL, QWEN3, hf_tokenizer, like_llama2, untagged
from chats import TOOL, composed, media_chat, plain_chat, reference, tool_chat
from jinja_chats import ANSWER, ASK, CALL, TAGGED, decoded, openai, recipe_of

import orchdata as od
from orchdata.loaders.errors import DecodeError, FieldError
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.text.jinja import Inputs

pytest.importorskip("transformers")
BOS = {"llama3": "<|begin_of_text|>", "gemma": "<bos>", "mistral": "<s>"}


@pytest.mark.parametrize("tags", [True, False], ids=["generation", "prefixes"])
@pytest.mark.parametrize("name", NAMED)
def test_plain_chats_are_those_of_transformers(name, tags):
    tagged = NAMED[name]
    recipe = recipe_of(tagged if tags else untagged(tagged), BOS.get(name))
    tokenizer = hf_tokenizer(bos=BOS.get(name))
    for seed in range(30):
        chat = plain_chat(random.Random(seed), system=name not in ("gemma", "mistral"))
        typed = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in chat]
        expected = reference(tokenizer, tagged, typed if name == "vicuna" else chat)
        assert composed(recipe, chat) == expected, chat
        llava = [{"from": turn["role"], "value": turn["content"]} for turn in chat]
        assert composed(recipe, {"conversations": llava}) == expected


@pytest.mark.parametrize("tags", [True, False], ids=["generation", "prefixes"])
@pytest.mark.parametrize("name", TAGGED)
def test_tools_and_reasoning_are_those_of_transformers(name, tags):
    tagged = TAGGED[name]
    unread = ("reasoning_content",) if name == "hermes" else ()
    recipe = recipe_of(tagged if tags else untagged(tagged), ignore_keys=unread)
    tokenizer = hf_tokenizer()
    for seed in range(40):
        draw = random.Random(seed)
        chat = tool_chat(draw)
        tools = [TOOL] if draw.random() < 0.7 else None
        expected = reference(tokenizer, tagged, chat, tools=tools)
        assert composed(recipe, {"messages": chat, "tools": json.dumps(tools)}) == expected, chat


@pytest.mark.parametrize("tags", [True, False], ids=["generation", "prefixes"])
def test_images_and_loss_flags_are_those_of_transformers(tags):
    plain = recipe_of(QWEN2_VL if tags else untagged(QWEN2_VL))
    numbered = recipe_of(QWEN2_VL if tags else untagged(QWEN2_VL), add_vision_id=True)
    tokenizer, marks = hf_tokenizer(), {"<|image_pad|>": "<|image_pad|>" * 4}
    for seed in range(40):
        draw = random.Random(seed)
        images = draw.randint(0, 4)
        chat = media_chat(draw, images)
        answers = [turn for turn in chat if turn["role"] == "assistant"]
        masked = tuple(number for number in range(1, len(answers)) if draw.random() < 0.4)
        for number in masked:
            flags = [{"weight": 0}, {"train": False}, {"loss": "0"}, {"masked": 1}, {"no_loss": True}]
            answers[number] |= draw.choice(flags)
        expected = reference(tokenizer, QWEN2_VL, chat, masked=masked, marks=marks)
        assert composed(plain, chat, images) == expected, chat
        expected = reference(tokenizer, QWEN2_VL, chat, masked=masked, marks=marks, add_vision_id=True)
        assert composed(numbered, {"messages": chat}, images) == expected
        assert (expected == reference(tokenizer, QWEN2_VL, chat, masked=masked, marks=marks)) == (images == 0)


@pytest.mark.parametrize("name", ["mistral", "qwen2-vl"])
def test_a_tokenizer_that_writes_blanks_into_words_gives_the_same(name):
    tokenizer, template, mark = like_llama2(), NAMED[name], "<|image_pad|>"
    rendered = od.ChatTemplate.from_jinja(template, **tokenizer.special_tokens_map)
    marks = {"image_placeholder": mark, "image_token_id": tokenizer.convert_tokens_to_ids(mark)}
    recipe = Recipe(text=od.TextPreprocessor(tokenizer, template=rendered, **marks))
    for seed in range(20):
        draw = random.Random(seed)
        images = draw.randint(0, 3) * (name == "qwen2-vl")
        chat = media_chat(draw, images) if name == "qwen2-vl" else plain_chat(draw, system=False)
        assert composed(recipe, chat, images) == reference(tokenizer, template, chat, marks={mark: mark * 4})


def test_places_as_people_write_them():
    recipe = recipe_of(QWEN2_VL)
    items = [{"type": "text", "text": "a "}, {"type": "image"}, {"type": "text", "text": "\nWhat?"}]
    answer = {"role": "assistant", "content": "A cat."}
    tokenizer, marks = hf_tokenizer(), {"<|image_pad|>": "<|image_pad|>" * 4}
    expected = reference(tokenizer, QWEN2_VL, [{"role": "user", "content": items}, answer], marks=marks)
    llava = [{"from": "human", "value": "a <image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]
    for written in (
        {"image": "0.jpg", "conversations": llava},
        [{"role": "user", "content": "a <image>\nWhat?"}, answer],
        [
            {"role": "user", "content": [items[0], {"type": "image_url", "image_url": {"url": "0.jpg"}}, items[2]]},
            answer,
        ],
        [{"role": "user", "content": ["a ", {"image": "0.jpg"}, {"text": "\nWhat?"}]}, answer],
    ):
        assert composed(recipe, written, 1) == expected
    # Without any place images come first in what the user says first.
    first = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}, answer]
    expected = reference(tokenizer, QWEN2_VL, first, marks=marks)
    assert composed(recipe, [{"role": "user", "content": "What?"}, answer], 1) == expected


@pytest.mark.parametrize("template", [untagged(CHATML), QWEN3], ids=["chatml", "qwen3"])
def test_a_template_of_strings_alone_gets_its_mark(template):
    chat = [{"role": "user", "content": "a <image>\nWhat?"}, {"role": "assistant", "content": "A cat."}]
    ids, _ = composed(recipe_of(template), chat, 1)
    text = hf_tokenizer(template).apply_chat_template(chat, tokenize=False).replace("<image>", "<|image_pad|>" * 4)
    assert ids == hf_tokenizer()(text)["input_ids"]


def test_the_end_mark_is_learned_and_the_blank_after_it_is_not():
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert decoded(recipe_of(untagged(CHATML)), chat)[1] == "b<|im_end|>"
    assert decoded(recipe_of(untagged(NAMED["gemma"]), "<bos>"), chat)[1] == "b<end_of_turn>"
    # Where blanks alone end a turn they are learned.
    prompt = "{% if add_generation_prompt %}assistant: {% endif %}"
    blanks = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}" + prompt
    assert decoded(recipe_of(blanks), chat)[1] == "b\n\n"


def test_arguments_in_strings_are_read_where_the_template_would_quote_them():
    chat = [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    assert '"arguments": {"city":"Oslo"}}' in decoded(recipe_of(QWEN3), chat)[0]  # as the string has it
    assert '"arguments": {"city": "Oslo"}}' in decoded(recipe_of(HERMES), chat)[0]
    broken = {**CALL, "function": {"name": "weather", "arguments": "Oslo"}}
    assert '"arguments": "Oslo"}' in decoded(recipe_of(HERMES), [ASK, {**chat[1], "tool_calls": [broken]}])[0]


def test_reasoning_is_learned_where_it_is_rendered():
    thought = {**ANSWER, "reasoning_content": "I look out of the window."}
    learned = decoded(recipe_of(QWEN3), [ASK, thought, ASK, thought])[1]
    assert learned == "It rains.<|im_end|><think>\nI look out of the window.\n</think>\n\nIt rains.<|im_end|>"
    inline = {**ANSWER, "content": "<think>I look.</think>It rains."}
    assert decoded(recipe_of(QWEN3), [ASK, inline, ASK, inline])[1].startswith("It rains.<|im_end|><think>")
    quiet = decoded(recipe_of(QWEN3, enable_thinking=False), [ASK, ANSWER, ASK, ANSWER])[1]
    assert quiet == "It rains.<|im_end|>It rains.<|im_end|>"


def sharegpt() -> dict[str, Any]:
    return {
        "system": "You know the weather.",
        "tools": json.dumps([TOOL]),
        "conversations": [
            {"from": "human", "value": "Oslo?"},
            {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
            {"from": "observation", "value": "rain"},
            {"from": "gpt", "value": "It rains."},
        ],
    }


def test_sharegpt_with_tools_is_openai_with_tools():
    recipe = recipe_of(QWEN3)
    expected = composed(recipe, openai())
    assert composed(recipe, sharegpt()) == expected
    record = sharegpt()
    columns = {name: record.pop(name) for name in ("tools", "system")}
    assert composed(recipe, record, **columns) == expected  # columns of a row
    tagged = TAGGED["qwen3"]
    assert expected == reference(hf_tokenizer(), tagged, openai()["messages"], tools=[TOOL])


def test_the_header_of_an_answer_is_not_learned_where_the_template_has_no_prompt_for_an_answer():
    turn = "### {{ 'Response' if m.role == 'assistant' else m.role }}:\n{{ m.content }}"
    body = "{% for m in messages %}" + turn + "{{ '</s>' if m.role == 'assistant' else '' }}\n\n{% endfor %}"
    system_first = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
    chat = [{"role": "system", "content": "Be brief."}, ASK, ANSWER, ASK, {**ANSWER, "content": "Response:"}]
    for template in (body, system_first + body, body + "{% if add_generation_prompt %}### Response:\n{% endif %}"):
        assert decoded(recipe_of(template), chat)[1] == "It rains.</s>Response:</s>"
    after_a_question = "{% if add_generation_prompt and messages[-1].role == 'user' %}### Response:\n{% endif %}"
    twice = [*chat, {"role": "tool", "content": "It is 5."}, ANSWER, ANSWER]
    assert decoded(recipe_of(body + after_a_question), twice)[1] == "It rains.</s>Response:</s>" + 2 * "It rains.</s>"
    no_prompt = body + "{% if not add_generation_prompt %}---{% endif %}"
    assert decoded(recipe_of(no_prompt), [ASK, ANSWER])[1].startswith("It rains.</s>")


def test_alpaca_records_are_chats():
    recipe = recipe_of(untagged(CHATML))
    record = {"instruction": "Translate.", "input": "Katze", "output": "cat", "history": [["a", "b"]]}
    record["system"] = "Be brief."
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "Translate.\nKatze"},
        {"role": "assistant", "content": "cat"},
    ]
    assert composed(recipe, record) == composed(recipe, chat)
    assert composed(recipe, {**record, "text": "Below is an instruction"}) == composed(recipe, chat)
    for history in (5, [["a", 1]], [["a"]]):
        with pytest.raises(FieldError, match="no list of pairs of strings"):
            composed(recipe, {**record, "history": history})
    columns = {name: value if isinstance(value, str) else json.dumps(value) for name, value in record.items()}
    assert composed(recipe, None, **columns) == composed(recipe, chat)
    assert composed(recipe, None, **columns, text="Below is an instruction") == composed(recipe, chat)
    assert composed(recipe, {"instruction": "a", "input": "", "output": "b"}) == composed(recipe, chat[1:3])


def test_of_prompt_and_completion_only_the_completion_is_learned():
    recipe = recipe_of(untagged(CHATML))
    prompt = [ASK, ANSWER, ASK]
    text, learned = decoded(recipe, {"prompt": prompt, "completion": [ANSWER]})
    assert learned == "It rains.<|im_end|>" and text.count(learned) == 2
    assert composed(recipe, None, prompt=json.dumps(prompt), completion=json.dumps([ANSWER])) == composed(
        recipe, {"prompt": prompt, "completion": [ANSWER]}
    )
    assert decoded(recipe, {"prompt": "1 + 1 =", "completion": " 2"}) == ("1 + 1 = 2", " 2")
    assert decoded(recipe, None, prompt="1 + 1 =", completion=" 2") == ("1 + 1 = 2", " 2")


@pytest.mark.parametrize("end", ["<|im_end|>", ""])
def test_an_eos_after_the_chat_belongs_to_no_answer(end):
    turn = "{% for m in messages %}{{ '<' + m.role + '>\\n' + m.content + '" + end + "\\n' }}{% endfor %}"
    template = turn + "{% if add_generation_prompt %}{{ '<assistant>\\n' }}{% else %}{{ eos_token }}{% endif %}"
    expected = ["A.<|im_end|>", "B.<|im_end|>"] if end else ["A.\n", "B.\n</s>"]  # where it is all that ends an answer
    recipe = recipe_of(template)
    answers = [{"role": "assistant", "content": text} for text in ("A.", "B.")]
    text, learned = decoded(recipe, [ASK, answers[0], ASK, answers[1]])
    assert text.endswith("</s>") and learned == "".join(expected)
    assert decoded(recipe, [ASK, answers[1]])[1] == expected[1]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        # Nothing is generated, by its own account.
        ("{% for m in messages %}{{ m.content }}{% endfor %}{% generation %}{% endgeneration %}", "marks nothing"),
        # It says an answer twice.
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}{{ messages[1].content }}", "cannot be located"),
    ],
)
def test_an_answer_that_cannot_be_located_is_an_error(template, message):
    with pytest.raises(FieldError) as caught:
        composed(recipe_of(template), [ASK, ANSWER, ASK, ANSWER])
    assert message in caught.value.reason


def test_templates_are_rendered_as_by_transformers():
    """The environment: loop controls, blanks, JSON, dates, special tokens, errors, and templates for tools."""
    from transformers.utils.chat_template_utils import render_jinja_template

    tokenizer = hf_tokenizer(bos="<s>")
    source = """
    {%- for message in messages %}
        {%- if loop.index > 2 %}{% break %}{% endif %}
        {% if tools %}
        {{ tools | tojson(indent=2) }} {{ {"b": "<&'\u00fc>", "a": [1.5, none, true]} | tojson(sort_keys=true) }}
        {% endif %}
{{ bos_token }}{{ message.content }} {{ strftime_now("%d %b %Y") }} {{ namespace(a=1).a }} {{ dict(a=2).a }}
    {% endfor %}
    {{ missing is defined }} {{ documents }} {{ switch }} {{ message }}
    """
    template = od.ChatTemplate.from_jinja(source, switch=[1, "a"], **tokenizer.special_tokens_map)
    assert template.date is not None
    messages = [ASK, ANSWER, ASK]
    for tools in (None, [TOOL]):
        (expected,), _ = render_jinja_template(
            [messages], chat_template=source, tools=tools, switch=[1, "a"], **tokenizer.special_tokens_map
        )
        assert template.render(messages, Inputs(tools=tools))[0] == expected
    assert "26 Jul 2024" in od.ChatTemplate.from_jinja(source, date="2024-07-26").render(messages, Inputs())[0]
    both = od.ChatTemplate.from_jinja({"default": "plain", "tool_use": "with tools"})
    assert [both.render(messages, Inputs(tools=tools))[0] for tools in (None, [TOOL])] == ["plain", "with tools"]
    for refused in (
        "{{ raise_exception('No.') }}",
        "{{ namespace(_a=1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 / 0 }}",
    ):
        with pytest.raises(DecodeError, match="the chat template refuses it"):
            od.ChatTemplate.from_jinja(refused).render(messages, Inputs())


def test_blanks_that_a_tokenizer_trims_from_offsets_mask_no_later_answer():
    """As processors have it; before transformers 5.24 a tokenizer's own masks end where an answer begins with one."""
    from tokenizers import processors

    tokenizer = hf_tokenizer(CHATML)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    recipe = Recipe(text=od.TextPreprocessor(tokenizer, template=od.ChatTemplate.from_jinja(tokenizer)))
    chat = [ASK, {**ANSWER, "content": " It rains.\n\nStill."}, ASK, ANSWER]
    tokens = composed(recipe, chat)
    assert tokens == reference(tokenizer, CHATML, chat, masked=(9,))  # none of its two answers
    assert sum(reference(tokenizer, CHATML, chat).loss) in (0, sum(tokens.loss)) and sum(tokens.loss) > 0


def odd(draw: random.Random, depth: int = 0) -> Any:
    """JSON of the words of chats, in places of any kind."""
    keys = (
        "role from content value type text image image_url name tool_calls function arguments weight train index "
        "reasoning_content tools system documents messages prompt completion instruction output history mask "
        "chat_template_kwargs functions"
    ).split()
    words = ["user", "gpt", "function_call", "image", "hi", "<image>", "", " ", "[1]", '{"name": "f"}', "x\ud800", "0"]
    if depth > 4 or draw.random() < 0.5:
        return draw.choice([*words, *words, None, True, 0, 1.5, 10**30])
    if draw.random() < 0.5:
        return [odd(draw, depth + 1) for _ in range(draw.randint(0, 3))]
    return {draw.choice(keys): odd(draw, depth + 1) for _ in range(draw.randint(0, 4))}


def test_odd_chats_are_read_or_refused_and_nothing_else():
    recipes = [recipe_of(template, "<bos>") for template in (QWEN2_VL, QWEN3, untagged(CHATML), NAMED["vicuna"])]
    read = 0
    for seed in range(1500):
        draw = random.Random(seed)
        role = {draw.choice(["role", "from"]): draw.choice(["user", "human", "gpt", "assistant", "observation"])}
        answer = {"role": "assistant", "content": odd(draw), draw.choice(["weight", "tool_calls", "name"]): odd(draw)}
        chat = {"messages": [{**role, "content": odd(draw)}, answer], "tools": odd(draw)}
        try:
            read += bool(composed(draw.choice(recipes), chat, draw.randint(0, 1)).ids)
        except FieldError as error:
            assert error.reason
    assert read > 20


def test_tools_may_each_be_json_in_a_string():
    recipe, chat = recipe_of(QWEN3), openai()["messages"]
    whole = composed(recipe, {"messages": chat, "tools": [TOOL, TOOL]})
    for tools in ([json.dumps(TOOL)] * 2, [TOOL, json.dumps(TOOL)], [json.dumps([TOOL, TOOL])]):
        assert composed(recipe, {"messages": chat, "tools": tools}) == whole
    for tool, error in (("get_weather(city)", "no JSON"), (json.dumps(json.dumps(TOOL)), "JSON in JSON")):
        with pytest.raises(FieldError, match=error):
            composed(recipe, {"messages": chat, "tools": [tool]})


def test_a_chat_whose_answers_are_all_masked_has_no_loss():
    masked = [ASK, {**ANSWER, "train": False}]
    for template in (CHATML, untagged(CHATML)):
        assert not any(composed(recipe_of(template), masked).loss)
        assert any(composed(recipe_of(template), [ASK, ANSWER]).loss)


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
        (CUTS_THOUGHTS, [ASK, {**ANSWER, "content": "<think>Warm.</think>Sun."}], "turn 2 (assistant) has '<think>'"),
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
