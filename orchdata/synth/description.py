"""What `orchdata synth` is asked to write: YAML or a dict -> a checked dict, with all defaults.

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
`{lognormal: [median, sigma], min: ..., max: ...}` or `{choice: {value: weight, ...}}`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from orchdata.yaml_file import read_yaml

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


def read_description(source: Mapping[str, Any] | str | Path) -> Description:
    """Check a description, or the YAML file that holds one: its path, or the name of an installed one, such as "omni".

    Raises:
        FileNotFoundError: there is no such file, and none of that name is installed.
        ValueError: the YAML does not parse, or a field is unknown or no number is drawn from it; names the field.
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
    package = Path(__file__).parents[1]  # a wheel has the folder in it, a checkout next to it
    folder = next((each for each in (package / "datasets", package.parent / "datasets") if each.is_dir()), package)
    installed = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    path = Path(source)
    if path.is_file() or path.suffix or path.name != source:
        return path
    if source not in installed:
        raise FileNotFoundError(f"{source}: no such file, and no description of that name: {', '.join(installed)}")
    return installed[source]
