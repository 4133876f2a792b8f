"""Recipes: sizes from headers, validation, and a fingerprint that is the same everywhere."""

from __future__ import annotations

import importlib.util
import json
import math
import textwrap
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from orchdata.loaders.functions import UserFunction
from orchdata.loaders.limits import Limits
from orchdata.loaders.recipe import (
    AudioPreprocessor,
    ChatTemplate,
    ImagePreprocessor,
    Recipe,
    TextPreprocessor,
    image_grid,
)


def qwen_smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The rule as Qwen2-VL publishes it, in floats."""
    rows, cols = round(height / factor) * factor, round(width / factor) * factor
    if rows * cols > max_pixels:
        beta = math.sqrt(height * width / max_pixels)
        rows, cols = math.floor(height / beta / factor) * factor, math.floor(width / beta / factor) * factor
    elif rows * cols < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        rows, cols = math.ceil(height * beta / factor) * factor, math.ceil(width * beta / factor) * factor
    return rows, cols


sides = st.integers(1, 100_000)
budgets = st.tuples(st.integers(1, 300), st.integers(0, 5000)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(width=sides, height=sides, budget=budgets, patch=st.integers(1, 32), merge=st.integers(1, 4))
def test_the_token_budget_always_holds(width, height, budget, patch, merge):
    low, high = budget
    pre = ImagePreprocessor(patch_size=patch, merge=merge, min_tokens=low, max_tokens=high)
    grid_h, grid_w = image_grid(width, height, pre)
    assert grid_h % merge == 0
    assert grid_w % merge == 0
    assert low <= pre.num_tokens((grid_h, grid_w)) <= high


@given(width=st.integers(28, 6000), height=st.integers(28, 6000))
def test_ordinary_images_get_the_size_that_qwen_gives_them(width, height):
    assume(max(width, height) < 100 * min(width, height))
    pre = ImagePreprocessor(min_tokens=4, max_tokens=1280)
    rows, cols = qwen_smart_resize(height, width, 28, 4 * 784, 1280 * 784)
    assume(rows * cols > 0)
    # Floats may fall on the wrong side where a scaled side is exactly whole tokens: 38 x 38 grows to 56.00001.
    for budget in (4, 1280):
        assume(math.isqrt(budget * height * width) ** 2 != budget * height * width)
    if 4 <= rows * cols // 784 <= 1280:
        assert image_grid(width, height, pre) == (rows // 14, cols // 14)


@given(frames=st.integers(1, 10**7), rate=st.integers(1, 400_000))
def test_audio_counts_are_whole_tokens(frames, rate):
    pre = AudioPreprocessor()
    num_samples = pre.num_samples(frames, rate)
    assert num_samples == math.ceil(frames * 16_000 / rate) or rate > 10**5  # floats are exact enough below
    assert pre.num_tokens(num_samples) == max(1, -(-num_samples * 25 // 16_000))
    assert pre.mel_frames(num_samples) == pre.num_tokens(num_samples) * 4  # 16,000 / (25 * 160)
    assert pre.mel_frames(num_samples) * pre.hop_length >= num_samples


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ImagePreprocessor(patch_size=0), "patch_size must be an int of at least 1, got 0"),
        (lambda: ImagePreprocessor(min_tokens=9, max_tokens=8), "max_tokens .* at least min_tokens=9, got 8"),
        (lambda: ImagePreprocessor(dtype="float16"), "dtype must be one of .* got 'float16'"),
        (lambda: ImagePreprocessor(std=(1.0, 0.0, 1.0)), "std must be above 0"),
        (lambda: AudioPreprocessor(hop_length=150), "whole number of mel frames"),
        (lambda: TextPreprocessor(lambda text: [1]), "needs an id"),
        (lambda: TextPreprocessor(fields="txt"), "fields must be a tuple"),
    ],
)
def test_what_cannot_be_is_refused_with_value_and_limit(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    "other",
    [
        Recipe(image=None),
        Recipe(image=ImagePreprocessor(resizer="pillow")),
        Recipe(image=ImagePreprocessor(resample="bilinear")),
        Recipe(image=ImagePreprocessor(draft=True)),
        Recipe(image=ImagePreprocessor(alpha="drop")),
        Recipe(image=ImagePreprocessor(rule="qwen2_vl")),
        Recipe(image=ImagePreprocessor(temporal_patch_size=2)),
        Recipe(image=ImagePreprocessor(max_tokens=4095)),
        Recipe(audio=AudioPreprocessor(num_mels=80)),
        Recipe(text=TextPreprocessor(list, id="a")),
        Recipe(text=TextPreprocessor(list, id="b")),
        Recipe(text=TextPreprocessor(template=ChatTemplate(suffix=""))),
        Recipe(text=TextPreprocessor(eos_token_id=258)),
        Recipe(limits=Limits(image_pixels=5)),
    ],
)
def test_every_difference_shows_in_the_fingerprint_and_the_description(other):
    base = Recipe()
    assert other.fingerprint() != base.fingerprint()
    assert json.loads(json.dumps(other.describe())) == other.describe() != base.describe()


# Functions of the user's: ids from source text, ids that must be given, and errors that name function and line.


SCALE = 3


def whole(record: dict[str, Any], most: int = 5) -> Any:
    import re

    words = [re.sub(r"\s", " ", str(word)) for word in record["words"]]
    return {"text": json.dumps(sorted(words)[:most]), "root": math.sqrt(4), "kind": str(np.float32)}


def with_global(record: dict[str, Any]) -> Any:
    return record["x"] * SCALE


def calls_other(record: dict[str, Any]) -> Any:
    return with_global(record)


def with_default(record: dict[str, Any], kinds: Any = np.arange(2)) -> Any:  # noqa: B008
    return kinds


def of_own_module(record: dict[str, Any]) -> Any:
    import shard_factory

    return shard_factory


class Callable:
    def __call__(self, record: dict[str, Any]) -> Any:
        return record

    def method(self, record: dict[str, Any]) -> Any:
        return record


def function_of(text: str, folder: Path, name: str = "made") -> Any:
    """The function `f` of a module with this text."""
    path = folder / f"{name}.py"
    path.write_text(textwrap.dedent(text))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.f


def identity(function: Any, given: str | None = None) -> str:
    return UserFunction.of("Recipe.record", function, given).id


def test_function_that_uses_builtins_and_packages_has_an_id_of_its_source() -> None:
    assert identity(whole) == identity(whole)
    assert identity(whole).startswith("source:")
    assert identity(whole, "v1") == "v1"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (with_global, "it uses SCALE, which is defined outside of it"),
        (calls_other, "it uses with_global, which is defined outside of it"),
        (with_default, "default that is no string or number"),
        (of_own_module, "it imports shard_factory, which is code of your own"),
        (lambda record: record, "a lambda has no source text of its own"),
        (partial(whole, most=2), "it is a partial"),
        (Callable(), "it is a Callable"),
    ],
)
def test_function_that_its_source_does_not_describe_needs_an_id(function: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        identity(function)
    assert 'record_id="..."' in str(caught.value)
    assert identity(function, "mine") == "mine"


def test_id_follows_the_source_and_the_modules_that_it_names(tmp_path: Path) -> None:
    text = "import {} as m\n\ndef f(record):\n    return m.dumps(record)\n"
    first = function_of(text.format("json"), tmp_path, "a")
    assert identity(first) == identity(function_of(text.format("json"), tmp_path, "b"))
    assert identity(first) != identity(function_of(text.format("pickle"), tmp_path, "c"))
    changed = text.format("json").replace("dumps(record)", "dumps([record])")
    assert identity(first) != identity(function_of(changed, tmp_path, "d"))
