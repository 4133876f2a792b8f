"""Tars of made-up samples of one kind: text, chats, captioned images, captioned clips; one recipe reads all of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from webdataset import TarWriter

from benchmarks.loading.job import Shards
from benchmarks.made_clips import make_video
from benchmarks.throughput.decoding import Decoder
from benchmarks.throughput.records import PeersJob, Records, RecordSamples
from orchdata.loaders.index.build import build_index
from orchdata.loaders.modalities.image import ImagePreprocessor
from orchdata.loaders.modalities.video.preprocessor import VideoPreprocessor
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.synth import synthesize

MERGE: Final = 2
RECIPE: Final = Recipe(
    image=ImagePreprocessor(merge=MERGE, min_tokens=1, max_tokens=16, dtype="float32"),
    audio=None,
    video=VideoPreprocessor(merge=MERGE, fps=4, min_tokens=1, max_tokens=16, dtype="float32"),
)
_SHORT: Final = {"uniform": [4, 24]}
KINDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "text": {"words": {"uniform": [10, 80]}},
    "chat": {"style": "chat", "turns": {"choice": {1: 0.4, 2: 0.3, 3: 0.3}}, "words": {"uniform": [10, 80]}},
    "images": {"words": _SHORT, "image": {"width": {"uniform": [64, 200]}}},
    "video": {},
}
"""Name -> what `orchdata synth` is asked for; it makes no video."""


def make_data(kind: str, samples: int, shards: int, seed: int, batch_size: int, workers: int, folder: Path) -> PeersJob:
    """Write the tars of a kind, and their index."""
    described = {"seed": seed, "samples": samples, "shards": shards, "kinds": {kind: dict(KINDS[kind])}}
    if kind == "video":
        urls = _video_tars(samples, shards, seed, folder / "tars")
    else:
        urls = tuple(str(path) for path in synthesize(described, folder / "tars").paths)
    records = Records.of(build_index(urls, RECIPE, cache=CacheFolder(folder / "cache")))
    decoder = Decoder(RECIPE)
    return PeersJob(
        shards=Shards(urls, RECIPE),
        samples=RecordSamples(records, decoder),
        urls=urls,
        records=records,
        decoder=decoder,
        batch_size=batch_size,
        workers=workers,
        seed=seed,
        cache=folder / "cache",
        folder=folder,
    )


def _video_tars(samples: int, shards: int, seed: int, folder: Path) -> tuple[str, ...]:
    """Write clips of half a second to two, 64 pixels wide, with what is seen in words."""
    folder.mkdir(parents=True)
    urls = tuple(str(folder / f"{shard:06d}.tar") for shard in range(shards))
    for shard, url in enumerate(urls):
        with TarWriter(url, encoder=False, mtime=0) as writer:
            for number in range(shard * samples // shards, (shard + 1) * samples // shards):
                rng = np.random.default_rng((seed, number))
                clip, words = make_video(rng, rng.uniform(0.5, 2), int(rng.choice([12, 24, 30])), 64, 48, "mp4")
                writer.write({"__key__": f"{number:08d}", "mp4": clip, "txt": words.encode()})
    return urls
