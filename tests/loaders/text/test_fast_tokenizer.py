"""Fast tokenizers are values by their content, and templates by their text: fingerprints follow both."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from chat_templates import CHATML, LLAMA3, hf_tokenizer, trained

import orchdata as od
from orchdata.loaders.errors import DecodeError
from orchdata.loaders.recipe import Recipe

tokenizers = pytest.importorskip("tokenizers")


def test_a_fast_tokenizer_needs_no_id_and_pickles():
    pre = od.TextPreprocessor(trained())
    assert pre.whole and pre.encode("a cat").tolist() == trained().encode("a cat", add_special_tokens=False).ids
    other = pickle.loads(pickle.dumps(pre))
    assert other == pre and other.describe() == pre.describe()
    assert other.encode("a cat").tolist() == pre.encode("a cat").tolist()
    assert replace(pre, id="mine") == pre


def test_the_fingerprint_follows_the_content():
    changed = tokenizers.Tokenizer.from_str(trained().to_str())
    changed.add_tokens(["new"])
    padded = tokenizers.Tokenizer.from_str(trained().to_str())
    padded.enable_truncation(2)
    padded.enable_padding()
    base = Recipe(text=od.TextPreprocessor(trained()))
    assert Recipe(text=od.TextPreprocessor(changed)).fingerprint() != base.fingerprint()
    assert Recipe(text=od.TextPreprocessor(padded)).fingerprint() == base.fingerprint()  # of its calls, not of itself
    assert len(od.TextPreprocessor(padded).encode("a cat on the mat")) > 2
    fewer = Recipe(text=od.TextPreprocessor(trained(), add_special_tokens=False))
    assert fewer.fingerprint() != base.fingerprint()


def test_the_fingerprint_follows_the_template_and_its_options():
    made = [
        od.ChatTemplate(),
        od.ChatTemplate.from_jinja(CHATML),
        od.ChatTemplate.from_jinja(CHATML + " "),
        od.ChatTemplate.from_jinja(CHATML, bos_token="<s>"),
        od.ChatTemplate.from_jinja(CHATML, enable_thinking=False),
        od.ChatTemplate.from_jinja(CHATML, ignore_keys=("channel",)),
        od.ChatTemplate.from_jinja(CHATML, roles=("critic",)),
        od.ChatTemplate.from_jinja(CHATML, add_special_tokens=True),
        od.ChatTemplate.from_jinja(CHATML + "{{ strftime_now('%Y') }}", date="2024-07-26"),
        od.ChatTemplate.from_jinja(CHATML + "{{ strftime_now('%Y') }}", date="2025-07-26"),
        od.ChatTemplate.from_jinja({"default": CHATML, "tool_use": LLAMA3}),
    ]
    recipes = [Recipe(text=od.TextPreprocessor(template=template)) for template in made]
    assert len({recipe.fingerprint() for recipe in recipes}) == len(recipes)
    for recipe in recipes:
        other = pickle.loads(pickle.dumps(recipe))
        assert other == recipe and other.fingerprint() == recipe.fingerprint()


def test_a_tokenizer_of_transformers_is_taken_as_it_is():
    pytest.importorskip("transformers")
    tokenizer = hf_tokenizer(bos="<s>", adds_bos=True)
    pre = od.TextPreprocessor(tokenizer)
    text = "A cat \U0001f600 on\n\nthe mat.<|im_end|>"
    expected = tokenizer(text, return_offsets_mapping=True)
    (encoded,) = pre.encode_all([(text, True)])
    assert encoded.ids.tolist() == expected["input_ids"] and encoded.ids.dtype == np.int32
    assert list(zip(encoded.starts.tolist(), encoded.ends.tolist(), strict=True)) == expected["offset_mapping"]
    assert pre.id != od.TextPreprocessor(hf_tokenizer(bos="<bos>")).id
    (failed,) = pre.encode_all([("\ud800", True)])
    assert isinstance(failed, DecodeError) and "failed" in str(failed)


def test_a_tokenizer_that_tells_no_offsets_is_refused_with_the_way_out():
    class Slow:
        special_tokens_map: dict[str, str] = {}

        def apply_chat_template(self) -> None: ...
        def __call__(self, text: str) -> list[int]:
            return []

    with pytest.raises(ValueError, match=r"Slow has no offsets.*wrap it, as in TextPreprocessor\(lambda text"):
        od.TextPreprocessor(Slow())


def test_a_tokenizer_that_differs_from_its_backend_is_an_error():
    pytest.importorskip("transformers")
    tokenizer = hf_tokenizer()

    class Other(type(tokenizer)):
        def __call__(self, *args, **kwargs):
            return {"input_ids": [1, 2, 3]}

    tokenizer.__class__ = Other
    with pytest.raises(ValueError, match="gives other ids than its backend tokenizer"):
        od.TextPreprocessor(tokenizer)


def test_a_tokenizer_that_splits_special_tokens_is_refused():
    bare = tokenizers.Tokenizer.from_str(trained().to_str())
    bare.encode_special_tokens = True
    whole = hf_tokenizer()
    whole.split_special_tokens = True
    for given in (bare, whole):
        with pytest.raises(ValueError, match="splits special tokens"):
            od.TextPreprocessor(given)
    whole.split_special_tokens = False
    assert od.TextPreprocessor(whole).encode("<|im_end|>").tolist() == whole("<|im_end|>")["input_ids"]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"source": "{% for %}"}, ValueError, "no chat template"),
        ({"source": object()}, ValueError, "no chat template in object: it has none"),
        ({"source": {"rag": "a"}}, ValueError, "none is called 'default' of"),
        ({"source": "a", "bos_token": object()}, TypeError, "must be JSON values"),
        ({"source": "a", "bos_token": (1,)}, TypeError, "must be JSON values"),
        ({"source": "a", "ignore_keys": "channel"}, ValueError, "must be a tuple, got the string 'channel'"),
        ({"source": "a", "roles": "critic"}, ValueError, "must be a tuple, got the string 'critic'"),
        ({"source": "a", "tools": []}, ValueError, "has 'tools' from each sample"),
        ({"source": "{{ strftime_now('%Y') }}", "date": "yesterday"}, ValueError, "Invalid isoformat"),
    ],
)
def test_what_is_no_template(given, error, message):
    with pytest.raises(error, match=message):
        od.ChatTemplate.from_jinja(**given)
