"""Members and texts -> parts: where media go, what carries loss, and what is refused with which words."""

from __future__ import annotations

import email
import json
from pathlib import Path

import numpy as np
import pytest

from orchdata.loaders.errors import DecodeError, FieldError
from orchdata.loaders.modalities.builtin import BUILTINS, KINDS, TEXT
from orchdata.loaders.modalities.modality import PartSize, read_header
from orchdata.loaders.recipe import ChatTemplate, ImagePreprocessor, Recipe, TextPreprocessor
from orchdata.loaders.samples.compose import composition_of, text_members
from orchdata.loaders.samples.measure import measure
from orchdata.loaders.samples.members import Member
from orchdata.loaders.samples.sample import TextPart, decode_sample
from orchdata.loaders.samples.spans import MediaSlot, Span
from orchdata.loaders.shards.fields import classify


def check_no_marks(text: str) -> None:
    composed(*sample(txt=text), Recipe(text=TextPreprocessor(image_placeholder="", audio_placeholder="")))


IMAGE, AUDIO = 1, 2

PLAIN = ChatTemplate(prefix="[{role}]", suffix=";")
RECIPE = Recipe(text=TextPreprocessor(template=PLAIN))


def sample(recipe: Recipe | None = None, **fields: object) -> tuple[list[Member], dict[int, bytes]]:
    """Members and texts: `txt="..."`, `json={...}`; media by None, as `jpg_0=None` for the field 0.jpg."""
    members, texts = [], {}
    for name, value in fields.items():
        field = ".".join(reversed(name.split("_")))
        if value is None:
            audio = field.endswith(("wav", "flac"))
            header = (16_000, 16_000) if audio else (56, 56)
            kind = (recipe or RECIPE).kind_of(field, AUDIO if audio else IMAGE)
            members.append(Member(field, kind, header, 100))
            continue
        payload = (
            value if isinstance(value, bytes) else (value if isinstance(value, str) else json.dumps(value)).encode()
        )
        texts[len(members)] = payload
        members.append(Member(field, TEXT, size=len(payload)))
    return members, texts


def composed(members: list[Member], texts: dict[int, bytes], recipe: Recipe = RECIPE) -> list[Span]:
    return composition_of(members, texts, recipe).spans(recipe, lambda *_: PartSize(4, 1, 4))


def shown(members: list[Member], texts: dict[int, bytes], recipe: Recipe = RECIPE) -> list[str]:
    """Spans as text: loss in capitals' place as `text!`, media as <field>."""
    rendered = []
    for span in composed(members, texts, recipe):
        if isinstance(span, MediaSlot):
            rendered.append(f"<{members[span.member].field}>")
        else:
            ids = span.token_ids
            text = bytes(ids.astype(np.uint8)).decode() if ids.max() < 256 else str(ids.tolist())
            rendered.append(text + "!" * span.loss)
    return rendered


CHAT = ["[user]q;[assistant]", "a;!"]
USER_THEN_ASSISTANT = [{"role": "user", "content": "hi <image>"}, {"role": "assistant", "content": "ok"}]


