"""Made-up samples of a family: chats with images and clips of many sizes, as HF takes them and as WebDataset shards."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from PIL import Image, ImageOps
from shard_factory import audio, jpeg, png, write_shard

from hf_families.families import Family

IMAGE, AUDIO = object(), object()


@dataclass(frozen=True)
class Sample:
    """One sample: turns of (role, items), each item a text, IMAGE or AUDIO, and the media in their order."""

    key: str
    turns: tuple[tuple[str, tuple[Any, ...]], ...]
    images: tuple[bytes, ...] = ()
    clips: tuple[bytes, ...] = ()

    def text(self, role: str) -> str:
        """What a role says in all, images as `<image>`."""
        said = [items for who, items in self.turns if who == role]
        return "".join("<image>" if item is IMAGE else item for items in said for item in items)


_SIZES = ((150, 100), (90, 260), (420, 90), (64, 64), (300, 310), (33, 47), (500, 380), (112, 112), (230, 120))
_SECONDS = (0.7, 1.9, 0.31, 3.2, 2.4, 1.0, 0.5)
_WORDS = "what is in the picture and where does the speaker say nothing about charts of three columns".split()


def made_up(family: Family, number: int = 8, seed: int = 0) -> list[Sample]:
    """Samples of every shape that the family takes: no media, one and several, in the first turn and in later ones."""
    media = _Media(family, seed)
    random = np.random.default_rng(seed)

    def words(low: int, high: int) -> str:
        return " ".join(random.choice(_WORDS, int(random.integers(low, high))))

    samples = []
    for at in range(number):
        if family.chat == "speech":
            turns: list[Any] = [("user", media.items(0, 1)), ("assistant", [words(1, 9)])]
        elif family.chat == "pair":
            turns = [("user", [*media.items(1, 0), words(1, 6)]), ("assistant", [words(1, 6)])]
        else:
            kind = at % 5
            first = [(1, 1), (2, 0), (0, 0), (1, 0 if "image" in family.media else 2), (0, 1)][kind]
            turns = [("system", [words(2, 6)])] if at % 3 == 1 else []
            turns += [("user", [*media.items(*first), words(2, 8)]), ("assistant", [words(1, 7)])]
            if kind in (2, 3):
                later = media.items(1, 1) if at > 4 else []
                turns += [("user", [*later, words(1, 5)]), ("assistant", [words(2, 9)])]
        key = f"{family.name.replace('_', '-')}-{seed}-{at:03d}"
        samples.append(Sample(key, tuple((role, tuple(items)) for role, items in turns), *media.taken()))
    return samples


class _Media:
    """Images and clips of the family's kinds, each of another size than the one before."""

    def __init__(self, family: Family, seed: int) -> None:
        self._kinds = family.media
        self._images = ((jpeg if at % 3 == 2 else png)(*_SIZES[at % len(_SIZES)], at) for at in count(seed))
        self._clips = (audio(_SECONDS[at % len(_SECONDS)], seed=at) for at in count(seed))
        self._taken: tuple[list[bytes], list[bytes]] = ([], [])

    def items(self, num_images: int, num_clips: int) -> list[Any]:
        """Their places; of a kind that the family lacks there are none."""
        images, clips = self._taken
        images += islice(self._images, num_images if "image" in self._kinds else 0)
        clips += islice(self._clips, num_clips if "audio" in self._kinds else 0)
        return [IMAGE] * num_images * ("image" in self._kinds) + [AUDIO] * num_clips * ("audio" in self._kinds)

    def taken(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """What was given places since the last call."""
        images, clips = self._taken
        self._taken = ([], [])
        return tuple(images), tuple(clips)


_REAL_IMAGES = (
    "images/scikit-image/**/*.png",
    "images/raccoon/**/*.jpg",
    "images/exif-orientation-examples/**/*_[3568].jpg",
    "multimodal/data-juicer/**/*.jpg",
)
_REAL_CLIPS = ("speech/speechbrain/**/single-mic/*.wav",)


def real(family: Family, fixtures: Path, number: int = 8) -> list[Sample]:
    """The shapes of `made_up`, with photographs, documents and speech of other people."""
    images = _some(fixtures, _REAL_IMAGES, number)
    clips = _some(fixtures, _REAL_CLIPS, number)
    samples = []
    for sample in made_up(family, number, seed=2):
        chosen = tuple(images[(len(samples) + at) % len(images)] for at in range(len(sample.images)))
        heard = tuple(clips[(len(samples) + at) % len(clips)] for at in range(len(sample.clips)))
        samples.append(replace(sample, images=chosen, clips=heard))
    return samples


def _some(folder: Path, patterns: Sequence[str], number: int) -> list[bytes]:
    """As many files of each pattern as are needed, in the order of their names."""
    found = [sorted(folder.glob(pattern))[: -(-number // len(patterns))] for pattern in patterns]
    assert all(found), "the fixtures lack what a pattern names"
    return [path.read_bytes() for paths in found for path in paths]


def hf_messages(family: Family, sample: Sample) -> list[dict[str, Any]]:
    """The chat as `apply_chat_template` takes it, media in place."""
    images = iter(sample.images)
    clips = iter(sample.clips)

    def item(of: Any) -> dict[str, Any]:
        if of is IMAGE:
            return {"type": "image", "image": as_image(next(images))}
        if of is AUDIO:
            return {"type": "audio", "audio": as_wave(next(clips))}
        return {"type": "text", "text": of}

    if not family.media:
        return [{"role": role, "content": "".join(items)} for role, items in sample.turns]
    return [{"role": role, "content": [item(of) for of in items]} for role, items in sample.turns]


def as_image(data: bytes) -> Image.Image:
    """As transformers' `load_image` does: upright, RGB."""
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")


def as_wave(data: bytes) -> Any:
    return soundfile.read(io.BytesIO(data), dtype="float32")[0]


def write_samples(family: Family, samples: Sequence[Sample], folder: Path, shards: int = 2) -> list[str]:
    """Shards of JSON chats or transcripts next to their media, as people keep them."""
    rows = [_fields(family, sample) for sample in samples]
    return [write_shard(folder / f"{family.name}-{at:06d}.tar", rows[at::shards]) for at in range(shards)]


def _fields(family: Family, sample: Sample) -> dict[str, Any]:
    fields: dict[str, Any] = {"__key__": sample.key}
    for at, data in enumerate(sample.images):
        suffix = "jpg" if data.startswith(b"\xff\xd8") else "png"
        fields[f"{at}.{suffix}"] = data
    for at, data in enumerate(sample.clips):
        fields[f"{at}.wav"] = data
    if family.chat == "speech":
        return fields | {"txt": sample.text("assistant").encode()}
    kinds = {id(IMAGE): {"type": "image"}, id(AUDIO): {"type": "audio"}}
    chat = [
        {
            "role": role,
            "content": [kinds.get(id(item)) or {"type": "text", "text": item} for item in items]
            if family.media
            else "".join(items),
        }
        for role, items in sample.turns
    ]
    return fields | {"json": json.dumps({"messages": chat}).encode()}
