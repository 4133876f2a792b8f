"""A user's YAML has limits by count; any content is read, or raises an error that names the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchdata import yaml_file
from orchdata.cli.dataset import read_mixture
from orchdata.loaders.recipe import Recipe
from orchdata.synth import read_description
from orchdata.yaml_file import read_yaml

pytestmark = pytest.mark.usefixtures("no_hang")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "a.yaml"


def test_numbers_and_aliases_are_read(file: Path) -> None:
    file.write_text("a: &a {b: 1e-3, c: 5_000, d: [x, null, true]}\ne: *a\nf: {<<: *a, b: 2}\n")
    inner = {"b": 0.001, "c": 5000, "d": ["x", None, True]}
    assert read_yaml(file) == {"a": inner, "e": inner, "f": {**inner, "b": 2}}


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)
MERGES = "a0: &a0 {x0: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}], x{n}: 1}}\n" for n in range(1, 40))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 30_000, "recursion"),
        (LAUGHS, "more than 50000 values with aliases expanded"),
        (MERGES, "more than 50000 values with aliases expanded"),
        ("a: &a [*a]", "more than 50000 values with aliases expanded"),
        ("a: &a {b: *a}", "more than 50000 values with aliases expanded"),
        ("a: *b", "undefined alias 'b'"),
        ("a: 1\na: 2", "'a' comes twice"),
        ("a: " + "9" * 5_000, "more than 100 digits"),
        ("a: 1" + ":1" * 100_000, "more than 100 digits"),
        ("a: 2001-13-13", "month must be"),
        ("a: !!timestamp b", "NoneType"),
        ("a: !!bool b", "'b'"),
        ("a: !!int b", "invalid literal"),
        ("a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("? [1, 2]\n: 3", "unhashable key"),
        ("a: \ud800".encode("utf-8", "surrogatepass"), "can't decode"),
        ("a: \0", "special characters are not allowed"),
    ],
    ids=lambda value: None if isinstance(value, str) and len(value) < 60 else "long",
)
def test_what_is_beyond_a_bound_is_refused(file: Path, text: str | bytes, words: str) -> None:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=words) as raised:
        read_yaml(file)
    assert str(file) in str(raised.value)
    for read in (read_description, lambda path: read_mixture(path, Recipe())):
        with pytest.raises(ValueError, match="not readable as YAML"):
            read(file)


def test_values_and_bytes_are_counted(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_file, "MOST_VALUES", 9)
    file.write_text(
        "{a: [1, 2, 3], b: {c: 4}}"
    )  # one mapping, two names, a list of 3, a mapping of a name and a number
    with pytest.raises(ValueError, match="more than 9 values"):
        read_yaml(file)
    file.write_text("{a: [" + "1, " * 10 + "], b: [")  # before the end is looked for
    with pytest.raises(ValueError, match="more than 9 values"):
        read_yaml(file)
    file.write_text("{a: [1, 2, 3], b: 4}")
    assert read_yaml(file) == {"a": [1, 2, 3], "b": 4}
    monkeypatch.setattr(yaml_file, "MOST_BYTES", 19)
    with pytest.raises(ValueError, match="has more than 19 bytes"):
        read_yaml(file)


def test_braces_that_stand_for_too_many_paths_are_refused(file: Path) -> None:
    file.write_text(f'sources: {{web: {{paths: "{"{a,b}" * 40}.tar", weight: 1}}}}')
    with pytest.raises(ValueError, match=r"a\.yaml: .*its braces stand for more than 1,000,000 paths.*give a glob"):
        read_mixture(file, Recipe())
