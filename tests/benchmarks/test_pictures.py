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
from benchmarks.pictures.diagrams import diagrams
from benchmarks.pictures.diagrams.canvas import Canvas
from benchmarks.pictures.draw import pictures
from benchmarks.pictures.drawn_plans import (
    IMAGES,
    LAYOUTS,
    MICRO_STEPS,
    MIXTURE,
    RESUMED,
    SAMPLES,
    STEP,
    DrawnPlans,
    run,
)
from benchmarks.pictures.loads import WAYS
from benchmarks.pictures.loss_curves import RANKS, LossCurves, curve_name, difference
from benchmarks.pictures.loss_curves import run as run_curves
from benchmarks.report.results import column
from orchdata.bench import Result, WideTable

NAMES = list(pictures())


@pytest.mark.slow
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


def test_curves_that_part_miss_the_demand() -> None:
    curves = {curve_name(ranks, way): np.array([4.0, 2.0, 1.0]) for ranks in RANKS for way in WAYS}
    assert difference(curves).met
    curves[curve_name(8, "balanced")] = np.array([4.0, 2.0, 1.001])
    assert difference(curves).median == pytest.approx(1e-3)
    assert not difference(curves).met


@pytest.mark.slow
def test_curves_of_all_numbers_of_ranks_are_one_curve() -> None:
    table, difference = run_curves(LossCurves(samples=32, steps=3, global_batch_size=8))
    assert isinstance(table, WideTable) and isinstance(difference, Result)
    assert table.columns == ("step", *(curve_name(ranks, way) for ranks in RANKS for way in WAYS))
    assert len(table.rows) == 3
    assert difference.met


# The pictures of docs: each is on a page, a plain SVG that people can read, and what the stored plans say.

REPOSITORY = Path(__file__).resolve().parents[2]
PICTURES = REPOSITORY / "docs" / "pictures"
DIAGRAMS = list(diagrams())
SVG = "{http://www.w3.org/2000/svg}"
SMALLEST = 11
# What a page can show of a picture: GitHub's column for the README, and the site's for docs.
COLUMN = {"README.md": 830, "docs": 736}


def pages_with(name: str) -> list[str]:
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
    shown = re.compile(rf"!\[[^\]]{{30,}}\]\((?:docs/)?pictures/{re.escape(name)}\)")
    return [page.name for page in pages if shown.search(page.read_text())]


@pytest.mark.parametrize("path", sorted(PICTURES.iterdir()), ids=lambda path: path.name)
def test_a_stored_picture_is_on_one_page_and_plain(path: Path) -> None:
    (page,) = pages_with(path.name)  # with a text in its place
    root = ElementTree.parse(path).getroot()
    assert root.find(f"{SVG}title") is not None
    assert not [element.tag for element in root.iter() if element.tag in (f"{SVG}script", f"{SVG}image")]
    addresses = [value for element in root.iter() for name, value in element.items() if name.endswith("href")]
    assert all(address.startswith("#") for address in addresses)
    shown = COLUMN.get(page, COLUMN["docs"])
    assert smallest_text(root, shown) >= SMALLEST


def smallest_text(root: ElementTree.Element, column: float) -> float:
    """The smallest text in pixels, where the picture may be as wide as `column`."""
    width, unit = re.fullmatch(r"([0-9.]+)(pt)?", root.attrib["width"]).groups()  # type: ignore[union-attr]
    natural = float(width) * (96 / 72 if unit else 1)
    scale = min(natural, column) / float(root.attrib["viewBox"].split()[2])
    sizes = []
    for element in root.iter():
        if element.tag in (f"{SVG}text", f"{SVG}tspan"):
            sizes += re.findall(r"([0-9.]+)px", element.get("style", "")) or [element.get("font-size", "inf")]
    return min(map(float, sizes)) * scale


def test_small_text_would_be_found() -> None:
    canvas = Canvas(100, "title", "description")
    canvas.text(10, 20, "large")
    assert smallest_text(ElementTree.fromstring(canvas.to_svg()), 736) == 12
    canvas.text(10, 40, "small", size=10.9)
    assert smallest_text(ElementTree.fromstring(canvas.to_svg()), 736) < SMALLEST


def test_all_diagrams_are_stored_and_small() -> None:
    assert set(DIAGRAMS) < {path.name for path in PICTURES.iterdir()}
    assert max((PICTURES / name).stat().st_size for name in DIAGRAMS) < 60_000


@pytest.mark.slow
def test_plans_are_drawn_from_real_lengths() -> None:
    if not lengths_folder().is_dir():
        pytest.skip("no fixtures: ORCHDATA_FIXTURES names their folder")
    found = run(DrawnPlans(steps=20, mixture_steps=4))
    tables = {each.title: each for each in found if isinstance(each, WideTable)}
    assert tables.keys() == {STEP, MICRO_STEPS, LAYOUTS, IMAGES, SAMPLES, MIXTURE, RESUMED}
    for phase in ("image", "audio", "llm"):
        for way in WAYS:
            loads = np.array(column(tables[STEP], f"{phase}, {way}"), np.float64)
            assert loads.mean() == pytest.approx(1)
    # The same samples, balanced or not: all micro-steps and phases together are as much work.
    works = [
        sum(
            float(cell or 0)
            for name in tables[MICRO_STEPS].columns
            if name.endswith(f", {way}")
            for cell in column(tables[MICRO_STEPS], name)
        )
        for way in WAYS
    ]
    assert works == pytest.approx([4, 4])  # of 4 ranks, in steps of even ranks
