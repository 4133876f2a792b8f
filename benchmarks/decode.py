"""The time of decoding by stage, compared to Pillow, soundfile and torch as a webdataset pipeline calls them.

    the same bytes --our decoders, default recipe----------------> patches, mel frames, ids
                   --Pillow, soundfile, torch, one after another--> the same tensors, but for the resizer's rounding

Bytes are in memory, so that nothing is read; all in one process, in turn. Stages are in CPU time of one thread, samples
a second in elapsed time: where cores are free, two threads show what holds the interpreter's lock.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray
from PIL import Image

from benchmarks.command import run_command
from benchmarks.loading.corpus import Corpus
from orchdata.bench import Result, WideTable, interleave
from orchdata.engines.threads import use_one_thread
from orchdata.loaders.limits import Limits
from orchdata.loaders.modalities.audio import AudioPreprocessor, mel_bands
from orchdata.loaders.modalities.audio_decode import decode_wave
from orchdata.loaders.modalities.image import ImagePreprocessor
from orchdata.loaders.modalities.image_decode import decode_jpeg, read_jpeg_header
from orchdata.loaders.modalities.modality import Modality, PartSize, read_header, stored_dtype
from orchdata.loaders.recipe import Recipe, TextPreprocessor

LIMITS = Limits()
T = TypeVar("T")
TEXT = TextPreprocessor()


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeBench:
    """What to measure.

    Attributes:
        samples: of the made-up data set of `orchdata bench throughput`, without its order and shards.
        small_budget: merged tokens of an image, where it is not at native resolution.
        threads: most threads that decode.
        repeats: of each stage, in turn, after one round that does not count.
        seed: of the samples.
    """

    samples: int = 60
    small_budget: int = 256
    threads: int = 2
    repeats: int = 7
    seed: int = 0


@dataclass
class Held:
    """One part: its bytes, size, and the memory that it is decoded into."""

    data: bytes
    modality: Modality
    size: PartSize
    out: dict[str, NDArray[Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, data: bytes, modality: Modality) -> Held:
        header = read_header(type(modality), len(data), lambda size: data[:size], LIMITS)
        size = modality.count_header(header, LIMITS)
        specs = modality.arrays().items()
        out = {name: np.empty((size.num_rows, *spec.row_shape), stored_dtype(spec.dtype)) for name, spec in specs}
        return cls(data, modality, size, out)

    def decode(self) -> None:
        self.modality.decode_into(memoryview(self.data), self.size, self.out, LIMITS)


Parts = tuple[list[Held], bytes]
"""Media and text of a sample."""


def run(config: DecodeBench) -> list[Result | WideTable]:
    """Measure. Raises ValueError for fewer than four samples, or no repeats."""
    if config.samples < 4 or config.repeats < 1 or config.threads < 1:
        raise ValueError(f"4 samples, a repeat and a thread are the least, got {config}")
    use_one_thread()
    fields = read_fields(config)
    budgets = {
        "native": ImagePreprocessor(),
        f"{config.small_budget}": ImagePreprocessor(max_tokens=config.small_budget),
    }
    recipes = {
        f"{name}, {'draft' if draft else 'full'}": replace(pre, draft=draft)
        for name, pre in budgets.items()
        for draft in (False, True)
    }
    found: list[Result | WideTable] = [_image_stages(config, fields, recipes), _audio_stages(config, fields)]
    return [*found, *(result for name, pre in recipes.items() for result in _rates(config, fields, name, pre))]


def read_fields(config: DecodeBench) -> list[dict[str, bytes]]:
    """The fields of each sample, by extension."""
    samples: dict[str, dict[str, bytes]] = {}
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus(samples=config.samples, shards=1, variety=min(48, config.samples), seed=config.seed)
        for path in corpus.write(Path(folder)):
            with tarfile.open(path) as tar:
                for member in tar:
                    key, _, extension = member.name.partition(".")
                    stream = tar.extractfile(member)
                    samples.setdefault(key, {})[extension] = stream.read() if stream else b""
    return list(samples.values())


def _image_stages(
    config: DecodeBench, fields: Sequence[Mapping[str, bytes]], recipes: Mapping[str, ImagePreprocessor]
) -> WideTable:
    """A stage's time is what adding it to those before takes."""
    columns: dict[str, dict[str, float]] = {}
    for column, pre in recipes.items():
        held = [Held.of(sample["jpg"], pre) for sample in fields]
        jobs = {
            "JPEG": _over(held, partial(_jpeg, pre=pre)),
            "pixels": _over(held, partial(_pixels, pre=pre)),
            "whole": _over(held, Held.decode),
            "reference": _over(held, partial(reference_patches, pre=pre)),
        }
        times = _milliseconds(jobs, len(held), config)
        columns[column] = {
            "JPEG to pixels": times["JPEG"],
            "resizing": times["pixels"] - times["JPEG"],
            "normalising and cutting": times["whole"] - times["pixels"],
            "an image": times["whole"],
            "an image by Pillow and torch": times["reference"],
            "times as long": times["reference"] / times["whole"],
        }
    note = "JPEGs of 500 x 400 on average, few of which are large enough for a draft"
    return _stages("Images, CPU ms each", columns, note)


