"""`orchdata bench throughput`: loading speed against webdataset in torch's DataLoader, with the same decoding.

    the same tars --od.DataLoader, 2 threads----------------------------> packed batches, samples/s
                  --webdataset, torch DataLoader of 2 worker processes--> packed batches, samples/s

Both decode with the same functions of this library under the same recipe, and pack a batch into one tensor for each
modality. What differs is who reads, schedules, and moves the data to the training process.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from orchdata.bench.corpus import Corpus
from orchdata.bench.harness import Result
from orchdata.dataloader import DataLoader
from orchdata.dataset.shard_dataset import ShardDataset
from orchdata.loaders.modalities.builtin import OTHER
from orchdata.loaders.modalities.image import ImagePreprocessor
from orchdata.loaders.modalities.probing import read_header
from orchdata.loaders.recipe import Recipe
from orchdata.loaders.samples.decode import decode_sample
from orchdata.loaders.samples.measure import measure
from orchdata.loaders.samples.members import Member
from orchdata.loaders.samples.sample import MediaPart, Part, Sample, TextPart
from orchdata.loaders.shards.fields import classify

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class ThroughputBench:
    """What to measure.

    Attributes:
        samples: of the made-up dataset: JPEGs of about 500 x 400 and 82 KiB, three in four with WAV or FLAC, text.
        batch_size: samples of a batch.
        workers: threads of ours, worker processes of torch's DataLoader.
        resizer: of the recipe, "torchvision" or "pillow"; the slower it is, the less the rest of a loader shows.
        repeats: epochs of each, in turn, after one that does not count.
        seed: of the dataset.
        folder: where to write it; a temporary folder by default.
    """

    samples: int = 1_000
    batch_size: int = 16
    workers: int = 2
    resizer: Literal["torchvision", "pillow"] = "torchvision"
    repeats: int = 5
    seed: int = 0
    folder: str | None = None


def run(config: ThroughputBench) -> list[Result]:
    """Measure; raises ValueError for fewer samples than two batches of each worker."""
    least = 2 * config.batch_size * config.workers
    if config.samples < least:
        raise ValueError(
            f"{config.workers} workers and batches of {config.batch_size} need {least} samples, got {config.samples}"
        )
    with tempfile.TemporaryDirectory(dir=config.folder) as folder:
        shards = min(8, config.samples)
        urls = Corpus(samples=config.samples, shards=shards, seed=config.seed).write(Path(folder))
        recipe = Recipe(image=ImagePreprocessor(resizer=config.resizer, draft=True))
        ShardDataset(urls, recipe).index()
        epochs: dict[str, Callable[[], Iterator[int]]] = {
            "ours": lambda: _ours(urls, recipe, config, None),
            "ours, samples": lambda: _ours(urls, recipe, config, pack),
            "webdataset": lambda: _webdataset(urls, recipe, config),
        }
        rates = _interleaved_rates(epochs, config)
    return [
        _ratio(
            "orchdata / webdataset", rates["ours"], rates["webdataset"], f"packed batches; resizer {config.resizer}"
        ),
        _ratio(
            "  with the same decode and collate functions in both",
            rates["ours, samples"],
            rates["webdataset"],
            "orchdata with collate_fn=, as it must where a user brings one",
        ),
        _rate(f"  orchdata, {config.workers} threads", rates["ours"]),
        _rate(f"  orchdata, {config.workers} threads, collate_fn=", rates["ours, samples"]),
        _rate(f"  webdataset, torch DataLoader, {config.workers} workers", rates["webdataset"]),
    ]


def _interleaved_rates(
    epochs: Mapping[str, Callable[[], Iterator[int]]], config: ThroughputBench
) -> dict[str, tuple[float, ...]]:
    """Samples a second over whole epochs of each in turn."""
    rates: dict[str, list[float]] = {name: [] for name in epochs}
    for turn in range(1 + config.repeats):
        for name in list(epochs) if turn % 2 == 0 else list(epochs)[::-1]:
            gc.collect()
            rate = _rate_of(epochs[name](), config.samples)
            if turn:
                rates[name].append(rate)
    return {name: tuple(values) for name, values in rates.items()}


def _rate_of(batch_sizes: Iterator[int], expected: int) -> float:
    """Samples a second from the first batch to the last: starting workers is not what is compared."""
    first = next(batch_sizes)
    started = time.perf_counter()
    others = sum(batch_sizes)
    seconds = time.perf_counter() - started
    if first + others != expected:
        raise RuntimeError(f"an epoch delivered {first + others} of {expected} samples")
    return others / seconds


def _ours(
    urls: Sequence[str], recipe: Recipe, config: ThroughputBench, collate: Callable[[Sequence[Sample]], Tensors] | None
) -> Iterator[int]:
    loader = DataLoader(
        ShardDataset(urls, recipe),
        batch_size=config.batch_size,
        shuffle=True,
        num_threads=config.workers,
        collate_fn=collate,
        dp=(0, 1),
    )
    for batch in loader:
        yield len(batch["number"] if collate else batch.keys)


def _webdataset(urls: Sequence[str], recipe: Recipe, config: ThroughputBench) -> Iterator[int]:
    # Not forked: our threads have used MKL in this process, and its allocator can then hang in a forked child.
    loader: Iterable[Tensors] = torch.utils.data.DataLoader(
        web_samples(urls, recipe),
        batch_size=config.batch_size,
        num_workers=config.workers,
        collate_fn=pack,
        multiprocessing_context="forkserver",
    )
    for batch in loader:
        yield len(batch["number"])


def web_samples(urls: Sequence[str], recipe: Recipe) -> Any:
    """A webdataset pipeline of decoded samples. Shards are dealt to workers and nothing is shuffled: less work than
    ours, which shuffles.
    """
    import webdataset

    return webdataset.WebDataset(
        list(urls), shardshuffle=False, empty_check=False, workersplitter=webdataset.split_by_worker
    ).map(DecodeFields(recipe))


@dataclass(frozen=True, slots=True)
class DecodeFields:
    """A webdataset sample, fields of bytes, decoded by the same functions as ours: headers, then parts."""

    recipe: Recipe

    def __call__(self, fields: Mapping[str, Any]) -> Sample:
        members: list[Member] = []
        payloads: dict[int, bytes] = {}
        for name, payload in fields.items():
            kind = OTHER if name.startswith("__") else classify(name)[0]
            if kind == OTHER:
                continue
            payloads[len(members)] = payload
            members.append(self._member(name, kind, payload))
        sizes = [part.size for part in measure(members, payloads, self.recipe).parts]
        parts = decode_sample(members, payloads, sizes, self.recipe)
        return Sample(shard=fields["__url__"], key=fields["__key__"], parts=parts)

    def _member(self, name: str, kind: int, payload: bytes) -> Member:
        found = self.recipe.kind_of(name, kind)
        modality = self.recipe.modality(found)
        if modality is None:
            return Member(name, found, size=len(payload))
        header = read_header(type(modality), len(payload), lambda size: payload[:size], self.recipe.limits)
        return Member(name, found, header, len(payload))


def pack(samples: Sequence[Sample]) -> Tensors:
    """One tensor for each modality and the lengths that part it, as a packed batch has them."""
    parts: list[Part] = [part for sample in samples for part in sample.parts]
    images = [part.tensor() for part in parts if isinstance(part, MediaPart) and part.modality == "image"]
    clips = [part.tensor() for part in parts if isinstance(part, MediaPart) and part.modality == "audio"]
    texts = [torch.from_numpy(np.asarray(part.token_ids)) for part in parts if isinstance(part, TextPart)]
    batch: Tensors = {"number": torch.arange(len(samples))}
    for name, tensors in (("image", images), ("audio", clips), ("text", texts)):
        if tensors:
            batch[name] = torch.cat(tensors)
            batch[f"{name}_lengths"] = torch.tensor([len(tensor) for tensor in tensors])
    return batch


def _ratio(name: str, ours: Sequence[float], theirs: Sequence[float], note: str) -> Result:
    ratios = tuple(mine / other for mine, other in zip(ours, theirs, strict=True))
    return Result(name=name, unit="x", values=ratios, demand=1.3, better="high", note=note)


def _rate(name: str, rates: tuple[float, ...]) -> Result:
    return Result(name=name, unit="samples/s", values=rates, better="high")
