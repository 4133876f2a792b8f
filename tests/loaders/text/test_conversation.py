"""Chats: what they say arrives in full, or the sample is refused with the key that would be lost."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from shard_factory import SKIP_ANY, png, write_shard

import orchdata as od
from orchdata.loaders.errors import DecodeError, FieldError
from orchdata.loaders.index.build import build_index
from orchdata.loaders.modalities.builtin import TEXT
from orchdata.loaders.modalities.modality import PartSize
from orchdata.loaders.recipe import ChatTemplate, Recipe, TextPreprocessor
from orchdata.loaders.samples.compose import composition_of, text_members
from orchdata.loaders.samples.measure import measure
from orchdata.loaders.samples.members import Member
from orchdata.loaders.samples.spans import MediaSlot
from orchdata.loaders.shards.named_media import media_of
from orchdata.loaders.text.conversation import document_of, parse_json
from orchdata.loaders.text.template import text_of

pytestmark = pytest.mark.usefixtures("kept_parquet_processes")

IMAGE, AUDIO = 1, 2
PIXELS = png(56, 56)

TEXT_RULES = TextPreprocessor(template=ChatTemplate(prefix="[{role}]", suffix=";"))
RECIPE = Recipe(text=TEXT_RULES)
ASK = {"role": "user", "content": "What is the weather in Oslo?"}
ANSWER = {"role": "assistant", "content": "It rains."}
CALL = [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"city": "string"}}}]
THOUGHTS = "The user asks for the weather, so I look out of the window."


def said(value: object) -> list[tuple[str, str]] | str | None:
    """Role and text of each turn, or the text."""
    document = document_of(parse_json(json.dumps(value).encode()), RECIPE.rules)
    if document.chat is None:
        return document.text
    return [(turn["role"], text_of(turn)) for turn in document.chat.messages]


def measured(images: int = 0, **fields: object):
    members = [Member(f"{number}.jpg", IMAGE, (56, 56), size=9) for number in range(images)]
    texts = {}
    for name, value in fields.items():
        payload = value if isinstance(value, bytes) else value.encode() if isinstance(value, str) else None
        texts[len(members)] = json.dumps(value).encode() if payload is None else payload
        members.append(Member(name.replace("_", "."), TEXT, size=len(texts[len(members)])))
    wanted = text_members(members, RECIPE)
    return measure(members, {index: texts[index] for index in wanted}, RECIPE)


LOST_OF_A_TURN = [
    ({"content": None, "tool_calls": CALL}, "turn 2 (assistant) has 'tool_calls', which no template renders"),
    ({"content": "It rains.", "reasoning_content": THOUGHTS}, "'reasoning_content'"),
    ({"content": "It rains.", "thinking": THOUGHTS}, "'thinking'"),
    ({"content": None, "refusal": "I will not say."}, "'refusal'"),
    ({"content": None, "audio": {"id": "audio_1", "transcript": "It rains."}}, "'audio'"),
    ({"content": "It rains.", "tool_call_id": "call_1"}, "'tool_call_id'"),
    ({"content": "It rains.", "weight": 0}, "'weight', a loss flag, which is not followed"),
    ({"content": "It rains.", "train": False}, "'train'"),
    ({"content": "It rains.", "masked": True}, "'masked'"),
    ({"content": "It rains.", "not_masked": True}, "'not_masked'"),
    ({"content": None}, "turn 2 (assistant) has no content"),
    ({"content": ""}, "turn 2 (assistant) says nothing"),
    ({"content": [{"type": "text", "text": ""}]}, "says nothing"),
    ({"content": "It rains.", "value": "It snows."}, "one thing under role and content, another under from"),
]
LOST_OF_A_CHAT = [
    ({"tools": TOOLS}, "the conversation has 'tools', which no template renders"),
    ({"documents": [{"title": "Oslo", "text": "It rains."}]}, "'documents'"),
    ({"system": "You are a weatherman."}, "'system'"),
    ({"chat_template_kwargs": {"custom_instructions": "Be brief.", "xml_tools": []}}, "'chat_template_kwargs'"),
    ({"history": [["What is the weather in Bergen?", "It pours."]]}, "'history'"),
    ({"chosen": {"from": "gpt", "value": "It snows."}, "rejected": {"from": "gpt", "value": "No."}}, "'chosen'"),
    ({"conversations": [ASK, {"role": "assistant", "content": "It snows."}]}, "two conversations that differ"),
]
LOST_OF_AN_ITEM = [
    ({"type": "image", "image": "a.jpg", "text": "a cat"}, "of type 'image' that holds 'text' too"),
    ({"type": "text", "text": "a cat", "image": "a.jpg"}, "of type 'text' that holds 'image' too"),
    ({"type": "input_audio", "input_audio": {"data": "x"}, "transcript": "a cat"}, "has 'transcript'"),
    ({"type": "image", "image": ["a.jpg", "b.jpg"]}, "that holds 2"),
    ({"type": "image", "index": 1}, "places image 1 where number 0 follows"),
    ({"type": "text", "text": "a", "reasoning": THOUGHTS}, "has 'reasoning'"),
    ({"type": ["image"]}, "an item of type a list"),
    ({"type": "tool_use", "input": {}}, "an item of type 'tool_use'"),
]
ROLES = ("Assistant", "ASSISTANT", "asistant", "function_call", "model", "prompter", "")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        *(([ASK, {"role": "assistant", **turn}], message) for turn, message in LOST_OF_A_TURN),
        *(({"messages": [ASK, ANSWER], **record}, message) for record, message in LOST_OF_A_CHAT),
        *(([{"role": "user", "content": [item]}, ANSWER], message) for item, message in LOST_OF_AN_ITEM),
        *(([{"role": role, "content": "x"}], "; known are system, ") for role in ROLES),
    ],
)
def test_what_would_be_lost_is_refused_by_its_key(value, message):
    with pytest.raises(DecodeError) as caught:
        said(value)
    assert message in caught.value.reason


@pytest.mark.parametrize(
    "context",
    [
        {"tools": [], "functions": None, "system": "", "documents": {}, "chosen": None},
        {"tools": "[]", "system_prompt": " "},
        {"reasoning": "on", "reasoning_effort": "high", "tools_used": "no", "thinking_budget": "1024"},
        {"chat_template_kwargs": {"custom_instructions": "", "enable_thinking": True, "python_tools": []}},
        {"id": 7, "source": "web", "score": 0.5, "split": "train", "prompt_id": "x", "model": "m", "loss": 2.5},
        {"prompt": ASK["content"], "text": "already rendered", "lang": "en", "category": "weather"},
        {"conversations": [{"from": "human", "value": ASK["content"]}, {"from": "gpt", "value": "It rains."}]},
        # The conversation is the preferred one, as in the data that preference training also uses.
        {"chosen": [ASK, ANSWER], "rejected": [ASK, {"role": "assistant", "content": "It snows."}]},
        {"system": ASK["content"]},  # said in a turn
    ],
)
@pytest.mark.parametrize(
    "keys",
    [
        {"tool_calls": None, "name": None, "refusal": None, "weight": None},
        {
            "tool_calls": [],
            "function_call": {},
            "reasoning_content": "",
            "weight": 1,
            "train": True,
            "masked": False,
            "noLoss": 0,
        },
        {"name": "assistant", "value": "It rains.", "from": "gpt", "text": "It rains."},
        {
            "id": "m1",
            "timestamp": 17.5,
            "model": "m",
            "lang": "en",
            "toxic": False,
            "parent_id": "m0",
            "markdown": None,
        },
        {"tokens": [1, 2], "scores": {"helpful": 3}, "thinking_tokens": 120},
    ],
)
def test_metadata_nulls_and_what_is_said_anyway_pass(context, keys):
    user = {**ASK, "weight": 0, "train": False, "id": 1}
    turns = said({"messages": [user, {**ANSWER, **keys}], **context})
    assert turns == [("user", ASK["content"]), ("assistant", "It rains.")]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "its words are under 'prompt'"),
        ({"dialog_turns": [ASK, ANSWER]}, "its words are under 'dialog_turns'"),
        ({"instruction": "Say x.", "output": "x"}, "instruction and output are read under a model's own template"),
        ({"messages": []}, "no turns"),
        ([{"text": "a"}, {"text": "b"}], "a file that is an array of samples ends in .json; ShardDataset(columns="),
        ("a bare caption", "a bare string"),
        ({"text": "<video> What is it?", "videos": ["a.mp4"]}, "it names a video under 'videos'"),
        ({"role": "x", "content": "y"}, "role and content are no turn"),
        ({"image": "a.jpg", "images": ["b.jpg", "c.jpg"], "caption": "x"}, "the record names 2 ('b.jpg', 'c.jpg')"),
    ],
)
def test_words_that_are_not_read_are_refused_where_the_sample_has_no_others(value, reason):
    payload = json.dumps(value).encode()
    with pytest.raises(FieldError) as caught:
        measured(images=1, json=payload)
    assert reason in caught.value.reason
    assert measured(images=1, json=payload, txt="the text").loss_tokens == len("the text")


def is_bad(folder: Path, container: str, row: dict[str, Any], recipe: Recipe = Recipe()) -> bool:  # noqa: B008
    path = folder / f"a.{container}"
    if container == "parquet":
        pq.write_table(pa.Table.from_pylist([row]), path)
    elif container == "tar":
        write_shard(path, [{"__key__": "0", "json": json.dumps(row).encode()}])
    else:
        path.write_text(json.dumps(row))
    return len(build_index([str(path)], recipe, force=True).bad_rows()) == 1


@pytest.mark.parametrize("container", ["jsonl", "tar", "parquet"])
def test_a_value_under_the_name_of_media_is_read_or_its_sample_is_bad(tmp_path: Path, container: str):
    for value in (5, 1.5, True, float("nan"), [[1, 2]], {"array": [0.1], "sampling_rate": 16_000}):
        assert is_bad(tmp_path, container, {"audio": value, "text": "words"}), value
        assert not is_bad(tmp_path, container, {"sound_level": value, "text": "words"}), value
    for value in (None, "", [], False, {"bytes": None, "path": None}):
        assert not is_bad(tmp_path, container, {"audio": value, "text": "words"}), value


@pytest.mark.parametrize("container", ["jsonl", "tar", "parquet"])
def test_a_value_under_the_name_of_a_text_or_chat_is_read_or_its_sample_is_bad(tmp_path: Path, container: str):
    for value in (5, True, False, float("nan"), ["a"], {"a": "b"}):
        assert is_bad(tmp_path, container, {"text": value, "caption": "words"}), value
        assert not is_bad(tmp_path, container, {"text": "words", "caption": value}), value  # which gives way
        assert is_bad(tmp_path, container, {"messages": value, "text": "words"}), value
    for value in (None, "", []):
        assert not is_bad(tmp_path, container, {"text": value, "messages": [ASK, ANSWER]}), value


def test_images_inside_of_the_turns_of_a_column_are_read(tmp_path: Path):
    items = [{"type": "image", "image": {"bytes": PIXELS, "path": None}}, {"type": "text", "text": "What?"}]
    turns = [{"role": "user", "content": items}, {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]}]
    assert not is_bad(tmp_path, "parquet", {"messages": turns})
    (batch,) = od.DataLoader(od.ShardDataset(str(tmp_path / "a.parquet")), batch_size=1, num_threads=0)
    assert "image of 4 tokens" in repr(batch)
    items[0]["image"] = {"bytes": None, "path": "a.png"}
    assert is_bad(tmp_path, "parquet", {"messages": turns})


CAULDRON = [{"user": "q", "assistant": "a", "source": "x"}]


@pytest.mark.parametrize(
    ("column", "cell"),
    [
        ("texts", CAULDRON),
        ("data", CAULDRON),
        ("text", ["a cat"]),
        ("qa", {"question": "q", "answer": "a"}),
        ("question", "q"),
        ("utterance", "x"),
    ],
)
def test_a_parquet_column_of_words_next_to_media_is_read_or_an_error(tmp_path: Path, column: str, cell: object):
    pixels = io.BytesIO()
    Image.new("RGB", (56, 56)).save(pixels, "PNG")
    columns = {"key": ["words", "empty"], "image": [{"bytes": pixels.getvalue()}] * 2, "license": ["MIT"] * 2}
    columns[column] = [cell, None]
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    loader = od.DataLoader(od.ShardDataset(str(tmp_path / "a.parquet")), batch_size=1, num_threads=0, on_error=SKIP_ANY)
    assert [key for batch in loader for _, key in batch.sample_ids] == ["1"]
    (failure,) = loader.gather_failures()
    assert (failure.key, failure.field) == ("0", column)
    assert re.match("has the sample's only words|a list, not a text", failure.reason)


def test_media_named_in_another_order_than_their_fields_are_refused():
    def sample(first: str, second: str, key: str | None):
        members = [Member(name, IMAGE, (56, 56), size=9) for name in ("a.jpg", "b.jpg")]
        if key is None:
            items = [{"type": "image", "image": name} for name in (first, second)]
            record: object = [{"role": "user", "content": [*items, {"type": "text", "text": "q"}]}, ANSWER]
        else:
            turns = [{"role": "user", "content": "<image><image>q"}, ANSWER]
            record = {"messages": turns, key: [first, second]}
        payload = json.dumps(record).encode()
        return measure([*members, Member("json", TEXT, size=len(payload))], {2: payload}, RECIPE)

    for key in (None, "images"):
        assert sample("dir/a.jpg", "key.B.jpg", key).llm_tokens == sample("x.jpg", "a.jpg", key).llm_tokens
        for first, second in (("b.jpg", "a.jpg"), ("dir/key.b.jpg", "A.jpg"), ("a.jpg", "a.jpg")):
            with pytest.raises(FieldError, match="in the order of the fields: a.jpg, b.jpg"):
                sample(first, second, key)


def test_marks_are_followed_where_only_media_of_another_kind_have_items():
    content = [{"type": "image"}, {"type": "text", "text": "Look at it, hear <audio> and say."}]
    members = [Member("jpg", IMAGE, (56, 56), size=9), Member("wav", AUDIO, header=(16_000, 16_000), size=9)]
    payload = json.dumps([{"role": "user", "content": content}, ANSWER]).encode()
    composition = composition_of([*members, Member("json", TEXT, size=len(payload))], {2: payload}, RECIPE)
    spans = composition.spans(RECIPE, lambda *_: PartSize(4, 1, 4))
    slots = [span.modality if isinstance(span, MediaSlot) else bytes(span.token_ids.tolist()) for span in spans]
    assert slots == [b"[user]", "image", b"Look at it, hear ", "audio", b" and say.;[assistant]", b"It rains.;"]


def test_two_json_members_must_not_say_two_things():
    other = {"messages": [ANSWER, ANSWER]}
    with pytest.raises(FieldError, match=r"a second conversation, besides that of a\.json") as caught:
        measured(a_json=[ANSWER], b_json=other)
    assert caught.value.field == "b.json"
    with pytest.raises(FieldError, match=r"a second text, besides that of a\.json"):
        measured(a_json={"text": "one"}, b_json={"text": "other"})
    for said in ({"messages": [ANSWER]}, {"text": "one"}):
        with pytest.raises(FieldError, match=r"besides that of a\.json: Recipe\(record=\.\.\.\) reads all"):
            measured(a_json=said, b_json=said)  # files of two samples may say the same
    assert measured(messages=[ANSWER], json={"messages": [ANSWER]}).llm_tokens == len("[assistant]It rains.;")
    assert measured(a_json=[ANSWER], b_json={"width": 3}, c_json={"text": "a caption"}).used_members == [0]


@pytest.mark.parametrize("field", ["tools", "tools_json", "system", "system_txt", "reasoning", "1_tools_json"])
def test_a_field_next_to_the_chat_must_not_be_lost(field):
    with pytest.raises(FieldError, match=f"has '{field.split('_')[-2 if field[0] == '1' else 0]}', which no template"):
        measured(json=[ASK, ANSWER], **{field: TOOLS if "tools" in field else "You are a weatherman."})
    assert measured(json=[ASK, ANSWER], **{field: "[]"}).used_members == [0]


def test_a_key_that_comes_twice_is_refused_where_it_is_read():
    for payload in (
        b'[{"role": "user", "content": "a", "content": "b"}]',
        b'{"messages": [{"role": "user", "content": "a"}], "messages": [{"role": "user", "content": "b"}]}',
        b'{"text": "a", "text": "b"}',
        b'[{"role": "user", "content": [{"type": "text", "text": "a", "text": "b"}]}]',
    ):
        with pytest.raises(DecodeError, match="twice"):
            document_of(parse_json(payload), RECIPE.rules)
    assert document_of(parse_json(b'{"text": "a", "exif": {"x": 1, "x": 2}}'), RECIPE.rules).text == "a"


def test_struct_chats_of_parquet_keep_their_meaning(tmp_path: Path):
    """A common struct type fills every turn with nulls; what is not null counts as in JSON."""
    plain = [{**ASK, "tool_calls": None}, {**ANSWER, "tool_calls": None}]
    calling = [{**ASK, "tool_calls": None}, {"role": "assistant", "content": None, "tool_calls": CALL}]
    columns = {
        "id": ["plain", "calling", "tools", "thinking"],
        "messages": [plain, calling, plain, plain],
        "tools": [[], None, TOOLS, None],
        "thinking": ["", None, "", THOUGHTS],
    }
    pq.write_table(pa.table(columns), tmp_path / "chats.parquet")
    dataset = od.ShardDataset(str(tmp_path / "chats.parquet"), recipe=RECIPE)
    loader = od.DataLoader(dataset, batch_size=1, num_threads=0, on_error=SKIP_ANY)
    assert [key for batch in loader for _, key in batch.sample_ids] == ["plain"]
    reasons = {failure.key: failure.reason for failure in loader.gather_failures()}
    assert reasons.keys() == {"calling", "tools", "thinking"}
    for key, name in (("calling", "tool_calls"), ("tools", "tools"), ("thinking", "thinking")):
        assert f"has '{name}'" in reasons[key]


@pytest.mark.parametrize("container", ["jsonl", "parquet"])
def test_texts_have_the_same_names_everywhere(tmp_path: Path, container: str):
    for name in ("txt", "text", "caption", "transcript", "transcription", "sentence"):
        assert not is_bad(tmp_path, container, {name: "words"})
    for name in ("prompt", "response", "question", "answer", "instruction"):
        assert is_bad(tmp_path, container, {name: "words"})


@pytest.mark.parametrize("container", ["jsonl", "tar", "parquet"])
def test_strings_of_a_sample_without_a_text_are_kept_or_an_error(tmp_path: Path, container: str):
    for value in ("B", ["a"], [{"q": "a"}]):
        row = {"image": PIXELS} if container == "parquet" else {"messages": [ASK]}
        assert is_bad(tmp_path, container, {**row, "reply": value}), value
        assert not is_bad(tmp_path, container, {**row, "reply": value}, Recipe(keep=("reply",))), value
        assert not is_bad(tmp_path, container, {**row, "license": "MIT", "score": 4})
    assert is_bad(tmp_path, "parquet", {"image": PIXELS, "text": "<image>", "reply": "B"})


@pytest.mark.parametrize(
    ("record", "advised"),
    [
        ({"utterance": "a"}, True),
        ({"utterance": "a", "label": 4}, False),
        ({"instruction": "a"}, False),
        ({"instruction": "a", "output": ["b"]}, False),
        ({"question": "a", "answer": 4}, False),
    ],
)
def test_a_key_is_renamed_only_if_that_makes_the_sample_whole(record: dict[str, Any], advised: bool):
    with pytest.raises(FieldError) as caught:
        measured(json=record)
    assert ("': 'text'}" in caught.value.reason) == advised
    with pytest.raises(FieldError) as caught:
        measured(**{name if isinstance(value, str) else f"{name}_words": value for name, value in record.items()})
    assert ("reads them" in caught.value.reason) == advised


@pytest.mark.parametrize("item", [{"audio_url": "a.wav"}, {"source": {"type": "base64", "data": "UklGRg=="}}])
def test_an_item_names_its_media_under_any_of_their_words(item: dict[str, Any]):
    value = {"messages": [{"role": "user", "content": [{"type": "audio", **item}]}, ANSWER]}
    (media,) = media_of(value, file_names=False)
    assert media.path == item.get("audio_url") and media.error is None


def test_a_mark_without_media_is_refused_with_the_way_to_read_it_as_text():
    with pytest.raises(FieldError, match=r'TextPreprocessor\(audio_placeholder=""\)'):
        measured(txt="the tag <audio>")