@pytest.mark.parametrize(
    ("fields", "spans"),
    [
        ({"txt": "words"}, ["words!"]),
        ({"jpg": None, "txt": "words"}, ["<jpg>", "words!"]),
        # Without placeholders media come first: images, then audio, each by number.
        ({"wav": None, "txt": "x", "png_10": None, "jpg_2": None}, ["<2.jpg>", "<10.png>", "<wav>", "x!"]),
        ({"jpg_0": None, "png_1": None, "txt": "a<image>b<image>"}, ["a!", "<0.jpg>", "b!", "<1.png>"]),
        ({"flac": None, "jpg": None, "txt": "<audio>x<image>"}, ["<flac>", "x!", "<jpg>"]),
        # Audio has no placeholder of its own, so it leads.
        ({"flac": None, "jpg": None, "txt": "x<image>y"}, ["<flac>", "x!", "<jpg>", "y!"]),
        ({"jpg": None, "json": USER_THEN_ASSISTANT}, ["[user]hi ", "<jpg>", ";[assistant]", "ok;!"]),
        ({"jpg": None, "json": {"messages": USER_THEN_ASSISTANT}}, ["[user]hi ", "<jpg>", ";[assistant]", "ok;!"]),
        # A conversation goes before text, text before a JSON caption, other JSON is metadata.
        ({"txt": "no", "json": [{"role": "assistant", "content": "yes"}]}, ["[assistant]", "yes;!"]),
        ({"txt": "yes", "json": {"text": "no"}}, ["yes!"]),
        ({"jpg": None, "json": {"caption": "yes"}}, ["<jpg>", "yes!"]),
        ({"txt": "yes", "json": {"width": 5}}, ["yes!"]),
        ({"jpg": None, "json": {"width": 5}}, ["<jpg>"]),
        ({"txt_en": "by extension"}, ["by extension!"]),
        # Columns of Parquet files keep the case of their names.
        ({"Text": "in capitals"}, ["in capitals!"]),
        # JSON Lines: one is what it says, several are a list.
        ({"jsonl": '{"text": "one"}\n'}, ["one!"]),
        ({"jsonl": '{"role": "user", "content": "q"}\n\n{"role": "assistant", "content": "a"}'}, CHAT),
        ({"txt": "yes", "jsonl": '{"a": 1}\n{"a": 2}'}, ["yes!"]),
        ({"gz_txt": "gunzipped by the reader"}, ["gunzipped by the reader!"]),
        # Words in angle brackets that are no placeholders of anyone.
        ({"txt": "<img> is a <video> tag of <i1>"}, ["<img> is a <video> tag of <i1>!"]),
        ({"jpg": None, "txt": "<p> (image_1) </picture>"}, ["<jpg>", "<p> (image_1) </picture>!"]),
        # Several media under one text, or under one of several JSON members.
        ({"jpg_0": None, "jpg_1": None, "txt_1": "a"}, ["<0.jpg>", "<1.jpg>", "a!"]),
        (
            {"jpg_left": None, "jpg_right": None, "json_a": {"text": "a"}, "json_b": {}},
            ["<left.jpg>", "<right.jpg>", "a!"],
        ),
    ],
)
def test_parts_in_order(fields, spans):
    assert shown(*sample(**fields)) == spans


@pytest.mark.parametrize(
    ("fields", "field", "reason"),
    [
        ({"txt": "a <image> b <image>", "jpg": None}, "txt", "<image> placeholder 2 of 2 has no image"),
        ({"txt": "a <image>"}, "txt", "<image> placeholder 1 of 1 has no image: the sample holds 0"),
        ({"txt": "<audio>", "jpg": None}, "txt", "<audio> placeholder 1 of 1 has no audio"),
        ({"txt": "<image>", "jpg_0": None, "jpg_1": None, "jpg_2": None}, "txt", "3 images but 1 <image> placeholders"),
        ({"json": b"{nope"}, "json", "not valid JSON"),
        ({"json": b"[" * 100_000}, "json", "not valid JSON"),
        ({"txt": b"caf\xe9"}, "txt", "not valid UTF-8"),
        ({"json": [{"role": "user", "content": "x"}, {"content": "y"}]}, "json", "turn 2 has no role"),
        ({"json": [{"role": "user", "content": "x"}, "y"]}, "json", "turn 2 is a str"),
        ({"json": [{"role": "user", "content": 5}]}, "json", "content of turn 1 is a int"),
        ({"json": [{"role": "user", "content": [{"type": "video"}]}]}, "json", "an item of type 'video'"),
        ({"txt": ""}, "txt", "no tokens"),
        # Placeholders of other tools.
        ({"txt": "see <image_1>", "jpg": None}, "txt", "'<image_1>' is no placeholder here"),
        ({"txt": "<__dj__audio> hear", "wav": None}, "txt", "'<__dj__audio>' is no placeholder here"),
        ({"json": [{"role": "user", "content": "<|image|> hi"}], "jpg": None}, "json", "no placeholder here"),
        # Files whose names have dots: 22.05.jpg and 22.06.jpg have the key 22.
        (
            {"jpg_05": None, "txt_05": "a", "jpg_06": None, "txt_06": "b"},
            "06.txt",
            "'05.txt', '06.txt' are texts of one sample: TextPreprocessor(fields=('05.txt',)) chooses one",
        ),
        ({"txt_question": "a", "txt_answer": "b"}, "answer.txt", "rename the files without further dots"),
        ({"txt": "a", "txt_b": "b"}, "b.txt", "'txt', 'b.txt' are texts of one sample"),
        ({"caption": "a", "caption_b": "b"}, "b.caption", "'caption', 'b.caption' are texts of one sample"),
    ],
)
def test_bad_samples_name_field_and_reason(fields, field, reason):
    with pytest.raises(FieldError) as caught:
        measure(*sample(**fields), RECIPE)
    assert caught.value.field == field
    assert reason in caught.value.reason


