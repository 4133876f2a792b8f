"""`orchdata synth`: a description -> WebDataset shards of procedural images and videos, synthesised audio and text.

    description --seed, sample number--> one sample's fields --webdataset's TarWriter--> OUT/shard-000000.tar ...

Each sample is drawn from its own generator, seeded by (seed, number): a shorter dataset is a prefix of a longer one,
and the same description gives the same bytes. Fields follow WebDataset's conventions: `key.jpg` or `key.0.jpg`,
`key.1.jpg`, `key.flac`, `key.mp4`, and `key.txt` or a chat in `key.json` with `<image>`, `<audio>` and `<video>`
placeholders.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from orchdata.synth.description import AudioMix, Description, ImageMix, Kind, VideoMix, read_description
from orchdata.synth.distributions import Choice, LogNormal, Uniform, pick
from orchdata.synth.media import make_audio, make_image, make_sentences

__all__ = ["OMNI", "Description", "SynthReport", "make_sample", "read_description", "synthesize"]

OMNI = Description(
    seed=0,
    samples=512,
    shards=4,
    kinds=(
        ("article", Kind(weight=0.30, words=LogNormal(50, 0.9, 6, 400))),
        (
            "caption",
            Kind(
                weight=0.22,
                words=Uniform(6, 30),
                image=ImageMix(
                    width=LogNormal(320, 0.6, 64, 1280), aspect=Uniform(0.6, 1.7), formats=(("jpg", 0.9), ("png", 0.1))
                ),
            ),
        ),
        (
            "album",
            Kind(
                weight=0.13,
                style="chat",
                words=Uniform(10, 60),
                turns=Choice((1, 2), (0.7, 0.3)),
                image=ImageMix(count=Choice((2, 3, 5), (0.5, 0.3, 0.2)), width=LogNormal(256, 0.6, 64, 1024)),
            ),
        ),
        (
            "speech",
            Kind(
                weight=0.25,
                words=LogNormal(16, 0.6, 3, 90),
                audio=AudioMix(
                    seconds=LogNormal(4, 0.8, 0.4, 30),
                    rates=Choice((16_000, 22_050, 44_100), (0.6, 0.2, 0.2)),
                    formats=(("flac", 0.7), ("wav", 0.3)),
                ),
            ),
        ),
        (
            "everything",
            Kind(
                weight=0.10,
                style="chat",
                words=Uniform(15, 80),
                turns=Choice((1, 2, 3), (0.5, 0.3, 0.2)),
                image=ImageMix(count=Choice((1, 2), (0.7, 0.3))),
                audio=AudioMix(seconds=LogNormal(3, 0.6, 0.4, 15)),
            ),
        ),
    ),
)
"""The default dataset, equal to `datasets/omni.yaml`: text, captioned images, albums, speech, and chats with both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SynthReport:
    """What was written: `paths` in order, and totals over all samples."""

    paths: tuple[Path, ...]
    samples: int
    payload_bytes: int
    images: int
    image_pixels: int
    audio_clips: int
    audio_seconds: float
    videos: int
    video_frames: int
    words: int
    kinds: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-safe values."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return values | {"paths": [str(path) for path in self.paths], "kinds": dict(self.kinds)}


