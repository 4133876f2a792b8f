"""What `orchdata synth` is asked to write: YAML or a dict -> a checked, frozen `Description`.

A description says how many samples and shards, and which *kinds* of samples, each with a weight:

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
`{lognormal: [median, sigma], min: ..., max: ...}` or `{choice: {value: weight, ...}}`. Every error is a `ValueError`
that starts with the field, as in `kinds.figure.image.width`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchdata.synth.distributions import Choice, Constant, Distribution, LogNormal, Uniform
from orchdata.yaml_file import read_yaml

IMAGE_FORMATS = ("jpg", "png")
AUDIO_FORMATS = ("flac", "wav")
VIDEO_FORMATS = ("mp4", "webm", "gif")
STYLES = ("text", "chat")
_MAX_SIDE = 16_384
_MAX_HEIGHT = 65_500
_MAX_CLIP_SECONDS = 3_600.0
_MAX_VIDEO_SECONDS = 600.0
_MAX_VIDEO_SIDE = 4_096


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageMix:
    """The images of one kind of sample: how many, how wide (pixels), what aspect (width / height), what format."""

    count: Distribution = Constant(1)
    width: Distribution = LogNormal(384, 0.5, 64, 1536)
    aspect: Distribution = Uniform(0.6, 1.7)
    formats: tuple[tuple[str, float], ...] = (("jpg", 1.0),)
    quality: int = 85


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioMix:
    """The audio clips of one kind of sample: how many, how long, at which sample rates (Hz), in what format."""

    count: Distribution = Constant(1)
    seconds: Distribution = LogNormal(4, 0.7, 0.3, 30)
    rates: Distribution = Choice((16_000, 44_100), (0.7, 0.3))
    formats: tuple[tuple[str, float], ...] = (("flac", 1.0),)


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoMix:
    """The videos of one kind of sample: how many, how long, at how many pictures a second, how wide (pixels), of what
    aspect (width / height), in what format. Making them needs PyAV.
    """

    count: Distribution = Constant(1)
    seconds: Distribution = LogNormal(4, 0.6, 0.5, 30)
    fps: Distribution = Choice((12, 24, 30), (0.3, 0.4, 0.3))
    width: Distribution = LogNormal(192, 0.4, 64, 640)
    aspect: Distribution = Uniform(0.6, 1.8)
    formats: tuple[tuple[str, float], ...] = (("mp4", 1.0),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One kind of sample. `style="text"` writes `key.txt`; `"chat"` writes `key.json` with `turns` rounds."""

    weight: float = 1.0
    style: str = "text"
    words: Distribution = LogNormal(60, 0.8, 4, 600)
    turns: Distribution = Constant(1)
    image: ImageMix | None = None
    audio: AudioMix | None = None
    video: VideoMix | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """A whole dataset. Equal descriptions give equal bytes (with equal versions of Pillow and libsndfile)."""

    kinds: tuple[tuple[str, Kind], ...]
    samples: int = 512
    shards: int = 4
    seed: int = 0


def read_description(source: Description | Mapping[str, Any] | str | Path) -> Description:
    """Check a description, or the YAML file that holds one: its path, or the name of an installed one, such as "omni".

    Raises:
        FileNotFoundError: there is no such file, and none of that name is installed.
        ValueError: the YAML does not parse, or a field is unknown, missing or out of range; the message starts with
            the file (if any) and the field.
    """
    if isinstance(source, Description):
        return source
    if isinstance(source, Mapping):
        return _description(source)
    content = read_yaml(_path_of(str(source)))
    try:
        return _description(content)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def installed_descriptions() -> dict[str, Path]:
    """Return the files that come with the library, by name: those of a wheel, or of the checkout."""
    package = Path(__file__).parents[1]
    folder = next((each for each in (package / "datasets", package.parent / "datasets") if each.is_dir()), package)
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _path_of(source: str) -> Path:
    """Return the file of a description. A file of the user's comes before the installed one of the same name."""
    path, installed = Path(source), installed_descriptions()
    if path.is_file() or path.suffix or path.name != source:
        return path
    if source not in installed:
        raise FileNotFoundError(f"{source}: no such file, and no description of that name: {', '.join(installed)}")
    return installed[source]


