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
CODE = "import orchdata, orchdata.loaders; print(orchdata.__file__, *orchdata.loaders.__path__)"
ALONE = ("-S",)
"""Without site-packages: nothing is installed."""
FACE = ("__init__.py", "__init__.pyi")


def checkout(folder: Path, *, linked: bool) -> Path:
    """What matters of one: two folders side by side, and the link."""
    for name in ("orchdata", "loaders"):
        (folder / name).mkdir(parents=True)
    for file in FACE:
        shutil.copy(REPOSITORY / "orchdata" / file, folder / "orchdata")
    shutil.copy(REPOSITORY / "loaders" / "__init__.py", folder / "loaders")
    if linked:
        shutil.copy(REPOSITORY / "orchdata" / "loaders", folder / "orchdata", follow_symlinks=False)
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