def test_a_recipe_without_images_leaves_them_alone_but_for_placeholders():
    recipe = Recipe(image=None, text=RECIPE.text)
    members, texts = sample(recipe, jpg=None, txt="words")
    assert measure(members, texts, recipe).used_members == [1]
    with pytest.raises(FieldError, match="recipe has no image preprocessor"):
        composed(*sample(recipe, jpg=None, txt="<image>"), recipe)
    with pytest.raises(FieldError, match=r"no usable field among: jpg; the recipe reads audio, text"):
        composed(*sample(recipe, jpg=None), recipe)


def test_special_ids_and_which_of_them_carry_loss():
    text = TextPreprocessor(
        bos_token_id=300, eos_token_id=301, image_start_id=302, image_end_id=303, audio_start_id=304, template=PLAIN
    )
    recipe = Recipe(text=text)
    assert shown(*sample(jpg=None, txt="x"), recipe) == ["[300]", "[302]", "<jpg>", "[303]", "x!", "[301]!"]
    turns = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    assert shown(*sample(json=turns), recipe) == ["[300]", "[assistant]", "a;!", "[user]b;", "[301]"]
    assert shown(*sample(wav=None), recipe) == ["[300]", "[304]", "<wav>", "[301]"]


def test_loss_tokens_are_the_labels_that_are_left():
    # "hello": 5 bytes, the first token of a sample never carries loss.
    assert measure(*sample(txt="hello"), RECIPE).loss_tokens == 4
    # 56 x 56 at patch 14, merged 2 x 2: 4 tokens before the text, so all its 5 bytes carry loss.
    measured = measure(*sample(jpg=None, txt="hello"), RECIPE)
    assert (measured.llm_tokens, measured.loss_tokens) == (4 + 5, 5)
    # "[user]hi;[assistant]" without loss, "ok;" with.
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]
    assert measure(*sample(json=turns), RECIPE).loss_tokens == len("ok;")


def test_text_is_tokenized_in_stretches_of_equal_loss():
    seen = []

    def tokenizer(text: str) -> list[int]:
        seen.append(text)
        return [7]

    recipe = Recipe(text=TextPreprocessor(tokenizer, id="spy", template=PLAIN))
    turns = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant")]
    composed(*sample(json=turns), recipe)
    assert seen == ["[system]s;[user]u;[assistant]", "a;"]


def test_a_bad_member_that_is_not_used_does_no_harm():
    recipe = Recipe(image=None)
    members = [Member("jpg", recipe.kind_of("jpg", IMAGE), (0, 0), error="not an image"), Member("txt", TEXT)]
    assert measure(members, {1: b"hello"}, recipe).llm_tokens == 5


def assert_decodes_as_measured(members: list[Member], payloads: dict[int, bytes], recipe: Recipe) -> None:
    texts = {index: payloads[index] for index in text_members(members, recipe)}
    measured = measure(members, texts, recipe)
    parts = decode_sample(members, payloads, [part.size for part in measured.parts], recipe)
    media = iter(measured.parts)
    llm_tokens = loss_tokens = 0
    for part in parts:
        if isinstance(part, TextPart):
            llm_tokens += len(part.token_ids)
            loss_tokens += int(part.loss.sum())
            continue
        expected = next(media)
        size = expected.size
        llm_tokens += size.tokens
        assert part.modality == expected.modality
        if part.modality == "image":
            assert part.grid_hw == size.extent
            assert len(part.patches) == size.positions == size.tokens * recipe.image.merge**2
        else:
            assert len(part.features) == size.rows == size.extent[1] == size.positions * recipe.audio.conv_stride
            assert np.isfinite(part.features).all()
    assert (llm_tokens, loss_tokens) == (measured.llm_tokens, measured.loss_tokens)


