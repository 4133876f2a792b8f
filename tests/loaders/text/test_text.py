"""Text to token ids: bytes by default, any tokenizer, and clear errors for what is not text or not ids."""

from __future__ import annotations

import threading
import time
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchdata.loaders.errors import DecodeError, StorageError
from orchdata.loaders.recipe import TextPreprocessor
from orchdata.loaders.text.preprocessor import decode_utf8


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
