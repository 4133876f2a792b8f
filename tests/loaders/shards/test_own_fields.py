"""Values of a user's container as fields: their names, kinds and bytes, or one clear error."""

from __future__ import annotations

import gzip
from typing import Any

import numpy as np
import pytest
from shard_factory import jpeg

from orchdata.loaders.errors import DecodeError, FieldError
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.builtin import KINDS, OTHER
from orchdata.loaders.shards.own.opened import cells_of

JPEG = jpeg(8, 8)
TURNS = [{"role": "user", "content": "hello"}]


def read(value: Any, *, all_values: bool = False, **names: str) -> dict[str, tuple[str, Any]]:
    """Field -> (kind, bytes)."""
    found = {}
    for cell in cells_of(value, names, Limits(), all_values=all_values):
        found[cell.field] = ("other" if cell.kind == OTHER else KINDS[cell.kind], cell.value)
    return found


def test_what_each_value_becomes() -> None:
    assert read({"jpg": b"x"}) == {"jpg": ("image", b"x")}  # the name says it
    assert read({"cover": JPEG}) == {"cover": ("image", JPEG)}  # its first bytes do
    assert read({"images": [JPEG, bytearray(JPEG)]}) == {"images.0": ("image", JPEG), "images.1": ("image", JPEG)}
    assert read({"caption": "ein Käse"}) == {"caption": ("text", "ein Käse".encode())}
    assert read({"txt.gz": gzip.compress(b"words")}) == {"txt.gz": ("text", b"words")}
    assert read({"messages": TURNS})["messages"][0] == "text"
    assert read({"json": {"text": "a"}}) == {"json": ("text", b'{"text": "a"}')}
    assert read({"score": np.float32(0.5), "id": 7, "boxes": [[1, 2]], "none": None, "nan": float("nan")}) == {
        "score": ("other", b"0.5"),
        "id": ("other", b"7"),
        "boxes": ("other", b"[[1, 2]]"),
    }


def test_a_function_of_the_users_gets_all_values() -> None:
    assert read({"score": 1, "none": None, "qa": {"question": "a"}}, all_values=True) == {
        "score.words": ("text", b"1"),
        "none = null": ("text", b""),
        "qa.words": ("text", b'{"question": "a"}'),
    }


def test_lists_under_names_of_texts_and_paths_are_no_text_of_the_sample() -> None:
    captions, paths = ["a", "b"], ["a.jpg"]
    assert read({"caption": captions, "images": paths}) == {
        "caption.words": ("text", b'["a", "b"]'),  # an error if the sample has no other text
        "images.words": ("text", b'["a.jpg"]'),  # an error if the sample has other images
    }
    assert read({"meta.json": captions}) == {"meta.json": ("text", b'["a", "b"]')}


def test_a_value_of_another_type_under_a_name_that_is_read_is_judged() -> None:
    assert read({"text": 5, "audio": {"array": [0.1]}, "img": 5}) == {
        "text.words": ("text", b"5"),
        "audio.words": ("text", b'{"array": [0.1]}'),
        "img": ("other", b"5"),
    }
    with pytest.raises(FieldError, match="NaN, and the name says text or media"):
        read({"text": float("nan")})


def test_renamed_fields_keep_the_kind_of_their_suffix() -> None:
    assert read({"txt": b"words"}, txt="note") == {"note": ("text", b"words")}
    assert read({"blob": b"x"}, blob="jpg") == {"jpg": ("image", b"x")}
    with pytest.raises(DecodeError, match="two fields with the name 'b'"):
        read({"a": b"x", "b": b"y"}, a="b")


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (None, "returned a NoneType: return a dict"),
        ([("jpg", b"x")], "returned a list: return a dict"),
        ({"": b"x"}, "names are strings that are not empty"),
        ({"__key__": "a"}, "a field '__key__': names are strings"),
        ({"x": np.zeros(3)}, "a ndarray cannot be a field .* as numpy.save writes them"),
        ({"x": {1, 2}}, "a set cannot be a field"),
        ({"x": {"y": b"z"}}, "a dict cannot be a field .*bytes is no JSON"),
        ({"jpg": (0, 5)}, "a tuple, and the name says media: return bytes"),
        ({"txt.gz": b"no gzip"}, "damaged gzip"),
        ({str(n): "x" for n in range(Limits().sample_parts + 1)}, "above Limits.sample_parts"),
    ],
)
def test_other_values_are_one_error(sample: Any, message: str) -> None:
    with pytest.raises((DecodeError, FieldError), match=message):
        read(sample)
