"""The dataset of `orchdata bench train`, equal to `datasets/skewed.yaml`, which says why it is as it is."""

from __future__ import annotations

from orchdata.synth.description import AudioMix, Description, ImageMix, Kind
from orchdata.synth.distributions import Choice, Constant, LogNormal, Uniform

SKEWED = Description(
    seed=0,
    samples=480,
    shards=4,
    kinds=(
        ("note", Kind(weight=0.66, words=LogNormal(10, 0.5, 4, 60))),
        ("report", Kind(weight=0.08, words=LogNormal(70, 0.3, 20, 160))),
        (
            "album",
            Kind(
                weight=0.14,
                style="chat",
                words=Uniform(8, 24),
                image=ImageMix(
                    count=Choice((2, 3, 5), (0.4, 0.3, 0.3)),
                    width=LogNormal(300, 0.3, 112, 560),
                    aspect=Uniform(0.75, 1.4),
                ),
            ),
        ),
        (
            "talk",
            Kind(
                weight=0.12,
                words=Uniform(6, 20),
                audio=AudioMix(
                    count=Choice((1, 2, 3), (0.4, 0.3, 0.3)),
                    seconds=LogNormal(10, 0.35, 3, 24),
                    rates=Constant(16_000),
                ),
            ),
        ),
    ),
)