def synthesize(
    description: Description | Mapping[str, Any] | str | Path,
    out: Path,
    *,
    samples: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SynthReport:
    """Write the described dataset as `out/shard-000000.tar` and on.

    Args:
        description: a `Description`, a dict of the same form as the YAML, the path of a YAML file, or the name of one
            that is installed, such as "omni".
        out: folder, made if absent; shards of the same names in it are replaced.
        samples: write this many instead of the described number (the first ones of the same dataset).
        progress: called after each sample with (samples written, samples in all).

    Raises:
        ValueError: the description, or `samples`, is not valid; the message names the field.
        FileExistsError: `out` holds other tar files, with which these would be read as one dataset.
    """
    from webdataset import TarWriter

    plan = read_description(description)
    if samples is not None:
        if samples < 1:
            raise ValueError(f"samples must be at least 1, got {samples}")
        plan = replace(plan, samples=samples, shards=min(plan.shards, samples))
    paths = tuple(out / f"shard-{number:06d}.tar" for number in range(plan.shards))
    _refuse_mixing(out, paths)
    out.mkdir(parents=True, exist_ok=True)

    totals: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    done = 0
    for number, path in enumerate(paths):
        stop = (number + 1) * plan.samples // plan.shards
        partial = path.with_name(f".{path.name}.partial")
        with partial.open("wb") as stream, TarWriter(stream, encoder=False, mtime=0, user="", group="") as writer:
            for index in range(done, stop):
                name, fields, counts = make_sample(plan, index)
                writer.write({"__key__": f"{index:08d}", **fields})
                totals.update(counts)
                totals["payload_bytes"] += sum(map(len, fields.values()))
                kinds[name] += 1
                if progress is not None:
                    progress(index + 1, plan.samples)
        partial.replace(path)
        done = stop
    return SynthReport(
        paths=paths,
        samples=plan.samples,
        payload_bytes=totals["payload_bytes"],
        images=totals["images"],
        image_pixels=totals["image_pixels"],
        audio_clips=totals["audio_clips"],
        audio_seconds=totals["audio_milliseconds"] / 1000,
        videos=totals["videos"],
        video_frames=totals["video_frames"],
        words=totals["words"],
        kinds={name: kinds[name] for name, _ in plan.kinds},
    )


def make_sample(
    description: Description, index: int, kind: str | None = None
) -> tuple[str, dict[str, bytes], dict[str, int]]:
    """Make sample number `index` of a description, drawn from its own generator.

    Args:
        description: the dataset it belongs to.
        index: number of the sample, from 0.
        kind: force this kind; by default it is drawn by weight.

    Returns:
        The kind's name; the sample's fields without the key (`{"0.jpg": ..., "txt": ...}`); counts for the report.
    """
    rng = np.random.default_rng((description.seed, index))
    drawn = description.kinds[pick(rng, tuple(kind.weight for _, kind in description.kinds))][0]
    name = drawn if kind is None else kind
    mix = dict(description.kinds)[name]

    fields: dict[str, bytes] = {}
    counts: Counter[str] = Counter()
    media = [pair for name in _MAKERS for pair in _add_media(rng, name, getattr(mix, name), fields, counts)]
    num_words = max(1, round(mix.words.draw(rng)))
    counts["words"] += num_words
    if mix.style == "text":
        fields["txt"] = _prose(rng, [words for _, words in media], num_words).encode()
    else:
        num_turns = max(1, round(mix.turns.draw(rng)))
        fields["json"] = json.dumps(_chat(rng, media, num_turns, num_words)).encode()
    return name, fields, dict(counts)


class _Made(NamedTuple):
    """A part that was drawn: its format, its bytes, what is seen or heard, and counts for the report."""

    format: str
    data: bytes
    words: str
    counts: dict[str, int]


def _made_image(rng: np.random.Generator, mix: ImageMix) -> _Made:
    width, height = _size(rng, mix)
    format = _format(rng, mix)
    made = make_image(rng, width, height, format, mix.quality)
    return _Made(format, *made, {"images": 1, "image_pixels": width * height})


def _made_audio(rng: np.random.Generator, mix: AudioMix) -> _Made:
    seconds = mix.seconds.draw(rng)
    format = _format(rng, mix)
    made = make_audio(rng, seconds, round(mix.rates.draw(rng)), format)
    return _Made(format, *made, {"audio_clips": 1, "audio_milliseconds": round(1000 * seconds)})


def _made_video(rng: np.random.Generator, mix: VideoMix) -> _Made:
    from orchdata.synth.clips import make_video

    seconds, fps = mix.seconds.draw(rng), max(1, round(mix.fps.draw(rng)))
    width, height = _size(rng, mix)
    format = _format(rng, mix)
    made = make_video(rng, seconds, fps, width, height, format)
    return _Made(format, *made, {"videos": 1, "video_frames": max(1, round(seconds * fps))})


def _size(rng: np.random.Generator, mix: ImageMix | VideoMix) -> tuple[int, int]:
    """(width, height) in pixels."""
    width = max(1, round(mix.width.draw(rng)))
    return width, max(1, round(width / mix.aspect.draw(rng)))


def _format(rng: np.random.Generator, mix: ImageMix | AudioMix | VideoMix) -> str:
    return mix.formats[pick(rng, tuple(weight for _, weight in mix.formats))][0]


_MAKERS: Final[dict[str, Callable[[np.random.Generator, Any], _Made]]] = {
    "image": _made_image,
    "audio": _made_audio,
    "video": _made_video,
}


def _add_media(
    rng: np.random.Generator, name: str, mix: Any, fields: dict[str, bytes], counts: Counter[str]
) -> list[tuple[str, str]]:
    """Add a sample's parts of a modality to `fields`; returns a (placeholder, description) pair for each."""
    if mix is None:
        return []
    descriptions = []
    count = round(mix.count.draw(rng))
    for number in range(count):
        made = _MAKERS[name](rng, mix)
        fields[f"{number}.{made.format}" if count > 1 else made.format] = made.data
        counts.update(made.counts)
        descriptions.append((f"<{name}>", made.words))
    return descriptions


def _prose(rng: np.random.Generator, descriptions: list[str], num_words: int) -> str:
    """Return the descriptions, then sentences, `num_words` words in all."""
    words = " and ".join(descriptions).split()[:num_words]
    return " ".join([*words, make_sentences(rng, num_words - len(words))]).strip()


def _chat(
    rng: np.random.Generator, media: list[tuple[str, str]], num_turns: int, num_words: int
) -> list[dict[str, str]]:
    """Rounds of question and answer; media are dealt to the questions in order, words to the answers evenly."""
    chat = []
    for turn in range(num_turns):
        mine = media[turn * len(media) // num_turns : (turn + 1) * len(media) // num_turns]
        share = (turn + 1) * num_words // num_turns - turn * num_words // num_turns
        question = "What is here?" if mine else "Tell me more."
        chat.append({"role": "user", "content": "".join(f"{placeholder}\n" for placeholder, _ in mine) + question})
        chat.append({"role": "assistant", "content": _prose(rng, [words for _, words in mine], max(1, share))})
    return chat


def _refuse_mixing(out: Path, paths: tuple[Path, ...]) -> None:
    others = sorted(path.name for path in out.glob("*.tar") if path not in paths) if out.is_dir() else []
    if others:
        raise FileExistsError(
            f"{out} already holds {len(others)} other tar files (first: {others[0]}); "
            "a glob would read them as one dataset with these. Choose another folder, or remove them"
        )
