"""What the benchmark of image processors compares are the same pixels, prepared in two ways."""

from __future__ import annotations

import numpy as np
import pytest
import transformers

from benchmarks import images
from benchmarks.images import CASES, ImagesBench, Pair, picture
from orchdata.hf.images import image_modality


@pytest.mark.parametrize("name", ["GLM-4V", "LLaVA-NeXT, defaults", "Gemma-4, its own class"])
def test_both_ways_give_the_same_pixels(name: str) -> None:
    kind, settings = CASES[name]
    processor = getattr(transformers, f"{kind}Pil")(**settings)
    modality = image_modality(processor, patch_size=14)
    assert modality.native or "its own class" in name
    ways = Pair(picture(200, 160, "BMP"), modality, processor).ways()
    ours, theirs = ways["ours"](), ways["theirs"]()
    values = theirs["pixel_values"].numpy()
    np.testing.assert_array_equal(ours["pixel_values"].reshape(values.shape), values)


@pytest.mark.slow
def test_a_run_reports_every_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "SIZES", ((60, 50),))
    monkeypatch.setattr(images, "CASES", {name: CASES[name] for name in ("GLM-4V", "PaliGemma")})
    for table in images.run(ImagesBench(repeats=1)):
        assert [row[0] for row in table.rows] == ["GLM-4V", "PaliGemma"]
        assert all(len(row) == 4 and row[3] > 0 for row in table.rows)
