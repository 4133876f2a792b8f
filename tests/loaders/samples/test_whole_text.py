"""All text of a sample tokenized at once: the ids of the text with every part written out, without its cost."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace

import pytest
from chat_templates import QWEN2_VL, hf_tokenizer, trained, untagged
from chats import text as some_text

import orchdata as od
from orchdata.loaders.errors import FieldError
from orchdata.loaders.modalities.builtin import TEXT
from orchdata.loaders.modalities.modality import PartSize
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.compose import composition_of, text_members
from orchdata.loaders.samples.members import Member
from orchdata.loaders.samples.spans import MediaSlot, Span, TextSpan

pytest.importorskip("tokenizers")
PAD = "<|image_pad|>"
ASK = {"role": "user", "content": "a <image>\nb<image>"}
ANSWER = {"role": "assistant", "content": "A cat."}


def token(text: str) -> int:
    return int(trained().token_to_id(text))


@dataclass(frozen=True, kw_only=True)
class Tiles(od.Modality):
    """Parts of so many tiles of two tokens as a file has bytes, with text around each."""

    fields = ("tiles",)
    slot = od.Slot(PAD, 7)

    def arrays(self):
        return {"tiles": od.ArraySpec((1,))}

    def count(self, data, limits):
        return od.PartSize(len(data), 2 * len(data))

    def expand(self, size):
        rows = [piece for row in range(size.positions) for piece in (f"<row_{row % 2 + 1}>", 2)]
        return ("<|vision_start|>", *rows, "\n<|vision_end|>")


@dataclass(frozen=True, kw_only=True)
class Marked(Tiles):
    slot = od.Slot(PAD, token(PAD))


@dataclass(frozen=True, kw_only=True)
class Between(od.Modality):
    """Parts of three tokens, between ids of their own."""

    fields = ("clip",)
    slot = od.Slot("<|AUDIO|>", token("<|AUDIO|>"), token("<|vision_start|>"), token("<|vision_end|>"))

    def arrays(self):
        return {"clip": od.ArraySpec((1,))}

    def count(self, data, limits):
        return od.PartSize(3, 3)


@dataclass(frozen=True, kw_only=True)
class WithoutTokens(Between):
    """Parts without tokens."""

    fields = ("sound",)
    slot = od.Slot("<sound>", 0)
    places = False

    def count(self, data, limits):
        return od.PartSize(3, 0)


def recipe_of(template: object = None, tokenizer: object = None, **options: object) -> Recipe:
    given = {"template": template} if template is not None else {}
    text = od.TextPreprocessor(tokenizer or trained(), **given, **options)
    return Recipe(image=Marked(), clip=Between(), sound=WithoutTokens(), audio=None, text=text)


SIZES = {"image": PartSize(2, 4), "clip": PartSize(3, 3), "sound": PartSize(3, 0)}


def composed(recipe: Recipe, asked: list[str] | None = None, **fields: object) -> list[Span]:
    members, texts = [], {}
    for name, value in fields.items():
        field = ".".join(reversed(name.split("_")))
        if value is not None:
            texts[len(members)] = (value if isinstance(value, str) else json.dumps(value)).encode()
        members.append(Member(field, TEXT if value is not None else recipe.kind_of(field, -1), size=9))

    def size_of(modality: str, member: int) -> PartSize:
        if asked is not None:
            asked.append(members[member].field)
        return SIZES[modality]

    wanted = {index: texts[index] for index in text_members(members, recipe)}
    return composition_of(members, wanted, recipe).spans(recipe, size_of)


def ids_of(recipe: Recipe, spans: list[Span]) -> list[int]:
    ids: list[int] = []
    for span in spans:
        known = isinstance(span, TextSpan)
        ids += span.token_ids.tolist() if known else [recipe.slots[span.modality].token_id] * span.tokens
    return ids


def learned(spans: list[Span]) -> str:
    ids = [token for span in spans if isinstance(span, TextSpan) and span.loss for token in span.token_ids.tolist()]
    return str(trained().decode(ids, skip_special_tokens=False))


def written_out(text: str) -> str:
    tile = f"<|vision_start|><row_1>{PAD}{PAD}<row_2>{PAD}{PAD}\n<|vision_end|>"
    return text.replace(PAD, tile).replace("<|AUDIO|>", "<|vision_start|><|AUDIO|><|AUDIO|><|AUDIO|><|vision_end|>")


def test_ids_are_those_of_the_text_with_every_part_written_out():
    pytest.importorskip("transformers")
    tokenizer = hf_tokenizer(untagged(QWEN2_VL))
    recipe = recipe_of(od.ChatTemplate.from_jinja(tokenizer), tokenizer)
    for seed in range(40):
        draw = random.Random(seed)
        images, clips = draw.randint(0, 3), draw.randint(0, 2)
        pieces = [some_text(draw) for _ in range(4)] + ["<image>"] * images + ["<clip>"] * clips
        draw.shuffle(pieces)
        chat = [{"role": "user", "content": "".join(pieces)}, ANSWER]
        spans = composed(
            recipe,
            json=chat,
            **{f"image_{n}": None for n in range(images)},
            **{f"clip_{n}": None for n in range(clips)},
        )
        said = {"<image>": f"<|vision_start|>{PAD}<|vision_end|>", "<clip>": "<|AUDIO|>"}
        user = "".join(said.get(piece, piece) for piece in pieces)
        text = tokenizer.apply_chat_template([{"role": "user", "content": user}, ANSWER], tokenize=False)
        assert ids_of(recipe, spans) == tokenizer(written_out(text))["input_ids"]
        assert learned(spans) == "A cat.<|im_end|>"


def test_a_part_is_asked_once_and_its_pieces_count_on():
    recipe, asked = recipe_of(), []
    spans = composed(recipe, asked, txt="x<|AUDIO|>y<image>z", image=None, clip=None)
    assert asked == ["clip", "image"]
    assert [span for span in spans if isinstance(span, MediaSlot)] == [
        MediaSlot("clip", 2, 0, 3),
        MediaSlot("image", 1, 0, 2),
        MediaSlot("image", 1, 2, 2),
    ]
    assert learned(spans) == "xyz"  # nothing that stands around media


def test_plain_text_has_media_first_and_the_tokenizers_own_tokens():
    pytest.importorskip("transformers")
    tokenizer = hf_tokenizer(bos="<s>", adds_bos=True)
    recipe = recipe_of(None, tokenizer)
    spans = composed(recipe, image=None, txt="A cat.")
    assert ids_of(recipe, spans) == tokenizer(written_out(f"{PAD}A cat."))["input_ids"]
    assert ids_of(recipe, composed(recipe, txt="A cat.")) == tokenizer("A cat.")["input_ids"]
    assert composed(recipe, txt="A cat.")[0].num_loss_tokens == len(tokenizer("A cat.")["input_ids"]) - 1
    bare = recipe_of(None, tokenizer, add_special_tokens=False)
    assert ids_of(bare, composed(bare, txt="A cat.")) == tokenizer("A cat.", add_special_tokens=False)["input_ids"]


def test_chats_have_special_tokens_as_transformers_adds_them():
    pytest.importorskip("transformers")
    tokenizer = hf_tokenizer("{{ messages[0].content }}: {{ messages[1].content }}", bos="<s>", adds_bos=True)
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    begun = [{"role": "user", "content": "<s>q"}, chat[1]]
    bos = tokenizer.bos_token_id
    for added in (None, False, True):
        recipe = recipe_of(od.ChatTemplate.from_jinja(tokenizer, add_special_tokens=added), tokenizer)
        assert (ids_of(recipe, composed(recipe, json=chat))[0] == bos) == (added is True)
        assert ids_of(recipe, composed(recipe, json=begun)).count(bos) == 1  # it begins with bos already

    class Processor:
        pass

    processor = Processor()
    processor.tokenizer = tokenizer
    assert od.ChatTemplate.from_jinja(processor) == od.ChatTemplate.from_jinja(tokenizer, add_special_tokens=True)


def test_parts_that_have_no_place_need_no_mark():
    recipe = recipe_of()
    spans = composed(recipe, sound=None, txt="A cat.")
    assert spans[0] == MediaSlot("sound", 0, 0, 0)
    assert spans[1].leads and ids_of(recipe, spans) == trained().encode("A cat.").ids
    chat = [{"role": "user", "content": [{"type": "sound"}, {"type": "text", "text": "q"}]}, ANSWER]
    rendered = recipe_of(od.ChatTemplate.from_jinja(untagged(QWEN2_VL)))
    spans = composed(rendered, sound=None, json=chat)
    assert [span for span in spans if isinstance(span, MediaSlot)] == [MediaSlot("sound", 0, 0, 0)]
    stretches = replace(rendered, text=od.TextPreprocessor(template=rendered.text.template))
    assert MediaSlot("sound", 0, 0, 0) in composed(stretches, sound=None, json=chat)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json": [{"role": "user", "content": f"a <image> b {PAD}"}, ANSWER], "image": None}, f"its text holds {PAD}"),
        ({"json": [{"role": "user", "content": f"a {PAD} b"}, ANSWER], "image": None}, f"its text holds {PAD}"),
        ({"json": [ASK, ANSWER], "image": None}, "placeholder 2 of 2 has no image"),
        ({"json": [ASK, {"role": "assistant", "content": "the mark <|AUDIO|>"}]}, "its text holds <|AUDIO|>"),
        ({"txt": "a <image> b <|AUDIO|>", "image": None}, "placeholder 1 of 1 has no clip"),
    ],
)
def test_a_text_that_holds_a_mark_is_refused_and_never_shifts_a_part(fields, message):
    recipe = recipe_of(od.ChatTemplate.from_jinja(untagged(QWEN2_VL)))
    with pytest.raises(FieldError) as caught:
        composed(recipe, **fields)
    assert message in caught.value.reason


def test_a_mark_that_is_no_token_is_refused():
    recipe = replace(recipe_of(), image=Tiles())
    with pytest.raises(FieldError, match="is not the one token 7 of the tokenizer"):
        composed(recipe, image=None, txt="a")
    seven = trained().decode([7])
    assert ids_of(recipe, composed(recipe, txt=seven)) == [7]  # an id of text is no mark where the mark is no token
