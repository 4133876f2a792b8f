"""The import rules of the house: what each room may import, no circles, nothing that shadows `datasets`."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import lazy_loader
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = {
    "orchdata": "orchdata",
    "orchdata.loaders": "loaders",
    "orchdata.balancers": "balancers",
    "orchdata.native": "native",
}
# A unit is a direct child of one of the folders: a room or a single file. Each line may import the lines above it, and
# folders the folders above them; units on one line do not import each other.
LAYERS = """
native: jit
native: sorting costs permutation decoding
native: assign fill_bins scan
native: pack_bins move_phases microbatches
native: minimal_move
balancers: assignment
balancers: costs
balancers: packed placement microbatches bins
balancers: phases
balancers: moves
balancers: __init__
loaders: environment
loaders: child_process
loaders: memory
loaders: errors amounts compact locks watch first_calls
loaders: limits functions generators pace
loaders: records
loaders: storage
loaders: text modalities
loaders: field_names
loaders: recipe
loaders: shards
loaders: unread_names
loaders: samples
loaders: index
orchdata: notices finalizers quarantine yaml_file html
orchdata: order
orchdata: planning
orchdata: ranks
orchdata: batch
orchdata: building
orchdata: engines
orchdata: delivery
orchdata: loop
orchdata: caching
orchdata: trainers
orchdata: dataset
orchdata: runtime
orchdata: steps
orchdata: dataloader post_balancing verifying
orchdata: showing
orchdata: profiling
orchdata: views
orchdata: planners
orchdata: testing
orchdata: hf torchtitan
orchdata: synth
orchdata: demo bench
orchdata: cli
"""
LAYER_OF = {
    (folder, unit): number
    for number, line in enumerate(LAYERS.strip().splitlines())
    for folder, units in [line.split(": ")]
    for unit in units.split()
}
# The face gives its names late, so that whoever is asked for them may import it for its version.
FACE = ("orchdata", "__init__")
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


def _unit(module: str) -> tuple[str, str]:
    """(folder, unit) of a module of ours."""
    _, second, third = [*module.split("."), "__init__", "__init__"][:3]
    return (second, third) if second in FOLDERS.values() else ("orchdata", second)


def _nodes(tree: ast.AST, *, typing: bool) -> Iterator[ast.AST]:
    """All nodes, function bodies too; those of `if TYPE_CHECKING` blocks with `typing`."""
    for node in ast.iter_child_nodes(tree):
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if typing or not typing_only:
            yield node
            yield from _nodes(node, typing=typing)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _imports(path: Path, *, typing: bool = True) -> frozenset[str]:
    """Full names of what a file imports; `from package import module` counts as the module."""
    imported = set()
    for node in _nodes(_tree(path), typing=typing):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= {name if name in MODULES else str(node.module) for name in full}
    return imported


MODULES = _modules()


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_only_what_lies_below_its_unit(module: str) -> None:
    unit = _unit(module)
    for name in _imports(MODULES[module]):
        top = name.split(".")[0]
        assert top not in {"loaders", "balancers", "native", "benchmarks"}, f"{module} must not import {name}"
        if top == "orchdata":
            used = _unit(name)
            below = used == unit or FACE in (unit, used) or LAYER_OF[used] < LAYER_OF[unit]
            assert below, f"{module} must not import {name}"
        elif unit[0] in THIRD_PARTY and top not in sys.stdlib_module_names:
            assert top in THIRD_PARTY[unit[0]], f"{module} must not import {name}"


def test_every_unit_has_its_layer() -> None:
    units = {_unit(module) for module in MODULES} - {FACE}
    empty = {(folder, "__init__") for folder in ("native", "loaders")}
    assert units - empty == set(LAYER_OF)


def test_no_two_folders_of_a_room_import_each_other() -> None:
    uses = set()
    for module, path in MODULES.items():
        for used in _imports(path) & set(MODULES):
            mine, other = ([*MODULES[name].relative_to(REPOSITORY).parts[:-1]] for name in (module, used))
            if mine[:2] == other[:2] and mine[2:3] and other[2:3] and mine[2] != other[2]:
                uses.add((*mine[:2], mine[2], other[2]))
    assert not [each for each in uses if (*each[:2], each[3], each[2]) in uses]


def test_no_public_name_is_that_of_a_unit() -> None:
    # Importing orchdata.name.file would replace the function or class with the subpackage.
    import orchdata

    units = {unit for folder, unit in LAYER_OF if folder == "orchdata"}
    assert units & set(orchdata.__all__) == {"hf", "planners", "torchtitan"}  # the subpackages themselves


def test_no_circles() -> None:
    graph = {name: _imports(path, typing=False) & set(MODULES) - {"orchdata"} for name, path in MODULES.items()}
    try:
        TopologicalSorter({name: used - {name} for name, used in graph.items()}).prepare()
    except CycleError as error:
        pytest.fail(f"import circle: {' -> '.join(error.args[1])}")


def test_a_loader_knows_no_shards() -> None:
    # Data sets bring what lists, measures, indexes and reads shards: a loader sees costs, orders and contents.
    found, left = set[str](), ["orchdata.dataloader"]
    while left:
        if (module := left.pop()) not in found:
            found.add(module)
            left += _imports(MODULES[module]) & set(MODULES) - {"orchdata"}
    rooms = {_unit(module) for module in found}
    assert rooms.isdisjoint(
        {("loaders", room) for room in ("shards", "text", "modalities", "samples", "index", "recipe")}
    )
    assert ("orchdata", "engines") in rooms


def test_datasets_folder_holds_no_python() -> None:
    # An importable `datasets` in the working directory would shadow Hugging Face's.
    assert not list((REPOSITORY / "datasets").rglob("*.py"))


@pytest.mark.parametrize("folder", ["pickle", "marshal", "shelve", "dill"])
def test_nothing_imports_a_module_that_executes_data(folder: str) -> None:
    users = [name for name, path in MODULES.items() if folder in _imports(path)]
    # The user's own objects go to his own workers, and what his own functions make there comes back from them. A
    # container that is tested goes to a child of its own. The recipe goes to the children of an index build, and they
    # send back what they have measured.
    ours = [
        *(f"orchdata.engines.{name}" for name in ("engine", "processes.message", "processes.worker")),
        "orchdata.testing",
        "orchdata.loaders.index.jobs",
    ]
    assert users == (ours if folder == "pickle" else [])
    assert "pickle.load" not in MODULES["orchdata.engines.engine"].read_text().replace("`pickle.loads(...).open()`", "")


@pytest.mark.slow_cases("exchange")
@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import orchdata", {"torch", "torchaudio", "numba", "numpy", "pyarrow", "webdataset", "plotly"}),
        ("import orchdata; orchdata.hf; orchdata.hf.__dir__()", {"torch", "transformers", "numba", "numpy"}),
        ("import orchdata; orchdata.hf.cost", {"torch", "transformers"}),
        # sympy: torch's compiler
        ("import orchdata; orchdata.DataLoader; orchdata.exchange", {"sympy", "transformers"}),
        ("import orchdata.cli", {"torch", "torchaudio", "numba", "numpy", "pyarrow", "webdataset", "plotly"}),
        (
            "from orchdata import DataLoader, ShardDataset, Recipe",
            {"torch._dynamo", "torchaudio", "transformers", "PIL", "numba", "scipy"},
        ),
        ("import orchdata.balancers", {"torch", "pyarrow", "numba"}),
        ("import orchdata.native", {"torch", "pyarrow"}),
    ],
)
def test_import_is_light(statement: str, heavy: set[str]) -> None:
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert heavy.isdisjoint(loaded)


# Two copies of the library: what lies on sys.path first is never mixed with what is installed, without a word.


CODE = "import orchdata, orchdata.loaders; print(orchdata.__file__, *orchdata.loaders.__path__)"
ALONE = ("-S",)
"""Without site-packages: nothing is installed."""
FACE_FILES = ("__init__.py", "__init__.pyi")


def checkout(folder: Path, *, linked: bool) -> Path:
    """What matters of one: two folders side by side, and the link."""
    for name in ("orchdata", "loaders"):
        (folder / name).mkdir(parents=True)
    for file in FACE_FILES:
        shutil.copy(REPOSITORY / "orchdata" / file, folder / "orchdata")
    shutil.copy(REPOSITORY / "loaders" / "__init__.py", folder / "loaders")
    if linked:
        shutil.copy(REPOSITORY / "orchdata" / "loaders", folder / "orchdata", follow_symlinks=False)
    return folder


def installed(folder: Path) -> Path:
    """The same as a wheel has it: one within the other."""
    (folder / "orchdata" / "loaders").mkdir(parents=True)
    for file in FACE_FILES:
        shutil.copy(REPOSITORY / "orchdata" / file, folder / "orchdata")
    shutil.copy(REPOSITORY / "loaders" / "__init__.py", folder / "orchdata" / "loaders")
    (folder / "lazy_loader").symlink_to(Path(lazy_loader.__file__).parent)
    return folder


def imported(cwd: Path, *options: str, path: str = "") -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *options, "-c", CODE],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def test_a_clone_next_to_an_installed_copy_is_imported_whole_or_not_at_all(tmp_path: Path) -> None:
    clone = checkout(tmp_path / "clone", linked=True)
    assert imported(clone) == (0, f"{clone / 'orchdata' / '__init__.py'} {clone / 'orchdata' / 'loaders'}")
    status, said = imported(without := checkout(tmp_path / "without links", linked=False))
    assert status and said.startswith(f"ImportError: {without / 'orchdata'} lacks its links: run `pip install -e .`")


@pytest.mark.parametrize("layout", ["checkout", "link to the checkout", "wheel", "link to the wheel"])
def test_layouts_of_one_copy_are_imported(tmp_path: Path, layout: str) -> None:
    cwd, options, path = tmp_path, ALONE, ""
    if layout == "checkout":
        cwd, options = REPOSITORY, ()
    elif layout == "link to the checkout":
        (tmp_path / "link").symlink_to(REPOSITORY)
        options, path = (), str(tmp_path / "link")
    else:
        site = installed(tmp_path / "site")
        if layout == "link to the wheel":
            (tmp_path / "link").symlink_to(site)
        path = str(tmp_path / "link" if layout == "link to the wheel" else site)
    status, said = imported(cwd, *options, path=path)
    assert status == 0, said
