"""Shards to measure on: a few media encoded once and dealt out to many samples, so that writing them takes seconds."""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from orchdata.synth import make_audio, make_image

_SYLLABLES = tuple(
    first + vowel + last for first in "bdfgklmnprstv" for vowel in "aeiou" for last in ("", "n", "r", "s")
)
_VOCABULARY = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """A made-up multimodal dataset: a JPEG and text in every sample, WAV or FLAC in most.

    Attributes:
        samples: in all shards together.
        shards: tars of equal size, give or take one sample.
        width, height: mean size of the images in pixels; half of them are larger.
        audio_share: share of samples with a clip, WAV and FLAC in turn.
        audio_seconds: mean length of the clips.
        words: mean number of words in a text.
        variety: different images, and different clips, that the samples share.
        seed: of everything.
    """

    samples: int
    shards: int = 8
    width: int = 500
    height: int = 400
    audio_share: float = 0.75
    audio_seconds: float = 3.0
    words: int = 60
    variety: int = 48
    seed: int = 0

    def write(self, folder: Path) -> list[str]:
        """Write the shards into an existing folder and return their paths."""
        if not 1 <= self.shards <= self.samples:
            raise ValueError(f"shards must be from 1 to the {self.samples} samples, got {self.shards}")
        rng = np.random.default_rng(self.seed)
        images = [self._image(rng) for _ in range(self.variety)]
        clips = [self._clip(rng, number) for number in range(self.variety)]
        bounds = np.linspace(0, self.samples, self.shards + 1).astype(int).tolist()
        paths = []
        for shard in range(self.shards):
            path = folder / f"bench-{shard:06d}.tar"
            with tarfile.open(path, "w") as tar:
                for number in range(bounds[shard], bounds[shard + 1]):
                    key = f"{number:09d}"
                    _add(tar, f"{key}.jpg", images[int(rng.integers(self.variety))])
                    if rng.random() < self.audio_share:
                        suffix, payload = clips[int(rng.integers(self.variety))]
                        _add(tar, f"{key}.{suffix}", payload)
                    _add(tar, f"{key}.txt", self.text(rng).encode())
            paths.append(str(path))
        return paths

    def text(self, rng: np.random.Generator) -> str:
        """One sample's text."""
        count = max(1, int(rng.poisson(self.words)))
        # Zipf's law, as in language: a few words are most of the text, and most words are rare.
        ranks = np.minimum(rng.zipf(1.3, count), _VOCABULARY)
        return " ".join(_word(int(rank)) for rank in ranks)

    def _image(self, rng: np.random.Generator) -> bytes:
        scale = float(rng.lognormal(0.0, 0.35))
        return make_image(rng, max(16, int(self.width * scale)), max(16, int(self.height * scale)), "jpg", 92)[0]

    def _clip(self, rng: np.random.Generator, number: int) -> tuple[str, bytes]:
        suffix = ("flac", "wav")[number % 2]
        seconds = float(self.audio_seconds * rng.uniform(0.3, 1.7))
        return suffix, make_audio(rng, seconds, 16_000, suffix)[0]


def _word(rank: int) -> str:
    """A made-up word: common ones are short."""
    word = ""
    while rank:
        rank, syllable = divmod(rank, len(_SYLLABLES))
        word += _SYLLABLES[syllable]
    return word


def _add(tar: tarfile.TarFile, name: str, payload: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(payload)
    tar.addfile(info, io.BytesIO(payload))
