"""Real lengths to balance: Parquet files of the fixtures folder -> positions of a phase, drawn with a seed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.distributions import ENCODER_CROSSOVER, LLM_CROSSOVER, Distribution, quadratic

PATCH_PIXELS = 14
AUDIO_RATE = 16_000
POSITIONS_PER_SECOND = 50
LONGEST = 131_072  # Positions of a long context: documents above it are cut in training.

Columns = dict[str, NDArray[np.int64]]


def _total(columns: Columns) -> NDArray[np.int64]:
    return np.minimum(sum(columns.values(), np.int64(0)), LONGEST)


def _patches(columns: Columns) -> NDArray[np.int64]:
    return (columns["width"] // PATCH_PIXELS) * (columns["height"] // PATCH_PIXELS)


def _positions(columns: Columns) -> NDArray[np.int64]:
    return -(-columns["samples_16khz"] * POSITIONS_PER_SECOND // AUDIO_RATE)


# Name -> (file, columns -> positions, where attention costs as much as the weights).
LISTS: Mapping[str, tuple[str, Callable[[Columns], NDArray[np.int64]], int]] = {
    "Azure chat": ("text_azure_llm_conv_2023", _total, LLM_CROSSOVER),
    "Azure code": ("text_azure_llm_code_2023", _total, LLM_CROSSOVER),
    "Wikipedia": ("text_wikipedia_tokens", _total, LLM_CROSSOVER),
    "GSM8K": ("text_gsm8k", _total, LLM_CROSSOVER),
    "ADE20K": ("image_ade20k_train", _patches, ENCODER_CROSSOVER),
    "LibriSpeech clean": ("audio_librispeech_train-clean-100", _positions, ENCODER_CROSSOVER),
    "LibriSpeech other": ("audio_librispeech_dev-other", _positions, ENCODER_CROSSOVER),
}


def lengths_folder() -> Path:
    """The folder of length lists: `lengths` in ORCHDATA_FIXTURES, by default in ../shared/fixtures."""
    return Path(os.environ.get("ORCHDATA_FIXTURES", "../shared/fixtures")) / "lengths"


def real_distributions(folder: Path) -> dict[str, Distribution]:
    """Linear and quadratic costs of each list that is there; empty without the folder."""
    found: dict[str, Distribution] = {}
    for name, (file, positions, crossover) in LISTS.items():
        path = folder / f"{file}.parquet"
        if path.is_file():
            found[name] = _draw(path, positions, None)
            found[f"{name} quadratic"] = _draw(path, positions, crossover)
    return found


def real_lengths(name: str) -> NDArray[np.int64]:
    """Positions of all of a list, at least 1 each."""
    file, positions, _ = LISTS[name]
    return np.maximum(positions(_read(lengths_folder() / f"{file}.parquet")), 1)


def all_lengths(name: str, longest: int) -> NDArray[np.int64] | None:
    """Tokens of all documents of a list, those above `longest` cut there; None without the folder."""
    path = lengths_folder() / f"{LISTS[name][0]}.parquet"
    if not path.is_file():
        return None
    return np.clip(sum(_read(path).values(), np.int64(0)), 1, longest)


def _draw(path: Path, positions: Callable[[Columns], NDArray[np.int64]], crossover: int | None) -> Distribution:
    def costs(generator: np.random.Generator, num_samples: int) -> NDArray[np.int64]:
        """Some of the list in random order; with replacement where it is shorter than that."""
        lengths = np.maximum(positions(_read(path)), 1)
        drawn = generator.choice(lengths, num_samples, replace=num_samples > len(lengths))
        return drawn if crossover is None else quadratic(drawn, crossover)

    return costs


@cache
def _read(path: Path) -> Columns:
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    return {name: table[name].to_numpy().astype(np.int64) for name in table.column_names}