def _description(content: Any) -> Description:
    fields = _mapping(content, "description", ("seed", "samples", "shards", "kinds"))
    if not isinstance(fields.get("kinds"), Mapping) or not fields["kinds"]:
        raise ValueError("kinds must name at least one kind of sample, as in `kinds: {article: {weight: 1}}`")
    kinds = tuple((str(name), _kind(value, f"kinds.{name}")) for name, value in fields["kinds"].items())
    description = Description(
        kinds=kinds,
        samples=_integer(fields.get("samples", 512), "samples", 1),
        shards=_integer(fields.get("shards", 4), "shards", 1),
        seed=_integer(fields.get("seed", 0), "seed", 0),
    )
    if description.shards > description.samples:
        raise ValueError(
            f"shards must be at most samples ({description.samples}), got {description.shards}: "
            "a shard without samples is not a valid shard"
        )
    return description


def _kind(content: Any, field: str) -> Kind:
    fields = _mapping(content, field, ("weight", "style", "words", "turns", "image", "audio", "video"))
    style = fields.get("style", "text")
    if style not in STYLES:
        raise ValueError(f"{field}.style must be one of {', '.join(STYLES)}, got {style!r}")
    if style == "text" and "turns" in fields:
        raise ValueError(f"{field}.turns needs `style: chat`; a text sample has no turns")
    known: dict[str, Any] = {"style": style}
    if "weight" in fields:
        known["weight"] = _number(fields["weight"], f"{field}.weight", above=0)
    if "words" in fields:
        known["words"] = _distribution(fields["words"], f"{field}.words", 1, 1_000_000)
    if "turns" in fields:
        known["turns"] = _distribution(fields["turns"], f"{field}.turns", 1, 1_000)
    if "image" in fields:
        known["image"] = _image(fields["image"], f"{field}.image")
    if "audio" in fields:
        known["audio"] = _audio(fields["audio"], f"{field}.audio")
    if "video" in fields:
        known["video"] = _video(fields["video"], f"{field}.video")
    return Kind(**known)


def _image(content: Any, field: str) -> ImageMix:
    fields = _mapping(content, field, ("count", "width", "aspect", "formats", "quality"))
    readers: dict[str, Callable[[Any, str], Any]] = {
        "count": lambda value, name: _distribution(value, name, 0, 1_000),
        "width": lambda value, name: _distribution(value, name, 8, _MAX_SIDE),
        "aspect": lambda value, name: _distribution(value, name, 0.05, 20),
        "formats": lambda value, name: _formats(value, name, IMAGE_FORMATS),
        "quality": lambda value, name: _integer(value, name, 1, 100),
    }
    mix = ImageMix(**{name: readers[name](value, f"{field}.{name}") for name, value in fields.items()})
    tallest = mix.width.high / mix.aspect.low
    if tallest > _MAX_HEIGHT:
        raise ValueError(
            f"{field} allows images {tallest:,.0f} pixels high (width up to {mix.width.high:g}, aspect down to "
            f"{mix.aspect.low:g}); JPEG ends at {_MAX_HEIGHT:,}"
        )
    return mix


def _audio(content: Any, field: str) -> AudioMix:
    fields = _mapping(content, field, ("count", "seconds", "rates", "formats"))
    readers: dict[str, Callable[[Any, str], Any]] = {
        "count": lambda value, name: _distribution(value, name, 0, 1_000),
        "seconds": lambda value, name: _distribution(value, name, 0.01, _MAX_CLIP_SECONDS),
        "rates": lambda value, name: _distribution(value, name, 1_000, 192_000),
        "formats": lambda value, name: _formats(value, name, AUDIO_FORMATS),
    }
    return AudioMix(**{name: readers[name](value, f"{field}.{name}") for name, value in fields.items()})


def _video(content: Any, field: str) -> VideoMix:
    fields = _mapping(content, field, ("count", "seconds", "fps", "width", "aspect", "formats"))
    readers: dict[str, Callable[[Any, str], Any]] = {
        "count": lambda value, name: _distribution(value, name, 0, 1_000),
        "seconds": lambda value, name: _distribution(value, name, 0.01, _MAX_VIDEO_SECONDS),
        "fps": lambda value, name: _distribution(value, name, 1, 240),
        "width": lambda value, name: _distribution(value, name, 16, _MAX_VIDEO_SIDE),
        "aspect": lambda value, name: _distribution(value, name, 0.1, 10),
        "formats": lambda value, name: _formats(value, name, VIDEO_FORMATS),
    }
    return VideoMix(**{name: readers[name](value, f"{field}.{name}") for name, value in fields.items()})


