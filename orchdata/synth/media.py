"""Procedural media: a generator and a size -> JPEG/PNG bytes, WAV/FLAC bytes, sentences, and words that describe them.

Cheap to make, yet not trivial: images have gradients, shapes and grain, so that JPEGs come out near the bytes per pixel
of photographs; sounds are chirps with overtones in noise; sentences follow a small fixed grammar. The text
describes the image or sound, so that a model that looks at it predicts the text better than one that does not.
"""

from __future__ import annotations

import io
import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

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


def make_image(rng: np.random.Generator, width: int, height: int, format: str, quality: int = 85) -> tuple[bytes, str]:
    """Draw a picture of shapes on a textured ground.

    Args:
        rng: drawn from; the same state gives the same picture.
        width, height: size in pixels.
        format: `jpg` or `png`.
        quality: JPEG quality, 1 to 100; PNG ignores it.

    Returns:
        The encoded bytes, and what is drawn: "two red circles".
    """
    canvas = ground(rng, width, height)
    colour = list(COLOURS)[int(rng.integers(len(COLOURS)))]
    shape = SHAPES[int(rng.integers(len(SHAPES)))]
    count = int(rng.integers(1, 5))
    draw = ImageDraw.Draw(canvas)
    for x, y, size in rng.random((count, 3)).tolist():
        radius = (0.08 + 0.14 * size) * min(width, height)
        centre = (radius + x * (width - 2 * radius), radius + y * (height - 2 * radius))
        draw_shape(draw, shape, centre, radius, COLOURS[colour])

    pixels = np.asarray(_grain(rng, canvas))
    stream = io.BytesIO()
    picture = Image.fromarray(pixels)
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


def _grain(rng: np.random.Generator, canvas: Image.Image) -> NDArray[np.uint8]:
    """Sensor noise of a few grey levels, from one small tile: without it JPEGs are a tenth of a photograph's size."""
    tile = rng.integers(-7, 8, (97, 89, 1), dtype=np.int16)
    pixels = np.asarray(canvas).astype(np.int16)
    height, width = pixels.shape[:2]
    repeats = (math.ceil(height / tile.shape[0]), math.ceil(width / tile.shape[1]), 1)
    pixels += np.tile(tile, repeats)[:height, :width]
    return np.clip(pixels, 0, 255).astype(np.uint8)


def make_audio(rng: np.random.Generator, seconds: float, rate: int, format: str) -> tuple[bytes, str]:
    """Synthesise a chirp with two overtones, a slow tremolo and noise; mono, 16 bit.

    Args:
        rng: drawn from; the same state gives the same sound.
        seconds: duration; at least one frame is written.
        rate: sample rate in Hz.
        format: `wav` or `flac`.

    Returns:
        The encoded bytes, and what is heard: "a low rising tone".
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
