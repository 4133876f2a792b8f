"""Images and audio are values like any other: nothing outside of their rooms names them, in code or in strings.

Docstrings and comments may give examples. The modules below hold what only these modalities have, or show them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = ("orchdata", "loaders", "native", "balancers")
ALLOWED = {
    "loaders/modalities/": "what they are",
    "native/scan.py": "their headers",
    "loaders/limits.py": "how large they may be",
    "loaders/recipe.py": "those of a recipe that names none",
    "loaders/text/template.py": "words of the marks that tools write for them",
    "loaders/shards/jsonl/stretch.py": "words before the names of a start and an end",
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
