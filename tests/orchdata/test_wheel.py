"""The wheel, installed into a clean environment outside the checkout, holds every module and a working command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
FOLDERS = ("orchdata", "loaders", "balancers", "native")


def test_every_package_is_listed() -> None:
    namespace = {folder: package for package, folder in SETUPTOOLS["package-dir"].items()}
    packages = set()
    for folder in FOLDERS:
        for init in (REPOSITORY / folder).rglob("__init__.py"):
            nested = init.parent.relative_to(REPOSITORY / folder).parts
            packages.add(".".join([namespace[folder], *nested]))
    assert namespace["datasets"] == "orchdata.datasets"  # files that are no Python
    assert sorted(SETUPTOOLS["packages"]) == sorted([*packages, "orchdata.datasets"])


def test_every_python_file_lies_in_a_package() -> None:
    for folder in FOLDERS:
        for path in (REPOSITORY / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), f"{path.parent} has no __init__.py: the wheel would lack it"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Built from a copy: setuptools keeps build/, and files there that were since deleted get into wheels.
    source = tmp_path_factory.mktemp("source")
    for folder in (*FOLDERS, "datasets"):
        shutil.copytree(
            REPOSITORY / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--no-index", "--wheel-dir", out, source], check=True)
    return next(out.glob("orchdata-*.whl"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment with only the wheel; the dependencies come from this one's site-packages."""
    root = tmp_path_factory.mktemp("environment")
    venv.create(root, with_pip=False)
    command = [sys.executable, "-m", "pip", "--python", root / "bin" / "python", "install"]
    subprocess.run([*command, "--quiet", "--no-deps", "--no-index", wheel], check=True)
    site = next((root / "lib").glob("python*/site-packages"))
    dependencies = Path(sysconfig.get_path("purelib"))
    # A .pth inside a directory that a .pth adds is not read: the editable install of the checkout stays invisible. That
    # of scripts/plain_torchaudio.py has to be repeated: without it, transformers may not import here.
    repeated = "import plain_torchaudio\n" if (dependencies / "plain_torchaudio.py").exists() else ""
    (site / "dependencies.pth").write_text(f"{dependencies}\n{repeated}")
    return root


def _run(environment: Path, *command: str, cwd: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "MYPYPATH"}}
    process = subprocess.run(
        [environment / "bin" / command[0], *command[1:]], cwd=cwd, env=clean, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_wheel_holds_only_our_namespace(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    version = PROJECT["project"]["version"]
    assert tops == {"orchdata", f"orchdata-{version}.dist-info"}
    for package in ("orchdata", "orchdata/loaders", "orchdata/balancers", "orchdata/native"):
        assert f"{package}/py.typed" in names
    for folder in FOLDERS:
        for path in (REPOSITORY / folder).rglob("*.py*"):
            if path.suffix not in (".py", ".pyi"):
                continue
            inside = path.relative_to(REPOSITORY).as_posix()
            assert (inside if folder == "orchdata" else f"orchdata/{inside}") in names


@pytest.mark.slow
def test_every_module_imports_from_the_wheel(environment: Path, tmp_path: Path) -> None:
    code = (
        "import importlib, pkgutil, sys, orchdata\n"
        "assert orchdata.__file__.startswith(sys.prefix), orchdata.__file__\n"
        "for module in pkgutil.walk_packages(orchdata.__path__, 'orchdata.'):\n"
        "    if not module.name.endswith('__main__') and not module.name.startswith('orchdata.torchtitan.'):\n"
        "        loaded = importlib.import_module(module.name)\n"
        "        assert loaded.__file__.startswith(sys.prefix), loaded.__file__\n"
        "        print(module.name)\n"
        "for name in orchdata.__all__:\n"
        "    getattr(orchdata, name)\n"
    )
    modules = _run(environment, "python", "-c", code, cwd=tmp_path).split()
    assert {"orchdata.loaders", "orchdata.balancers", "orchdata.native", "orchdata.cli"} <= set(modules)


SKIPPED = "[mypy-torch.*,scipy.*,transformers.*,accelerate.*,numba.*,PIL.*,pyarrow.*]\nfollow_imports = skip\n"


def _checked(environment: Path, folder: Path, program: str, config: str) -> list[str]:
    """Return what `mypy --strict` says of a user's program, in the user's environment."""
    (folder / "program.py").write_text(program)
    (folder / "mypy.ini").write_text(f"[mypy]\n{config}")
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", environment / "bin" / "python"]
    return subprocess.run([*command, "program.py"], cwd=folder, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("config", [pytest.param(SKIPPED, id="others skipped"), pytest.param("", id="torch too")])
def test_mypy_knows_every_public_name(environment: Path, tmp_path: Path, config: str) -> None:
    program = (REPOSITORY / "tests" / "support" / "typed_program.py").read_text()
    wrong = (
        "bad = [\n"
        "    od.DataLoader(dataset, batchsize=8),\n"
        "    od.DataLoader(dataset, collate_fn=8),\n"
        "    od.hf.cots,\n"
        "    od.Dataloader,\n"
        "    od.hf.cost(config, frozen=1),\n"
        "]\n"
    )
    said = _checked(environment, tmp_path, program + wrong, config)
    errors = [line.partition(": error: ")[2] for line in said if ": error: " in line]
    assert len(errors) == 5, said  # none in the program itself
    for error, part in zip(errors, ("batchsize", "collate_fn", "cots", "Dataloader", "frozen"), strict=True):
        assert part in error


@pytest.mark.slow
def test_console_script_runs(environment: Path, tmp_path: Path) -> None:
    out = _run(environment, "orchdata", "--help", cwd=tmp_path)
    for command in ("demo", "synth", "index", "profile", "bench"):
        assert command in out
