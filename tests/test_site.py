"""The site of docs/ by `docs/conf.py`: dead links end a build, and links out of the folder lead to pages of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sphinx")

REPOSITORY = Path(__file__).resolve().parents[1]


def build(folder: Path, page: str) -> subprocess.CompletedProcess[str]:
    """Build a site of one page, without those of public names, next to an example and a README."""
    (folder / "docs").mkdir()
    (folder / "examples").mkdir()
    shutil.copy(REPOSITORY / "docs" / "conf.py", folder / "docs")
    (folder / "docs" / "index.md").write_text(f"# A page\n\n## One part\n\n{page}\n")
    (folder / "examples" / "one.py").write_text("print('an example')\n")
    (folder / "docs" / "dot.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"/>')
    (folder / "README.md").write_text(
        "# Read me\n\n## Install it\n\n[Back](docs/index.md#one-part) ![A dot](docs/dot.svg)\n"
    )
    options = ["-q", "-W", "--keep-going", "-n", "-D", "exclude_patterns=names"]
    command = [sys.executable, "-m", "sphinx", *options, str(folder / "docs"), str(folder / "site")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_links_that_leave_the_folder_lead_to_pages_of_the_site(tmp_path: Path) -> None:
    done = build(
        tmp_path, "[one](../examples/one.py) [all](../examples) [how](../README.md#install-it) [here](#one-part)"
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "index.html").read_text()
    for target in ("examples/one.py.html", "examples.html", "README.html#install-it"):
        assert f'href="repository/{target}"' in page
    assert "an example" in (tmp_path / "site" / "repository" / "examples" / "one.py.html").read_text()
    read_me = (tmp_path / "site" / "repository" / "README.html").read_text()
    assert 'href="../index.html#one-part"' in read_me and 'src="../_images/dot.svg"' in read_me


def test_dead_links_and_anchors_end_the_build(tmp_path: Path) -> None:
    dead = ["other.md", "../examples/two.py", "#no-part", "../README.md#no-part"]
    done = build(tmp_path, " ".join(f"[here]({link})" for link in dead))
    assert done.returncode == 1
    assert done.stderr.count("xref_missing") == len(dead)
