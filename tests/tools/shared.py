"""What jobs of the tools share: data, the code of their pages, what a rank reports, and samples as a plain loader has
them, which nothing of the library reads or orders.

    TOOL_job.py ours     the page's code over a loader of orchdata --> ours-RANK.jsonl: loss and keys of each step
    TOOL_job.py plain    the same training over torch's loader of the samples in steps.json --> plain-RANK.jsonl
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

DOCS = Path(__file__).parents[2] / "docs"
PLACES = {
    "lightning": ("trainers.md", "Lightning"),
    "megatron_core": ("megatron_torchtitan.md", "megatron-core"),
    "torchtitan": ("megatron_torchtitan.md", "torchtitan"),
    "trl": ("trainers.md", "TRL"),
}
SIZE, STEPS = 8, 5
RATE = 0.1


def page_code(tool: str) -> str:
    """The first Python block below the heading of a tool."""
    page, heading = PLACES[tool]
    return (DOCS / page).read_text().partition(f"## {heading}\n")[2].partition("```python\n")[2].partition("```")[0]


def rank() -> int:
    return int(os.environ["RANK"])


def num_ranks() -> int:
    return int(os.environ["WORLD_SIZE"])


class Recorder:
    """Writes a line for each step of this rank."""

    def __init__(self, way: str) -> None:
        self._path = Path(f"{way}-{rank()}.jsonl").absolute()

    def step(self, loss: Any, keys: Iterable[str]) -> None:
        """Args: loss: the mean over the tokens of the step, on all ranks."""
        with self._path.open("a") as file:
            file.write(json.dumps({"loss": float(loss), "keys": sorted(keys)}) + "\n")


def keys_of(microbatches: Iterable[Any]) -> list[str]:
    return [key for batch in microbatches for _, key in batch.sample_ids]


def plain_steps() -> list[list[tuple[str, str]]]:
    """Key and text of the samples of each step, in the order of their keys."""
    texts = {}
    for path in sorted(Path("data").glob("*.tar")):
        with tarfile.open(path) as archive:
            for member in archive.getmembers():
                texts[member.name.removesuffix(".txt")] = archive.extractfile(member).read().decode()
    return [[(key, texts[key]) for key in sorted(keys)] for keys in json.loads(Path("steps.json").read_text())]


class OwnSamples(torch.utils.data.Sampler[list[int]]):
    """A batch sampler: of each step, the samples of this rank."""

    def __iter__(self) -> Any:
        for step in range(STEPS):
            yield list(range(step * SIZE + rank(), (step + 1) * SIZE, num_ranks()))

    def __len__(self) -> int:
        return STEPS


def plain_loader(collate: Any) -> torch.utils.data.DataLoader[Any]:
    """torch's loader; `collate` is given (key, tokens) of a rank's samples of a step, tokens the bytes of a text."""
    samples = [(key, list(text.encode())) for step in plain_steps() for key, text in step]
    return torch.utils.data.DataLoader(samples, batch_sampler=OwnSamples(), collate_fn=collate)


def padded(samples: list[tuple[str, list[int]]], length: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and unshifted labels, a row a sample; -100 where no token is predicted."""
    length = length or max(len(tokens) for _, tokens in samples)
    ids, labels = torch.zeros(len(samples), length, dtype=torch.int64), torch.full((len(samples), length), -100)
    for row, (_, tokens) in enumerate(samples):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, 1 : len(tokens)] = torch.tensor(tokens[1:])
    return ids, labels
