"""Tables of benchmarks/*.md: they are those of the stored reports, and the check fails where they differ."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import benchmarks.report.__main__ as program
from benchmarks.report import results
from benchmarks.report.demo import results as demo_results
from benchmarks.report.pages import named, rewrite
from benchmarks.report.results import ResultsError, column, figure, ran_on, read_report
from benchmarks.report.tables import CLAIMS, TABLES, wide_table
from orchdata.bench import Result, WideTable, make_report
from orchdata.demo import DemoConfig, DemoReport

REPOSITORY = Path(__file__).resolve().parents[2]


def page(*lines: str) -> str:
    return "\n".join(lines) + "\n"


def test_a_figure_that_was_changed_by_hand_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "benchmarks").mkdir()
    readme = tmp_path / "benchmarks" / "README.md"
    readme.write_text(rewrite(page("<!-- table: loaders -->", "<!-- end of table -->"), TABLES))
    monkeypatch.setattr(program, "REPOSITORY", tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmarks.report", "--check"])
    program.main()
    assert "| 478 |" in readme.read_text()
    changed = readme.read_text().replace("| 478 |", "| 578 |")
    readme.write_text(changed)
    with pytest.raises(SystemExit, match=r"in 1 page\(s\): run python -m benchmarks.report"):
        program.main()
    said = capsys.readouterr().err
    assert "-| orchdata, processes | 578 |" in said and "+| orchdata, processes | 478 |" in said
    assert readme.read_text() == changed  # a check writes nothing
    monkeypatch.setattr(sys, "argv", ["benchmarks.report"])
    program.main()
    assert "| 478 |" in readme.read_text()


def test_every_table_stands_on_one_page_and_every_stored_report_is_shown() -> None:
    pages = (REPOSITORY / "benchmarks").glob("*.md")
    names = [name for path in pages for name in named(path.read_text())]
    assert sorted(names) == sorted(TABLES)
    shown = {claim.report for claim in CLAIMS} | {"loads", "loss_curves", "drawn_plans"}  # the last three are pictures
    shown |= {
        "loaders",
        "loaders_xeon",
        "loaders_memory",
        "loaders_energon",
        "profile_report",
        "steps_h200",
        "resume",
        "memory",
        "teams",
        "planned_layouts",
        "planned_steps",
    }
    assert {path.stem for path in results.FOLDER.glob("*.json")} == shown


def test_every_stored_report_names_command_machine_and_version() -> None:
    for path in results.FOLDER.glob("*.json"):
        report = read_report(path.stem)
        assert report.command.startswith(("orchdata bench ", "python -m benchmarks.")), path
        assert "cores, torch 2." in ran_on(report), path
        assert report.results or report.tables, path


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["<!-- table: two -->", "<!-- end of table -->"], "no table is called 'two'; there are one"),
        (["<!-- table: one -->", "text"], "table 'one' does not end: write '<!-- end of table -->' below it"),
        (
            ["<!-- table: one -->", "<!-- table: one -->", "<!-- end of table -->"],
            "table 'one' does not end: write '<!-- end of table -->' below it",
        ),
        (["<!-- end of table -->"], "'<!-- end of table -->' ends no table"),
    ],
)
def test_markers_that_do_not_fit_are_errors(lines: list[str], message: str) -> None:
    with pytest.raises(ResultsError, match=message):
        rewrite(page(*lines), {"one": lambda: "new"})


def stored(folder: Path, content: object) -> Path:
    (folder / "some.json").write_text(json.dumps(content))
    return folder


def test_what_a_benchmark_prints_can_be_stored(tmp_path: Path) -> None:
    config = DemoConfig()
    table = WideTable(title="t", columns=("a", "b"), rows=(("x", 1.5), ("y", None)))
    made = make_report("python -m benchmarks.some", config, [Result(name="n", unit="s", values=(1.0, 3.0, 2.0)), table])
    report = read_report("some", stored(tmp_path, made.to_dict()))
    assert figure(report, "n") == 2.0
    assert column(report.tables[0], "b") == [1.5, None]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"some.json is missing: store what its benchmark prints with --json there"):
        read_report("some", tmp_path)
    with pytest.raises(ResultsError, match=r"is not what a benchmark prints with --json \(KeyError: 'command'\)"):
        read_report("some", stored(tmp_path, {}))
    with pytest.raises(ResultsError, match=r"is not what a benchmark prints with --json \(TypeError"):
        read_report("some", stored(tmp_path, []))
    report = read_report("bins")
    with pytest.raises(ResultsError, match="has no result 'rooms'; it has 'tokens over room, least of 12 lists'"):
        figure(report, "rooms")
    with pytest.raises(ResultsError, match=r"has no column 'samples'; it has loader, samples/s"):
        wide_table("loaders", ("samples",))
    with pytest.raises(ResultsError, match="bins.json has no table"):
        wide_table("bins")


def test_the_demo_becomes_results() -> None:
    names = ("step_ms", "waiting_share", "compute_imbalance", "cpu_imbalance")
    lane = dict.fromkeys(names, 0.5) | {"planned_imbalance": {"image": 1.5, "audio": 2.0, "llm": 1.25}}
    fields: dict[str, Any] = dict.fromkeys(DemoReport.__slots__, 0)
    report = DemoReport(**{**fields, "speedup": 1.5, "lanes": {"unbalanced": lane, "balanced": lane}})
    found = {result.name: result.median for result in demo_results(report)}
    assert found["speedup"] == 1.5
    assert found["planned imbalance, llm, balanced"] == 1.25
    (claim,) = (claim for claim in CLAIMS if claim.report == "demo")
    assert set(claim.figures.values()) <= set(found)
