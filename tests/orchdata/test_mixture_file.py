"""A mixture as a YAML file: read, refused by the name of the field, and profiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from printed import run
from shard_factory import RECIPE, chat, omni_shards, write_shard

import orchdata as od
from orchdata import yaml_file
from orchdata.cli.dataset import read_mixture
from orchdata.loaders.recipe import Recipe
from orchdata.synth import read_description
from orchdata.yaml_file import read_yaml

pytestmark = pytest.mark.usefixtures("no_hang")

MIX = """
by: tokens
stop: repeat
epoch_tokens: 20_000
sources:
  omni: {paths: "omni-{000000..000001}.tar", weight: 3, recipe: "shard_factory:RECIPE"}
  words:
    weight: 1
    sources:
      chat: {paths: [chat.tar], weight: 2, recipe: "shard_factory:RECIPE"}
      text: {paths: "text.t*r", weight: 1, recipe: "shard_factory:RECIPE", loss_weight: 0.5}
"""


ALLOW = "--allow-recipes"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    omni_shards(tmp_path, shards=2, samples=10)
    write_shard(tmp_path / "chat.tar", [{"__key__": f"c{n}", "json": chat("say", "word " * n)} for n in range(1, 10)])
    write_shard(tmp_path / "text.tar", [{"__key__": f"t{n}", "txt": b"short text"} for n in range(7)])
    (tmp_path / "mix.yaml").write_text(MIX)
    return tmp_path


def test_a_file_is_the_mixture_that_it_describes(folder: Path) -> None:
    mixture = read_mixture(folder / "mix.yaml", RECIPE, allow_recipes=True)
    assert [leaf.name for leaf in mixture.leaves] == ["omni", "words/chat", "words/text"]
    assert [leaf.loss_weight for leaf in mixture.leaves] == [1.0, 1.0, 0.5]
    assert mixture.epoch_size == ("tokens", 20_000)
    loader = od.DataLoader(mixture, batch_size=4, dp=(0, 1), num_threads=0)
    assert len(loader) > 10


@pytest.mark.slow_cases("size0")
@pytest.mark.parametrize("size", [["--batch-size", "2"], ["--batch-tokens", "900"]])
def test_profile_takes_a_mixture(folder: Path, size: list[str]) -> None:
    result = run("profile", str(folder / "mix.yaml"), ALLOW, "--ranks", "2,8", "--json", *size)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["samples"] == 20 + 9 + 7
    shares = {name: source["share"] for name, source in report["sources"].items()}
    assert shares["omni"] == pytest.approx(0.75, abs=0.05)
    assert shares["words/chat"] == pytest.approx(1 / 6, abs=0.05)
    assert report["sources"]["words/text"]["passes"] > 2
    table = run("profile", str(folder / "mix.yaml"), ALLOW, "--ranks", "2", *size)
    assert "What sources give in an epoch" in table.stdout


def test_recipes_of_a_file_are_imported_where_the_command_allows_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module next to the working directory may be anyone's, like a file that came with a data set."""
    monkeypatch.chdir(folder)
    lines = ("import pathlib", "pathlib.Path('was here').touch()", "from shard_factory import RECIPE as R")
    (folder / "neighbour.py").write_text("\n".join(lines))
    file = folder / "mix.yaml"
    file.write_text(MIX.replace("shard_factory:RECIPE", "neighbour:R", 1))
    for command in (["profile", "--ranks", "2"], ["show"]):
        refused = run(command[0], str(file), *command[1:])
        assert refused.exit_code == 1
        assert "sources.omni.recipe 'neighbour:R' would import the module 'neighbour'" in refused.output
        assert "give --allow-recipes if you trust" in refused.output
        assert not (folder / "was here").exists()
    with pytest.raises(ValueError, match="would import the module 'neighbour'"):
        read_mixture(file, RECIPE)
    allowed = run("show", str(file), ALLOW)
    assert allowed.exit_code == 0, allowed.output
    assert (folder / "was here").exists()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("by: tokens", "by: bytes", "mix.yaml: Mixture.by must be one of 'tokens', 'samples', got 'bytes'"),
        (
            "weight: 3",
            "wight: 3",
            "mix.yaml: sources.omni has no field 'wight'; it may have paths, media_root, columns",
        ),
        ("weight: 3", "columns: 5", "sources.omni: columns is a dict of old name -> new name, got 5"),
        ("weight: 3", "index_fields: score", "sources.omni: index_fields is a tuple of names"),
        ("weight: 3", "weight: heavy", "Source.weight must be a number of at least 0, got 'heavy'"),
        ("paths: [chat.tar]", "paths: []", "sources.words.sources.chat.paths must be a path, or a list of paths"),
        ("weight: 3", "filter: 5", "sources.omni.filter must be a text, got 5"),
        ("  words:", "  omni:", "'omni' comes twice"),
        ("weight: 3", "weight: 3, weight: 4", "'weight' comes twice"),
        ("weight: 3", "media_root: 5", "sources.omni.media_root must be a text, got 5"),
        (
            '"shard_factory:RECIPE"',
            "5",
            "sources.omni.recipe must be MODULE:NAME, such as my_project.data:recipe, got 5",
        ),
        ("shard_factory:RECIPE", "shard_factory:NONE", "sources.omni.recipe shard_factory:NONE: AttributeError"),
    ],
)
def test_what_is_no_mixture_is_named(folder: Path, old: str, new: str, words: str) -> None:
    file = folder / "mix.yaml"
    file.write_text(MIX.replace(old, new, 1))
    with pytest.raises(ValueError, match="mix.yaml") as error:
        read_mixture(file, RECIPE, allow_recipes=True)
    assert words in str(error.value)


# A user's YAML has limits by count; any content is read, or raises an error that names the file.


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


@pytest.mark.slow_cases("recursion")
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
