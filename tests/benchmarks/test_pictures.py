"""The pictures of the README and of docs: drawn from stored figures, the same bytes each time, readable as text."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

pytest.importorskip("matplotlib")
import benchmarks.pictures.__main__ as program
from benchmarks.balance.real_lengths import lengths_folder
from benchmarks.pictures.draw import pictures
from benchmarks.pictures.loads import WAYS, LoadsBench
from benchmarks.pictures.loads import run as run_loads
from benchmarks.pictures.loss_curves import LARGEST_DIFFERENCE, RANKS, LossCurves, curve_name, difference
from benchmarks.pictures.loss_curves import run as run_curves
from benchmarks.report.results import column, figure, read_report
from orchdata.bench.harness import Result, WideTable

REPOSITORY = Path(__file__).resolve().parents[2]
NAMES = list(pictures())


def test_a_picture_that_was_changed_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.pictures", str(tmp_path)])
    monkeypatch.setattr(program, "pictures", lambda: {name: pictures()[name] for name in NAMES[:2]})
    program.main()
    monkeypatch.setattr(sys, "argv", ["benchmarks.pictures", str(tmp_path), "--check"])
    program.main()
    (tmp_path / NAMES[0]).write_text("<svg/>")
    with pytest.raises(SystemExit, match=rf"{NAMES[0]} in .* differ from benchmarks/results; run python -m"):
        program.main()


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_has_its_labels_as_text_and_no_date(name: str) -> None:
    made = pictures()[name]()
    root = ElementTree.fromstring(made)
    texts = "".join(text for element in root.iter() if element.tag.endswith("text") for text in element.itertext())
    wanted = {
        "loads.svg": [
            "image encoder",
            "audio encoder",
            "LLM",
            "waiting for the slowest rank",
            "unbalanced: ranks wait",
        ],
        "loss_curves.svg": [curve_name(ranks, way) for ranks in RANKS for way in WAYS],
    }
    for text in wanted.get(name, []):
        assert text in texts
    assert texts
    assert b"<dc:date>" not in made
    ids = re.findall(rb' id="([^"]+)"', made)
    assert len(ids) == len(set(ids))


def test_the_stored_step_waits_less_once_balanced() -> None:
    report = read_report("loads")
    waits = {way: figure(report, f"share of the step that ranks wait, {way}") for way in WAYS}
    assert waits["balanced"] < waits["unbalanced"] / 10


def test_the_stored_curves_are_one_curve() -> None:
    report = read_report("loss_curves")
    assert figure(report, "largest relative difference from the curve of one rank") <= LARGEST_DIFFERENCE
    (table,) = report.tables
    first = column(table, curve_name(1, "unbalanced"))
    assert isinstance(first[0], float) and isinstance(first[-1], float)
    assert first[-1] < first[0] / 2  # it learns


def test_curves_that_part_miss_the_demand() -> None:
    curves = {curve_name(ranks, way): np.array([4.0, 2.0, 1.0]) for ranks in RANKS for way in WAYS}
    assert difference(curves).met
    curves[curve_name(8, "balanced")] = np.array([4.0, 2.0, 1.001])
    assert difference(curves).median == pytest.approx(1e-3)
    assert not difference(curves).met


def test_loads_keep_the_sum_of_each_phase() -> None:
    if not lengths_folder().is_dir():
        pytest.skip("no fixtures: ORCHDATA_FIXTURES names their folder")
    found = run_loads(LoadsBench(ranks=4, samples_per_rank=4, steps=3))
    (table,) = (each for each in found if isinstance(each, WideTable))
    sums: dict[str, dict[str, float]] = {way: {} for way in WAYS}
    for heading in table.columns[1:]:
        phase, way = heading.split(", ")
        sums[way][phase] = sum(float(cell or 0) for cell in column(table, heading))
    assert sums["balanced"] == pytest.approx(sums["unbalanced"])  # the same samples
    assert sum(sums["balanced"].values()) == pytest.approx(4)  # 1 is the mean over 4 ranks
    assert all(len(each.values) == 3 for each in found if isinstance(each, Result))


@pytest.mark.slow
def test_curves_of_all_numbers_of_ranks_are_one_curve() -> None:
    table, difference = run_curves(LossCurves(samples=32, steps=3, global_batch_size=8))
    assert isinstance(table, WideTable) and isinstance(difference, Result)
    assert table.columns == ("step", *(curve_name(ranks, way) for ranks in RANKS for way in WAYS))
    assert len(table.rows) == 3
    assert difference.met