FOLDERS = [
    "images/exif-orientation-examples",
    "images/pillow",
    "images/raccoon",
    "images/scikit-image",
    "multimodal",
    "speech",
]


@pytest.mark.parametrize("folder", FOLDERS)
def test_costs_from_headers_equal_what_decoding_yields(fixtures_dir: Path, folder: str):
    """Every real image and clip that has a header decodes to exactly the size it says, or is damaged."""
    recipe = Recipe(image=ImagePreprocessor(max_tokens=64), text=RECIPE.text)  # small: resizing is not what is tested
    decoded, damaged = 0, []
    for path in sorted((fixtures_dir / folder).rglob("*")):
        kind, _ = classify(path.name.lower())
        if not path.is_file() or kind not in (IMAGE, AUDIO):
            continue
        data = path.read_bytes()
        try:
            header = read_header(BUILTINS[KINDS[kind]], len(data), lambda size, data=data: data[:size], recipe.limits)
        except DecodeError:
            continue
        field = path.suffix[1:].lower()
        members = [Member(field, kind, header, len(data)), Member("txt", TEXT)]
        try:
            assert_decodes_as_measured(members, {0: data, 1: path.name.encode()}, recipe)
            decoded += 1
        except FieldError as error:
            assert error.field == field
            damaged.append(f"{path.name}: {error.reason}")
    assert decoded
    assert all("damaged" in line for line in damaged), damaged
    assert len(damaged) <= 5  # of images/pillow, none of which Pillow itself can load


MARKS = ["<image_1>", "<Image 2>", "<|video|>", "<bbox_1>", "<loc_0123>", "<crop_1>"]
NEXT_TO_MEDIA = ["<bbox>", "<ref-object>", "<__dj__image>", "</img>", "<im_patch>"]
WORDS = [
    "(image 1)",
    "</object>",
    "<p>",
    "a[image1]",
    "[image](u)",
    "<Imagine>",
    "[Figure 1]",
    "[crop]",
    "<|im_start|>",
]


@pytest.mark.parametrize("mark", [*MARKS, *NEXT_TO_MEDIA, *WORDS])
def test_a_mark_of_any_tool_that_is_left_in_a_text_makes_its_sample_bad(mark):
    ask = [{"role": "user", "content": f"see {mark} here"}, {"role": "assistant", "content": f"a {mark}"}]
    for fields in ({"txt": f"see {mark} here"}, {"json": ask}, {"json": {"text": mark}}):
        for media, marks in (({"jpg": None}, MARKS + NEXT_TO_MEDIA), ({}, MARKS)):
            given = sample(**fields, **media)
            if mark in marks:
                with pytest.raises(FieldError, match="is no placeholder here"):
                    composed(*given)
            else:
                composed(*given)
            assert composed(*given, Recipe(text=TextPreprocessor(template=PLAIN, marks="keep")))


def test_texts_of_other_subjects_have_no_marks(fixtures_dir):
    for name in ("email", "idlelib", "xml", "html"):
        for path in (Path(email.__file__).parents[1] / name).rglob("*.[pht]*"):
            check_no_marks(path.read_text(errors="replace"))
    for path in (fixtures_dir / "text").rglob("*.json*"):
        check_no_marks(path.read_text())


def test_llava_records():
    record = {
        "id": "7",
        "image": "coco/train/7.jpg",
        "conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}],
    }
    assert shown(*sample(jpg=None, json=record)) == ["[user]", "<jpg>", "\nWhat?;[assistant]", "A cat.;!"]
    with pytest.raises(FieldError) as caught:
        composed(*sample(json=record), RECIPE)
    assert caught.value.field == "image"
    assert "names 1 ('coco/train/7.jpg'), the sample holds none" in caught.value.reason
