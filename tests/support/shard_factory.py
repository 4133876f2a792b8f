"""Small real shards for tests, written with webdataset's own writer."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import webdataset
from PIL import Image

import orchdata as od

# Images of at most 12 tokens and short audio rows: what tests train on.
RECIPE = od.Recipe(
    image=od.ImagePreprocessor(patch_size=8, merge=2, min_tokens=1, max_tokens=12, dtype="float32"),
    audio=od.AudioPreprocessor(num_mels=16, dtype="float32"),
)

# Bad samples are left out, however many they are.
SKIP_ANY = od.ErrorPolicy("skip", max_failures=None)


@cache
def jpeg(width: int, height: int, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).resize((width, height)).save(out, "JPEG", quality=85)
    return out.getvalue()


@cache
def png(width: int, height: int, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).resize((width, height)).save(out, "PNG")
    return out.getvalue()


@cache
def audio(seconds: float, rate: int = 16_000, suffix: str = "wav", seed: int = 0) -> bytes:
    times = np.arange(round(seconds * rate)) / rate
    wave = 0.3 * np.sin(2 * np.pi * (200 + 50 * seed) * times)
    out = io.BytesIO()
    soundfile.write(out, wave.astype(np.float32), rate, format={"wav": "WAV", "flac": "FLAC"}[suffix])
    return out.getvalue()


def chat(user: str, assistant: str) -> bytes:
    turns = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return json.dumps(turns).encode()


def write_shard(path: Path, samples: Sequence[dict[str, Any]]) -> str:
    """Samples are dicts with `__key__` and one entry of bytes for each field, stored as they are."""
    with webdataset.TarWriter(str(path), encoder=False) as writer:
        for sample in samples:
            writer.write(sample)
    return str(path)


def omni_samples(count: int, *, prefix: str = "s", seed: int = 0) -> list[dict[str, Any]]:
    """Text, image + text, audio + text, interleaved images, and everything at once, in turn, of varied sizes."""
    random = np.random.default_rng(seed)
    samples = []
    for number in range(count):
        side = int(random.integers(40, 200))
        seconds = float(random.uniform(0.2, 2.0))
        words = " ".join("word" for _ in range(int(random.integers(1, 30))))
        key = f"{prefix}{number:04d}"
        kind = number % 5
        sample: dict[str, Any] = {"__key__": key}
        if kind == 0:
            sample["txt"] = f"plain {words}".encode()
        elif kind == 1:
            sample |= {"jpg": jpeg(side, 2 * side // 3 + 28, number), "txt": words.encode()}
        elif kind == 2:
            sample |= {"flac": audio(seconds, 22_050, "flac", number % 7), "txt": words.encode()}
        elif kind == 3:
            sample |= {
                "0.jpg": jpeg(side, side, number),
                "1.png": png(60, side, number),
                "json": chat("compare <image> with <image> now", words),
            }
        else:
            sample |= {
                "jpg": jpeg(side, 90, number),
                "wav": audio(seconds),
                "json": chat("<image> and <audio> tell", words),
            }
        samples.append(sample)
    return samples


def omni_shards(folder: Path, *, shards: int = 3, samples: int = 20) -> list[str]:
    return [
        write_shard(folder / f"omni-{number:06d}.tar", omni_samples(samples, prefix=f"s{number}-", seed=number))
        for number in range(shards)
    ]
