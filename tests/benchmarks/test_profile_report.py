"""The benchmark of reports at tiny sizes: it runs, and nothing about time is asserted."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.profile_report.run import Case, take, tree_of
from orchdata.bench import synthetic_index


@pytest.mark.slow
def test_a_process_profiles_an_index_and_a_mixture(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.index" for name in ("one", "two")]
    for seed, path in enumerate(paths):
        synthetic_index(path, 60, seed)
    page = tmp_path / "page.html"
    for case in (Case(None, paths[:1], None), Case(None, paths, page)):
        took = take(case, "2")
        assert took.cpu_seconds > 0 and took.imports_seconds > 0 and took.anonymous_bytes > 1e6
        assert page.exists() == (case.page is not None)
    with pytest.raises(RuntimeError, match="ended with 1"):
        take(Case(None, [tmp_path / "none.index"], None), "2")


def test_a_commit_is_a_package_of_its_own(tmp_path: Path) -> None:
    tree = tree_of("HEAD", tmp_path / "head")
    assert (tree / "orchdata" / "loaders" / "recipe.py").is_file()
    with pytest.raises(ValueError, match=r"commit 'nothing' cannot be read .* name another commit with --before"):
        tree_of("nothing", tmp_path / "nothing")
