"""Text to token ids: bytes by default, any tokenizer, and clear errors for what is not text or not ids."""

from __future__ import annotations

import pickle
import threading
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from chat_templates import CHATML, LLAMA3, hf_tokenizer, trained
from hypothesis import given
from hypothesis import strategies as st

import orchdata as od
from orchdata.loaders.errors import DecodeError, StorageError
from orchdata.loaders.recipe import Recipe, TextPreprocessor
from orchdata.loaders.text import preprocessor as module
from orchdata.loaders.text.preprocessor import FastTokenizer, decode_utf8


@given(st.text())
def test_bytes_are_the_default_ids(text):
    ids = TextPreprocessor().encode(text)
    assert ids.dtype == np.int32
    assert bytes(ids.astype(np.uint8)) == text.encode()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, -2], "returned id -2"),
        ([1, 2**31], "returned id 2147483648"),
        ([1, 2**70], "not a list of ints"),
        ([1.5], "not a list of ints"),
        ([[1, 2]], "not a list of ints"),
        (None, "returned NoneType None"),
    ],
)
def test_what_a_tokenizer_may_not_return(ids, message):
    with pytest.raises(DecodeError, match=rf"tokenizer 'odd' {message}|tokenizer 'odd'.*{message}"):
        TextPreprocessor(lambda text: ids, id="odd").encode("x")


def test_payloads_must_be_utf8():
    assert decode_utf8(b"\xef\xbb\xbfna\xc3\xafve") == "naïve"
    assert decode_utf8(memoryview(b"x")) == "x"
    with pytest.raises(DecodeError, match="not valid UTF-8: invalid continuation byte at byte 1"):
        decode_utf8(b"a\xe9 b")


@pytest.mark.parametrize("error", [MemoryError(), StorageError("vocab.json", "Input/output error", 5)], ids=repr)
def test_an_error_that_says_nothing_about_the_text_passes(error):
    def fails(text: str) -> list[int]:
        raise error

    with pytest.raises(type(error)):
        TextPreprocessor(fails, id="mine").encode("x")


class Shared:
    """A tokenizer with a place of its own to work in, and only one: notes whether two threads were in it at once."""

    def __init__(self) -> None:
        self.inside = threading.Lock()
        self.met = False

    def __call__(self, text: str) -> list[int]:
        if not self.inside.acquire(blocking=False):
            self.met = True
            return []
        time.sleep(0.001)  # lets others come in, where they may
        self.inside.release()
        return [1]

    def encode(self, text: str, flag: bool = False) -> list[int]:
        return self(text)


def in_threads(*preprocessors: TextPreprocessor) -> None:
    together = threading.Barrier(len(preprocessors))

    def work(pre: TextPreprocessor) -> None:
        together.wait()
        for _ in range(20):
            pre.encode("x")

    threads = [threading.Thread(target=work, args=(pre,)) for pre in preprocessors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_tokenizer_is_in_one_thread_at_a_time_whoever_holds_it():
    shared = Shared()
    ways = [shared, shared.encode, partial(shared.encode, flag=True), shared]
    in_threads(*(TextPreprocessor(way, id=f"{number}") for number, way in enumerate(ways)))
    assert not shared.met


def test_a_thread_safe_tokenizer_is_in_several_threads_at_once():
    shared = Shared()
    pre = TextPreprocessor(shared, id="mine", thread_safe=True)
    for _ in range(50):
        in_threads(*[pre] * 4)
        if shared.met:
            break
    assert shared.met


def test_a_tokenizer_may_come_back_to_itself():
    class Recursive:
        def __call__(self, text: str) -> list[int]:
            return [len(text), *TextPreprocessor(self, id="rest").encode(text[1:])] if text else []

    assert TextPreprocessor(Recursive(), id="whole").encode("abc").tolist() == [3, 2, 1]


def test_ids_are_copied_before_the_next_thread_may_overwrite_them():
    ids = np.zeros(3, np.int32)

    def fill(text: str) -> np.ndarray:
        ids[:] = int(text)
        return ids

    pre = TextPreprocessor(fill, id="reuses")
    first, second = pre.encode("1"), pre.encode("2")
    assert first.tolist() == [1, 1, 1] and second.tolist() == [2, 2, 2]


def test_a_lone_surrogate_is_an_error():
    with pytest.raises(DecodeError, match="not valid Unicode: surrogates not allowed at character 1"):
        TextPreprocessor().encode("a\ud800")


# Fast tokenizers are values by their content, and templates by their text: fingerprints follow both.


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
    assert isinstance(failed, DecodeError) and "not valid Unicode" in str(failed)


def test_a_tokenizer_that_differs_from_its_backend_is_an_error():
    pytest.importorskip("transformers")
    tokenizer = hf_tokenizer()

    class Other(type(tokenizer)):
        def __call__(self, *args, **kwargs):
            return {"input_ids": [1, 2, 3]}

    tokenizer.__class__ = Other
    with pytest.raises(ValueError, match="gives other ids than its backend tokenizer"):
        od.TextPreprocessor(tokenizer)


def _tokenizers_of_many_kinds():
    made = {"bytes": trained(), "bytes, added": _added(), "words": tokenizers.Tokenizer(tokenizers.models.WordLevel())}
    words = made["words"]
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.train_from_iterator(
        TEXTS, tokenizers.trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False)
    )
    words.model.unk_token = "<unk>"
    pieces = made["pieces"] = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    pieces.normalizer = tokenizers.normalizers.BertNormalizer()
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    pieces.train_from_iterator(TEXTS, tokenizers.trainers.WordPieceTrainer(special_tokens=special, show_progress=False))
    pieces.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    unigram = made["unigram"] = tokenizers.Tokenizer(tokenizers.models.Unigram())
    unigram.normalizer = tokenizers.normalizers.NFKC()
    unigram.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    trainer = tokenizers.trainers.UnigramTrainer(special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    unigram.train_from_iterator(TEXTS, trainer)
    return made


def _added():
    bpe = tokenizers.Tokenizer.from_str(trained().to_str())
    around = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|> <|im_end|>",
        special_tokens=[(token, bpe.token_to_id(token)) for token in ("<|im_start|>", "<|im_end|>")],
    )
    bpe.post_processor = tokenizers.processors.Sequence([bpe.post_processor, around])
    return bpe


