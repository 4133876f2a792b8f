"""`orchdata synth`: a description -> WebDataset shards of procedural images, synthesised audio and text.

    description --seed, sample number--> one sample's fields --webdataset's TarWriter--> OUT/shard-000000.tar ...

Each sample is drawn from its own generator, seeded by (seed, number): a shorter dataset is a prefix of a longer one,
and the same description gives the same bytes. It says how many samples and shards, and which *kinds* of samples:

    seed: 0
    samples: 512
    shards: 4
    kinds:
      article:                                     # text alone
        weight: 0.4
        words: {lognormal: [60, 0.9], min: 8, max: 600}
      figure:                                      # a chat about one to three images
        weight: 0.6
        style: chat
        words: {uniform: [10, 60]}
        image: {count: {choice: {1: 0.8, 3: 0.2}}, width: {lognormal: [384, 0.6], min: 64, max: 1536}}

Wherever a number is drawn, one of four forms is allowed: a plain number, `{uniform: [low, high]}`,
`{lognormal: [median, sigma], min: ..., max: ...}` or `{choice: {value: weight, ...}}`.

JPEGs come out near the bytes per pixel of photographs. The text describes the image or sound, so that a model that
looks at it predicts the text better than one that does not.
"""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from PIL import Image, ImageDraw

from orchdata.yaml_file import read_yaml

__all__ = ["SynthReport", "make_sample", "read_description", "synthesize"]


Description: TypeAlias = dict[str, Any]
Drawn: TypeAlias = float | Mapping[str, Any]

_WHOLE: Final[Description] = {"seed": 0, "samples": 512, "shards": 4}
_WORDS: Final = {"lognormal": [60, 0.8], "min": 4, "max": 600}
_KIND: Final[Description] = {"weight": 1.0, "style": "text", "words": _WORDS, "turns": 1}
_FORMATS: Final = {"image": ("jpg", "png"), "audio": ("flac", "wav")}
MEDIA: Final[dict[str, Description]] = {
    "image": {
        "count": 1,
        "width": {"lognormal": [384, 0.5], "min": 64, "max": 1536},
        "aspect": {"uniform": [0.6, 1.7]},  # width / height
        "formats": {"jpg": 1.0},
        "quality": 85,
    },
    "audio": {
        "count": 1,
        "seconds": {"lognormal": [4, 0.7], "min": 0.3, "max": 30},
        "rates": {"choice": {16_000: 0.7, 44_100: 0.3}},  # Hz
        "formats": {"flac": 1.0},
    },
}

