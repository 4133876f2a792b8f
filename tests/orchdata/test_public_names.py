"""The public face: `orchdata.__all__` is what docs/api.md lists, and every name is there when asked for."""

from __future__ import annotations

import ast
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import orchdata

REPOSITORY = Path(__file__).resolve().parents[2]
ROOMS = ("balancers", "hf", "planners", "torchtitan")
NAMES = [name for name in orchdata.__all__ if name not in ROOMS]


def test_all_is_what_the_docs_list() -> None:
    in_rooms = [f"{room}.{name}" for room in ROOMS[1:] for name in getattr(orchdata, room).__all__]
    listed = re.findall(r"^- `od\.([\w.]+)", (REPOSITORY / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted([*NAMES, "balancers", *in_rooms]) == sorted(listed)
    # The program that mypy checks against a wheel uses them all.
    program = (REPOSITORY / "tests" / "support" / "typed_program.py").read_text()
    used = {ast.unparse(node) for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Attribute)}
    assert {f"od.{name}" for name in [*NAMES, *in_rooms]} <= used
    assert len(set(orchdata.__all__)) == len(orchdata.__all__)
    assert set(ROOMS) < set(orchdata.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_public_name_exists_and_says_what_it_is(name: str) -> None:
    value = getattr(orchdata, name)
    assert value.__name__ == name
    assert value.__module__.startswith("orchdata.")
    assert value.__doc__


def test_errors_are_one_tree_and_survive_a_process_border() -> None:
    public = [value for name in NAMES if isinstance(value := getattr(orchdata, name), type)]
    errors = [value for value in public if issubclass(value, BaseException)]
    assert {error.__name__ for error in errors} >= {"OrchdataError", "DataError", "StepError"}
    for error in errors:
        assert issubclass(error, orchdata.OrchdataError)
    given = orchdata.StepError("rank 1 failed at step 2: no room", 2, 1)
    copied = pickle.loads(pickle.dumps(given))
    assert (str(copied), copied.step, copied.rank) == (str(given), 2, 1)
    assert isinstance(copied, RuntimeError)


@pytest.mark.parametrize("stub", ["orchdata/__init__.pyi", *(f"orchdata/{room}/__init__.pyi" for room in ROOMS[1:])])
def test_type_checkers_see_each_name_of_a_stub(stub: str) -> None:
    # In a stub `from .file import name` is private to it; with `as name` it is public.
    imports = [node for node in ast.parse((REPOSITORY / stub).read_text()).body if isinstance(node, ast.ImportFrom)]
    assert imports
    for node in imports:
        assert [alias.asname for alias in node.names] == [alias.name for alias in node.names]


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Dataloader'"):
        orchdata.Dataloader  # noqa: B018


def test_unknown_name_of_a_room_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="input"):
        orchdata.hf.input  # noqa: B018


def test_dir_lists_the_public_names_alone() -> None:
    assert dir(orchdata) == sorted(orchdata.__all__)
    assert dir(orchdata.hf) == sorted(orchdata.hf.__all__)


# Images and audio are values like any other: nothing outside of their rooms names them, in code or in strings.


FOLDERS = ("orchdata", "loaders", "native", "balancers")
ALLOWED = {
    "loaders/modalities/": "what they are",
    "native/scan.py": "their headers",
    "loaders/limits.py": "how large they may be",
    "loaders/recipe.py": "those of a recipe that names none",
    "loaders/text/template.py": "words of the marks that tools write for them",
    "loaders/field_names.py": "words before the names of a start and an end",
    "loaders/text/preprocessor.py": "their tokens, by parameters of their own",
    "orchdata/batch/": "batch.image and batch.audio",
    "orchdata/hf/": "what processors and models of Hugging Face call them",
    "orchdata/engines/parcel.py": "pixels are the same on all processors",
    "orchdata/synth.py": "makes them up",
    "orchdata/demo.py": "a model of them",
    "orchdata/bench.py": "measures them",
    "orchdata/cli/": "says so in its help",
    "orchdata/showing.py": "shrinks with PIL.Image",
    "balancers/costs/model.py": "the phases that come first, which plans depend on",
    "balancers/costs/families.py": "what published configs call their towers",
}
_NAMED = re.compile(r"(?<![a-z])(image|audio)s?(?![a-z])")


def named(source: str) -> list[tuple[int, str]]:
    """(line, what) of each identifier, attribute and string that names a built-in modality; docstrings do not count."""
    if not re.search("image|audio", source, re.IGNORECASE):
        return []
    tree = ast.parse(source)
    docstrings = set(_docstrings(tree))
    words = []
    for node in ast.walk(tree):
        for word in _words(node, docstrings):
            if _NAMED.search(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", word).lower()):
                words.append((getattr(node, "lineno", 0), word))
    return sorted(set(words))


def _words(node: ast.AST, docstrings: set[int]) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
        yield node.value
    for field in ("id", "attr", "arg", "name", "asname", "module"):
        word = getattr(node, field, None)
        if isinstance(word, str):
            yield word


def _docstrings(tree: ast.AST) -> Iterator[int]:
    """Strings that are statements of their own: also those under a constant."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield id(node.value)


def _modules() -> list[str]:
    return [
        str(path.relative_to(REPOSITORY)) for folder in FOLDERS for path in sorted((REPOSITORY / folder).rglob("*.py"))
    ]


def test_no_module_names_a_modality_but_those_that_are_allowed() -> None:
    naming = {module: words for module in _modules() if (words := named((REPOSITORY / module).read_text()))}
    assert {module: words for module, words in naming.items() if not module.startswith(tuple(ALLOWED))} == {}
    for allowed in ALLOWED:
        assert any(module.startswith(allowed) for module in naming), f"{allowed} needs no exception"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("batch.image", ["image"]),
        ("def decode_audio(): pass", ["decode_audio"]),
        ("from orchdata.loaders.modalities.image import x", ["orchdata.loaders.modalities.image"]),
        ("f(audio=1)", ["audio"]),
        ("PHASES = ('image', 'llm')", ["image"]),
        ("x = f'{n} audio clips'", [" audio clips"]),
        ('def f():\n    """Reads an image."""', []),
        ("# an image\nimagine, audiology = pilgrimage", []),
    ],
)
def test_names_are_found_wherever_they_stand(source: str, words: list[str]) -> None:
    assert [word for _, word in named(source)] == words