def _audio_stages(config: DecodeBench, fields: Sequence[Mapping[str, bytes]]) -> WideTable:
    pre = AudioPreprocessor()
    columns: dict[str, dict[str, float]] = {}
    for kind in ("wav", "flac"):
        held = [Held.of(sample[kind], pre) for sample in fields if kind in sample]
        jobs = {
            "read": _over(held, partial(_wave, pre=pre)),
            "whole": _over(held, Held.decode),
            "reference": _over(held, partial(reference_mel, pre=pre)),
        }
        times = _milliseconds(jobs, len(held), config)
        columns[kind.upper()] = {
            "bytes to samples": times["read"],
            "mel frames": times["whole"] - times["read"],
            "a clip": times["whole"],
            "a clip by soundfile and torch": times["reference"],
            "times as long": times["reference"] / times["whole"],
        }
    return _stages("Clips of 3 s on average, 16 kHz, CPU ms each", columns)


def _stages(title: str, columns: Mapping[str, Mapping[str, float]], note: str = "") -> WideTable:
    """Columns of the same stages, as rows."""
    stages = next(iter(columns.values()))
    return WideTable(
        title=title,
        columns=("stage", *columns),
        rows=tuple((stage, *[column[stage] for column in columns.values()]) for stage in stages),
        note=note,
    )


def _rates(
    config: DecodeBench, fields: Sequence[Mapping[str, bytes]], name: str, pre: ImagePreprocessor
) -> list[Result]:
    """Samples a second, images, clips and texts."""
    recipe = Recipe(image=pre)
    samples = [_parts_of(sample, recipe) for sample in fields]
    jobs: dict[str, Callable[[], object]] = {}
    with ThreadPoolExecutor(config.threads, initializer=use_one_thread) as pool:
        for who, decode in (("orchdata", decode_sample), ("reference", reference_sample)):
            jobs[f"{who}, 1 thread"] = _over(samples, decode)
            jobs[f"{who}, {config.threads} threads"] = partial(_in_pool, pool, samples, decode)
        times = interleave(jobs, repeats=config.repeats)
    rates = {job: tuple(len(samples) / seconds for seconds in each) for job, each in times.items()}
    found: list[Result] = []
    for threads in ("1 thread", f"{config.threads} threads"):
        ours, theirs = rates[f"orchdata, {threads}"], rates[f"reference, {threads}"]
        times_as_fast = tuple(mine / other for mine, other in zip(ours, theirs, strict=True))
        note = f"{median(ours):.0f} against {median(theirs):.0f} samples/s"
        title = f"{name}: {threads}, times as fast"
        found.append(Result(name=title, unit="x", values=times_as_fast, better="high", note=note))
    return found


def _over(items: Sequence[T], work: Callable[[T], object]) -> Callable[[], None]:
    def run_all() -> None:
        for item in items:
            work(item)

    return run_all


def _in_pool(pool: Executor, items: Sequence[T], work: Callable[[T], object]) -> None:
    for _ in pool.map(work, items):
        pass