COLOURS = {
    "red": (205, 45, 45), "green": (50, 160, 75), "blue": (45, 85, 200), "yellow": (235, 205, 60),
    "violet": (130, 70, 175), "orange": (240, 140, 40), "black": (25, 25, 30), "white": (240, 240, 235),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle")
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six")

_GRAMMAR = {
    "start": ("the", "every", "some"),
    "noun": ("river", "engine", "letter", "garden", "planet", "signal", "market", "mirror", "shadow", "window"),
    "verb": ("follows", "carries", "remembers", "crosses", "answers", "holds", "changes", "measures"),
    "adjective": ("quiet", "bright", "heavy", "distant", "narrow", "golden", "broken", "patient"),
    "ending": ("at night.", "in spring.", "before dawn.", "without a sound.", "as before.", "once more."),
}


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
    kinds: Mapping[str, int]

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
    """Write the described dataset as `out/shard-000000.tar` and on; shards of the same names in the folder are
    replaced.

    A description is as for `read_description`. With `samples` the first ones of the same dataset are written, so many.
    `progress` is called after each sample with (samples written, samples in all). Raises ValueError, which names the
    field, and FileExistsError if `out` holds other tar files, with which these would be read as one dataset.
    """
    from webdataset import TarWriter

    plan = read_description(description)
    if samples is not None:
        if samples < 1:
            raise ValueError(f"samples must be at least 1, got {samples}")
        plan |= {"samples": samples, "shards": min(plan["shards"], samples)}
    paths = tuple(out / f"shard-{number:06d}.tar" for number in range(plan["shards"]))
    if others := sorted(path.name for path in out.glob("*.tar") if path not in paths):
        raise FileExistsError(
            f"{out} already holds {len(others)} other tar files (first: {others[0]}); "
            "a glob would read them as one dataset with these. Choose another folder, or remove them"
        )
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
    """Make sample number `index`: the kind's name, fields (`{"0.jpg": ..., "txt": ...}`), and counts for the report."""
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


def read_description(source: Mapping[str, Any] | str | Path) -> Description:
    """Check a description, or the YAML file that holds one: its path, or the name of an installed one, such as "omni".

    Raises FileNotFoundError, and ValueError that names a field which is unknown or from which no number is drawn.
    """
    if not isinstance(source, Mapping):
        content = read_yaml(_path_of(str(source)))
        try:
            return read_description(content if isinstance(content, Mapping) else {"": content})
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error
    whole = _filled(source, "description", {**_WHOLE, "kinds": {}})
    kinds = whole["kinds"]
    if not isinstance(kinds, Mapping) or not kinds:
        raise ValueError("kinds must name at least one kind of sample, as in `kinds: {article: {weight: 1}}`")
    whole["kinds"] = {str(name): _kind(content, f"kinds.{name}") for name, content in kinds.items()}
    if not all(isinstance(whole[name], int) and whole[name] >= 0 for name in _WHOLE):
        raise ValueError(f"{', '.join(_WHOLE)} must be integers of 0 or more")
    if not 1 <= whole["shards"] <= whole["samples"]:
        raise ValueError(f"shards must be from 1 to the {whole['samples']} samples, got {whole['shards']}")
    return whole


def _kind(content: Any, field: str) -> Description:
    kind = _filled(content, field, {**_KIND, **dict.fromkeys(MEDIA)})
    if kind["style"] not in ("text", "chat"):
        raise ValueError(f"{field}.style must be text or chat, got {kind['style']!r}")
    for name in MEDIA:
        if kind[name] is not None:
            kind[name] = _filled(kind[name], f"{field}.{name}", MEDIA[name])
            if isinstance(kind[name]["formats"], str):
                kind[name]["formats"] = {kind[name]["formats"]: 1.0}
            if not set(kind[name]["formats"]) <= set(_FORMATS[name]):
                raise ValueError(f"{field}.{name}.formats must be of {', '.join(_FORMATS[name])}")
    return kind


def _filled(content: Any, field: str, defaults: Description) -> Description:
    """Return the fields with those that are left out. Everything that is drawn is drawn once, to see that it can be."""
    if not isinstance(content, Mapping):
        raise ValueError(f"{field} must be a mapping of {', '.join(defaults)}, got {content!r}")
    if unknown := [str(name) for name in content if name not in defaults]:
        raise ValueError(f"{field} has unknown field {', '.join(map(repr, unknown))}; known are {', '.join(defaults)}")
    filled = {**defaults, **content}
    for name in set(content) - {"kinds", "style", "formats", *MEDIA}:
        try:
            draw(np.random.default_rng(0), filled[name])
        except (TypeError, ValueError, KeyError) as error:
            raise ValueError(
                f"{field}.{name} must be a number or one of {{uniform: [low, high]}}, {{lognormal: [median, sigma], "
                f"min: ..., max: ...}}, {{choice: {{value: weight}}}}, got {filled[name]!r}"
            ) from error
    return filled


def draw(rng: np.random.Generator, drawn: Drawn) -> float:
    """Draw a number. A log-normal one is clipped: to `min` and `max`, or 0 and 50 medians."""
    if not isinstance(drawn, Mapping):
        return drawn + 0  # fails for what is no number
    if "choice" in drawn:
        return list(drawn["choice"])[pick(rng, drawn["choice"])] + 0  # type: ignore[no-any-return]
    if "uniform" in drawn:
        return float(rng.uniform(*drawn["uniform"]))
    median, sigma = drawn["lognormal"]
    value = median * math.exp(sigma * rng.standard_normal())
    return float(np.clip(value, drawn.get("min", 0.0), drawn.get("max", 50 * median)))


def pick(rng: np.random.Generator, weights: Mapping[Any, float]) -> int:
    """Draw the number of an entry in proportion to its weight."""
    cumulative = np.cumsum(list(weights.values()))
    return int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))


def _path_of(source: str) -> Path:
    """Return the file of a description. A file of the user's comes before the installed one of the same name."""
    package = Path(__file__).parent  # a wheel has the folder in it, a checkout next to it
    folder = next((each for each in (package / "datasets", package.parent / "datasets") if each.is_dir()), package)
    installed = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    path = Path(source)
    if path.is_file() or path.suffix or path.name != source:
        return path
    if source not in installed:
        raise FileNotFoundError(f"{source}: no such file, and no description of that name: {', '.join(installed)}")
    return installed[source]


