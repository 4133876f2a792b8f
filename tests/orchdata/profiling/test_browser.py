"""The report in a browser: what people can read on a phone and on a desk, in light and dark, and on paper."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import pytest
from browsers import LOOK, show
from shard_factory import RECIPE, omni_shards

import orchdata as od

pytestmark = pytest.mark.slow

COST = od.CostModel(image=od.PhaseCost(3.0), audio=od.PhaseCost(1.0), llm=od.PhaseCost(1.0, 0.01))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    data = od.ShardDataset(omni_shards(folder, shards=3, samples=40), recipe=RECIPE)
    profile = data.profile(cost=COST, ranks=(2, 4, 64), batch_size=4, group_size=2)
    profile.write_html(folder / "report.html", data)
    return folder / "report.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 700, 1440])
def test_people_can_read_it(browser: Any, report: Path, width: int, scheme: str) -> None:
    show(browser, report, width, scheme)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    texts = browser.execute_script(LOOK)
    assert len(texts) > 100
    assert not [text for text in texts if text[1] < 11]
    assert not [text for text in texts if text[2] < 4.5]


def test_it_loads_and_runs_nothing(browser: Any, report: Path) -> None:
    show(browser, report, 1440, "light")
    assert browser.get_log("browser") == []
    requests = [entry["message"] for entry in browser.get_log("performance") if "requestWillBeSent" in entry["message"]]
    assert len([message for message in requests if '"url":"data:' not in message]) == 1  # the page itself
    pictures = browser.execute_script("return [...document.images].map(image => image.naturalWidth)")
    assert pictures
    assert all(pictures)


def test_it_prints(browser: Any, report: Path) -> None:
    show(browser, report, 1440, "dark")
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})
    assert base64.b64decode(printed["data"]).startswith(b"%PDF")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": []})
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    texts = browser.execute_script(LOOK)
    assert not [text for text in texts if text[2] < 4.5]
    assert [text for text in texts if text[0] == "percentile"]  # tables that are folded on the screen
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})


def test_it_prints_on_few_pages(browser: Any, report: Path) -> None:
    """Sections break where a page ends, two histograms stand side by side, and no word of a heading is cut."""
    show(browser, report, 718, "light")  # A4 without its margins
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": []})
    style = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    assert browser.execute_script(style, "section", "breakInside") == "auto"
    for heading in ("h2", "h3", "thead"):
        assert browser.execute_script(style, heading, "breakAfter") == "avoid"
    assert browser.execute_script(style, "th", "overflowWrap") == "normal"
    tops = "return [...document.querySelectorAll('figure')].slice(1, 3).map(each => each.getBoundingClientRect().top)"
    first, second = browser.execute_script(tops)
    assert first == second
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"paperWidth": 8.27, "paperHeight": 11.69})
    pages = re.findall(rb"/Type\s*/Page\b", base64.b64decode(printed["data"]))
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    assert 3 < len(pages) <= 9


def test_the_checks_can_fail(browser: Any, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        "<body style='background:#fff'><p style='font-size:9px'>small</p><p style='color:#bbb'>pale</p>"
        "<p style='width:2000px'>wide</p><img src='http://127.0.0.1:9/none.png'><script>alert</script></body>"
    )
    show(browser, page, 390, "light")
    texts = {text[0]: text[1:] for text in browser.execute_script(LOOK)}
    assert texts["small"][0] < 11
    assert texts["pale"][1] < 4.5
    assert browser.execute_script("return document.documentElement.scrollWidth") > 390
    assert browser.get_log("browser")


@pytest.mark.parametrize(("paper", "ink"), [("#ffffff", "#222222"), ("#111111", "#dddddd")])
def test_views_in_a_notebook_take_its_colours(browser: Any, report: Path, tmp_path: Path, paper: str, ink: str) -> None:
    data = od.ShardDataset([str(path) for path in sorted(report.parent.glob("*.tar"))], recipe=RECIPE)
    loader = od.DataLoader(data, batch_size=4, num_threads=0)
    views = [data, loader, next(iter(loader)), loader.plan_at(0, 0), data.show([0, 1])]
    page = tmp_path / "notebook.html"
    html = "".join(view._repr_html_() for view in views)
    page.write_text(
        f"<meta charset=utf-8><body style='background:{paper};color:{ink}'><p class=n>outside</p>{html}</body>"
    )
    show(browser, page, 1440, "light")
    texts = browser.execute_script(LOOK)
    assert len(texts) > 50
    assert not [text for text in texts if text[1] < 11 or text[2] < 4.5]
    outside = "return getComputedStyle(document.querySelector('p.n')).textAlign"
    assert browser.execute_script(outside) in ("start", "left")  # no rule of a view is for what is around it
