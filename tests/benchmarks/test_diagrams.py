"""The pictures of docs: each is on a page, a plain SVG that people can read, and what the stored plans say."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.balance.real_lengths import lengths_folder
from benchmarks.pictures.diagrams import diagrams
from benchmarks.pictures.diagrams.canvas import Canvas
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
from benchmarks.report.results import column
from orchdata.bench import WideTable

REPOSITORY = Path(__file__).resolve().parents[2]
PICTURES = REPOSITORY / "docs" / "pictures"
NAMES = list(diagrams())
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
    assert set(NAMES) < {path.name for path in PICTURES.iterdir()}
    assert max((PICTURES / name).stat().st_size for name in NAMES) < 60_000


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
