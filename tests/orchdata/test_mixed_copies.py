"""Two copies of the library: what lies on sys.path first is never mixed with what is installed, without a word."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import lazy_loader
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
CODE = "import orchdata; print(orchdata.__file__)"
ALONE = ("-S",)
"""Without site-packages: nothing is installed."""
FACE = ("__init__.py", "__init__.pyi")


def checkout(folder: Path) -> Path:
    """What matters of one: the two folders side by side."""
    for name in ("orchdata", "loaders"):
        (folder / name).mkdir(parents=True)
    for file in FACE:
        shutil.copy(REPOSITORY / "orchdata" / file, folder / "orchdata")
    shutil.copy(REPOSITORY / "loaders" / "__init__.py", folder / "loaders")
    return folder


def installed(folder: Path) -> Path:
    """The same as a wheel has it: one within the other."""
    (folder / "orchdata" / "loaders").mkdir(parents=True)
    for file in FACE:
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


def test_a_clone_next_to_an_editable_install_of_another_is_an_error_that_names_both(tmp_path: Path) -> None:
    clone = checkout(tmp_path / "clone")
    status, said = imported(clone)
    assert status and said.startswith("ImportError: two copies of orchdata are mixed")
    for named in (clone / "orchdata", REPOSITORY / "loaders", f"pip install -e {clone}", "python -P"):
        assert str(named) in said
    assert imported(clone, "-P") == (0, str(REPOSITORY / "orchdata" / "__init__.py"))  # the way out


def test_a_clone_next_to_an_installed_wheel_is_an_error_that_names_the_clone(tmp_path: Path) -> None:
    clone, site = checkout(tmp_path / "clone"), installed(tmp_path / "site")
    status, said = imported(clone, *ALONE, path=str(site))
    assert status and said.startswith(f"ImportError: orchdata is imported from the checkout {clone}, which is not")
    assert imported(clone, "-P", *ALONE, path=str(site)) == (0, str(site / "orchdata" / "__init__.py"))


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
