"""How fast shards are scanned, what measuring texts costs, and what a shard costs by itself.

tars of JPEG + WAV/FLAC + text --facts, one core--> samples/s
                               --costs under a recipe / the tokenizer alone--> ratio
tars of one small sample each  --build_index, from nothing and where nothing changed--> shards/s
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.command import run_command
from benchmarks.loading.corpus import Corpus
from orchdata.bench import Result, interleave, work_folder
from orchdata.loaders.index.build import build_index
from orchdata.loaders.index.costs import cost_shard
from orchdata.loaders.index.facts import Probes
from orchdata.loaders.limits import Limits
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards.open import open_shard
from orchdata.loaders.shards.shard import Facts, FactsTable, Shard
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.text.preprocessor import TextPreprocessor

Tokenizer = Callable[[str], list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexBench:
    """What to measure.

    Attributes:
        samples: of the made-up dataset, about 100 KiB each.
        words: mean length of a text; the default is that of instruction data.
        small_shards: tars of one sample each.
        repeats: of each measurement.
        seed: of the dataset.
        folder: where to write it; a temporary folder by default.
    """

    samples: int = 6_000
    words: int = 300
    small_shards: int = 2_000
    repeats: int = 5
    seed: int = 0
    folder: str = ""


def run(config: IndexBench) -> list[Result]:
    """Measure."""
    with work_folder(config.folder or None) as folder:
        corpus = Corpus(
            samples=config.samples,
            shards=min(6, config.samples),
            words=config.words,
            seed=config.seed,
            audio_seconds=1.5,
        )
        urls = corpus.write(folder)
        cache = CacheFolder(folder / "cache")
        name, tokenizer = make_tokenizer(urls, cache)
        return [
            *_scanning(urls, cache, config),
            *_tokenizing(urls, cache, config, name, Recipe(text=TextPreprocessor(tokenizer, id=name)), tokenizer),
            *_small_shards(folder / "small", config),
        ]


def _open(url: str, cache: CacheFolder) -> Shard:
    return open_shard(url, limits=Limits(), cache=cache)


def scan(urls: Sequence[str], cache: CacheFolder) -> list[Facts]:
    """Scan each shard again, and return its facts."""
    facts = []
    for url in urls:
        with closing(_open(url, cache)) as shard:
            facts.append(shard.facts())
    return facts


def _scanning(urls: Sequence[str], cache: CacheFolder, config: IndexBench) -> list[Result]:
    wall = interleave({"scan": lambda: scan(urls, cache)}, repeats=config.repeats)["scan"]
    cpu = interleave({"scan": lambda: scan(urls, cache)}, repeats=config.repeats, clock=time.process_time)["scan"]
    return [
        Result(
            name="walk shards and read media headers",
            unit="samples per CPU second",
            values=tuple(config.samples / seconds for seconds in cpu),
            demand=30_000.0,
            better="high",
            note="JPEG + WAV/FLAC + text, one thread, page cache warm",
        ),
        Result(
            name="  the same, elapsed",
            unit="samples/s",
            values=tuple(config.samples / seconds for seconds in wall),
            better="high",
        ),
    ]


def _tokenizing(
    urls: Sequence[str], cache: CacheFolder, config: IndexBench, name: str, recipe: Recipe, tokenizer: Tokenizer
) -> list[Result]:
    facts = dict(zip(urls, scan(urls, cache), strict=True))
    texts = [text for url in urls for text in read_texts(url, facts[url].table, cache)]

    probes = Probes(recipe, cache)

    def cost_layer() -> None:
        for url in urls:
            with closing(_open(url, cache)) as shard:
                cost_shard(facts[url], lambda shard=shard: shard, recipe, probes)  # type: ignore[misc]

    def tokenizer_alone() -> None:
        for text in texts:
            tokenizer(text)

    seconds = interleave(
        {"cost layer": cost_layer, "tokenizer": tokenizer_alone}, repeats=config.repeats, clock=time.process_time
    )
    pairs = list(zip(seconds["cost layer"], seconds["tokenizer"], strict=True))
    return [
        Result(
            name="costs under a recipe / the tokenizer alone",
            unit="x",
            values=tuple(layer / alone for layer, alone in pairs),
            demand=1.2,
            note=f"CPU time; {name}, {sum(map(len, texts)) / len(texts):.0f} characters a text",
        ),
        Result(
            name="  added to the tokenizer",
            unit="us a sample",
            values=tuple(1e6 * (layer - alone) / config.samples for layer, alone in pairs),
            note="for any length of the text",
        ),
        Result(
            name="  costs under a recipe",
            unit="samples per CPU second",
            values=tuple(config.samples / value for value in seconds["cost layer"]),
            better="high",
        ),
        Result(
            name="  the tokenizer alone",
            unit="samples per CPU second",
            values=tuple(config.samples / value for value in seconds["tokenizer"]),
            better="high",
        ),
    ]


def _small_shards(folder: Path, config: IndexBench) -> list[Result]:
    folder.mkdir()
    count = config.small_shards
    small = Corpus(samples=count, shards=count, words=20, width=64, height=48, audio_share=0.0, variety=4)
    urls = small.write(folder)
    turns = itertools.count()

    def build() -> CacheFolder:
        cache = CacheFolder(folder / f"cache-{next(turns)}")
        build_index(urls, Recipe(), cache=cache)
        return cache

    kept = build()
    seconds = interleave(
        {"new": build, "same": lambda: build_index(urls, Recipe(), cache=kept)}, repeats=config.repeats, warmup=0
    )
    return [
        Result(
            name="index tars of one sample each",
            unit="shards/s",
            values=tuple(count / value for value in seconds["new"]),
            demand=1_000.0,
            better="high",
            note="JPEG + text, all CPUs, the whole build of an index",
        ),
        Result(
            name="  again, nothing changed",
            unit="shards/s",
            values=tuple(count / value for value in seconds["same"]),
            better="high",
        ),
    ]


def read_texts(url: str, facts: FactsTable, cache: CacheFolder) -> list[str]:
    """The text members of a shard."""
    rows = zip(facts.field, facts.offset, facts.size, facts.encoding, strict=True)
    with closing(_open(url, cache)) as shard:
        return [
            bytes(shard.read(offset, size, encoding, field)).decode()
            for field, offset, size, encoding in rows
            if field == "txt"
        ]


def make_tokenizer(urls: Sequence[str], cache: CacheFolder) -> tuple[str, Tokenizer]:
    """A byte-level BPE trained on a shard's texts; without the `tokenizers` package, the bytes of the text."""
    try:
        from tokenizers import Tokenizer as Trained
        from tokenizers import decoders, models, pre_tokenizers, trainers
    except ImportError:
        return "UTF-8 bytes (tokenizers is not installed)", lambda text: list(text.encode())
    trained = Trained(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=8_000, show_progress=False)
    trained.train_from_iterator(read_texts(urls[0], scan(urls[:1], cache)[0].table, cache), trainer)
    return "BPE of 8,000 tokens (tokenizers)", lambda text: trained.encode(text).ids


if __name__ == "__main__":
    run_command("benchmarks.index", IndexBench, run)
