"""The decoders that ours are compared to return the same tensors, but for the resizer's rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks import decode
from benchmarks.decode import DecodeBench, Held
from orchdata.loaders.recipe import AudioPreprocessor, ImagePreprocessor


def test_the_reference_gives_the_same_tensors():
    (sample, *_) = [each for each in decode.read_fields(DecodeBench(samples=8)) if "wav" in each]
    for draft in (False, True):
        image = Held.of(sample["jpg"], ImagePreprocessor(draft=draft, max_tokens=64))
        image.decode()
        ours = torch.from_numpy(image.out["patches"]).view(torch.bfloat16).float()
        theirs = decode.reference_patches(image, image.modality).float()
        assert (ours - theirs).abs().mean() < 0.02  # a level in a hundred of the range
    clip = Held.of(sample["wav"], AudioPreprocessor())
    clip.decode()
    np.testing.assert_allclose(clip.out["features"][:-3], decode.reference_mel(clip, clip.modality)[:-3], atol=1e-4)


@pytest.mark.slow
def test_a_run_reports_stages_and_ratios():
    images, clips, *ratios = decode.run(DecodeBench(samples=6, repeats=1))
    assert [row[0] for row in images.rows][:3] == ["JPEG to pixels", "resizing", "normalising and cutting"]
    assert clips.columns == ("stage", "WAV", "FLAC")
    assert len(ratios) == 8
    assert all(min(result.values) > 0 for result in ratios)