TEXTS = [
    "",
    " ",
    "A cat \U0001f600 on\n\nthe mat.<|im_end|>",
    "<|im_start|><|im_start|>",
    "d\u00e9j\u00e0 vu e\u0301\u200d\ufb01 \u4e2d\u6587 \u0627\u0644\u0639",
    "a\0b\r\n\t\ufeff",
]


def _expected(tokenizer, text, added):
    encoding = tokenizer.encode(text, add_special_tokens=added)
    return encoding.ids, encoding.offsets


def _pairs(encoded):
    assert [array.dtype for array in encoded] == [np.int32, np.int64, np.int64]
    return encoded.ids.tolist(), list(zip(encoded.starts.tolist(), encoded.ends.tolist(), strict=True))


def _random_texts(count):
    rng = np.random.default_rng(0)
    blocks = [(32, 127), (0xA0, 0x250), (0x300, 0x370), (0x600, 0x700), (0x4E00, 0x4F00), (0x1F600, 0x1F650)]
    for _ in range(count):
        drawn = [int(rng.integers(*blocks[rng.integers(len(blocks))])) for _ in range(int(rng.integers(60)))]
        yield "".join(map(chr, drawn))


def test_tokens_are_those_of_a_text_alone(fixtures_dir):
    texts = TEXTS + list(_random_texts(80))
    for path in sorted(fixtures_dir.glob("text/**/*.json*")):
        texts += [line[:5000] for line in path.read_text().splitlines()[::1500]]
    flags = [number % 3 == 0 for number in range(len(texts))]
    for name, tokenizer in _tokenizers_of_many_kinds().items():
        fast = FastTokenizer(tokenizer.to_str())
        batch = fast.encode_batch(texts, add_special_tokens=flags)
        for text, added, encoded in zip(texts, flags, batch, strict=True):
            assert _pairs(encoded) == _expected(tokenizer, text, added), (name, text)
            assert _pairs(fast.encode(text, add_special_tokens=added)) == _pairs(encoded)
            assert fast(text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_a_text_that_fails_in_a_batch_fails_alone(monkeypatch):
    fast = FastTokenizer(trained().to_str())
    monkeypatch.setattr(module, "_BATCH_CHARACTERS", 12)
    texts = ["a cat", "\ud800", "on", "the mat", "\ud800", "a longer text than a batch has"]
    flags = [True, True, False, True, False, False]
    batch = fast.encode_batch(texts, add_special_tokens=flags)
    for text, added, encoded in zip(texts, flags, batch, strict=True):
        if text == "\ud800":
            with pytest.raises(type(encoded), match="must be str"):
                fast.encode(text, add_special_tokens=added)
        else:
            assert _pairs(encoded) == _expected(trained(), text, added)
    assert fast.encode_batch([], add_special_tokens=[]) == []
