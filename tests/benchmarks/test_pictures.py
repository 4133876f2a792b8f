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
from benchmarks.pictures.draw import pictures
from benchmarks.pictures.loads import WAYS
from benchmarks.pictures.loss_curves import RANKS, LossCurves, curve_name, difference
from benchmarks.pictures.loss_curves import run as run_curves
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
