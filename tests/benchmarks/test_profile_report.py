"""The benchmark of reports at tiny sizes: it runs, and nothing about time is asserted."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.profile_report.run import Case, ProfileReportBench, Took, results, take, tree_of
from orchdata.bench.harness import Result, WideTable
from orchdata.synth.made_up_index import synthetic_index


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


def test_what_is_asked_is_compared_in_pairs() -> None:
    took = {
        "before": [Took(10.0, 1.0, 300_000_000), Took(20.0, 1.0, 300_000_000)],
        "now": [Took(20.0, 1.0, 350_000_000), Took(30.0, 1.0, 350_000_000)],
        "mixture": [Took(50.0, 2.0, 400_000_000)],
    }
    *found, table = results(ProfileReportBench(), took, 200_000, 400_000)
    known = {result.name: result for result in found if isinstance(result, Result)}
    assert known["CPU time of profile and page over that of the profile before"].values == (2.0, 1.5)
    assert known["peak of anonymous memory, more than before"].values == (50.0, 50.0)
    assert isinstance(table, WideTable)
    assert [row[1:] for row in table.rows] == [(15.0, 300.0, None), (25.0, 350.0, 0.2), (50.0, 400.0, 0.4)]
    with pytest.raises(ValueError, match="repeats must be at least 1, got 0"):
        ProfileReportBench(repeats=0)
