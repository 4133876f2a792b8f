"""The pictures of docs: each is on a page, a plain SVG that people can read, and what the stored plans say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from browsers import show

from benchmarks.balance.real_lengths import lengths_folder
from benchmarks.pictures.diagrams import diagrams
from benchmarks.pictures.diagrams.canvas import PALETTE, WIDTH, Canvas
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
SMALLEST, LEAST_CONTRAST = 11, 4.5
# What a page can show of a picture: GitHub's column for the README, and the site's for docs.
COLUMN = {"README.md": 830, "docs": 736}
# Rectangles that texts of the page take, and those of what is hatched.
RECTANGLES = """
const of = query => [...document.querySelectorAll(query)].map(element => {
  const box = element.getBoundingClientRect();
  return [box.left, box.top, box.right, box.bottom, element.textContent];
});
return [of('text'), of('rect.f-hatch')];
"""


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


def contrast(first: str, second: str) -> float:
    def light(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((light(first), light(second)))
    return (high + 0.05) / (low + 0.05)


def grounds(root: ElementTree.Element) -> set[tuple[str, str]]:
    """(colour of a text, fill under it) of all texts: the last rectangle before it that has its middle."""
    found, boxes = set(), []
    for element in root:
        kind = element.get("class", "").split()
        if element.tag == f"{SVG}rect":
            boxes.append((*(float(element.attrib[name]) for name in ("x", "y", "width", "height")), kind[0]))
        elif element.tag == f"{SVG}text":
            side = {"start": 4, "middle": 0, "end": -4}[element.attrib["text-anchor"]]
            x, y = float(element.attrib["x"]) + side, float(element.attrib["y"]) - 4
            under = [fill for left, top, wide, high, fill in boxes if 0 <= x - left <= wide and 0 <= y - top <= high]
            found.add((kind[0].removeprefix("f-"), under[-1].removeprefix("f-")))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_text_of_a_diagram_stands_out_in_light_and_dark(name: str) -> None:
    for text, ground in grounds(ElementTree.fromstring(diagrams()[name]())):
        assert ground != "hatch"
        for scheme in (0, 1):
            assert contrast(PALETTE[text][scheme], PALETTE[ground][scheme]) >= LEAST_CONTRAST, (text, ground)  # type: ignore[index]


def test_contrast_is_measured() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)
    canvas = Canvas(100, "title", "description")
    canvas.box(10, 10, 50, 20, "hatch")
    canvas.text(20, 24, "on a hatch")
    assert grounds(ElementTree.fromstring(canvas.to_svg())) == {("ink", "hatch")}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_texts_of_a_diagram_neither_overlap_nor_are_cut(browser: Any, name: str) -> None:
    show(browser, PICTURES / name, WIDTH, "light")
    texts, hatched = browser.execute_script(RECTANGLES)
    height = float(ElementTree.parse(PICTURES / name).getroot().attrib["height"])
    assert len(texts) > 10
    for number, one in enumerate(texts):
        assert one[0] >= 8 and one[2] <= WIDTH - 8 and one[1] >= 0 and one[3] <= height, one
        assert not [other for other in [*texts[:number], *hatched] if overlap(one, other)], one


def overlap(one: list[Any], other: list[Any]) -> bool:
    """Whether two rectangles share more than the empty line above and below letters."""
    wide = min(one[2], other[2]) - max(one[0], other[0])
    high = min(one[3], other[3]) - max(one[1], other[1])
    return bool(wide > 1 and high > 3)


def test_texts_overlap_where_letters_would_touch() -> None:
    assert overlap([0, 0, 40, 14, "one"], [38, 4, 80, 18, "other"])
    assert not overlap([0, 0, 40, 14, "one"], [0, 12, 40, 26, "the next line"])
    assert not overlap([0, 0, 40, 14, "one"], [41, 0, 80, 14, "the next word"])


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
