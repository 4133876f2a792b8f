"""What a piece of a long text costs: tokenized alone, and with its whole text.

    made-up documents --index, undivided and in pieces--> seconds a document
                      --StoredSample.decode, in any order--> milliseconds a piece, and the whole document

A byte-level BPE is trained on the documents' words, and uses one thread. Files are in the page cache.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import run_command
from orchdata.bench import Result, WideTable
from orchdata.loaders.index.build import build_index
from orchdata.loaders.index.index import Index
from orchdata.loaders.index.stored import StoredSample
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.shards.open import OpenShards
from orchdata.loaders.storage.cache import CacheFolder
from orchdata.loaders.text.preprocessor import TextPreprocessor

_WORDS = 20_000
_SYLLABLES = "ka lo mi ter an sto re vi ung per ti on al me se cra".split()


@dataclass(frozen=True, kw_only=True, slots=True)
class PiecesBench:
    """What to measure.

    Attributes:
        documents: of the data set.
        tokens: of a document, about.
        max_tokens: of a piece.
        repeats: of each measurement, in turn.
        seed: of the documents.
    """

    documents: int = 4
    tokens: int = 100_000
    max_tokens: int = 4096
    repeats: int = 5
    seed: int = 0


def run(config: PiecesBench) -> list[Result | WideTable]:
    """Measure a configuration."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    texts, tokenizer = made_up(config)
    cut = TextPreprocessor(tokenizer, max_tokens=config.max_tokens, overflow="split")
    recipes = [Recipe(image=None, audio=None, text=text) for text in (TextPreprocessor(tokenizer), cut)]
    indexing: list[list[float]] = [[], []]
    decoding: list[list[float]] = [[], []]
    notes = ["", ""]
    with tempfile.TemporaryDirectory() as folder:
        path, cache = write_texts(texts, Path(folder, "texts.jsonl")), CacheFolder(Path(folder, "cache"))
        for _ in range(config.repeats):
            for way, recipe in enumerate(recipes):
                begin = time.perf_counter()
                index = build_index([str(path)], recipe, cache=cache, num_threads=1, force=True)
                indexing[way].append((time.perf_counter() - begin) / len(texts))
                decoding[way].append(1000 * _seconds_a_row(index, recipe, cache))
                notes[way] = f"{int(index.llm_tokens.sum()) // len(texts):,} tokens"
        notes[1] = f"{int((index.text_start >= 0).sum())} of {index.num_rows} alone"
    return [
        Result(name="indexing a document, undivided", unit="s", values=tuple(indexing[0]), note=notes[0]),
        Result(name="indexing it in pieces", unit="s", values=tuple(indexing[1]), note=notes[1]),
        Result(name="decoding a document, undivided", unit="ms", values=tuple(decoding[0])),
        Result(name="decoding a piece", unit="ms", values=tuple(decoding[1])),
    ]


def _seconds_a_row(index: Index, recipe: Recipe, cache: CacheFolder) -> float:
    shards = OpenShards(limits=recipe.limits, cache=cache)
    begin = time.perf_counter()
    for row in np.random.default_rng(0).permutation(index.num_rows).tolist():
        StoredSample(index, shards, row).decode(recipe)
    shards.close()
    return (time.perf_counter() - begin) / index.num_rows


def made_up(config: PiecesBench) -> tuple[Sequence[str], Any]:
    """Documents of words whose frequencies fall as 1/rank, and a tokenizer trained on them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    rng = np.random.default_rng(config.seed)
    words = ["".join(rng.choice(_SYLLABLES, rng.integers(1, 5))) for _ in range(_WORDS)]
    share = 1 / np.arange(1, _WORDS + 1)
    drawn = [rng.choice(_WORDS, config.tokens, p=share / share.sum()) for _ in range(config.documents)]
    texts = [" ".join(words[each] for each in of.tolist()) for of in drawn]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=32_000, initial_alphabet=alphabet, show_progress=False)
    )
    return texts, bpe


def write_texts(texts: Sequence[str], path: Path) -> Path:
    """Write a JSON Lines file of them, and return its path."""
    path.write_text("".join(json.dumps({"id": str(at), "text": text}) + "\n" for at, text in enumerate(texts)))
    return path


if __name__ == "__main__":
    run_command("benchmarks.pieces", PiecesBench, run)
