"""`docs/errors.md` has the words of each refusal of the first hour, and each exception; calls raise them as written."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from first_hour import EXCEPTIONS, REFUSALS, write_data

import orchdata as od

PAGE = Path(__file__).resolve().parents[1] / "docs" / "errors.md"
SECTIONS = dict(re.findall(r"^### `(.*?)`\n\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_has_these_and_no_others() -> None:
    assert len(REFUSALS) >= 20
    assert list(SECTIONS) == [*REFUSALS, *(f"od.{name}" for name in EXCEPTIONS)]
    public = {name for name in od.__all__ if _is_exception(getattr(od, name, None))}
    assert public == set(EXCEPTIONS)


def _is_exception(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


def test_each_section_says_what_it_means_and_what_to_do() -> None:
    for heading, section in SECTIONS.items():
        meaning, _, remedy = section.partition("\n\nWhat to do: ")
        assert len(meaning.split()) > 3 and len(remedy.split()) > 3, heading


@pytest.mark.parametrize(("words", "call"), REFUSALS.items(), ids=list(REFUSALS))
def test_a_refusal_begins_with_the_words_of_its_heading(folder: Path, words: str, call: Callable[[], Any]) -> None:
    kinds = (ValueError, TypeError, AttributeError, OSError, RuntimeError, UserWarning, od.StorageError)
    with pytest.raises(kinds) as raised:
        call()
    assert str(raised.value).replace(f"{folder}/", "").startswith(words)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("name", "words", "call"), [(name, *each) for name, each in EXCEPTIONS.items()])
def test_an_exception_has_the_words_of_its_section(name: str, words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(getattr(od, name)) as raised:
        call()
    assert words in str(raised.value)
    assert words in SECTIONS[f"od.{name}"]