def _distribution(content: Any, field: str, low: float, high: float) -> Distribution:
    """Read one of the four forms; every value it can draw must lie in [low, high]."""
    if not isinstance(content, Mapping):
        return Constant(_number(content, field, low=low, high=high))
    names = [name for name in ("uniform", "lognormal", "choice") if name in content]
    if len(names) != 1:
        raise ValueError(
            f"{field} must be a number or one of {{uniform: [low, high]}}, "
            f"{{lognormal: [median, sigma], min: ..., max: ...}}, {{choice: {{value: weight}}}}, got {dict(content)}"
        )
    form = names[0]
    if form == "choice":
        return _choice(_mapping(content, field, ("choice",))["choice"], f"{field}.choice", low, high)
    first, second = _pair(content[form], f"{field}.{form}")
    if form == "uniform":
        _mapping(content, field, ("uniform",))
        _number(first, f"{field}.uniform[0]", low=low, high=high)
        _number(second, f"{field}.uniform[1]", low=first, high=high)
        return Uniform(first, second)
    _mapping(content, field, ("lognormal", "min", "max"))
    median = _number(first, f"{field}.lognormal[0]", low=low, high=high)
    sigma = _number(second, f"{field}.lognormal[1]", above=0, high=10)
    least = _number(content.get("min", low), f"{field}.min", low=low, high=median)
    # Without a `max` the tail is cut at 50 medians: one sample of a million words would be an accident.
    most = _number(content.get("max", min(high, 50 * median)), f"{field}.max", low=median, high=high)
    return LogNormal(median, sigma, least, most)


def _choice(content: Any, field: str, low: float, high: float) -> Choice:
    if not isinstance(content, Mapping) or not content:
        raise ValueError(f"{field} must map each value to its weight, got {content!r}")
    values = tuple(_number(value, f"{field}.{value}", low=low, high=high) for value in content)
    weights = tuple(_number(weight, f"{field}.{value}", above=0) for value, weight in content.items())
    return Choice(values, weights)


def _formats(content: Any, field: str, known: tuple[str, ...]) -> tuple[tuple[str, float], ...]:
    if isinstance(content, str):
        content = {content: 1.0}
    if not isinstance(content, Mapping) or not content:
        raise ValueError(f"{field} must be a format or map each format to its weight, got {content!r}")
    unknown = [str(name) for name in content if name not in known]
    if unknown:
        raise ValueError(f"{field} must be of {', '.join(known)}, got {', '.join(unknown)}")
    return tuple((name, _number(weight, f"{field}.{name}", above=0)) for name, weight in content.items())


def _pair(content: Any, field: str) -> tuple[float, float]:
    if not isinstance(content, list | tuple) or len(content) != 2:
        raise ValueError(f"{field} must be two numbers, got {content!r}")
    return _number(content[0], f"{field}[0]"), _number(content[1], f"{field}[1]")


def _mapping(content: Any, field: str, known: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(content, Mapping):
        raise ValueError(f"{field} must be a mapping of {', '.join(known)}, got {content!r}")
    unknown = [str(name) for name in content if name not in known]
    if unknown:
        raise ValueError(f"{field} has unknown field {', '.join(map(repr, unknown))}; known are {', '.join(known)}")
    return content


def _number(
    content: Any, field: str, *, low: float = -math.inf, high: float = math.inf, above: float = -math.inf
) -> float:
    if isinstance(content, bool) or not isinstance(content, int | float) or math.isnan(content):
        raise ValueError(f"{field} must be a number, got {content!r}")
    if not low <= content <= high:
        raise ValueError(f"{field} must lie in [{low:g}, {high:g}], got {content:g}")
    if not content > above:
        raise ValueError(f"{field} must be above {above:g}, got {content:g}")
    return content


def _integer(content: Any, field: str, low: int, high: int = 2**31 - 1) -> int:
    if isinstance(content, bool) or not isinstance(content, int):
        raise ValueError(f"{field} must be an integer, got {content!r}")
    return int(_number(content, field, low=low, high=high))