def _milliseconds(jobs: Mapping[str, Callable[[], object]], count: int, config: DecodeBench) -> dict[str, float]:
    """CPU time of each job, for each of `count` things it works on."""
    times = interleave(jobs, repeats=config.repeats, clock=time.thread_time)
    return {name: median(each) / count * 1e3 for name, each in times.items()}


def _parts_of(sample: Mapping[str, bytes], recipe: Recipe) -> Parts:
    names = {"jpg": "image", "wav": "audio", "flac": "audio"}
    media = [Held.of(data, recipe.modalities[names[kind]]) for kind, data in sample.items() if kind in names]
    return media, sample["txt"]


def decode_sample(parts: Parts) -> NDArray[np.int32]:
    """Decode the media into their memory; returns the ids of the text."""
    media, text = parts
    for each in media:
        each.decode()
    return TEXT.encode(text.decode())


def reference_sample(parts: Parts) -> torch.Tensor:
    """As `decode_sample`, by the reference."""
    media, text = parts
    for each in media:
        if isinstance(each.modality, ImagePreprocessor):
            torch.from_numpy(each.out["patches"]).view(torch.bfloat16)[:] = reference_patches(each, each.modality)
        elif isinstance(each.modality, AudioPreprocessor):
            torch.from_numpy(each.out["features"])[:] = reference_mel(each, each.modality)
    return torch.tensor(list(text), dtype=torch.int32)


def reference_patches(each: Held, pre: ImagePreprocessor) -> torch.Tensor:
    """Patches (num_patches, patch_dim), bfloat16, as image processors make them: Pillow, then torch."""
    (high, wide), side, merge = each.size.extent, pre.patch_size, pre.merge
    target = (wide * side, high * side)
    image = Image.open(io.BytesIO(each.data))
    if pre.draft:
        image.draft("RGB", target)
    resized = image.convert("RGB").resize(target, Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(resized)).permute(2, 0, 1).float().div_(255)
    pixels = (pixels - torch.tensor(pre.mean)[:, None, None]) / torch.tensor(pre.std)[:, None, None]
    blocks = pixels.view(3, high // merge, merge, side, wide // merge, merge, side)
    return blocks.permute(1, 4, 2, 5, 0, 3, 6).reshape(high * wide, -1).to(torch.bfloat16)


def reference_mel(each: Held, pre: AudioPreprocessor) -> torch.Tensor:
    """Log-mel frames (num_frames, num_mels) of a clip at the recipe's rate, as Whisper makes them."""
    wave, _ = soundfile.read(io.BytesIO(each.data), dtype="float32")
    frames = each.size.num_rows
    padded = torch.zeros((frames + 3) * pre.hop_length)  # silence after the clip, as ours
    padded[: len(wave)] = torch.from_numpy(wave)
    window = torch.hann_window(pre.n_fft)
    spectrum = torch.stft(padded, pre.n_fft, pre.hop_length, window=window, return_complex=True)[:, :frames]
    mel = _reference_bands(pre).T @ spectrum.abs() ** 2
    log = torch.clamp(mel, min=1e-10).log10()
    return ((torch.maximum(log, log.max() - 8.0) + 4.0) / 4.0).T


_BANDS: dict[tuple[int, int, int], torch.Tensor] = {}


def _reference_bands(pre: AudioPreprocessor) -> torch.Tensor:
    key = (pre.num_mels, pre.n_fft, pre.sample_rate)
    if key not in _BANDS:
        _BANDS[key] = torch.from_numpy(mel_bands(*key)).float()
    return _BANDS[key]


def _jpeg(each: Held, pre: ImagePreprocessor) -> None:
    header = read_jpeg_header(each.data)
    if header is None:
        raise ValueError("no plain JPEG")
    (high, wide), side = each.size.extent, pre.patch_size
    decode_jpeg(each.data, header, "RGBX", (wide * side, high * side) if pre.draft else None)


def _pixels(each: Held, pre: ImagePreprocessor) -> None:
    high, wide = each.size.extent
    pre._pixels(memoryview(each.data), LIMITS, (high, wide))


def _wave(each: Held, pre: AudioPreprocessor) -> None:
    decode_wave(memoryview(each.data), pre.sample_rate, each.size.extent[0], LIMITS)


if __name__ == "__main__":
    run_command("benchmarks.decode", DecodeBench, run)
