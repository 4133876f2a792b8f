"""`orchdata synth`: a description -> WebDataset shards of procedural images, synthesised audio and text.

    description --seed, sample number--> one sample's fields --webdataset's TarWriter--> OUT/shard-000000.tar ...

Each sample is drawn from its own generator, seeded by (seed, number): a shorter dataset is a prefix of a longer one,
and the same description gives the same bytes. Fields follow WebDataset's conventions: `key.jpg` or `key.0.jpg`,
`key.1.jpg`, `key.flac`, and `key.txt` or a chat in `key.json` with `<image>` and `<audio>` placeholders.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from orchdata.synth.description import MEDIA, Description, draw, pick, read_description
from orchdata.synth.media import make_audio, make_image, make_sentences

__all__ = ["SynthReport", "make_sample", "read_description", "synthesize"]


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
    words: int
    kinds: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-safe values."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return values | {"paths": [str(path) for path in self.paths], "kinds": dict(self.kinds)}


def synthesize(
    description: Mapping[str, Any] | str | Path,
    out: Path,
    *,
    samples: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SynthReport:
    """Write the described dataset as `out/shard-000000.tar` and on.

    Args:
        description: a dict of the same form as the YAML, the path of a YAML file, or the name of one that is installed,
            such as "omni".
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
        plan |= {"samples": samples, "shards": min(plan["shards"], samples)}
    paths = tuple(out / f"shard-{number:06d}.tar" for number in range(plan["shards"]))
    _refuse_mixing(out, paths)
    out.mkdir(parents=True, exist_ok=True)

    totals: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    done = 0
    for number, path in enumerate(paths):
        stop = (number + 1) * plan["samples"] // plan["shards"]
        partial = path.with_name(f".{path.name}.partial")
        with partial.open("wb") as stream, TarWriter(stream, encoder=False, mtime=0, user="", group="") as writer:
            for index in range(done, stop):
                name, fields, counts = make_sample(plan, index)
                writer.write({"__key__": f"{index:08d}", **fields})
                totals.update(counts)
                totals["payload_bytes"] += sum(map(len, fields.values()))
                kinds[name] += 1
                if progress is not None:
                    progress(index + 1, plan["samples"])
        partial.replace(path)
        done = stop
    return SynthReport(
        paths=paths,
        samples=plan["samples"],
        payload_bytes=totals["payload_bytes"],
        images=totals["images"],
        image_pixels=totals["image_pixels"],
        audio_clips=totals["audio_clips"],
        audio_seconds=totals["audio_milliseconds"] / 1000,
        words=totals["words"],
        kinds={name: kinds[name] for name in plan["kinds"]},
    )


def make_sample(description: Description, index: int) -> tuple[str, dict[str, bytes], dict[str, int]]:
    """Make sample number `index` of a checked description, drawn from its own generator.

    Returns:
        The kind's name; the sample's fields without the key (`{"0.jpg": ..., "txt": ...}`); counts for the report.
    """
    rng = np.random.default_rng((description["seed"], index))
    kinds = description["kinds"]
    name = list(kinds)[pick(rng, {name: kind["weight"] for name, kind in kinds.items()})]
    mix = kinds[name]

    fields: dict[str, bytes] = {}
    counts: Counter[str] = Counter()
    media = [pair for name in MEDIA for pair in _add_media(rng, name, mix[name], fields, counts)]
    num_words = max(1, round(draw(rng, mix["words"])))
    counts["words"] += num_words
    if mix["style"] == "text":
        fields["txt"] = _prose(rng, [words for _, words in media], num_words).encode()
    else:
        num_turns = max(1, round(draw(rng, mix["turns"])))
        fields["json"] = json.dumps(_chat(rng, media, num_turns, num_words)).encode()
    return name, fields, dict(counts)


def _add_media(
    rng: np.random.Generator, name: str, mix: Any, fields: dict[str, bytes], counts: Counter[str]
) -> list[tuple[str, str]]:
    """Add a sample's parts of a modality to `fields`; returns a (placeholder, description) pair for each."""
    if mix is None:
        return []
    descriptions = []
    count = round(draw(rng, mix["count"]))
    for number in range(count):
        if name == "image":
            width = max(1, round(draw(rng, mix["width"])))
            height = max(1, round(width / draw(rng, mix["aspect"])))
            format = list(mix["formats"])[pick(rng, mix["formats"])]
            data, words = make_image(rng, width, height, format, mix["quality"])
            counts.update({"images": 1, "image_pixels": width * height})
        else:
            seconds = draw(rng, mix["seconds"])
            format = list(mix["formats"])[pick(rng, mix["formats"])]
            data, words = make_audio(rng, seconds, round(draw(rng, mix["rates"])), format)
            counts.update({"audio_clips": 1, "audio_milliseconds": round(1000 * seconds)})
        fields[f"{number}.{format}" if count > 1 else format] = data
        descriptions.append((f"<{name}>", words))
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
