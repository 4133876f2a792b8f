"""The import rules of the house: what each folder may import, no circles, nothing that shadows `datasets`."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = {
    "orchdata": "orchdata",
    "orchdata.loaders": "loaders",
    "orchdata.balancers": "balancers",
    "orchdata.native": "native",
}
# Which of our own packages a folder may import, beside itself.
MAY_IMPORT = {
    "native": set(),
    "balancers": {"native"},
    "loaders": {"native"},
    "orchdata": {"native", "balancers", "loaders"},
}
# Third-party packages of the two folders that promise to stay light.
THIRD_PARTY = {"native": {"numpy", "numba", "llvmlite"}, "balancers": {"numpy", "scipy"}}


def _modules() -> dict[str, Path]:
    """Full module name -> file, for every Python file of the four folders."""
    modules = {}
    for package, folder in FOLDERS.items():
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            parts = path.relative_to(REPOSITORY / folder).with_suffix("").parts
            modules[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return modules


def _folder(module: str) -> str:
    second = module.split(".")[1] if "." in module else ""
    return second if second in MAY_IMPORT and second != "orchdata" else "orchdata"


def _nodes(tree: ast.AST, *, late: bool) -> Iterator[ast.AST]:
    """Nodes that run at import; with `late` also function bodies and `if TYPE_CHECKING` blocks."""
    for node in ast.iter_child_nodes(tree):
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if late or not (function or typing_only):
            yield node
            yield from _nodes(node, late=late)


def _imports(path: Path, modules: dict[str, Path], *, late: bool = True) -> set[str]:
    """Full names of what a file imports; `from package import module` counts as the module."""
    found = set()
    for node in _nodes(ast.parse(path.read_text()), late=late):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else str(node.module) for name in full}
    return found


MODULES = _modules()


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_only_what_its_folder_may(module: str) -> None:
    folder = _folder(module)
    for name in _imports(MODULES[module], MODULES):
        top = name.split(".")[0]
        assert top not in {"loaders", "balancers", "native"}, f"{module}: import {name} by its full name"
        if top == "orchdata":
            assert _folder(name) in MAY_IMPORT[folder] | {folder}, f"{module} must not import {name}"
        elif folder in THIRD_PARTY and top not in sys.stdlib_module_names:
            assert top in THIRD_PARTY[folder], f"{module} must not import {name}"


def test_no_circles() -> None:
    graph = {name: _imports(path, MODULES, late=False) & set(MODULES) for name, path in MODULES.items()}
    try:
        TopologicalSorter({name: used - {name} for name, used in graph.items()}).prepare()
    except CycleError as error:
        pytest.fail(f"import circle: {' -> '.join(error.args[1])}")


def test_datasets_folder_holds_no_python() -> None:
    # An importable `datasets` in the working directory would shadow Hugging Face's.
    assert not list((REPOSITORY / "datasets").rglob("*.py"))


@pytest.mark.parametrize("folder", ["pickle", "marshal", "shelve", "dill"])
def test_nothing_imports_a_module_that_executes_data(folder: str) -> None:
    users = [name for name, path in MODULES.items() if folder in _imports(path, MODULES)]
    assert users == []


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import orchdata", {"torch", "torchaudio", "numba", "numpy", "pyarrow", "webdataset", "plotly"}),
        ("import orchdata.cli", {"torch", "torchaudio", "numba", "numpy", "pyarrow", "webdataset", "plotly"}),
        ("import orchdata.balancers", {"torch", "pyarrow"}),
        ("import orchdata.native", {"torch", "pyarrow"}),
    ],
)
def test_import_is_light(statement: str, heavy: set[str]) -> None:
    code = f"import sys; {statement}; print(' '.join(m for m in sys.modules if '.' not in m))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert heavy.isdisjoint(loaded)