def make_image(rng: np.random.Generator, width: int, height: int, format: str, quality: int = 85) -> tuple[bytes, str]:
    """Draw shapes on a textured ground, as `jpg` or `png`. Return the bytes, and what is drawn: "two red circles"."""
    canvas = ground(rng, width, height)
    colour = list(COLOURS)[int(rng.integers(len(COLOURS)))]
    shape = SHAPES[int(rng.integers(len(SHAPES)))]
    count = int(rng.integers(1, 5))
    draw = ImageDraw.Draw(canvas)
    for x, y, size in rng.random((count, 3)).tolist():
        radius = (0.08 + 0.14 * size) * min(width, height)
        centre = (radius + x * (width - 2 * radius), radius + y * (height - 2 * radius))
        draw_shape(draw, shape, centre, radius, COLOURS[colour])

    # Sensor noise of a few grey levels, from one small tile: without it JPEGs are a tenth of a photograph's size.
    tile = rng.integers(-7, 8, (97, 89, 1), dtype=np.int16)
    repeats = (math.ceil(height / tile.shape[0]), math.ceil(width / tile.shape[1]), 1)
    pixels = np.asarray(canvas).astype(np.int16) + np.tile(tile, repeats)[:height, :width]
    stream = io.BytesIO()
    picture = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    if format == "jpg":
        picture.save(stream, "JPEG", quality=quality)
    else:
        picture.save(stream, "PNG", compress_level=1)
    return stream.getvalue(), f"{_NUMBERS[count]} {colour} {shape}{'s' if count > 1 else ''}"


def ground(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """A smooth colour field (one cell per 160 pixels) blended with a finer one (per 12 pixels)."""
    layers = []
    for cell in (160, 12):
        shape = (2 + height // cell, 2 + width // cell, 3)
        field = Image.fromarray(rng.integers(30, 226, shape, dtype=np.uint8))
        layers.append(field.resize((width, height), Image.Resampling.BICUBIC))
    return Image.blend(layers[0], layers[1], 0.25)


def draw_shape(
    draw: ImageDraw.ImageDraw, shape: str, centre: tuple[float, float], radius: float, colour: tuple[int, int, int]
) -> None:
    x, y = centre
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        draw.ellipse(box, fill=colour)
    elif shape == "square":
        draw.rectangle(box, fill=colour)
    else:
        draw.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=colour)


def make_audio(rng: np.random.Generator, seconds: float, rate: int, format: str) -> tuple[bytes, str]:
    """Synthesise a chirp with two overtones, a slow tremolo and noise; mono, 16 bit, as `wav` or `flac`, at least one
    frame. Return the bytes, and what is heard: "a low rising tone".
    """
    import soundfile

    num_frames = max(1, round(seconds * rate))
    time = np.arange(num_frames) / rate
    pitch, bend = int(rng.integers(3)), int(rng.integers(3))
    start_hz = (180.0, 420.0, 900.0)[pitch] * rng.uniform(0.9, 1.1)
    slope = (-0.4, 0.0, 0.6)[bend] / max(time[-1], 1e-3)
    phase = 2 * np.pi * start_hz * (time + 0.5 * slope * time**2)
    signal = np.sin(phase) + 0.4 * np.sin(2 * phase) + 0.2 * np.sin(3 * phase)
    signal *= 0.25 * (1 + 0.3 * np.sin(2 * np.pi * rng.uniform(2, 6) * time))
    signal += 0.01 * rng.standard_normal(num_frames)
    stream = io.BytesIO()
    soundfile.write(stream, np.clip(signal, -1, 1), rate, format=format.upper(), subtype="PCM_16")
    return stream.getvalue(), f"a {('low', 'middle', 'high')[pitch]} {('falling', 'steady', 'rising')[bend]} tone"


def make_sentences(rng: np.random.Generator, num_words: int) -> str:
    """Write exactly `num_words` words of a fixed grammar: each word narrows the next, so that it can be learned."""
    words: list[str] = []
    while len(words) < num_words:
        words += _sentence(rng)
    return " ".join(words[:num_words])


def _sentence(rng: np.random.Generator) -> list[str]:
    start, adjective, noun, verb, other, ending = rng.random(6).tolist()

    def choose(part: str, at: float) -> str:
        return _GRAMMAR[part][int(at * len(_GRAMMAR[part]))]

    subject = choose("noun", noun)
    # The verb is one of two that belong to its noun.
    verbs = _GRAMMAR["verb"]
    first = _GRAMMAR["noun"].index(subject)
    words = [
        choose("start", start),
        choose("adjective", adjective),
        subject,
        verbs[(first + int(2 * verb)) % len(verbs)],
    ]
    words += ["the", choose("noun", other), *choose("ending", ending).split()]
    return [words[0].capitalize(), *words[1:]]
