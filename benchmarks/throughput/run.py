"""Loading speed compared to other loaders, with the same decoding.

    tars --index--> Records --a child process a lane and turn: measure()--> Figures --> report
         '--prepare, not timed--> formats that peers want

All lanes take the same samples, decode them with the same functions under the same recipe, and pack a batch into one
tensor for each modality. What differs is who reads, schedules, and moves data to the process that iterates.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.loading.compare import Comparison, check_sizes, compare, made_up_shards
from benchmarks.loading.job import Shards
from benchmarks.throughput.decoding import Decoder, PillowImages
from benchmarks.throughput.lanes import chosen_lanes
from benchmarks.throughput.records import PeersJob, Records, RecordSamples
from orchdata.bench import Result, WideTable, work_folder
from orchdata.loaders.index.build import build_index
from orchdata.loaders.modalities.image import ImagePreprocessor
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.storage.paths import expand_paths


@dataclass(frozen=True, kw_only=True, slots=True)
class PeersBench:
    """What to measure.

    Attributes:
        data: plain tars, as globs, braces or files, with spaces between them; without any, a made-up data set.
        samples: of the made-up data set: JPEGs of about 500 x 400 and 82 KiB, three in four with WAV or FLAC, text.
        peers: "all", "none", or names with commas between them.
        consumer: what is done with each batch: "none", "torch" (small operations) or "python" (pure Python).
        consumer_ms: how long that takes where nothing else runs.
        decode: of the peers and of bare threads: "orchdata", as ours, or "pillow", images by Pillow and torch.
        max_tokens: of an image, above which it is resized; by default only the largest are.
        draft: whether large JPEGs are scaled while they are decoded.
        batch_size: samples of a batch.
        workers: threads, or worker processes, of each loader.
        repeats: epochs of each that count.
        seed: of data set and order.
        folder: where to write data; by default a temporary folder.
    """

    data: str = ""
    samples: int = 800
    peers: str = "all"
    consumer: str = "none"
    consumer_ms: float = 50.0
    decode: str = "orchdata"
    max_tokens: int = 4096
    draft: bool = False
    batch_size: int = 16
    workers: int = 2
    repeats: int = 3
    seed: int = 0
    folder: str = ""

    def __post_init__(self) -> None:
        check_sizes(self.shared)
        if self.decode not in ("orchdata", "pillow"):
            raise ValueError(f"decode must be one of orchdata, pillow, got {self.decode!r}")

    @property
    def shared(self) -> Comparison:
        """What all comparisons have."""
        names = ("samples", "consumer", "consumer_ms", "batch_size", "workers", "repeats", "seed")
        return Comparison(**{name: getattr(self, name) for name in names}, folder=self.folder or None)


def run(config: PeersBench) -> list[Result | WideTable]:
    """Measure. A loader that is not installed, or fails, is a row that says why.

    Raises ValueError for unknown peers, data that cannot be compared, and too few samples for batches of this size.
    """
    lanes = chosen_lanes(config.peers)
    with work_folder(config.folder or None) as folder:
        return compare(config.shared, make_job(config, folder), lanes)


def make_job(config: PeersBench, folder: Path) -> PeersJob:
    """The data, indexed."""
    urls = expand_paths(config.data.split()) if config.data else made_up_shards(config.shared, folder)
    recipe = Recipe(image=ImagePreprocessor(max_tokens=config.max_tokens, draft=config.draft))
    theirs = recipe if config.decode == "orchdata" else Recipe(image=PillowImages(max_tokens=config.max_tokens))
    index = build_index(urls, recipe, cache=CacheFolder(folder / "cache"))
    records, decoder = Records.of(index), Decoder(theirs)
    return PeersJob(
        shards=Shards(tuple(urls), recipe),
        samples=RecordSamples(records, decoder),
        urls=tuple(urls),
        records=records,
        decoder=decoder,
        batch_size=config.batch_size,
        workers=config.workers,
        seed=config.seed,
        cache=folder / "cache",
        folder=folder,
    )
