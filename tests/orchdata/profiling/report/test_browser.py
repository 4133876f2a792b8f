"""The report in a browser: what people can read on a phone and on a desk, in light and dark, and on paper."""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shard_factory import RECIPE, omni_shards

import orchdata as od

pytestmark = pytest.mark.slow

COST = od.CostModel(image=od.PhaseCost(3.0), audio=od.PhaseCost(1.0), llm=od.PhaseCost(1.0, 0.01))
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
# Each text that is seen: its size on the screen, and the contrast to its background.
LOOK = """
const channel = value => { value /= 255; return value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4; };
const parts = colour => colour.match(/[0-9.]+/g).map(Number);
const light = colour => { const [r, g, b] = parts(colour).map(channel); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const background = element => {
  for (let at = element; at; at = at.parentElement) {
    const colour = getComputedStyle(at).backgroundColor, [, , , alpha] = parts(colour);
    if (alpha === undefined || alpha > 0) return colour;
  }
  return 'rgb(255, 255, 255)';
};
const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const text = walker.currentNode.textContent.trim(), element = walker.currentNode.parentElement;
  if (!text || ['STYLE', 'title'].includes(element.tagName)) continue;
  const style = getComputedStyle(element), box = element.getBoundingClientRect();
  if (!box.width || style.visibility === 'hidden') continue;
  const drawn = element.ownerSVGElement, turn = drawn ? element.getScreenCTM() : {a: 1, b: 0};
  const scale = Math.hypot(turn.a, turn.b);
  const front = light(drawn ? style.fill : style.color);
  const back = light(background(drawn ? drawn.parentElement : element));
  const contrast = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
  found.push([text.slice(0, 40), parseFloat(style.fontSize) * scale, contrast]);
}
return found;
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    data = od.ShardDataset(omni_shards(folder, shards=3, samples=40), recipe=RECIPE)
    profile = data.profile(cost=COST, ranks=(2, 4, 64), batch_size=4, group_size=2)
    profile.write_html(folder / "report.html", data)
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium of the distribution; where CI sets its variable, it must be there."""
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        assert not os.environ.get("CI"), "CI has no Chromium: apt-get install chromium chromium-driver"
        pytest.skip("there is no Chromium with its driver: apt-get install chromium chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    opened = webdriver.Chrome(options=options, service=Service(driver))
    yield opened
    opened.quit()


def show(browser: Any, page: Path, width: int, scheme: str) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get_log("performance")
    browser.get(page.as_uri())


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
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
    assert not [text for text in browser.execute_script(LOOK) if text[2] < 4.5]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})


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
