"""Chromium of the distribution, to look at pages as people see them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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


@pytest.fixture(scope="session")
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
