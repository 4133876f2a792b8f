"""Text to token ids: bytes by default, any tokenizer, and clear errors for what is not text or not ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchdata.loaders.decode_error import DecodeError
from orchdata.loaders.recipe import TextPreprocessor
from orchdata.loaders.text import decode_utf8


@given(st.text())
def test_bytes_are_the_default_ids(text):
    ids = TextPreprocessor().encode(text)
    assert ids.dtype == np.int32
    assert bytes(ids.astype(np.uint8)) == text.encode()


def test_a_trained_tokenizer_is_any_callable():
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    bpe.train_from_iterator(
        ["to be or not to be"] * 3, tokenizers.trainers.BpeTrainer(special_tokens=["?"], show_progress=False)
    )
    pre = TextPreprocessor(lambda text: bpe.encode(text).ids, id="tiny-bpe")
    assert pre.encode("to be").tolist() == bpe.encode("to be").ids
    with pytest.raises(DecodeError, match=r"'whole' returned Encoding .*tokenizer\.encode\(text\)\.ids"):
        TextPreprocessor(bpe.encode, id="whole").encode("to be")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, -2], "returned id -2"),
        ([1, 2**31], "returned id 2147483648"),
        ([1, 2**70], "not a list of ints"),
        ([1.5], "not a list of ints"),
        (["a"], "not a list of ints"),
        ([[1, 2]], "not a list of ints"),
        ([[1], [2, 3]], "not a list of ints"),
        ([True], "not a list of ints"),
        (None, "returned NoneType None"),
        (7, "returned int 7"),
    ],
)
def test_what_a_tokenizer_may_not_return(ids, message):
    with pytest.raises(DecodeError, match=rf"tokenizer 'odd' {message}|tokenizer 'odd'.*{message}"):
        TextPreprocessor(lambda text: ids, id="odd").encode("x")


@pytest.mark.parametrize("ids", [[], (), np.array([3, 4], np.uint16), (5, 6)])
def test_any_sequence_of_ids_is_taken(ids):
    assert TextPreprocessor(lambda text: ids, id="any").encode("x").tolist() == list(ids)


def test_a_tokenizer_that_fails_is_named_with_its_error():
    def fails(text: str) -> list[int]:
        raise KeyError(text)

    with pytest.raises(DecodeError, match="tokenizer 'mine' failed: KeyError"):
        TextPreprocessor(fails, id="mine").encode("x")


def test_payloads_must_be_utf8():
    assert decode_utf8(b"\xef\xbb\xbfna\xc3\xafve") == "naïve"
    assert decode_utf8(memoryview(b"x")) == "x"
    with pytest.raises(DecodeError, match="not valid UTF-8: invalid continuation byte at byte 1"):
        decode_utf8(b"a\xe9 b")


def test_a_lone_surrogate_is_an_error():
    with pytest.raises(DecodeError, match="not valid Unicode: surrogates not allowed at character 1"):
        TextPreprocessor().encode("a\ud800")
